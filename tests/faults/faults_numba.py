"""Bugs in the tensor-core kernels in Python, as `faults` has them of the rest: these need a GPU.

    python tests/faults/faults_numba.py [NAME ...]

seeds each in turn and says whether the tests that should notice it did. With a bug in its order of
events a kernel may hang or be stopped by the GPU instead; that is noticed, too.

Bugs that show by luck only are left out: a later tile not awaited, which has mostly arrived, Q
alone, which the copy engine brings right behind K, or the end of the kernel before, which mostly
has come: test_numba_kernels.py reads that it is waited for. A product of Hopper's that is not
waited for never shows in results, since ptxas adds a wait; it says so, and the same file hears.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from faults import table

NUMBA = "flashsim.backends.numba_gpu"
FORWARD, TILES = f"{NUMBA}.hopper.forward", f"{NUMBA}.hopper.wgmma_tiles"
KEYS = f"{NUMBA}.hopper.kv_outer"
BACKWARD, GRADIENTS = f"{NUMBA}.hopper.backward", f"{NUMBA}.hopper.gradients"
SUMS = f"{NUMBA}.hopper.key_gradients"
SOFTMAX = f"{NUMBA}.tensor.softmax"
FUNCTIONS = f"{NUMBA}.tensor.functions"
INDENT = " " * 20  # of a visit's lines in the forward
RAGGED = ("gpu/test_hopper.py::test_kinds_of_scores", "-k", "128-rising-python")
#: One key: the weight of one more is as large as its own. Among hundreds it drowns in rounding.
ONE_KEY = ("gpu/test_gpu_grid.py::test_shapes[python-hopper-64-full-1x1]",)
#: Some rows see nothing of the last tile that their row tile visits.
EMPTY_TILES = ("gpu/test_hopper.py::test_features[more keys-64-python-hopper]",)
CAUSAL = ("gpu/test_hopper.py::test_features", "-k", "causal-64-python")
OF_MASKS = ("gpu/test_functions.py::test_masks", "-k", "python and documents and 64")
VARLEN = ("gpu/test_hopper.py::test_features", "-k", "varlen-64-python")
COUNTS = (
    "gpu/test_hopper.py::test_counts_are_the_simulators",
    *("-k", "python-hopper-ragged-96-ascending"),
)
BITS = (
    "gpu/test_hopper.py::test_two_hundred_runs_give_the_same_bits",
    *("-k", "python-hopper-4096-64 and full"),
)
DEFERRED = (
    "gpu/test_hopper.py::test_dq_of_a_visit_computed_in_the_next_one",
    *("-k", "causal-64-python"),
)
#: A block's roles on a CPU, in an order drawn by lot: what on a GPU would show by luck.
ROLES = ("backends/test_numba_barriers.py::test_every_role_finds_what_it_waits_for",)
CLUSTER_ROLES = (
    "backends/test_numba_barriers.py::test_every_role_of_a_cluster_finds_what_it_waits_for",
    *("-k", "early or carried or neither"),
)
FORWARD_ROLES = (
    "backends/test_numba_forward_barriers.py::test_every_role_finds_what_it_waits_for",
)
MMA = (
    "gpu/test_gpu_grid.py::test_shapes",
    "-k",
    "[python-64-causal-128x217] or [python-64-causal-127x512]",
)

WORK_TILES = f"{NUMBA}.hopper.work_tiles"
LAYOUT = f"{NUMBA}.hopper.smem_layout"
PIECES_OF_DQ = ("backends/test_numba_kernels.py", "-k", "piece_of_dq")
CLUSTER_SIZES = ("gpu/test_hopper.py::test_launches_of_several_cluster_sizes", "-k", "python")
OF_ALIBI = ("gpu/test_functions.py::test_scores", "-k", "python and alibi and 64")
OF_RELATIVE = ("gpu/test_functions.py::test_scores", "-k", "python and relative and 64")
OF_SINKS = ("gpu/test_functions.py::test_sinks", "-k", "python and not tensor")
FAULTS = table(
    r"""
# -- Hopper's forward: what is computed
hopper-o-not-rescaled: FORWARD, RAGGED
    O keeps the scale of an older maximum
- if not late:
+ if False:
# O and l stay right, as alpha takes them from any maximum to any other, but LSE is -inf for
# a row whose last tile is all masked.
hopper-maximum-not-carried: FORWARD, EMPTY_TILES
    each tile starts from a maximum of -inf
- top, again = softmax.row_max_of_bits(m, s)
-                     if again:
-                         top = softmax.row_max(m, s)
+ top, again = softmax.row_max_of_bits(new_max(), s)
+                     if again:
+                         top = softmax.row_max(new_max(), s)
hopper-mask-of-later-visits-ignored: FORWARD, CAUSAL
    only a row's first tile is masked
- s = shaped(s, a, slot, steps, n, query)
+ pass
hopper-mask-one-key-late: SOFTMAX, ONE_KEY
    a row sees one key past its end
