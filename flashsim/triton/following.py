"""Run a wrong program again and find the first key tile after which its variables are wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from flashsim.own_kernels import LOAD, KernelTrace
from flashsim.own_kernels.check import Verdict, matrices
from flashsim.own_kernels.steps import Follower
from flashsim.problem.oracle import keep_matrix
from flashsim.triton.narrow_floats import widen

if TYPE_CHECKING:
    from flashsim.triton.machine import Machine


def followed(machine: Machine, traced: KernelTrace, verdict: Verdict) -> Verdict:
    """Return the verdict with its `step`, for a forward pass that stored a wrong O or L."""
    g, p = traced.geometry, traced.problem
    usual = {"Q", "K", "V"} <= set(g.labels) and verdict.tensor in ("O", "L") and verdict.program
    if not usual or p.n_q == 1:
        return verdict
    ran = machine.ran[verdict.launch]
    x = {n: matrices(g, g.labels.index(n), traced.values[g.labels.index(n)]) for n in "QKV"}
    a = g.record.accesses
    mine = (a["launch"] == verdict.launch) & (a["tensor"] == g.labels.index("Q"))
    number = g.record.launches[verdict.launch].number(verdict.program)
    its = np.flatnonzero(mine & (a["program"] == number) & (a["active"] > 0))
    if not len(its):
        return verdict
    head, first = int(g.lead[its[0]]), int(g.row[its[0]])
    key = head // p.heads * p.kv_heads + head % p.heads // p.group
    rows = np.arange(first, first + int(g.rows[its[0]]))
    keep = keep_matrix(p)[rows]
    scores = np.where(keep, x["Q"][head][rows] @ x["K"][key].T * p.scale, -np.inf)
    narrow = p.dtype not in ("float32", "float64")
    follower = Follower(scores, x["V"][key], first, 2e-2 if narrow else 1e-3)

    def variables() -> dict[str, np.ndarray]:
        found = {}
        for name, value in machine.locals().items():
            data = value.handle
            if data.dtype.scalar.is_floating() and data.data.ndim and data.data.size > 1:
                found[name] = np.array(widen(data))[: len(rows)]
        return found

    def look(op: int, code: int, offsets: np.ndarray) -> None:
        label = g.labels[code] if code >= 0 else ""
        if op == LOAD and label == "K":
            index, _ = g.record.tensors[code].coordinates(offsets)
            along = index[g.sides[code].rows]
            follower.tile(int(along.min()), int(along.max()) + 1, variables())
        elif op != LOAD and label in ("O", "L"):
            follower.end(variables())

    machine.again(ran, verdict.program, look)
    return replace(verdict, step=follower.found)


__all__ = ["followed"]
