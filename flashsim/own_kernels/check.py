"""Checks a kernel's results; if any are wrong, finds the first wrong element and the mistake."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from flashsim.errors import TraceError, shown
from flashsim.own_kernels import mistakes
from flashsim.own_kernels.geometry import Geometry
from flashsim.problem import oracle
from flashsim.problem.problem import MAX_HEAD_DIM, Problem
from flashsim.schedule.names import LOAD

#: A user's reference: maps the loaded tensors, by label, to the tensors that should be stored.
Reference = Callable[[dict[str, np.ndarray]], Any]
#: A result's allowed error, as a multiple of the error of plain attention in the same type: in
#: float64 and float32; and in 16 bits, where plain attention also rounds its scores.
TIMES, TIMES_16 = 16, 2
#: Rounding errors of an exponent that are allowed: S is a sum of many products.
ROUNDINGS = 8
LOG2_E = float(np.log2(np.e))
_FORWARD, _BACKWARD = ("O", "L"), ("dQ", "dK", "dV", "delta")


@dataclass(frozen=True)
class Output:
    """The check of one result tensor: the largest error, the allowed error, and wrong elements."""

    tensor: str
    error: float
    allowed: float
    wrong: int
    size: int

    @property
    def right(self) -> bool:
        """Return True if no element of the tensor is wrong."""
        return not self.wrong


@dataclass(frozen=True)
class Verdict:
    """The result of checking a kernel's results.

    Attributes
    ----------
    mistake : the known mistake that gives the same wrong numbers, or ""
    tensor : the first wrong tensor, or ""
    head, row, column : the indices of the first wrong element of `tensor`
    program, line : the program and the line that stored this element
    got, wanted : the element's value, and the value that it should have
    step : the program's first wrong key tile, in words; "" if unknown
    """

    outputs: tuple[Output, ...]
    mistake: str = ""
    tensor: str = ""
    head: int = 0
    row: int = 0
    column: int = 0
    program: tuple[int, ...] = ()
    line: int = 0
    got: float = 0.0
    wanted: float = 0.0
    step: str = field(default="", compare=False)
    launch: int = 0

    @property
    def right(self) -> bool:
        """Return True if every output of the kernel is right."""
        return all(one.right for one in self.outputs)

    def __str__(self) -> str:
        parts = [
            f"{one.tensor} {'right' if one.right else 'WRONG'} (error {one.error:.1e}, allowed "
            f"{one.allowed:.1e}"
            + (f", {one.wrong:,} of {one.size:,} elements)" if one.wrong else ")")
            for one in self.outputs
        ]
        if not self.right:
            where = f"{self.tensor} of head {self.head}, row {self.row}, column {self.column}"
            if self.program:
                who = (
                    f"first in program {self.program}, line {self.line}: {where} is {self.got:.6g}"
                )
            else:
                who = f"{where} was never stored, so it is {self.got:.6g}"
            parts.append(f"{who}; it should be {self.wanted:.6g}")
            if self.step:
                parts.append(self.step)
            parts.append(
                f"a kernel gives these numbers if {self.mistake}"
                if self.mistake
                else "no known mistake gives these numbers"
            )
        return "\n".join(parts)


def matrices(g: Geometry, code: int, array: np.ndarray) -> np.ndarray:
    """Return a tensor in float64: a matrix as (heads, rows, columns), a vector as (heads, rows)."""
    side = g.sides[code]
    x = np.asarray(array).astype(np.float64)
    if x.ndim == 0:
        return x.reshape(1, 1)
    x = x.reshape(g.shapes[code])
    x = np.moveaxis(x, side.rows, -1 if side.vector else -2)
    leads, length = g.leads[code], g.lengths[code]
    return x.reshape((leads, length) if side.vector else (leads, length, x.shape[-1]))


def check(g: Geometry, values: Sequence[np.ndarray], reference: Reference | None = None) -> Verdict:
    """Compare the tensors that a kernel stored with a reference (default: float64 attention)."""
    if not values:
        raise TraceError(
            "this record does not hold the tensors' values, so results cannot be checked; trace "
            "the kernel again with check=True"
        )
    arrays = {
        label: matrices(g, code, values[code])
        for code, label in enumerate(g.labels)
        if g.record.tensors[code].size
    }
    stored = [g.labels[code] for code in g.record.stored]
    if reference is not None:
        return _by_reader(g, values, reference)
    arrays = {name: _without_padding(g.problem, name, x) for name, x in arrays.items()}
    p, inputs = _of_scores(g.problem, _inputs(g, arrays))
    wanted: dict[str, np.ndarray] = {}
    allowed: dict[str, float] = {}
    direction = _FORWARD if {"O", "L"} & set(stored) else ()
    if direction and {"Q", "K", "V"} <= inputs.keys():
        wanted, allowed = _forward(p, inputs)
    if {"dO", "Q", "K", "V"} <= inputs.keys() and set(stored) & set(_BACKWARD):
        more, more_allowed = _backward(p, inputs)
        wanted |= more
        allowed |= more_allowed
    wanted = {name: wanted[name] for name in stored if name in wanted}
    if not wanted:
        raise TraceError(
            f"none of the stored tensors ({', '.join(stored)}) can be checked: attention "
            "computes O, L, dQ, dK or dV from Q, K, V and dO. Name the kernel's parameters by "
            "names={parameter: name}, or pass a reference: check(lambda inputs: {'y': ...})"
        )
    outputs: list[Output] = []
    wrong: dict[str, np.ndarray] = {}
    for name, want in wanted.items():
        if arrays[name].shape != want.shape:
            raise TraceError(
                f"{name} has shape {arrays[name].shape} (heads, rows, columns), but the problem "
                f"implies {want.shape}; pass the kernel's problem as "
                "problem=flashsim.Problem(...)"
            )
        one = _output(name, arrays[name], want, allowed[name], wrong)
        if name in wrong and name == "L" and _is_m(g):
            in_base_2 = _output(name, arrays[name], want * LOG2_E, allowed[name] * LOG2_E, {})
            if in_base_2.right:  # what Triton's own example keeps for its backward pass
                del wrong[name]
                one = replace(in_base_2, tensor="L in base 2")
        outputs.append(one)
    verdict = Verdict(tuple(outputs))
    if not wrong:
        return verdict
    got = {name: arrays[name] for name in wanted}
    mistake = _mistake(g, p, inputs, got, wanted, allowed)
    name = next(iter(wrong))
    return _located(g, verdict, name, wrong[name], arrays[name], wanted[name], mistake)


def _without_padding(p: Problem, name: str, x: np.ndarray) -> np.ndarray:
    """Return L or delta without padding after the last query; return any other array unchanged."""
    padded = name in ("L", "delta") and x.ndim == 2 and x.shape[1] > p.n_q
    return x[:, : p.n_q] if padded else x


def _is_m(g: Geometry) -> bool:
    """Return True if the tensor that holds the LSE is called M."""
    return g.record.tensors[g.labels.index("L")].name.lower().startswith("m")


def _inputs(g: Geometry, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return a kernel's inputs by label: tensors that are loaded before any store to them."""
    a, found = g.record.accesses, {}
    for code, label in enumerate(g.labels):
        ops = a["op"][(a["tensor"] == code) & (a["active"] > 0)]
        if len(ops) and ops[0] == LOAD:
            found[label] = arrays[label]
    return found


