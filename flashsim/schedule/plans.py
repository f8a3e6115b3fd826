"""Computes an algorithm's stages for one problem: moves with their sizes, and on-chip buffers."""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from flashsim.errors import OptionError, UnsupportedError
from flashsim.problem import checks
from flashsim.problem.problem import Problem
from flashsim.schedule import dataflow, tensors
from flashsim.schedule.dataflow import Outer, Per, StageDataflow
from flashsim.schedule.names import OPS, TRANSFERS
from flashsim.schedule.split import WHOLE, Split

ALGORITHMS = tuple(dataflow.ALGORITHMS)
#: The algorithms with a backward pass.
TRAINING = tuple(name for name, flow in dataflow.ALGORITHMS.items() if flow.backward)
#: The algorithms whose backward pass works with any schedule.
GENERAL = tuple(
    name for name in TRAINING if not any(x.once for x in dataflow.ALGORITHMS[name].backward)
)
#: The algorithms that split no keys, but whose forward pass may pack the query heads of a group.
PACKING = ("flash2", "flash2-fused", "flash2-fused-first", "flash2-once")
#: The algorithms whose backward adds to a float32 dQ in HBM. In the second one, the first visit of
#: a row tile stores instead, so that no kernel writes zeros.
FUSED = ("flash2-fused", "flash2-fused-first")
#: The fields of a problem that tiles with rows of several heads do not support.
FUNCTIONS = ("mask_mod", "score_mod", "sinks")
#: The learnable sink of each query head, and its gradient.
SINKS = ("sink", "dSink")
DIRECTIONS = ("forward", "backward")


