"""A catalogue of classic bugs, each one a replaced fragment of a module or of a GPU kernel.

``python -m pytest --fault NAME`` seeds one and runs the suite, which should then fail. A fragment
that no longer occurs exactly once is an error: a fault that changes nothing would prove nothing.
Those that need a GPU are in `faults_numba` (kernels in Python) and `kernel_faults` (CUDA C++).
"""

import difflib
import importlib.machinery
import importlib.util
import os
import re
import sys
from dataclasses import dataclass

# Where each fault shows: pytest's arguments for a quick part of the suite.
KINDS_1 = ("engines/test_engines.py::test_kinds_and_types", "-k", "simulator-flash1- and float32")
KINDS_2 = ("engines/test_engines.py::test_kinds_and_types", "-k", "simulator-flash2- and float32")
KINDS_FUSED = (
    "engines/test_engines.py::test_kinds_and_types",
    "-k",
    "simulator-flash2-fused and float32",
)
KINDS_STANDARD = (
    "engines/test_engines.py::test_kinds_and_types",
    "-k",
    "simulator-standard and float32",
)
OPTIONS = ("engines/test_engines.py::test_options", "-k", "simulator-flash2- and float32")
LEAST = (
    "engines/test_extremes.py::test_both_passes_have_one_p_where_scores_are_the_least_there_are",
)
BIAS, SHARED_BIAS, SOFTCAP = (
    (f"engines/test_engines.py::test_options[simulator-flash2-{case}-float32]",)
    for case in ("bias", "bias-shared", "softcap")
)
PRECISION = ("engines/test_engines.py::test_p_is_rounded_to_the_input_type",)
ORACLE = ("problem/test_oracle.py::test_agrees_with_a_second_formula", "-k", "causal or window")
FP8 = ("api/test_quantize.py::test_attention_is_that_of_the_numbers_that_are_meant",)
FLUSH = ("problem/test_precision.py::test_what_is_flushed_is_one_tensor_core_sum",)
FLUSH_SCALED = ("problem/test_precision.py::test_what_is_not_flushed_yet_is_rescaled",)
BITS = ("problem/test_precision.py::test_a_tensor_core_keeps_14_bits_of_what_it_adds",)
ROTATION = ("api/test_quantize.py::test_rotation_lowers_the_error_that_outliers_make",)
SCALES = ("counts/test_traffic.py::test_fp8_and_its_scales_by_hand",)
TRAFFIC = ("counts/test_traffic.py::test_fixed_problems_are_counted_exactly", "-k", "gqa")
DECODE = ("counts/test_flash_decode.py::test_kinds_and_types", "-k", "float32-normal")
PAGES = ("counts/test_flash_decode.py::test_pages_hold_what_a_contiguous_cache_does",)
CASCADE = ("counts/test_cascade.py::test_it_is_attention_over_all_keys_and_counted",)
PARTS = ("counts/test_flash_decode.py::test_parts_cover_the_walk_once_and_evenly",)
WORK = ("counts/test_work.py", "-k", "flash2-plain")
TILES_DOTS, TILES_WEIGH = (
    (f"engines/test_cpu_decode.py::{test}", "-k", "EmulatedAmx")
    for test in ("test_dots", "test_weigh")
)
TILE_MACHINE = ("engines/test_bf16_dot.py::test_the_machine_multiplies", "-k", "add")
KEPT, KEPT_OVER_A_GAP = (
    (f"engines/test_bf16_dot.py::test_p_waits_for_its_product_with_v[{case}]",)
    for case in ("grows", "keys are left out")
)


class FaultError(Exception):
    """A fault that does not exist, or that no longer fits the source."""


@dataclass(frozen=True)
class Fault:
    """`old` becomes `new` in `source`, a module or a file of backends/kernels/.

    The tests of `caught_by`, which are pytest's arguments in tests/, must notice.
    """

    bug: str
    source: str
    old: str
    new: str
    caught_by: tuple[str, ...]

    @property
    def in_kernels(self) -> bool:
        """Whether the source is CUDA C++."""
        return "/" in self.source

    def seeded(self, text: str) -> str:
        """The source's text with the bug in it."""
        if text.count(self.old) != 1:
            raise FaultError(
                f"{self.source} holds the fragment {self.old!r} {text.count(self.old)} times, not "
                "once; bring tests/faults up to date"
            )
        return text.replace(self.old, self.new)