def _of_scores(p: Problem, x: dict[str, np.ndarray]) -> tuple[Problem, dict[str, np.ndarray]]:
    """Return softmax(S) V as an attention problem, in which Q is S and K is the identity matrix."""
    if not {"S", "V"} <= x.keys() or {"Q", "K"} & x.keys() or p.n_kv > MAX_HEAD_DIM:
        return p, x
    keys = np.broadcast_to(np.eye(p.n_kv), (p.batch * p.kv_heads, p.n_kv, p.n_kv))
    p = replace(p, head_dim=p.n_kv, head_dim_v=x["V"].shape[-1], scale=1.0, causal=False)
    return p, {**x, "Q": x["S"], "K": keys}


def _four(p: Problem, x: np.ndarray) -> np.ndarray:
    return x.reshape(p.batch, -1, *x.shape[1:])


def _forward(
    p: Problem, x: Mapping[str, np.ndarray]
) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    q, k, v = (_four(p, x[name]) for name in "QKV")
    out, lse = oracle.attention(q, k, v, p)
    plain, plain_lse = oracle.attention(q, k, v, p, dtype=p.dtype)
    wanted = {"O": out.reshape(-1, *out.shape[2:]), "L": lse.reshape(-1, lse.shape[2])}
    allowed = {
        "O": _allowed(p, plain - out, out) + _of_exponents(p, lse, out),
        "L": max(_allowed(p, plain_lse - lse, lse), 1e-5),
    }
    return wanted, allowed