class Buffer(NamedTuple):
    """One on-chip buffer: its bytes per query row, per key column and per score of a tile.

    A buffer of FP8 scales takes these bytes once per `every` rows or columns. `fixed` bytes do not
    depend on the tile's size.
    """

    name: str
    per_row: int = 0
    per_col: int = 0
    per_score: int = 0
    visit: bool = False  # lives for one visit; otherwise for a whole outer step
    every: int = 1
    fixed: int = 0

    def nbytes(self, rows, cols):
        """Return the bytes of the buffer for a tile of `rows` x `cols` (numbers or arrays)."""
        if self.every > 1:
            rows, cols = -(-rows // self.every), -(-cols // self.every)
        of_tile = self.per_row * rows + self.per_col * cols + self.per_score * rows * cols
        return of_tile + self.fixed


class Move(NamedTuple):
    """One operation (load, store, reduce or alloc) of a stage on a tensor and its buffer."""

    op: str
    tensor: str
    tile: Buffer
    #: True for what score and mask functions or sinks need. A GPU kernel does not report its bytes.
    of_functions: bool = False

    @property
    def code(self) -> int:
        """The index of the move's operation in `names.OPS`."""
        return OPS.index(self.op)

    @property
    def transfers(self) -> bool:
        """Whether the move transfers bytes between HBM and SRAM."""
        return self.code in TRANSFERS

    @property
    def for_masked(self) -> bool:
        """Whether the move occurs only in MASKED tiles; FULL tiles do not use the buffer."""
        return self.tensor == "M"

    @property
    def holds(self) -> bool:
        """Whether the move fills an on-chip buffer."""
        return self.op in ("load", "alloc")


@dataclass(frozen=True)
class Stage:
    """One stage (one kernel, one pass over the score matrix) of an algorithm, for one problem.

    The fields are those of `StageDataflow`, but packed heads change `per` from "head" to "group".
    Buffers with ``visit=False`` are live throughout the inner loop.
    """

    name: str
    outer: Outer
    buffers: tuple[Buffer, ...] = ()
    dense: bool = False
    per: Per = "head"
    whole_rows: bool = False
    converts: bool = False
    parts: str = ""
    once: bool = False
    stores_first: bool = False
    before: tuple[Move, ...] = ()
    visit: tuple[Move, ...] = ()
    after: tuple[Move, ...] = ()

    @property
    def moves(self) -> tuple[Move, ...]:
        """All moves of the stage, each listed once."""
        return (*self.before, *self.visit, *self.after)


def stages(
    problem: Problem, algorithm: str, direction: str = "forward", split: Split = WHOLE
) -> tuple[Stage, ...]:
    """Return the stages of an algorithm for a problem, in the order in which they run.

    Raises
    ------
    UnsupportedError
        If the algorithm lacks that direction, or does not support a field of the problem.
    """
    checks.instance("problem", problem, Problem, "flashsim.Problem")
    check_algorithm(algorithm)
    checks.one_of("direction", direction, DIRECTIONS)
    return _stages(problem, algorithm, direction, split.pack_gqa)


@lru_cache(maxsize=256)
def _stages(problem: Problem, algorithm: str, direction: str, packed: bool) -> tuple[Stage, ...]:
    if problem.page_size is not None and not splits_keys(algorithm):
        raise UnsupportedError(
            f"{algorithm!r} cannot read a paged cache; use algorithm='flash-decode', or leave "
            "out page_size="
        )
    if problem.latent and not splits_keys(algorithm):
        raise UnsupportedError(
            f"{algorithm!r} loads K and V separately, but V is part of K here; use "
            "algorithm='flash-decode', which reads V from K, or pass v="
        )
    if problem.shared_prefix and not splits_keys(algorithm):
        raise UnsupportedError(
            f"{algorithm!r} cannot merge partial results, so sequences cannot share a prefix; "
            "use algorithm='flash-decode', or leave out shared_prefix="
        )
    several, what, instead = splits_keys(algorithm), repr(algorithm), "use algorithm='flash2'"
    if packed and algorithm in PACKING and problem.group > 1:
        several, what, instead = True, "pack_gqa=True", "leave out pack_gqa="
    if problem.scales is not None and several:
        raise UnsupportedError(
            f"{what} does not support scales of FP8 inputs, because its tiles contain rows of "
            f"several heads; {instead}, or leave out scales="
        )
    functions = [name for name in FUNCTIONS if getattr(problem, name)]
    if functions and several:
        raise UnsupportedError(
            f"{what} does not support {' and '.join(functions)}, because its tiles contain rows "
            f"of several heads; {instead}"
        )
    if problem.sinks and algorithm not in ("flash2", *FUSED):
        raise UnsupportedError(
            f"{algorithm!r} does not support sinks; use algorithm='flash2' or 'flash2-fused'"
        )
    if direction == "backward":
        check_backward(algorithm)
        if problem.score_mod is not None and algorithm == "standard":
            raise UnsupportedError(
                "the backward pass of 'standard' does not support score functions; use "
                "algorithm='flash2'"
            )
    wide = problem.itemsize == problem.compute_itemsize
    listed: tuple[StageDataflow, ...] = getattr(dataflow.ALGORITHMS[algorithm], direction)
    if packed:
        listed = tuple(flow._replace(per="group") for flow in listed)
    stages = (_stage(problem, flow) for flow in listed if not (wide and flow.converts))
    return tuple(stage for stage in stages if stage.moves)


def _stage(p: Problem, flow: StageDataflow) -> Stage:
    parts = flow.before, flow.visit, flow.after
    before, visit, after = (_moves(p, text, flow.outer) for text in parts)
    held = [m.tile for m in before if m.holds]
    each = [m.tile._replace(visit=True) for m in visit if m.holds]
    if flow.whole_rows:  # a buffer has the size of the longest row of scores
        longest = max(s.k_stop - s.k_start for s in p.sequences) if flow.per != "bias" else p.n_kv
        each = [Buffer(tile.name, tile.per_row + tile.per_score * longest) for tile in each]
    how = flow.dense, flow.per, flow.whole_rows, flow.converts, flow.parts, flow.once
    buffers = (*held, *each)
    return Stage(flow.name, flow.outer, buffers, *how, flow.stores_first, before, visit, after)


def _moves(p: Problem, text: str, outer: Outer) -> tuple[Move, ...]:
    wide = p.itemsize == p.compute_itemsize
    #: Whether the problem has a tensor; it has those that are not listed.
    present = {
        "S_raw": p.score_mod is not None,
        **{"dF": tensors.reduced(p), "gate": p.softcap, "dL": p.dlse, "V": not p.latent},
        "table": p.page_size is not None,
        **dict.fromkeys(SINKS, p.sinks),
        **dict.fromkeys(tensors.BIASES, p.bias),
        **{name: tensors.captured(p, name, outer) for name in tensors.CAPTURED},
    }
    moves = []
    for part in filter(None, text.split(", ")):
        op, *names = part.split()
        for name in names:
            tensor, _, needs = name.partition("/")
            if not present.get(tensor, True) or (needs == "sink" and not p.sinks):
                continue
            if wide:
                tensor = tensor.removesuffix("_acc")
            of_functions = tensor in (*tensors.CAPTURED, *SINKS, "dF") or needs == "sink"
            moves.append(Move(op, tensor, _tile(p, op, tensor, outer), of_functions))
            if op == "load" and tensor in tensors.INPUTS and p.scales is not None:
                moves.append(Move(op, f"{tensor}_scale", _scale(p, f"{tensor}_scale")))
    return tuple(moves)


def _scale(p: Problem, name: str) -> Buffer:
    its, every = tensors.shape(p, name), tensors.rows_a_scale(p, name)
    row, col = (its.itemsize * (its.axis == axis) for axis in (tensors.ROW, tensors.COL))
    return Buffer(name, row, col, every=every)


def _tile(p: Problem, op: str, tensor: str, outer: Outer) -> Buffer:
    """Return the on-chip buffer that holds one tile of a tensor.

    A loaded or stored tile takes as many bytes as in HBM. An allocated tile has the accumulator
    type.
    """
    if tensor in tensors.CAPTURED:
        of = tensors.captured(p, tensor, outer)
        row, col, score = (of.get(side, 0) for side in ("row", "col", "score"))
        return Buffer(tensor, row, col, score, fixed=of.get("fixed", 0))
    its = tensors.shape(p, tensor)
    if tensor in SINKS:
        return Buffer(tensor, fixed=its.itemsize)
    if tensor == "dF":
        return Buffer("dF", per_score=tensors.reduced(p) * its.itemsize)
    width = its.elements * p.compute_itemsize if op == "alloc" else its.width
    row, col, score = (
        width * (its.axis == axis) for axis in (tensors.ROW, tensors.COL, tensors.TILE)
    )
    return Buffer(tensor.removesuffix("_acc"), row, col, score)


@lru_cache(maxsize=256)
def tensors_of(problem: Problem, algorithm: str, direction: str, *ops: str) -> tuple[str, ...]:
    """Return the tensors that a pass moves by any operation of `ops`, in order of first use."""
    moves = (m for stage in stages(problem, algorithm, direction) for m in stage.moves)
    return tuple(dict.fromkeys(m.tensor for m in moves if m.op in ops))


def backward_form(algorithm: str, deterministic: bool | None) -> str:
    """Return "flash2" if `deterministic` is true, a fused form if false, `algorithm` if None.

    Raises
    ------
    OptionError, UnsupportedError
        If the algorithm has only one form of the backward pass, or none.
    """
    check_backward(algorithm)
    if deterministic is None:
        return algorithm
    checks.flag("deterministic", deterministic)
    if algorithm not in ("flash2", *FUSED):
        raise OptionError(
            "deterministic= chooses between the forms of FlashAttention-2's backward pass, but "
            f"{algorithm!r} has only one form, which is deterministic; leave out deterministic="
        )
    if deterministic:
        return "flash2"
    return "flash2-fused" if algorithm == "flash2" else algorithm


def check_algorithm(algorithm: str) -> str:
    """Return `algorithm`, or raise an `OptionError` that lists the names of all algorithms."""
    return checks.one_of("algorithm", algorithm, ALGORITHMS)


def check_backward(algorithm: str) -> None:
    """Raise `UnsupportedError` unless the algorithm has a backward pass."""
    if algorithm not in TRAINING:
        raise UnsupportedError(
            f"{algorithm!r} has no backward pass, because decoding does not train; use "
            "algorithm='flash2', which has the same output"
        )


@lru_cache(maxsize=32)
def splits_keys(algorithm: str) -> bool:
    """Return True if the algorithm can split the keys of a row tile into parts (see `Split`)."""
    return any(flow.parts for flow in dataflow.ALGORITHMS[algorithm].forward)


def heads_of(stage: Stage, problem: Problem) -> tuple[int, int]:
    """Return how often a stage runs the loops, and by how many query heads each run advances."""
    p = problem
    if stage.per == "bias":
        batch, heads = p.bias or (1, 1)
        return batch * heads, 1 if heads == p.heads else p.heads
    stride = p.group if stage.per == "group" else 1
    return p.batch * p.heads // stride, stride


def members_of(stage: Stage, problem: Problem, split: Split) -> int:
    """Return how many query heads each run of a stage's loops processes one after the other."""
    return problem.group if stage.per == "group" and not split.pack_gqa else 1