- last = b.sub(b.sub(key_stop, i32(1)), column)
+ last = b.sub(key_stop, column)
hopper-sequences-start-at-0: WORK_TILES, VARLEN
    the keys of every packed sequence are read from the first one's tiles
- base = int32(read_int(other, tile * 4) - tile * block)
+ pass
hopper-second-chunk-of-v: TILES, RAGGED
    a product steps from one 64-column chunk of V to a wrong one
- descriptor(b, v, (of or depth) * 128)
+ descriptor(b, v, (of or depth) * 64)
hopper-quads-not-transposed: TILES, RAGGED
    lanes of a quad store each other's columns
- four = transposed_quad(b, four, odd, high)
+ pass
hopper-ragged-tile-counted-whole: FORWARD, COUNTS
    a ragged tile of K counts as a whole one
- int32(min(block_k, get(slot + word.END) - key) * row_bytes)
+ int32(block_k * row_bytes)
# -- Hopper's forward: when
hopper-stage-not-free: FORWARD, BITS
    a tile is copied over one that is still read
- tile_free(shared + k_free, now)
+ pass
hopper-lap-forgotten: TILES, BITS
    a full stage is taken for the next lap's
- barrier_of(b, barriers, position), lap_of(b, position)
+ barrier_of(b, barriers, position), i32(0)
hopper-next-k-not-awaited: FORWARD, FORWARD_ROLES
    a visit's scores are queued before its K is there
- which = following
+ which = now
hopper-k-of-no-visit-awaited: FORWARD, FORWARD_ROLES
    behind an item's last visit the next K is waited for, which may be the next item's
- more = n < count
+ more = True
# -- Hopper's backward: what is computed
hopper-dk-of-the-last-queries-only: BACKWARD, RAGGED
    dK forgets all visits but the last
- dk = queue_dk(dk, ds, shared + q_at + shift)
-                     dq =
+ dk = queue_dk(new_grad(), ds, shared + q_at + shift)
+                     dq =
hopper-gradients-not-masked: BACKWARD, CAUSAL
    the backward's scores are not masked
- s = mask(s, key, query, limits[0], limits[1], a.left, a.right)
+ pass
hopper-backward-mask-one-query-early: GRADIENTS, CAUSAL
    a key has gradients of the query before the first that sees it
- low = b.sub(centre, window_right)
+ low = b.sub(b.sub(centre, i32(1)), window_right)
hopper-delta-left-out: GRADIENTS, RAGGED
    dP does not start at -delta
- deltas.append(b.fmul(x, f32(-1.0)))
+ deltas.append(f32(0.0))
hopper-ds-not-swizzled: GRADIENTS, RAGGED
    dS lies in shared memory as if no banks were permuted
- piece = b.xor(b.lshr(lane, i32(4)), turn)
+ piece = b.lshr(lane, i32(4))
hopper-dq-of-other-keys: LAYOUT, PIECES_OF_DQ
    with 64 queries per tile and 64 columns, half of dQ reads the dS of other keys
