"""The layout of each tensor in HBM: the axis that is cut into tiles, and the number of bytes."""

import math
from functools import lru_cache
from typing import NamedTuple

from flashsim.functions.graph import Graph
from flashsim.functions.operations import SIDES
from flashsim.problem.problem import Problem, numpy_dtype

ROW, COL, TILE = range(3)  # a tensor is divided into row tiles, column tiles or score tiles
QUERY, KEY, BIAS = range(3)  # it has one matrix per query head, per key head or per bias head

#: Tensors with one matrix per bias head.
BIASES = frozenset(("bias", "dBias", "dBias_acc"))
#: Tensors with one number per row.
STATISTICS = frozenset(("L", "L_part", "l", "m", "delta", "dL"))
#: Tensors in the type of q, k and v.
INPUTS = ("Q", "K", "V")
#: The scales by which FP8 inputs are multiplied.
SCALES = tuple(f"{name}_scale" for name in INPUTS)
#: Bytes of an entry of a block table.
TABLE_ITEM = 4
#: The elements of captured arrays that score and mask functions read; see `captured`.
CAPTURED = ("F", "F_own", "M", "M_own")
#: The axis along which each tensor is divided into tiles.
AXES = {
    **dict.fromkeys(STATISTICS, ROW),
    **dict.fromkeys(BIASES, TILE),
    **dict.fromkeys(("Q", "O", "dO", "dQ", "O_acc", "dQ_acc", "O_part"), ROW),
    **dict.fromkeys(("K", "V", "dK", "dV", "table"), COL),
    **dict.fromkeys(("S", "P", "dP", "dS", "gate"), TILE),
    **dict.fromkeys(("F", "M", "S_raw", "dF"), TILE),
    **dict.fromkeys(("F_own", "M_own", "sink", "dSink"), ROW),
    **dict(zip(SCALES, (ROW, COL, COL), strict=True)),
}
_WIDTHS = {  # elements per row; other tensors have one per row or score
    **dict.fromkeys(("Q", "K", "dQ", "dK", "dQ_acc"), "head_dim"),
    **dict.fromkeys(("V", "O", "dO", "dV", "O_acc", "O_part"), "head_dim_v"),
}


class TensorShape(NamedTuple):
    """The layout of a tensor in HBM: tiles along `axis`, and elements per row, column or score.

    Each row, column or score has `elements` elements of `itemsize` bytes. A statistic (one number
    per row) or an FP8 scale (one number per several rows) has ``vector=True``.
    """

    axis: int
    owner: int
    elements: int
    itemsize: int
    vector: bool

    @property
    def width(self) -> int:
        """The bytes of the tensor per row, per column or per score."""
        return self.elements * self.itemsize


def shape(problem: Problem, name: str) -> TensorShape:
    """Return the layout of a tensor for a problem."""
    axis, statistic = AXES[name], name in STATISTICS
    owner = BIAS if name in BIASES else KEY if axis == COL else QUERY
    elements = getattr(problem, _WIDTHS[name]) if name in _WIDTHS else 1
    itemsize = numpy_dtype(dtype(problem, name)).itemsize
    if name == "table":  # int32 page numbers, at most one per key
        itemsize = TABLE_ITEM
    return TensorShape(axis, owner, elements, itemsize, statistic or name in SCALES)


def dtype(problem: Problem, name: str) -> str:
    """Return the element type of a tensor in HBM."""
    if name in STATISTICS or name in SCALES or name in ("sink", "dSink", "dF"):
        return problem.compute_dtype
    if name.endswith(("_acc", "_part")):
        return problem.compute_dtype
    return problem.dtype if name in INPUTS else problem.result_dtype


def function_of(problem: Problem, name: str) -> Graph | None:
    """Return the score or mask function that reads a tensor of CAPTURED."""
    if name.startswith("F"):
        return problem.score_mod
    return problem.mask_graph