def table(text: str, names: dict) -> dict[str, Fault]:
    """Return the faults of a table, by name; its expressions use the `names`.

    An entry begins with the fault's name, source and tests. The next line is the bug in words. The
    other lines are the change as in a patch: "- " before what goes, and "+ " before what comes.
    """
    found = {}
    for entry in re.split(r"\n(?=\w)", text)[1:]:
        head, bug, *change = [line for line in entry.split("\n") if line and line[0] != "#"]
        name, where = head.split(": ", 1)
        source, tests = eval(where, names)
        old, new = ("\n".join(line[2:] for line in change if line[0] == sign) for sign in "-+")
        found[name] = Fault(bug.strip(), source, old, new, tests)
    return found


FLASH1, FLASH2 = "flashsim.algorithms.flash1", "flashsim.algorithms.flash2"
STANDARD, TILES = "flashsim.algorithms.standard", "flashsim.algorithms.score_tile"
HBM, SRAM = "flashsim.algorithms.hbm", "flashsim.algorithms.sram"
PROBLEM = "flashsim.problem.problem"
SCHEDULE, GRID = "flashsim.schedule.schedule", "flashsim.schedule.grid"
COUNTS = "flashsim.counts.forms"

QUANTIZE, NUMBERS = "flashsim.api.quantize", "flashsim.problem.precision"
DECODING, MERGE = "flashsim.algorithms.flash_decode", "flashsim.algorithms.merge"

AMX, STEPS = "flashsim.engines.cpu.bf16_dot.amx_tiles", "flashsim.engines.cpu.bf16_dot.steps"
ALONG = "flashsim.engines.cpu.micro_kernels.decode_gemv_amx"

FUNCTIONS, CLASSIFY = "flashsim.algorithms.functions", "flashsim.schedule.classify"
WITH_SCORE, WITH_MASK, WITH_SINKS = (
    (
        "functions/test_functions_engines.py::test_results_gradients_and_counts",
        *("-k", f"simulator-flash2-{case}"),
    )
    for case in ("score", "mask", "sinks")
)
TILES_OF_FUNCTIONS = ("functions/test_tiles_of_functions.py", "-k", "every_score and alone")

