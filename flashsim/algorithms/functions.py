"""Evaluates the user's score and mask functions, and their derivatives, on the simulated machine.

A function can only use elements of captured arrays that were loaded into SRAM. An element that was
never loaded raises an error, and an element of an earlier tile is NaN.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from flashsim.algorithms.hbm import CapturedTensor
from flashsim.algorithms.sram import Sram
from flashsim.functions.derivative import DOUT, adjoints
from flashsim.functions.graph import Graph, add_at
from flashsim.functions.operations import SCORE
from flashsim.schedule.schedule import Schedule, Visit
from flashsim.schedule.tables import FULL

#: Loaded values of captured arrays, by the function's letter (F or M) and the node that reads them.
Values = Mapping[tuple[str, int], np.ndarray]
NOTHING: Values = MappingProxyType({})


class Chain(NamedTuple):
    """The data with which the backward pass turns a tile's dS into the gradient of scale Q K^T.

    `cap` is the softcap's derivative. `raw` is the score that was passed to the score function.
    `values` are the captured elements that the function read, and `positions` the arguments b, h,
    q, k.
    """

    cap: np.ndarray | None = None
    raw: np.ndarray | None = None
    values: Values = NOTHING
    positions: Mapping[str, np.ndarray] = MappingProxyType({})


def indices(
    schedule: Schedule, i: int, rows: slice, cols: slice | None, member: int | None
) -> dict[str, np.ndarray]:
    """Return a function's arguments b, h, q, k for a tile, as arrays (lead, group, rows, cols)."""
    p, s = schedule.problem, schedule.sequence_of_row(i)
    lead = np.arange(p.batch * p.kv_heads)[:, None, None, None]
    members = np.arange(p.group) if member is None else np.array([member])
    k = np.zeros(1, np.int64) if cols is None else np.arange(cols.start, cols.stop) - s.k_start
    return {
        "b": lead // p.kv_heads,
        "h": lead % p.kv_heads * p.group + members[:, None, None],
        "q": (np.arange(rows.start, rows.stop) - s.q_start)[:, None],
        "k": k,
    }


def load_own(sram: Sram, i: int) -> Values:
    """Load row tile i's captured elements that do not depend on keys, for a Q-outer loop."""
    rows = sram.schedule.row_slice(i)
    positions = indices(sram.schedule, i, rows, None, None)
    values: dict[tuple[str, int], np.ndarray] = {}
    for name in ("F_own", "M_own"):
        values |= _loaded(sram, name, positions, rows, slice(0, 0))
    return values


def _loaded(
    sram: Sram, name: str, positions: Mapping[str, np.ndarray], rows: slice, cols: slice
) -> dict[tuple[str, int], np.ndarray]:
    tensor = sram.hbm.tensors.get(name)
    if tensor is None or not sram.has(name):
        return {}
    assert isinstance(tensor, CapturedTensor)
    values = sram.load_captured(tensor, positions, rows, cols)
    return {(name[0], n): value for n, value in values.items()}


def apply_score(
    sram: Sram, visit: Visit, S_ij: np.ndarray, own: Values, member: int | None
) -> Chain:
    """Apply the score function to S_ij in place, and return the data that its derivative needs."""
    p = visit.schedule.problem
    if p.score_mod is None:
        return Chain()
    positions = indices(visit.schedule, visit.i, visit.rows, visit.cols, member)
    raw = None
    if sram.has("S_raw"):
        raw = sram.alloc("S_raw", S_ij.shape[-2:])
        raw[...] = S_ij
    values = {**own, **_loaded(sram, "F", positions, visit.rows, visit.cols)}
    S_ij[...] = _evaluated(p.score_mod, "F", {**positions, SCORE: S_ij}, values, S_ij.dtype.name)
    return Chain(None, raw, values, positions)


def apply_mask(sram: Sram, visit: Visit, S_ij: np.ndarray, own: Values, member: int | None) -> None:
    """Set a tile's scores to -inf where the mask function removes the score."""
    mask = visit.schedule.problem.mask_mod
    if mask is None:
        return
    if visit.kind == FULL:
        if sram.has("M"):
            sram.reserve("M", visit.rows, visit.cols)
        return
    positions = indices(visit.schedule, visit.i, visit.rows, visit.cols, member)
    values = {**own, **_loaded(sram, "M", positions, visit.rows, visit.cols)}
    kept = _evaluated(mask.graph, "M", positions, values, mask.dtype)
    np.copyto(S_ij, -np.inf, where=~kept)


def _evaluated(
    graph: Graph, letter: str, positions: Mapping[str, np.ndarray], values: Values, dtype: str
) -> np.ndarray:
    read = {n: values[letter, n] for n in graph.loads}
    return graph.values(positions, (), dtype, read)[graph.root]


def score_derivative(sram: Sram, chain: Chain, dS: np.ndarray) -> None:
    """Turn dS into the gradient of the score function's input; sum captured arrays' gradients."""
    p = sram.problem
    if chain.raw is None or p.score_mod is None:
        return
    adds = any(move.tensor == "dF" for move in sram.stage.visit)
    derivative = adjoints(p.score_mod, p.score_grads if adds else ())
    graph = Graph(derivative.nodes, derivative.root, derivative.arrays)
    arguments = {**chain.positions, SCORE: chain.raw, DOUT: dS}
    read = {n: chain.values["F", n] for n in graph.loads}
    values = graph.values(arguments, (), dS.dtype.name, read)
    quiet = dS == 0  # such as a masked score, whose derivative may be infinite
    for n, g in derivative.reads:
        node = graph.nodes[n]
        array = sram.hbm.captured_gradients[graph.arrays[node.value].name]
        each = np.where(quiet, 0, np.broadcast_to(values[g], dS.shape))
        add_at(array, (values[a] for a in node.args), each)
    if adds:
        sram.note_reduce("dF", dS.shape[-2:])
    dS[...] = 0 if derivative.score is None else np.where(quiet, 0, values[derivative.score])