def captured(problem: Problem, name: str, outer: str) -> dict[str, int]:
    """Return the bytes of captured arrays that a tile reads, per head, row, column and score.

    A Q-outer loop reads elements that depend only on the head or the row (`_own`) once per row
    tile, and the remaining elements at each visit. A KV-outer loop reads all elements at each
    visit.
    """
    graph, own = function_of(problem, name), name.endswith("_own")
    if graph is None or (own and outer == "keys"):
        return {}
    sides = ("fixed", "row") if own else ("col", "score") if outer == "queries" else SIDES
    return {side: graph.widths[side] for side in sides if graph.widths[side]}


def title(problem: Problem, name: str, direction: str) -> str:
    """Return a tensor's name for tables, with the captured array's name: "slopes (F_own)"."""
    if name not in (*CAPTURED, "dF"):
        return name
    graph = problem.score_mod if name == "dF" else function_of(problem, name)
    if graph is None:
        return name
    if name == "dF":
        read = [f"d{a.name}" for a in graph.arrays if a.name in problem.score_grads]
    else:
        # A backward pass has a KV-outer loop, which reads all captured elements at each visit.
        own = name.endswith("_own")
        each: tuple[str, ...] = SIDES if direction == "backward" else ("col", "score")
        sides = ("fixed", "row") if own else each
        at = {graph.nodes[n].value for n in graph.loads if graph.side(n) in sides}
        read = [a.name for n, a in enumerate(graph.arrays) if n in at]
    return f"{', '.join(read)} ({name})" if read else name


def reduced(problem: Problem) -> int:
    """Return how many elements per score a backward pass adds to gradients of captured arrays."""
    graph, wanted = problem.score_mod, problem.score_grads
    if graph is None:
        return 0
    return sum(graph.arrays[graph.nodes[n].value].name in wanted for n in graph.loads)


def rows_a_scale(problem: Problem, name: str) -> int:
    """Return how many rows of Q, K or V share one FP8 scale."""
    if isinstance(problem.scales, tuple):
        return problem.scales[AXES[name]]
    return problem.n_q if AXES[name] == ROW else problem.n_kv


def matrices(problem: Problem, owner: int) -> int:
    """Return how many matrices a tensor has: one per query head, key head or matrix of the bias."""
    p = problem
    bias = p.bias[0] * p.bias[1] if p.bias else 0
    return {QUERY: p.batch * p.heads, KEY: p.batch * p.kv_heads, BIAS: bias}[owner]


@lru_cache(maxsize=256)
def whole_bytes(problem: Problem, name: str) -> int:
    """Return the bytes of a tensor in HBM over all heads.

    For partial results (`O_part`, `L_part`), the bytes are those of one part of the keys. For a
    matrix of scores, only the scores within each packed sequence count.
    """
    p, its = problem, shape(problem, name)
    if name == "table":
        return p.pages * TABLE_ITEM
    if name in CAPTURED:  # each array is in HBM once, whichever part of a step reads it
        graph = function_of(p, name)
        return 0 if graph is None or name.endswith("_own") else graph.nbytes
    if name in ("sink", "dSink"):
        return p.heads * its.itemsize
    if name == "dF":
        graph, wanted = p.score_mod, p.score_grads
        return sum(math.prod(a.shape) for a in graph.arrays if a.name in wanted) * its.itemsize
    if name in SCALES:
        rows = p.n_q if its.axis == ROW else p.n_kv
        heads = 1 if p.scales == "tensor" else matrices(p, its.owner)
        return heads * -(-rows // rows_a_scale(p, name)) * its.itemsize
    scores = p.n_q * p.n_kv
    if its.owner == QUERY:
        scores = sum((s.q_stop - s.q_start) * (s.k_stop - s.k_start) for s in p.sequences)
    extent = {ROW: p.n_q, COL: p.n_kv, TILE: scores}[its.axis]
    return matrices(p, its.owner) * extent * its.width
