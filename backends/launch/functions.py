"""Turn mask and score functions into the CUDA code and the packed bytes that kernels take.

`flashsim.functions.emit` generates the code from traced functions. The code defines
``FlashCaptured`` (the captured arrays and numbers), ``flash_mask``, ``flash_score`` and
``flash_score_grad``. The generated code precedes a kernel's source, and the bytes of
``FlashCaptured`` follow ``struct Args``.
"""

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from flashsim.errors import UnsupportedError
from flashsim.functions import emit
from flashsim.functions.derivative import adjoints
from flashsim.functions.graph import FLOAT, ArraySpec, Graph
from flashsim.functions.intervals import (
    in_32_bits,
    largest_result,
    ranges_of_integers,
    without_poles,
)
from flashsim.functions.mask import MaskFunction
from flashsim.functions.operations import INT
from flashsim.functions.spans import spans_of
from flashsim.problem.problem import Problem

#: Text around the generated functions. It selects the hardware's tanh where a softcap uses it
#: (common.cuh), and disables warnings about values that a function does not need.
_BEFORE = """\
#if FS_BF16
#define FLASH_FAST_TANH
#endif
#pragma nv_diagnostic push
#pragma nv_diag_suppress 177
"""
_AFTER = "#pragma nv_diagnostic pop\n"


class BiasTile(NamedTuple):
    """An array that a score function reads at index [.., q, k] and that TMA can load tile by tile.

    `array` is the index of the array among the score function's captured arrays. `node` is the
    index of the load operation among the score function's nodes.
    """

    array: int
    spec: ArraySpec
    node: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """The array's shape as (planes, queries, keys), where each head reads one of the planes."""
        *planes, rows, columns = self.spec.shape
        return math.prod(planes), rows, columns


class TableBand(NamedTuple):
    """An array that a score function reads at index [.., sign * (q - k) + offset].

    A tile pair has few different distances q - k, so a kernel can keep their elements in shared
    memory. `node` is the index of the load operation among the score function's nodes.
    """

    node: int
    sign: int
    offset: int


class Ramp(NamedTuple):
    """A score function that adds a linear function of the positions to the score (ALiBi).

    `factors` are the indices of the score function's nodes that depend only on the batch entry and
    the head. The function adds the product of these nodes and an integer that is linear in the
    positions. The integer grows by `steps` per key.
    """

    factors: tuple[int, ...]
    steps: int


@dataclass(frozen=True)
class Generated:
    """The CUDA source code that was generated for one kernel; the defaults are no functions.

    `source` has the functions alone, without the text around them. `captured_bytes` is the size of
    ``struct FlashCaptured``, a multiple of 8. With `sums`, ``flash_score_grad`` adds to the
    gradients of the captured arrays named in `wanted`. With `mask_reads` or `score_reads`, the
    function reads captured arrays by query or key, so a kernel must call it only at existing
    positions. `reads_beside` is the same as `score_reads`, but ignores the arrays `tile` and
    `band`. With `ranges`, the mask keeps ranges of keys and of queries, and kernels need not call
    it.

    A kernel may load the array `tile` into shared memory, one tile at a time. If `tile` is None, a
    kernel may load the elements of `band` for the distances q - k in a tile pair. `ramp` is a term
    of the score function that is linear in the positions. With `adds`, the score function only adds
    a term to the score. With `by_distance`, this term depends on positions only through their
    distance. `graphs` are the traced mask and score function, which kernels in Python use. For each
    of the two, `inside` has pairs (index node, size of an axis) in which the index is certainly in
    range. `first_sum` is the place of the first gradient's address among the struct's addresses.
    With `poles`, the score function may be infinite or NaN at positions that do not exist, or at
    scores of 0 there.
    """

    text: str = ""
    captured_bytes: int = 0
    mask: bool = False
    score: bool = False
    sums: bool = False
    mask_reads: bool = False
    score_reads: bool = False
    reads_beside: bool = False
    ranges: bool = False
    tile: BiasTile | None = None
    band: TableBand | None = None
    ramp: Ramp | None = None
    adds: bool = False
    by_distance: bool = False
    graphs: tuple[Graph | None, Graph | None] = (None, None)
    wanted: tuple[str, ...] = ()
    inside: tuple[tuple[tuple[int, int], ...], ...] = ((), ())
    first_sum: int = 0
    poles: bool = False
    source: emit.CudaSource | None = field(default=None, compare=False, repr=False)

    @property
    def constants(self) -> dict[str, int]:
        """Compile-time constants that tell a kernel which functions the problem has."""
        return {
            "MASK_MOD": int(self.mask),
            "SCORE_MOD": int(self.score),
            "SCORE_SUMS": int(self.sums),
            "READS": int(self.mask_reads or self.score_reads or self.poles),
        } | ({"POLES": 1} if self.poles else {})