def _backward(
    p: Problem, x: Mapping[str, np.ndarray]
) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    q, k, v, do = (_four(p, x[name]) for name in ("Q", "K", "V", "dO"))
    exact = oracle.gradients(q, k, v, do, p)
    plain = oracle.gradients(q, k, v, do, p, dtype=p.dtype)
    _, lse = oracle.attention(q, k, v, p)
    wanted, allowed = {}, {}
    for name, key in (("dQ", "dq"), ("dK", "dk"), ("dV", "dv")):
        wanted[name] = exact[key].reshape(-1, *exact[key].shape[2:])
        allowed[name] = _allowed(p, plain[key] - exact[key], exact[key])
        allowed[name] += _of_exponents(p, lse, exact[key])
    if "O" in x:
        wanted["delta"] = (x["O"] * x["dO"]).sum(axis=-1)
        allowed["delta"] = _allowed(p, np.zeros(1), wanted["delta"]) + 1e-5
    return wanted, allowed


def _allowed(p: Problem, error: np.ndarray, exact: np.ndarray) -> float:
    """Return the allowed error: plain attention's error times TIMES, plus one rounding error."""
    bits = {"float64": 52, "float32": 23, "float16": 10, "bfloat16": 7}.get(p.dtype, 3)
    times = TIMES if bits > 16 else TIMES_16
    return times * _largest(error) + _largest(exact) * 2.0**-bits


def _of_exponents(p: Problem, lse: np.ndarray, exact: np.ndarray) -> float:
    """Return the error allowed because a kernel computes P = exp(S - m) or exp(S - L).

    S, m and L are rounded numbers about as large as L, and their errors multiply P. Plain attention
    has no such error in a row of one key, for example.
    """
    bits = 52 if p.dtype == "float64" else 23  # kernels keep these three in float32
    return ROUNDINGS * 2.0**-bits * _largest(lse) * _largest(exact)


def _differs(got: np.ndarray, want: np.ndarray, allowed: float) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        near = np.abs(got - want) <= allowed
    return ~(near | (got == want) | (np.isnan(got) & np.isnan(want)))


def _output(
    name: str, got: np.ndarray, want: np.ndarray, allowed: float, wrong: dict[str, np.ndarray]
) -> Output:
    differs = _differs(got, want, allowed)
    if differs.any():
        wrong[name] = differs
    with np.errstate(invalid="ignore"):
        distance = np.abs(got - want)
    distance = np.where(got == want, 0, distance)
    error = float("nan") if np.isnan(distance).any() else float(distance.max(initial=0))
    return Output(name, error, allowed, int(differs.sum()), differs.size)


def _mistake(
    g: Geometry,
    p: Problem,
    inputs: Mapping[str, np.ndarray],
    got: Mapping[str, np.ndarray],
    wanted: Mapping[str, np.ndarray],
    allowed: Mapping[str, float],
) -> str:
    """Return the first known mistake that explains all the wrong outputs, or "" if none does."""
    block_q, block_k = (max(sides) for sides in zip(*g.heights, strict=True))
    own = g.scale
    if own is not None and (own <= 0 or math.isclose(own, p.scale, rel_tol=1e-6)):
        own = None
    with np.errstate(all="ignore"):
        for text, make in mistakes.known(p, inputs, block_q, block_k, own):
            made = make()
            if not set(made) & set(got):
                continue
            every = {name: made.get(name, wanted[name]) for name in got}
            scale = {n: 2 * allowed[n] + 1e-5 * _largest(every[n]) for n in got}
            off = {n: _differs(got[n], every[n], scale[n]) & ~np.isnan(every[n]) for n in got}
            if not any(one.any() for one in off.values()):
                return text
    return _by_place(g)


