"""The dataflow table: which tensors each stage of each algorithm moves, and when.

An algorithm runs in stages, one kernel each. A stage's entry, the *dataflow*, has three lists of
*moves*: at the start of an outer step, at each visit (one tile pair), and at the end of the step. A
move loads a tensor from HBM, stores or reduces (adds) a tensor to HBM, or allocates an on-chip
buffer. The algorithms in `flashsim.algorithms` and the closed forms in `counts.forms` do not use
this module. Tests compare the bytes of both with this table's bytes.

Five rules keep one dataflow valid for many problems:

- A tensor that the problem does not have is left out. A stage without remaining tensors is left
  out. The tensors `bias` and `dBias` need a bias, `gate` needs a softcap, and `table` needs a paged
  cache. The tensor `V` is left out if V is stored as columns of K, and `dL` if the LSE has no
  gradient. The tensors `F`, `S_raw` and `dF` need a score function. The tensor `M` needs a mask
  function with captured arrays. The tensor `sink` needs sinks, and `L/sink` is L in problems with
  sinks and left out in others.
- `F_own` and `M_own` are the captured elements whose index contains only the head or the query. A
  Q-outer loop reads them at the start of a step. `F` and `M` are all other captured elements, which
  are read for each tile of scores. For FULL tiles, `M` is not loaded.
- An accumulator `X_acc` is the tensor X itself if both have the same type.
- A stage that only converts `X_acc` to the type of X is left out if `X_acc` and X have the same
  type.
- In a problem with FP8 scales, each tile of Q, K or V is loaded together with its scales.
"""

from typing import Literal, NamedTuple

Outer = Literal["queries", "keys"]
Per = Literal["head", "group", "bias"]


class StageDataflow(NamedTuple):
    """One stage (one pass over the score matrix) and the tensors that it moves.

    `outer` is the outer loop, over query tiles or key tiles. The stage runs the loop once for each
    `per`: a query head, a group of query heads that share a key head, or a bias matrix that several
    heads share. A `dense` stage (standard attention) visits every tile, even fully masked tiles. A
    stage with `whole_rows` (standard attention's softmax) processes complete rows of scores, and
    `visit` lists the moves per row. A stage with `converts` only rounds an accumulator to the
    input's type.

    With ``parts="walks"``, an outer step processes one part of a row tile's keys (see `Split`). The
    step stores `O_part` and `L_part`, or O and L if the keys are not split. With
    ``parts="merges"``, an outer step merges the parts of one row tile's keys, and `visit` lists the
    moves per part.

    With `once`, one visit computes a row tile's complete results, so each row tile must have
    exactly one visit (`Schedule.visited_once`).

    With `stores_first`, the first visit of a row tile stores dQ_acc, and later visits add to it.
    Which visit is first depends on the order in which blocks run, so the account counts all of them
    as "reduce". Hardware executes the first one as a store, which moves as many bytes.
    """

    name: str
    outer: Outer
    before: str = ""
    visit: str = ""
    after: str = ""
    per: Per = "head"
    dense: bool = False
    whole_rows: bool = False
    converts: bool = False
    parts: Literal["", "walks", "merges"] = ""
    once: bool = False
    stores_first: bool = False


class Algorithm(NamedTuple):
    """An algorithm's stages in order, title, and variant of the backward pass (`form`)."""

    title: str
    forward: tuple[StageDataflow, ...]
    backward: tuple[StageDataflow, ...]
    form: str = ""

    def direction(self, name: str) -> str:
        """Return a direction and the variant as text, such as "backward in three passes"."""
        return f"{name} {self.form}" if name == "backward" and self.form else name


def _convert(result: str) -> StageDataflow:
    return StageDataflow(
        "convert", "queries", f"load {result}_acc", after=f"store {result}", converts=True
    )


_CLEAR_DBIAS = StageDataflow(
    "clear_dbias", "queries", visit="store dBias_acc", per="bias", whole_rows=True
)
_CONVERT_DBIAS = StageDataflow(
    *("convert_dbias", "queries"),
    visit="load dBias_acc, store dBias",
    per="bias",
    whole_rows=True,
    converts=True,
)

# -- standard attention: S and P in HBM -----------------------------------------------------------

_STANDARD_FORWARD = (
    StageDataflow(
        *("scores", "queries", "load Q F_own M_own"),
        "load K, alloc S gate, load bias F M, store S gate",
        dense=True,
    ),
    StageDataflow("softmax", "queries", visit="load S, store P", dense=True, whole_rows=True),
    StageDataflow("output", "queries", "alloc O", "load P V", "store O", dense=True),
)
_STANDARD_BACKWARD = (
    StageDataflow("dv", "keys", "alloc dV", "load P dO", "store dV", "group", dense=True),
    StageDataflow("dp", "queries", "load dO", "load V, alloc dP, store dP", dense=True),
    _CLEAR_DBIAS,
    StageDataflow(
        *("ds", "queries"),
        visit="load P dP dL, reduce dBias_acc, load gate, store dS",
        dense=True,
        whole_rows=True,
    ),
    StageDataflow("dq", "queries", "alloc dQ", "load dS K", "store dQ", dense=True),
    StageDataflow("dk", "keys", "alloc dK", "load dS Q", "store dK", "group", dense=True),
    _CONVERT_DBIAS,
)