_NO_FUNCTIONS = Generated()


class Functions(NamedTuple):
    """The CUDA code generated for one problem's mask and score functions, in two versions.

    The version `summing` adds up gradients of captured arrays, and `plain` does not. In a backward
    pass, only the KV-outer kernel uses `summing`, since it computes every score exactly once.
    """

    plain: Generated
    summing: Generated


def functions_of(problem: Problem) -> Functions | None:
    """Return the CUDA code of a problem's mask and score functions, or None if it has neither."""
    if problem.mask_mod is None and problem.score_mod is None:
        return None
    return _functions(problem.mask_mod, problem.score_mod, problem.score_grads, _extents(problem))


def plain_of(problem: Problem) -> Generated:
    """Return `Functions.plain` of a problem, or its defaults if the problem has no functions."""
    functions = functions_of(problem)
    return _NO_FUNCTIONS if functions is None else functions.plain


def read_arrays(problem: Problem, *, beside_ahead: bool = False, ranges: bool = False) -> bool:
    """Return whether the mask or score function reads captured arrays by query or key.

    With `beside_ahead`, the arrays of `tile_of`, of `Generated.band` and of terms `by_distance` do
    not count, because kernels load them in advance. With `ranges`, a mask that keeps ranges does
    not count.
    """
    plain = plain_of(problem)
    apart = beside_ahead and (tile_of(problem) or plain.band)
    score = plain.reads_beside if apart else plain.score_reads
    score = score and not (beside_ahead and plain.by_distance)
    return score or (plain.mask_reads and not (ranges and plain.ranges))


def has_known_slope(problem: Problem) -> bool:
    """Return whether the score function's derivative is independent of the score, as for a bias."""
    return problem.score_mod is not None and _known_slope(problem.score_mod)


@lru_cache(maxsize=256)
def _known_slope(graph: Graph) -> bool:
    parts = adjoints(graph, ())
    if parts.score is None:
        return True
    return "score" not in Graph(parts.nodes, parts.score, parts.arrays).uses


def tile_of(problem: Problem) -> BiasTile | None:
    """Return the largest captured array that is read at [.., q, k] and that TMA can load, or None.

    TMA needs rows whose length is a multiple of 16 bytes. For packed sequences the result is None,
    because a token's index in the array is not its position among the packed tokens.
    """
    return None if problem.cu_seqlens_q is not None else plain_of(problem).tile


def _tile_of(graph: Graph) -> BiasTile | None:
    found = []
    for n in graph.loads:
        node = graph.nodes[n]
        spec = graph.arrays[node.value]
        if len(node.args) < 2 or spec.dtype not in ("float16", "bfloat16", "float32"):
            continue
        rows, columns = (graph.nodes[a] for a in node.args[-2:])
        at_positions = (rows.op, rows.value, columns.op, columns.value) == ("arg", "q", "arg", "k")
        per_head = all(graph.depends[a] <= {"b", "h"} for a in node.args[:-2])
        whole = spec.shape[-1] * spec.itemsize % 16 == 0
        if at_positions and per_head and whole:
            found.append(BiasTile(node.value, spec, n))
    return max(found, key=lambda t: math.prod(t.spec.shape) * t.spec.itemsize, default=None)


def _band_of(graph: Graph, extents: tuple[tuple[str, int], ...]) -> TableBand | None:
    last = dict(extents)
    for n in graph.loads:
        node = graph.nodes[n]
        spec = graph.arrays[node.value]
        if not node.args or spec.kind != FLOAT:
            continue
        factors = _linear(graph, node.args[-1])
        if factors is None:
            continue
        sign, of_k, offset = factors.tolist()
        ends = [sign * d + offset for d in (1 - last["k"], last["q"] - 1)]
        inside = min(ends) >= 0 and max(ends) < spec.shape[-1]
        per_head = all(graph.depends[a] <= {"b", "h"} for a in node.args[:-1])
        if abs(sign) == 1 and of_k == -sign and inside and per_head:
            return TableBand(n, sign, offset)
    return None