ONE_VISIT = ("engines/test_one_visit.py::test_kinds_and_types", "-k", "normal-float32")
FAULTS = table(
    r"""
# -- Score and mask functions
mask-function-shifted: FUNCTIONS, WITH_MASK
    in a partial tile the mask function gets the next key
- _evaluated(mask.graph, "M", positions, values, mask.dtype)
+ _evaluated(mask.graph, "M", {**positions, "k": positions["k"] + 1}, values, mask.dtype)
full-tile-as-partial: CLASSIFY, TILES_OF_FUNCTIONS
    a box that keeps every score is taken for one that needs the mask
- np.where(whole & ~ragged, FULL, MASKED)
+ np.where(~whole, FULL, MASKED)
partial-tile-as-full: CLASSIFY, TILES_OF_FUNCTIONS
    a tile that keeps some scores is taken for one that keeps all
- kind = np.where(every, FULL, MASKED)
+ kind = np.where(some, FULL, MASKED)
captured-at-wrong-head: FUNCTIONS, WITH_SCORE
    a captured array is read at the key head, not at the query head
- lead % p.kv_heads * p.group + members
+ lead % p.kv_heads + 0 * members
captured-gradient-of-one-entry: FUNCTIONS, WITH_SCORE
    a captured array's gradient is not summed over the batch
- np.where(quiet, 0, np.broadcast_to
+ np.where(quiet | (chain.positions['b'] > 0), 0, np.broadcast_to
sink-left-out: FLASH2, WITH_SINKS
    the sum of exponentials begins without the sink
- fill=float(p.sinks)
+ fill=0.0
# -- One visit
once-anywhere: SCHEDULE, ("engines/test_one_visit.py::test_other_schedules_are_refused",)
    a backward for one visit of each row tile takes any schedule
- any(stage.once for stage in stages) and not Schedule(problem, tiling).visited_once:
+ False:
once-delta-without-p: TILES, ONE_VISIT
    delta made on chip is a sum of dP, not of P dP
- np.sum(P_ij * dP_ij, axis=-1, out=delta_i)
+ np.sum(dP_ij, axis=-1, out=delta_i)
# -- AMX tiles
tile-of-b-for-two: AMX, TILE_MACHINE
    both columns of a block are multiplied with the first one's tile
- for register in (tile, a, b)
+ for register in (tile, a, first_b)
tile-sums-begin-anew: AMX, TILE_MACHINE
    what is added to begins as zero
- if mode == "set":
+ if mode != "none":
kept-over-a-new-maximum: STEPS, KEPT
    P that waits for its product is multiplied after the sums have been scaled
- weigh(cpu, O, P, V, panel, dv, (begin, end))
-         begin = start
+ pass
kept-over-a-gap: STEPS, KEPT_OVER_A_GAP
    P that waits is multiplied with the keys between two tiles that a row visits, too
- if end != start or moved
+ if moved
tile-rows-beyond-the-last: ALONG, TILES_WEIGH
    a last odd row of V is paired with what lies behind it
- below = b.select(b.icmp_signed("<", r, last), b.add(r, one), last)
+ below = b.add(r, one)
tile-of-short-rows: ALONG, TILES_DOTS
    rows of K that a tile does not divide are read as if it did
- b.and_(b.icmp_signed("==", rest, zero), enough)
+ enough
# -- parts of the keys
split-lost: DECODING, DECODE
    the last part is not merged
- for part in range(int(schedule.slots[i, 1])):
+ for part in range(int(schedule.slots[i, 1]) - 1):
prefix-counted-twice: PROBLEM, CASCADE
    the first entry's own keys begin with the shared prefix
- Segment(q[s], q[s + 1], k[s], k[s + 1])
+ Segment(q[s], q[s + 1], k[s] * (s > 0), k[s + 1])
merged-lse-of-the-wrong-base: MERGE, DECODE
    the merged LSE stands on one part's, not on the larger
- return out, m + np.log(safe)
+ return out, lse_b + np.log(safe)
parts-overlap: "flashsim.schedule.split", PARTS
    each part begins with the last key tile of the one before
- return first + n * part // parts,
+ return first + max(0, n * part // parts - 1),
page-off-by-one: HBM, PAGES
    a key is looked for in the page after its own
- [at // size - start // size]
+ [(at // size - start // size + 1) % len(self.pages.ravel())]
packed-rows-masked-as-queries: GRID, DECODE
    row r of a tile of packed heads is masked as query r
- np.arange(*self.rows[i, :2].tolist()) // self.members
+ np.arange(*self.rows[i, :2].tolist())
# -- online softmax
o-not-rescaled: FLASH2, KINDS_2
    O keeps the scale of an older maximum
- rescale=alpha
+ rescale=alpha * 0 + 1
l-not-rescaled: FLASH2, KINDS_2
    l keeps the scale of an older maximum
- l_i[:] = alpha * l_i + P_ij
+ l_i[:] = l_i + P_ij
maximum-not-carried: FLASH2, KINDS_2
    each tile starts from a maximum of -inf
- m_i[:] = m_new
+ pass
maximum-of-the-tile-only: FLASH2, KINDS_2
    the maximum may fall from tile to tile, and the sums overflow
- np.maximum(m_i, S_ij.max(axis=-1))
+ S_ij.max(axis=-1)
o-not-normalised: FLASH2, KINDS_2
    O is stored without the division by l
- return O_i / l_safe[..., None],
+ return O_i,
lse-without-log: TILES, KINDS_2
    LSE is m + l
- m + np.log(np.where(l == 0, 1, l))
+ m + np.where(l == 0, 1, l)
empty-row-is-nan: FLASH2, OPTIONS
    a row that has seen no key subtracts -inf from -inf
- S_ij -= finite(m_new)[..., None]
+ S_ij -= m_new[..., None]
masked-row-is-a-mean: TILES, LEAST
    a row whose scores are all the lowest finite number has keys, and P = 1 going back
- m <= masked_score(m.dtype)
+ np.isneginf(m)
flash1-beta-left-out: FLASH1, KINDS_1
    FlashAttention-1 adds a tile at its own maximum's scale
- beta[..., None] * (sram.rounded("P", P_ij) @ V_j)
+ sram.rounded("P", P_ij) @ V_j
# -- scores and masks
scale-off-by-1e-4: TILES, KINDS_2
    the scale is off by one part in ten thousand
- S_ij *= p.scale
+ S_ij *= p.scale * (1 + 1e-4)
mask-ignored: TILES, OPTIONS
    masked scores of a visited tile count
- S_ij[..., ~keep] = -np.inf
+ pass
mask-shifted-by-one: GRID, OPTIONS
    a tile's mask is that of the keys one to the left
- np.arange(*self.cols[j, :2].tolist())
+ np.arange(*self.cols[j, :2].tolist()) - 1
window-off-by-one: PROBLEM, ORACLE
    the window's left side is exclusive
- (rel >= -self.left)
+ (rel > -self.left)
causal-top-left: PROBLEM, ORACLE
    causal masks are aligned at the top left
- self.k_stop - self.q_stop
+ self.k_start - self.q_start
edge-tile-called-full: GRID, OPTIONS
    the tile that the diagonal or a ragged edge cuts counts as FULL
- full_hi = (end + 1) // block
+ full_hi = -(-(end + 1) // block)
span-one-tile-short: GRID, KINDS_2
    the last tile of a row is not visited
- end // block + 1)
+ np.maximum(end // block, 1))
bias-of-the-first-row: TILES, BIAS
    the bias of the first query serves all rows of a tile
- S_ij += sram.load(
+ S_ij[..., :1, :] += sram.load(
# -- backward
delta-left-out: TILES, KINDS_2
    dS = P dP
- P_ij, dP_ij - delta_i[..., None]
+ P_ij, dP_ij
softcap-gradient-missing: TILES, SOFTCAP
    the softcap is not differentiated
- dS_ij *= chain.cap
+ pass
dk-not-summed-over-group: FLASH2, OPTIONS
    dK and dV take the first query head of a group alone
- for g in range(p.group):
+ for g in range(1):
dk-without-scale: FLASH2, KINDS_2
    dK lacks the scale
- sram.store(hbm.dK, cols, dK_j * p.scale)
+ sram.store(hbm.dK, cols, dK_j)
flash1-p-not-normalised: FLASH1, KINDS_1
    FlashAttention-1's backward forgets that P is divided by l
- P_ij /= np.where(l_i == 0, 1, l_i)[..., None]
+ pass
reduce-overwrites: HBM, KINDS_FUSED
    a tile reduced into HBM replaces what was there
- self.view(rows, cols, member)[...] += tile
+ self.view(rows, cols, member)[...] = tile
dbias-of-the-first-head: HBM, SHARED_BIAS
    a shared bias's gradient is not summed over the heads
- += full.sum(axis=shared, keepdims=True)
+ += full[:1, :1]
standard-row-sum-left-out: STANDARD, KINDS_STANDARD
    standard attention's dS = P dP
- (dP_i - D_i[..., None])
+ dP_i
forgotten-store: FLASH2, KINDS_2
    dV stays on chip
- sram.store(hbm.dV, cols, dV_j)
+ pass
# -- precision
p-not-rounded: FLASH2, PRECISION
    P V is computed from P in float32
- O_i, sram.rounded("P", P_ij), V_j
+ O_i, P_ij, V_j
flush-skipped: SRAM, FLUSH
    the tensor cores' sum is never added to the float32 accumulator
- if tiles + 1 < flush:
+ if True:
flushed-sum-not-rescaled: SRAM, FLUSH_SCALED
    what is not flushed yet keeps the scale of an older maximum
- small *= rescale[..., None]
+ pass
bits-of-the-accumulator: NUMBERS, BITS
    tensor cores keep one bit more than they do
- TERMS, FRACTION = 32, 13
+ TERMS, FRACTION = 32, 14
scale-left-out: SRAM, FP8
    an FP8 tile is read as if its scale were 1
- tile *= tensor.scale.spread(
+ _ = tensor.scale.spread(
scale-of-the-wrong-block: HBM, FP8
    every row of a tile has the scale of its first block
- np.arange(rows.start, rows.stop) // self.every - first
+ [0]
q-rotated-alone: QUANTIZE, ROTATION
    K keeps its basis while Q is rotated
- for name in "qk"}
+ for name in "q"}
scale-not-counted: COUNTS, SCALES
    the closed form knows one scale a tile, whatever its blocks
- -(-table[:, 1].astype(int) // every) - table[:, 0] // every
+ table[:, 0] * 0 + 1
# -- counting
k-loaded-once: FLASH2, TRAFFIC
    K is read for free after the first row tile
- K_j = sram.load(K, visit.cols)
+ K_j = sram.load(K, visit.cols) if not visit.i else K.view(visit.cols, slice(None), None)
ragged-tile-counted-whole: SCHEDULE, TRAFFIC
    the closed form counts keys that do not exist
- reach = np.concatenate([[0], np.cumsum(widths)])
+ reach = np.arange(self.t_c + 1) * self.tiling.block_k
group-loads-counted-per-head: COUNTS, TRAFFIC
    the closed form counts dK and dV once a query head
- return self.kv_heads * self.p.n_kv * self.p.head_dim * item
+ return self.heads * self.p.n_kv * self.p.head_dim * item
lse-in-the-input-type: COUNTS, TRAFFIC
    statistics are counted at the input's width
- return self.heads * self.p.n_q * self.a
+ return self.heads * self.p.n_q * self.e
multiply-add-is-one: "flashsim.counts.work", WORK
    a multiply-add of a gradient counts as one FLOP
- TileOp(name, reads, writes, {"matmul": scores(2 * inner)})
+ TileOp(name, reads, writes, {"matmul": scores(inner)})
""",
    globals(),
)


