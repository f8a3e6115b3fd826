"""The work per visit: floating-point operations by kind, and bytes read and written on chip.

The work of a stage is a short list of tile operations. The cost of each operation is linear in the
tile's rows, columns and scores. So one list gives the cost of one visit and, from sums over all
tiles, the cost of all visits.

A multiply-add in a matrix product is 2 FLOPs. The kind ``exp`` counts exponentials, logarithms and
tanh (which a GPU's special-function unit computes), and the kind ``max`` counts comparisons. The
kind ``add`` includes subtractions. A row sum or row maximum over n elements is n operations. Counts
leave out the handling of rows that see no key. A tile operation reads each operand from SRAM once,
and writes the result once; reuse in registers is ignored. A masked tile costs as much as a full
tile, because the hardware computes every score. The kind ``function`` counts each floating-point
operation of a score function and its derivative once. A mask function compares integers, so its
operations are not counted.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from flashsim.functions.derivative import gradient_flops
from flashsim.problem.problem import Problem
from flashsim.schedule import plans

KINDS = ("matmul", "exp", "max", "add", "multiply", "divide", "function")


class Cost(NamedTuple):
    """A cost, such as FLOPs or bytes, that is linear in a tile's rows, columns and scores."""

    row: int = 0
    col: int = 0
    score: int = 0

    def at(self, rows: int, cols: int, scores: int) -> int:
        """Return the cost of one tile, or of many tiles if the arguments are sums over tiles."""
        return self.row * rows + self.col * cols + self.score * scores


@dataclass(frozen=True)
class TileOp:
    """One operation on tiles in SRAM: the buffers read and written, and the FLOPs by kind."""

    name: str
    reads: str
    writes: str
    flops: dict[str, Cost] = field(default_factory=dict)


@dataclass(frozen=True)
class StageWork:
    """The tile operations of one stage, listed per visit and per outer step.

    A stage that merges partial results counts an outer step's operations once per part of the keys.
    """

    visit: tuple[TileOp, ...] = ()
    outer: tuple[TileOp, ...] = ()


def scores(n: int) -> Cost:
    """Return the `Cost` of `n` operations for each score of a tile."""
    return Cost(score=n)


def rows(n: int, score: int = 0) -> Cost:
    """Return the `Cost` of `n` operations per row of a tile, plus `score` operations per score."""
    return Cost(row=n, score=score)


def columns(n: int) -> Cost:
    """Return the `Cost` of `n` operations for each column of a tile."""
    return Cost(col=n)


def stage_work(problem: Problem, algorithm: str, direction: str, stage: str) -> StageWork:
    """Return the tile operations of one stage, or empty lists if the stage has no arithmetic."""
    table = _forward if direction == "forward" else _backward
    work = table(problem, problem.head_dim, problem.head_dim_v, algorithm)
    return work.get(stage, StageWork())


def _scores(p: Problem, d: int, *, gated: bool = False) -> tuple[TileOp, ...]:
    """Return the tile operations of S = softcap(scale Q K^T) + bias."""
    ops = [TileOp("S = scale Q K^T", "Q K", "S", {"matmul": scores(2 * d), "multiply": scores(1)})]
    if p.softcap:
        cap = {"divide": scores(1), "exp": scores(1), "multiply": scores(1)}
        ops.append(TileOp("S = c tanh(S / c)", "S", "S", cap))
        if gated:
            gate = {"multiply": scores(1), "add": scores(1)}
            ops.append(TileOp("gate = 1 - tanh(S / c)^2", "S", "gate", gate))
    if p.bias:
        ops.append(TileOp("S = S + bias", "S bias", "S", {"add": scores(1)}))
    if p.score_mod is not None:
        ops.append(TileOp("S = score_mod(S)", "S", "S", {"function": scores(p.score_mod.flops)}))
    return tuple(ops)