def _by_place(g: Geometry) -> str:
    """Describe how a kernel stores results to the wrong rows; return "" if the rows are right."""
    a = g.record.accesses
    for label in ("O", "dQ", "dK"):
        if label not in g.labels:
            continue
        mine = (a["tensor"] == g.labels.index(label)) & (a["op"] != LOAD) & (g.rows > 1)
        starts, rows = np.unique(g.row[mine]), g.rows[mine].max(initial=0)
        if len(starts) > 1 and (np.diff(starts) == 1).all():
            return (
                f"row tile i begins at row i: the program's index is not multiplied by the tile's "
                f"{rows} rows"
            )
    return ""


def _largest(x: np.ndarray) -> float:
    return float(np.abs(x[np.isfinite(x)]).max(initial=0))


def _located(
    g: Geometry,
    verdict: Verdict,
    name: str,
    wrong: np.ndarray,
    got: np.ndarray,
    want: np.ndarray,
    mistake: str,
) -> Verdict:
    """Return the verdict with the first wrong element and the program that stored the element."""
    at = np.argwhere(wrong)[0]
    head, row, column = int(at[0]), int(at[1]), int(at[2]) if len(at) > 2 else 0
    a, code = g.record.accesses, g.labels.index(name)
    mine = np.flatnonzero((a["tensor"] == code) & (a["op"] != LOAD) & (a["active"] > 0))
    holds = (g.lead[mine] == head) & (g.row[mine] <= row) & (row < g.row[mine] + g.rows[mine])
    program: tuple[int, ...] = ()
    line = launch = 0
    if holds.any():
        access = a[mine[np.flatnonzero(holds)[-1]]]
        launch = int(access["launch"])
        program = g.record.launches[launch].place(int(access["program"]))
        line = g.record.lines[int(access["line"])][1]
    return Verdict(
        verdict.outputs,
        mistake,
        name,
        *(head, row, column, program, line),
        *(float(got[tuple(at)]), float(want[tuple(at)])),
        launch=launch,
    )


def _by_reader(g: Geometry, values: Sequence[np.ndarray], reference: Reference) -> Verdict:
    """Compare tensors with the results of a user's reference function, element by element."""
    given = {label: np.array(values[code]) for code, label in enumerate(g.labels)}
    answer = reference(given)
    stored = {g.labels[code]: code for code in g.record.stored}
    if not isinstance(answer, Mapping):
        if len(stored) != 1:
            raise TraceError(
                f"the kernel stores {', '.join(stored)}, so the reference must return a dict of "
                f"arrays by these names, but it returned {shown(answer)}"
            )
        answer = {next(iter(stored)): answer}
    outputs, first = [], None
    wrong: dict[str, np.ndarray] = {}
    for name, want in answer.items():
        if name not in stored:
            raise TraceError(
                f"the reference returns {name!r}, which the kernel does not store; it stores "
                f"{', '.join(stored)}"
            )
        code = stored[name]
        got, want = values[code].astype(np.float64), np.asarray(want, np.float64)
        if got.shape != want.shape:
            raise TraceError(
                f"{name} has shape {got.shape}, but the reference's {name} has shape {want.shape}; "
                "return an array of the tensor's shape"
            )
        bits = {"float64": 40, "float32": 17, "float16": 8}.get(g.record.tensors[code].dtype, 5)
        allowed = _largest(want) * 2.0**-bits
        outputs.append(_output(name, got, want, allowed, wrong))
        if name in wrong and first is None:
            first = name, matrices(g, code, wrong[name]) > 0, matrices(g, code, got)
            target = matrices(g, code, want)
    verdict = Verdict(tuple(outputs))
    if first is None:
        return verdict
    return _located(g, verdict, *first, target, "")