def catalogue() -> dict[str, Fault]:
    """These faults, and those that need a GPU."""
    import faults_numba  # these import this module
    import kernel_faults

    return FAULTS | faults_numba.FAULTS | kernel_faults.FAULTS


def install(name: str) -> None:
    """Seed one fault; a module must not have been imported yet, nor a kernel compiled.

    Raises
    ------
    FaultError
        If there is no such fault, it no longer fits, or it comes too late.
    """
    known = catalogue()
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise FaultError(f"no fault {name!r}{hint}; there are: {', '.join(known)}")
    fault = known[name]
    if fault.in_kernels:
        _into_kernels(fault)
        return
    if "flashsim" in sys.modules:
        raise FaultError("flashsim is already imported; a fault must be seeded before that")
    faulty_source(fault)
    sys.meta_path.insert(0, _Finder(fault))


def _into_kernels(fault: Fault) -> None:
    from flashsim.backends.kernels import nvrtc

    sound = nvrtc.source

    def faulty(file: str) -> str:
        return fault.seeded(sound(file)) if file == fault.source else sound(file)

    faulty(fault.source)  # fails here rather than at the first launch
    sound.cache_clear()
    nvrtc.source = faulty


def faulty_source(fault: Fault) -> str:
    """The module's source with the bug in it; reads the file, imports nothing of the module."""
    *parents, leaf = fault.source.split(".")
    folder = importlib.util.find_spec(parents[0])
    path = "/".join([*folder.submodule_search_locations, *parents[1:], f"{leaf}.py"])
    if not os.path.exists(path):  # as checked out, flashsim.backends lies beside flashsim
        path = path.replace("/flashsim/backends/", "/backends/")
    with open(path, encoding="utf-8") as file:
        return fault.seeded(file.read())


class _Finder:
    """Finds one module before the ordinary finders do, and compiles the faulty source."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault

    def find_spec(self, fullname, path=None, target=None):
        if fullname != self.fault.source:
            return None
        found = importlib.machinery.PathFinder.find_spec(fullname, path)
        found.loader = _Loader(fullname, found.origin, self.fault)
        return found


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, fullname, path, fault: Fault) -> None:
        super().__init__(fullname, path)
        self.fault = fault

    def get_code(self, fullname):  # never from, and never into, the bytecode cache
        return compile(faulty_source(self.fault), self.path, "exec")