def _score_gradient(p: Problem) -> tuple[TileOp, ...]:
    """Return the tile operations that compute the gradient of the scaled product from dS."""
    ops = []
    if p.score_mod is not None:
        cost = {"function": scores(gradient_flops(p.score_mod, p.score_grads))}
        ops.append(TileOp("dS = d score_mod(S) dS", "S_raw dP", "dP", cost))
    if p.softcap:
        ops.append(TileOp("dS = gate dS", "gate dP", "dP", {"multiply": scores(1)}))
    return tuple(ops)


def _forward(p: Problem, d: int, dv: int, algorithm: str) -> dict[str, StageWork]:
    softmax = {
        "max": rows(1, score=1),  # the tile's row maximum; against m_old
        "add": rows(2, score=2),  # S - m, row sum of P; m_old - m_new, alpha l + ..
        "exp": rows(1, score=1),  # P; alpha
        "multiply": rows(1),  # alpha l
    }
    finish = {"divide": rows(dv), "exp": rows(1), "add": rows(1)}
    if algorithm == "standard":
        of_row = {"max": scores(1), "add": scores(2), "exp": scores(1), "divide": scores(1)}
        return {
            "scores": StageWork(visit=_scores(p, d, gated=True)),
            "softmax": StageWork(outer=(TileOp("P = softmax(S)", "S", "S", of_row),)),
            "output": StageWork(visit=(_mm("O = O + P V", "P V O", "O", dv),)),
        }
    if algorithm == "flash1":
        local = {"max": scores(1), "add": scores(2), "exp": scores(1)}
        merge = {
            "matmul": scores(2 * dv),
            "add": rows(dv + 3),  # l_new, two exponents
            "exp": rows(2),  # alpha, beta
            **{"max": rows(1), "multiply": rows(2 * dv + 3), "divide": rows(dv)},
        }
        exponential = TileOp("P = exp(S - m~)", "S", "S", local)
        product = TileOp("O = (alpha l O + beta P V) / l_new", "S V O m l", "O m l", merge)
        return {"forward": StageWork(visit=(*_scores(p, d), exponential, product))}
    values = "K" if p.latent else "V"  # latent attention reads V from K's tile
    product = TileOp(
        "O = alpha O + P V", f"S {values} O", "O", {"matmul": scores(2 * dv), "multiply": rows(dv)}
    )
    walk = StageWork(
        visit=(*_scores(p, d), TileOp("online softmax", "S m l", "S m l", softmax), product),
        outer=(TileOp("O = O / l, L = m + log l", "O m l", "O m", finish),),
    )
    if algorithm == "flash-decode":
        merge = {
            "max": rows(1),
            "exp": rows(3),  # both weights; log of their sum
            "add": rows(dv + 4),  # two exponents, the weights' sum, L = m + log; the two O
            "divide": rows(2),
            "multiply": rows(2 * dv),
        }
        op = TileOp("O, L = merge(O, L, O_part, L_part)", "O L O_part L_part", "O L", merge)
        return {"split": walk, "combine": StageWork(outer=(op,))}
    return {"forward": walk}


