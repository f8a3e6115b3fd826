"""Decoding: the keys are split over thread blocks.

One query attends to a cache of 96 keys. A single step (thread block) would use one SM, and
leave all other SMs idle. So no step may load more than a quarter of K. Each of four steps
computes attention over 24 keys, and stores a partial O and LSE in a workspace. A second stage
(kernel) merges the partial results:

    L = log Σ_s exp(L_s)        O = Σ_s exp(L_s - L) O_s

`machine.hbm.new("O_split", rows, width)` creates a workspace in HBM. Store O and L.
"""

import numpy as np

from flashsim.exercises.exercise import Exercise, Problem, Task, Tiling
from flashsim.exercises.references import LSE_SLIPS, SLIPS, attention, output_terms
from flashsim.schedule.names import CODES, COMPUTE, LOAD
from flashsim.schedule.tensors import whole_bytes

PARTS = 4


def reference(machine):
    """Run Flash-Decoding's two kernels. Each part of the keys is one tile."""
    hbm, p = machine.hbm, machine.problem
    query, parts = slice(0, 1), machine.key_tiles()  # four slices of 24 keys
    O_split = hbm.new("O_split", len(parts), p.head_dim_v)
    L_split = hbm.new("L_split", len(parts))
    with machine.stage("split") as sram:
        for at, cols in enumerate(parts):
            with sram.step(query), sram.visit(query, cols):
                # TODO: attention over these keys, into row `at` of the workspaces
                S = sram.load(hbm.Q, query) @ sram.load(hbm.K, cols).T
                S *= p.scale
                m = S.max(axis=1)
                S -= m[:, None]
                np.exp(S, out=S)
                l = S.sum(axis=1)
                O = S @ sram.load(hbm.V, cols)
                O /= l[:, None]
                sram.store(O_split, slice(at, at + 1), O)
                sram.store(L_split, slice(at, at + 1), m + np.log(l))
                # END
    with machine.stage("combine") as sram, sram.step(query):
        # TODO: merge
        L_s = sram.load(L_split, slice(0, len(parts)))
        m = L_s.max(keepdims=True)
        L = m + np.log(np.exp(L_s - m).sum(keepdims=True))
        weights = np.exp(L_s - L)
        O = weights[None] @ sram.load(O_split, slice(0, len(parts)))
        sram.store(hbm.O, query, O)
        sram.store(hbm.L, query, L)
        # END


def budget(task):
    """Return the bytes for full marks: Q once per part, partial results twice, the rest
    once."""
    p = task.problem
    once = sum(whole_bytes(p, name) for name in ("K", "V", "O", "L"))
    partial = whole_bytes(p, "O") + whole_bytes(p, "L")
    return once + PARTS * (whole_bytes(p, "Q") + 2 * partial)


def in_parallel(trace):
    """Return an error text if a step loads more than a quarter of the keys, else ""."""
    share = whole_bytes(trace.problem, "K") // PARTS
    for stage in trace.stages:
        e = stage.events
        step = np.cumsum((e["op"] == COMPUTE) & (e["visit"] < 0))  # a step ends with a computation
        loads = (e["op"] == LOAD) & (e["tensor"] == CODES["K"])
        most = int(np.bincount(step, weights=e["bytes"] * loads).max(initial=0))
        if most > share:
            return (
                f"a step of stage {stage.name!r} loads {most:,} B of K; a quarter is {share:,} B: "
                "compute each part of the keys in its own step"
            )
    return ""


EXERCISE = Exercise(
    name="decode-splits",
    statement=__doc__,
    task=Task(Problem(1, n_kv=96, head_dim=12), Tiling(1, 24), 2560, outputs=("O", "L")),
    reference=reference,
    truth=attention,
    terms=output_terms,
    hints=(
        "Each part is a forward pass over one tile, so it needs no running maximum.",
        "Divide each part's O by its own l; L_s = m + log l is then its weight.",
        "Subtract the largest L_s before exp, as always: m = L_s.max(keepdims=True).",
    ),
    budget=budget,
    demand=in_parallel,
    mistakes={**SLIPS, **LSE_SLIPS},
)
