"""Go from softmax to FlashAttention in eleven steps, each executed, counted and predicted."""

from flashsim import SramOverflow, Tiling
from flashsim.studies import ladder

# Every step uses the same 512 x 1024 scores. The loads and stores per score fall to zero.
climb = ladder.climb(n_q=512, n_kv=1024, head_dim=64, tiling=Tiling(32, 64))
print(climb)

# The closed forms predict the moved bytes exactly.
assert all(step.moved == step.predicted for step in climb.steps.values())

# If the maximum is not subtracted, large scores overflow, and the error is NaN.
print(ladder.climb(n_q=64, n_kv=64, magnify=200.0, rungs=["naive", "stable", "online"]))

# An algorithm that keeps whole rows on chip moves as few bytes as FlashAttention. It fails if a
# row does not fit on chip.
try:
    ladder.climb(n_q=64, n_kv=100_000, rungs=["whole-row-attention"])
except SramOverflow as error:
    print(f"\nSramOverflow: {error}")
