"""Show the tiles that a causal mask skips, and the bytes of keys that query heads share."""

import numpy as np

import flashsim
from flashsim import Problem, Schedule, Tiling

rng = np.random.default_rng(0)
q = rng.standard_normal((8, 512, 64), dtype=np.float32)  # 8 query heads ...
k, v = rng.standard_normal((2, 2, 512, 64), dtype=np.float32)  # ... share 2 key heads
tiling = Tiling(64, 64)

for causal in (False, True):
    trace = flashsim.run(q, k, v, causal=causal, tiling=tiling, trace=True).trace
    print(
        f"causal={causal!s:<5}  {trace.n_visits} visits per head, K: {trace.bytes('load', 'K'):,} B"
    )

# Print the tiles: F is a full tile, M a tile that needs the mask, and a dot a skipped tile.
schedule = Schedule(Problem(n_q=512, causal=True), tiling)
grid = np.full((schedule.t_r, schedule.t_c), ".")
for visit in schedule:
    grid[visit.i, visit.j] = "F" if visit.keep is None else "M"
print("\n".join(" ".join(row) for row in grid))

# In the forward pass, every query head loads the K tiles of its KV head. In the backward pass, one
# thread block computes all query heads of a KV head. It loads K once, sums dK and dV over these
# heads, and stores the sums once.
result = flashsim.run(q, k, v, causal=True, tiling=tiling)
gradients = result.backward(result.out, trace=True)
print(f"dk {gradients.dk.shape}, stored once: {gradients.trace.bytes('store', 'dK'):,} B")