def _backward(p: Problem, d: int, dv: int, algorithm: str) -> dict[str, StageWork]:
    less = int(p.dlse)  # the LSE's gradient is subtracted from delta, one addition per row
    dlse = " dL" if p.dlse else ""
    delta = {"multiply": rows(dv), "add": rows(dv + less)}
    scale_dq = TileOp("dQ = scale dQ", "dQ", "dQ", {"multiply": rows(d)})
    scale_dk = TileOp("dK = scale dK", "dK", "dK", {"multiply": columns(d)})
    if algorithm == "standard":
        ds = {"multiply": scores(2), "add": rows(less, score=2)}
        reads = f"P dP{dlse}"
        if p.softcap:
            ds["multiply"], reads = scores(3), f"{reads} gate"
        return {
            "dv": StageWork(visit=(_mm("dV = dV + P^T dO", "P dO dV", "dV", dv),)),
            "dp": StageWork(visit=(_mm("dP = dO V^T", "dO V", "dP", dv),)),
            "ds": StageWork(outer=(TileOp("dS = P (dP - sum(P dP))", reads, "dP", ds),)),
            "dq": StageWork((_mm("dQ = dQ + dS K", "dS K dQ", "dQ", d),), (scale_dq,)),
            "dk": StageWork((_mm("dK = dK + dS^T Q", "dS Q dK", "dK", d),), (scale_dk,)),
        }
    ds = {"add": scores(1), "multiply": scores(1)}
    softmax = {"add": scores(1), "exp": scores(1)}
    if algorithm == "flash1":
        softmax = {**softmax, "divide": scores(1)}
    stats = "m l" if algorithm == "flash1" else "L"
    recompute = (*_scores(p, d, gated=True), TileOp("P = exp(S - L)", f"S {stats}", "S", softmax))
    grad_s = (
        _mm("dP = dO V^T", "dO V", "dP", dv),
        TileOp("dS = P (dP - delta)", "S dP" if algorithm == "flash1" else "S dP delta", "dP", ds),
        *_score_gradient(p),
    )
    dv_op = _mm("dV = dV + P^T dO", "S dO dV", "dV", dv)
    dk_op = _mm("dK = dK + dS^T Q", "dP Q dK", "dK", d)
    dq_op = _mm("dQ = dQ + dS K", "dP K dQ", "dQ", d)
    # If every visit stores or reduces a tile of dQ, every visit scales it.
    product = {"matmul": scores(2 * d), "multiply": rows(d)}
    to_reduce = TileOp("dQ = scale dS K", "dP K", "dQ", product)
    added_dq = TileOp("dQ = dQ + scale dS K", "dP K dQ", "dQ", {**product, "add": rows(d)})
    table = {
        "delta": StageWork(outer=(TileOp("delta = rowsum(dO O)", f"O dO{dlse}", "delta", delta),)),
        "dkdv": StageWork((*recompute, dv_op, *grad_s, dk_op), (scale_dk,)),
        "dq": StageWork((*recompute, *grad_s, dq_op), (scale_dq,)),
        "fused": StageWork((*recompute, dv_op, *grad_s, dk_op, to_reduce), (scale_dk,)),
    }
    if algorithm == "flash2-once":
        cost = {"multiply": scores(1), "add": rows(less, score=1)}
        delta_on_chip = TileOp("delta = rowsum(P dP)", f"S dP{dlse}", "delta", cost)
        visit = (*recompute, dv_op, grad_s[0], delta_on_chip, *grad_s[1:], dk_op, to_reduce)
        table["fused"] = StageWork(visit, (scale_dk,))
    if algorithm == "flash1":
        row_sum = TileOp("D = rowsum(dO O)", f"O dO{dlse}", "", delta)
        visit = (*recompute, dv_op, row_sum, *grad_s, dk_op, added_dq)
        table["backward"] = StageWork(visit, (scale_dk,))
    return table


def _mm(name: str, reads: str, writes: str, inner: int) -> TileOp:
    return TileOp(name, reads, writes, {"matmul": scores(2 * inner)})


def total_flops(ops: tuple[TileOp, ...], n_rows: Any, n_cols: Any, n_scores: Any) -> dict[str, Any]:
    """Return the FLOPs of tile operations by kind, for one tile, for sums over tiles or arrays."""
    result: dict[str, Any] = dict.fromkeys(KINDS, 0)
    for op in ops:
        for kind, cost in op.flops.items():
            result[kind] = result[kind] + cost.at(n_rows, n_cols, n_scores)
    return result


def on_chip_bytes(
    ops: tuple[TileOp, ...], stage: plans.Stage, n_rows: int, n_cols: int, n_scores: int
) -> dict[str, int]:
    """Return ``{"read": bytes, "write": bytes}`` that the tile operations move on chip."""
    size = {b.name: Cost(b.per_row, b.per_col, b.per_score) for b in stage.buffers}
    result = {"read": 0, "write": 0}
    for op in ops:
        for key, names in (("read", op.reads), ("write", op.writes)):
            result[key] += sum(size[name].at(n_rows, n_cols, n_scores) for name in names.split())
    return result