- (first // wide * block_k * wide + first % wide) * 2
+ first * block_k * 2
hopper-dq-half-of-a-piece: GRADIENTS, RAGGED
    only one box of a piece of dQ is sent off
- for box in range(wide // 32):
+ for box in range(1):
hopper-dq-halves-not-added: f"{NUMBA}.hopper.row_gradients", RAGGED
    dQ alone, at d = 128, lacks half of each visit's keys
- total[first + e] = b.fadd(dq[first + e], other)
+ total[first + e] = dq[first + e]
hopper-dq-rows-not-counted: f"{NUMBA}.hopper.kv_outer", COUNTS
    reductions of a ragged tile count as a whole one's
- rows = max(0, min(dq_rows, get(slot + word.END) - query - below))
+ rows = dq_rows
hopper-deferred-dq-of-the-wrong-visit: BACKWARD, DEFERRED
    deferred, dQ takes this visit's dS for the last one's
- queue_piece(shared, group, done - 1 if deferred else done)
+ queue_piece(shared, group, done)
hopper-scores-start-at-this-visits-statistics: BACKWARD, CAUSAL
    at 128 rows scores start where those of the visit before did
- s = load_starts(shared, done + 1)
+ s = load_starts(shared, done)
hopper-shares-from-the-start: KEYS, CLUSTER_ROLES
    every block of a cluster begins with the item's first visit
- return member, int32(first - member * count), int32(stop - first)
+ return int32(0), int32(0), int32(stop - first)
hopper-items-taken-twice: WORK_TILES, CLUSTER_SIZES
    the launch behind clusters begins with their items, not with the others
- return a.first if part else int32(0)
+ return int32(0)
# -- Hopper's backward: when
hopper-ds-not-awaited: BACKWARD, BITS
    dQ is made before the other warpgroup has written its dS
- ds_ready(int32(_DS_READY))
+ pass
hopper-deferred-ds-not-awaited: BACKWARD, ROLES
    dQ of the last visit is made before the other warpgroup has written its dS
- if due:  # both warpgroups' dS of the last visit is written
+ if False:
hopper-deferred-ds-not-free: BACKWARD, ROLES
    dS is written over that of the visit before the last, which may still be read
- wait_free(shared + ds_free, done)
+ pass
hopper-next-visit-not-awaited: BACKWARD, ROLES
    at 128 rows the next visit's statistics are read before they are there
- wait_full(shared + full, done + 1)
+ pass
hopper-a-cluster-waits-for-no-item: KEYS, CLUSTER_ROLES
    a block of a cluster waits until K of an item before it is free, of which there is none
-         if again:
-             wait(shared + k_free, parity)
+         wait(shared + k_free, parity)
hopper-sums-laid-over-tiles: SUMS, CLUSTER_ROLES
    a block lays dK and dV down over tiles that its other warpgroup still reads
- tiles_read(int32(_TILES_READ))
+ pass
hopper-a-block-of-a-cluster-ends-early: SUMS, CLUSTER_ROLES
    a block of a cluster ends while others read its dK and dV
- cluster_sync()  # the other blocks have read this block's sums
+ pass
hopper-out-of-turn: GRADIENTS, BITS
    dQ is added in any order where a fixed one is asked for
- ptx_hopper.wait_equal(b, turn, mine)
+ pass
# -- mask and score functions in Hopper's kernels
functions-mask-one-query-late: FUNCTIONS, OF_MASKS
    functions see each query as the one behind it
- b.add(place[2], q)
+ b.add(b.add(place[2], q), i32(1))
functions-partial-tiles-whole: FORWARD, OF_MASKS
    the forward evaluates no mask function
-             if has_mask:
-
+             if False:
+
functions-gradient-of-half-a-warp: FUNCTIONS, OF_ALIBI
    the gradient of an element of the head lacks half of a warp's lanes
- for mask in (1, 2, 4, 8, 16):
+ for mask in (1, 2, 4, 8):
functions-head-of-the-group: BACKWARD, OF_RELATIVE
    the backward calls functions with the first query head of a group
- head = int32(member - batch * a.heads)
+ head = int32((walk - batch * kv_heads) * a.group)
functions-sink-left-out: FORWARD, OF_SINKS
    the row sum lacks the sink
-         if sinks:
-
+         if False:
+
# -- the mma.sync kernels
mma-copies-not-waited-for: f"{NUMBA}.ptx", MMA
    tiles are read before their copies have arrived
- instruction("cp.async.wait_all;")
+ instruction("")
mma-bank-swizzle-of-reads: f"{NUMBA}.mma_tiles", MMA
    a tile is read without the permutation with which it was written
- low = col // 8 & (self.spread - 1)
+ low = 0
mma-dk-not-scaled: f"{NUMBA}.tensor.backward_dkdv", MMA
    dK lacks the factor of the scores' scale
- mma_tiles.scale_all(dk, a.scale)
+ dk
mma-delta-of-one-lane: f"{NUMBA}.tensor.backward_rows", MMA
    delta is not summed over the lanes that share a row
- sums = lane_sums(sums)
+ pass
mma-rows-of-a-batch-in-one: f"{NUMBA}.tensor.backward_rows", MMA
    the rows that a thread loads together are all the first one
- far = ir.Constant(I64, j * apart)
+ far = ir.Constant(I64, 0)
mma-pieces-of-a-batch-in-one: f"{NUMBA}.tensor.backward_rows", MMA
    the pieces of dQ that a thread rounds together are all the first one
- numbers = [b.add(first, i32(j * apart))
+ numbers = [b.add(first, i32(0))
""",
    globals(),
)


#: What CUDA says, through whichever library, of a kernel that it stopped; not of one that does not
#: compile or load.
STOPPED = (
    "unspecified launch failure",
    "an illegal memory access was encountered",
    "an illegal instruction was encountered",
    "misaligned address",
)
#: What test_numba_barriers.py says where every role waits.
WAITS = "Stuck: "


def shows(returncode: int, said: str) -> bool:
    """Whether pytest's exit status and output are those of a test that a running kernel failed."""
    return returncode == 1 and any(sign in said for sign in ("AssertionError", WAITS, *STOPPED))


def noticed(name: str) -> str:
    """Run the tests that should fail under a fault, and say what came of it."""
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        try:
            done = subprocess.run(
                [*command, "-p", "no:xdist", "--fault", name, *FAULTS[name].caught_by],
                cwd=Path(__file__).parents[1],
                env={**os.environ, "FLASHSIM_CACHE_DIR": cache},
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return "caught: hangs"
    if shows(done.returncode, done.stdout):
        return "caught: " + done.stdout.strip().splitlines()[-1]
    return f"NOT CAUGHT (pytest says {done.returncode}): " + (done.stdout + done.stderr)[-300:]


def main() -> int:
    """How many faults were not noticed."""
    names = sys.argv[1:] or list(FAULTS)
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(noticed, names))
    for name, result in zip(names, results, strict=True):
        print(f"{name:38}{result}")
    return sum("NOT CAUGHT" in result for result in results)


if __name__ == "__main__":
    sys.exit(main())