# -- FlashAttention-1: KV-outer, so every visit loads the output from HBM and stores it again ------

_FLASH1_FORWARD = (
    StageDataflow("init", "queries", after="store O_acc l m"),
    StageDataflow(
        *("forward", "keys", "load K V"),
        "load Q O_acc l m, alloc S, load bias F M, store O_acc l m",
    ),
    _convert("O"),
)
_FLASH1_BACKWARD = (
    StageDataflow("init", "queries", after="store dQ_acc"),
    _CLEAR_DBIAS,
    StageDataflow(
        *("backward", "keys", "load K V, alloc dK dV"),
        "load Q O dO dL dQ_acc l m, alloc S gate S_raw, load bias F M, alloc dP, reduce dF, "
        "store dQ_acc, reduce dBias_acc",
        *("store dK dV", "group"),
    ),
    _convert("dQ"),
    _CONVERT_DBIAS,
)

# -- FlashAttention-2 -----------------------------------------------------------------------------

_FLASH2_FORWARD = (
    StageDataflow(
        *("forward", "queries"),
        *("load Q F_own M_own sink, alloc O l m", "load K V, alloc S, load bias F M", "store O L"),
    ),
)
_DELTA = StageDataflow(
    *("delta", "queries", "load O dO dL, alloc delta, load sink L/sink"),
    after="store delta, reduce dSink",
)
_DKDV = StageDataflow(
    *("dkdv", "keys", "load K V, alloc dK dV"),
    "load Q dO L delta, alloc S gate S_raw, load bias F M, alloc dP",
    *("store dK dV", "group"),
)
_DQ = StageDataflow(
    *("dq", "queries", "load Q F_own M_own dO L delta, alloc dQ"),
    "load K V, alloc S gate S_raw, load bias F M, alloc dP, reduce dF dBias_acc",
    "store dQ",
)
_FLASH2_BACKWARD = (_DELTA, _CLEAR_DBIAS, _DKDV, _DQ, _CONVERT_DBIAS)
_FUSED_BACKWARD = (
    _DELTA._replace(after="store delta, reduce dSink, store dQ_acc"),
    _CLEAR_DBIAS,
    _DKDV._replace(
        name="fused", visit=f"{_DKDV.visit}, reduce dF, alloc dQ, reduce dQ_acc dBias_acc"
    ),
    _convert("dQ"),
    _CONVERT_DBIAS,
)
# No stage writes zeros. On a GPU, two flags per row tile say which visit is first; like semaphores,
# they are not counted.
_FIRST_BACKWARD = tuple(
    _DELTA if stage.name == "delta" else stage._replace(stores_first=stage.name == "fused")
    for stage in _FUSED_BACKWARD
)
# A row tile with one visit has all its P and dP on chip at once. So the visit computes delta from
# them, and its dQ is complete. No stage before it computes delta, and none after it sums dQ.
_ONCE_BACKWARD = (
    _CLEAR_DBIAS,
    StageDataflow(
        *("fused", "keys", "load K V, alloc dK dV"),
        "load Q dO L dL, alloc S gate S_raw, load bias F M, alloc dP delta, reduce dF, "
        "alloc dQ, store dQ, reduce dBias_acc",
        *("store dK dV", "group"),
        once=True,
    ),
    _CONVERT_DBIAS,
)

# -- FlashDecoding: splits the keys of a row tile into parts, then merges the parts ----------------

_DECODE = (
    StageDataflow(
        *("split", "queries", "load Q, alloc O l m", "load table K V, alloc S, load bias"),
        "store O L O_part L_part",
        parts="walks",
    ),
    StageDataflow(
        *("combine", "queries", "alloc O L", "load O_part L_part", "store O L"), parts="merges"
    ),
)

ALGORITHMS = {
    "standard": Algorithm("standard", _STANDARD_FORWARD, _STANDARD_BACKWARD),
    "flash1": Algorithm("FlashAttention-1", _FLASH1_FORWARD, _FLASH1_BACKWARD),
    # The paper's Algorithm 2 is one pass, "flash2-fused". This one has three, without sums in HBM.
    "flash2": Algorithm("FlashAttention-2", _FLASH2_FORWARD, _FLASH2_BACKWARD, "in three passes"),
    "flash2-fused": Algorithm("FlashAttention-2 fused", _FLASH2_FORWARD, _FUSED_BACKWARD),
    "flash2-fused-first": Algorithm(
        "FlashAttention-2 fused first", _FLASH2_FORWARD, _FIRST_BACKWARD
    ),
    "flash2-once": Algorithm("FlashAttention-2 in one visit", _FLASH2_FORWARD, _ONCE_BACKWARD),
    "flash-decode": Algorithm("FlashDecoding", _DECODE, ()),
}