def _linear(graph: Graph, n: int) -> np.ndarray | None:
    """Return the integers (a, b, c) if node `n` computes a * q + b * k + c, or None otherwise."""
    node = graph.nodes[n]
    if node.op == "const":
        return np.array([0, 0, node.value])
    if node.op == "arg" and node.value in ("q", "k"):
        return np.array([node.value == "q", node.value == "k", 0], int)
    operations = ("add", "sub", "neg", "mul")
    terms = [_linear(graph, a) for a in node.args] if node.op in operations else []
    known = [x for x in terms if x is not None]
    if not known or len(known) < len(terms):
        return None
    if node.op == "neg":
        return -known[0]
    if node.op == "mul":
        constant, other = known if not known[0][:2].any() else known[::-1]
        return None if constant[:2].any() else constant[2] * other
    return known[0] + known[1] if node.op == "add" else known[0] - known[1]


#: Factors of the scores (softmax scales) by which a step per key can be divided in float32.
_SCALES = 1e-9, 1e9


def ramp_of(problem: Problem) -> Ramp | None:
    """Return the linear term that the score function adds, or None if tensor cores cannot add it.

    The Hopper forward's tensor cores add the term while they compute the scores (Ramp in
    hopper/forward.cu). Because bfloat16 has float32's exponent range, three bfloat16 numbers can
    sum to any float32 step.
    """
    if problem.dtype != "bfloat16" or problem.softcap:
        return None
    return plain_of(problem).ramp if _SCALES[0] <= problem.scale <= _SCALES[1] else None


def _adds(graph: Graph) -> bool:
    """Return whether a score function only adds a term that is independent of the score."""
    score, n = graph.argument("score"), graph.root
    while n != score:
        node = graph.nodes[n]
        scored = [a for a in node.args if "score" in graph.depends[a]]
        if len(scored) != 1 or node.op not in ("add", "sub"):
            return False
        if node.op == "sub" and node.args[0] != scored[0]:
            return False
        n = scored[0]
    return True


def _by_distance(graph: Graph) -> bool:
    """Return whether a score function adds a term that only depends on the distance q - k.

    The term may also depend on the batch entry and the head, and may read arrays.
    """
    if not _adds(graph) or not graph.uses & {"q", "k"}:
        return False
    pending = [graph.root]
    while pending:
        n = pending.pop()
        if not graph.depends[n] & {"q", "k"}:
            continue
        node = graph.nodes[n]
        if node.op in ("lt", "le", "eq", "ne"):  # depends on the difference
            both = [_linear(graph, a) for a in node.args]
            linear = None if both[0] is None or both[1] is None else both[0] - both[1]
        else:
            linear = _linear(graph, n)
        if linear is not None and linear[0] == -linear[1]:
            continue  # a multiple of the distance, plus a constant
        if node.op == "arg":
            return False
        pending += node.args
    return True


def _ramp_of(graph: Graph) -> Ramp | None:
    root = graph.nodes[graph.root]
    score = graph.argument("score")
    if root.op not in ("add", "sub") or score not in root.args or root.args[0] == root.args[1]:
        return None
    if root.op == "sub" and root.args[0] != score:
        return None
    pending, factors, linear = [n for n in root.args if n != score], [], None
    while pending:
        n = pending.pop()
        node = graph.nodes[n]
        if graph.depends[n] <= {"b", "h"}:
            factors.append(n)
        elif node.op == "mul":
            pending += node.args
        elif node.op == "cast" and linear is None:
            linear = _linear(graph, node.args[0])
            if linear is None:
                return None
        else:
            return None
    if linear is None or not linear[1]:
        return None
    return Ramp(tuple(sorted(factors)), int(linear[1]) * (-1 if root.op == "sub" else 1))


def score_bound(problem: Problem) -> float:
    """Return an upper bound of the scores' absolute values before the softmax, or infinity."""
    if problem.score_mod is None:
        return problem.softcap or math.inf
    return _largest(problem.score_mod, _extents(problem))


@lru_cache(maxsize=256)
def _largest(graph: Graph, extents: tuple[tuple[str, int], ...]) -> float:
    return largest_result(graph, dict(extents))


def heads_share(problem: Problem, least: int) -> bool:
    """Return whether all heads read one array of at least `least` bytes by query and key."""
    graph = problem.score_mod
    return graph is not None and any(
        {"q", "k"} <= graph.depends[n] and "h" not in graph.depends[n] and size >= least
        for n in graph.loads
        for spec in [graph.arrays[graph.nodes[n].value]]
        for size in [math.prod(spec.shape) * spec.itemsize]
    )


def sources_of(problem: Problem) -> tuple[emit.CudaSource, emit.CudaSource]:
    """Return a problem's functions as CUDA code, without and with gradients of captured arrays."""
    functions = functions_of(problem)
    assert functions is not None
    assert functions.plain.source is not None
    assert functions.summing.source is not None
    return functions.plain.source, functions.summing.source


def arrays_of_mask(mask: MaskFunction) -> tuple[tuple[ArraySpec, ...], tuple[np.ndarray, ...]]:
    """Return the types and values of the arrays that kernels read for a mask function.

    The ends of the ranges that the mask keeps follow its captured arrays.
    """
    spans = spans_of(mask)
    if spans is None:
        return mask.graph.arrays, mask.arrays
    return (*mask.graph.arrays, *spans.arrays), (*mask.arrays, *spans.values)


def _extents(problem: Problem) -> tuple[tuple[str, int], ...]:
    rows = [(s.q_stop - s.q_start, s.k_stop - s.k_start) for s in problem.sequences]
    q, k = (max(lengths) for lengths in zip(*rows, strict=True))
    return (("b", problem.batch), ("h", problem.heads), ("q", q), ("k", k))


@lru_cache(maxsize=256)
def _functions(mask: Any, score: Any, wanted: Any, extents: Any) -> Functions:
    graph, score = _narrow(mask, score, extents)
    # kernels load at most one array in advance
    tile = None if score is None else _tile_of(score)
    band = None if score is None or tile else _band_of(score, extents)
    ahead = tile.node if tile else band.node if band else None
    ramp = None if score is None else _ramp_of(score)
    spans = None if mask is None else spans_of(mask)
    given = dict(extents), ahead, band and (band.sign, band.offset), ramp, spans
    code = emit.cuda_source(graph, score, (), *given)
    summing_code = emit.cuda_source(graph, score, wanted, *given) if wanted else code
    bound = math.inf if score is None else _largest(score, extents)
    before = _BEFORE + (f"#define FLASH_BOUND {bound!r}f\n" if math.isfinite(bound) else "")
    plain, summing = (
        Generated(
            before + source.text + _AFTER,
            -(-source.pack([0] * len(source.arrays), [0] * len(source.gradients)).nbytes // 8) * 8,
            mask is not None,
            score is not None,
            bool(source.gradients),
            bool(_reads(graph)),
            bool(_reads(score)),
            any(n != ahead for n in _reads(score)),
            spans is not None,
            tile,
            band,
            ramp,
            score is not None and _adds(score),
            score is not None and _by_distance(score),
            (graph, score),
            tuple(source.gradients),
            (_inside(graph, extents), _inside(score, extents)),
            next((n for n, f in enumerate(source.fields) if f.what == "gradient"), 0),
            score is not None and not without_poles(score.nodes, dict(extents))[score.root],
            source,
        )
        for source in (code, summing_code)
    )
    return Functions(plain, summing)


def _reads(graph: Graph | None) -> list[int]:
    """Return the numbers of the nodes that read an array by query or key."""
    return [] if graph is None else [n for n in graph.loads if graph.depends[n] & {"q", "k"}]


def _inside(
    graph: Graph | None, extents: tuple[tuple[str, int], ...]
) -> tuple[tuple[int, int], ...]:
    if graph is None:
        return ()
    ranges = ranges_of_integers(graph.nodes, dict(extents))
    loads = [graph.nodes[n] for n in graph.loads]
    pairs = {x for at in loads for x in zip(at.args, graph.arrays[at.value].shape, strict=True)}
    return tuple(sorted((n, size) for n, size in pairs if 0 <= ranges[n][0] <= ranges[n][1] < size))


def _narrow(
    mask: MaskFunction | None, score: Graph | None, extents: tuple[tuple[str, int], ...]
) -> tuple[Graph | None, Graph | None]:
    """Return the graphs of a mask and a score function with 32-bit integers.

    Raises
    ------
    UnsupportedError
        If a constant or an element of an array that the mask captures needs more bits.
    """
    sizes = dict(extents)
    narrow = None if score is None else in_32_bits(score, sizes)
    if mask is None:
        return None, narrow
    for spec, array in zip(mask.graph.arrays, mask.arrays, strict=True):
        if spec.kind == INT and not (array.min() >= -(2**31) and array.max() < 2**31):
            raise UnsupportedError(
                f"the array {spec.name} that {mask.graph.name} captures has integers of more than "
                "32 bits, which kernels on a GPU do not support; number the values from 0, or use "
                "backend='numba', which computes with 64 bits on the CPU"
            )
    return in_32_bits(mask.graph, sizes), narrow
