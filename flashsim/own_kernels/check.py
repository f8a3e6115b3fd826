"""Checks a kernel's results; if any are wrong, finds the first wrong element and the mistake."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from flashsim.errors import TraceError, shown
from flashsim.own_kernels import mistakes
from flashsim.own_kernels.geometry import Geometry
from flashsim.own_kernels.record import float64
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
        parts = []
        for one in self.outputs:
            word = "right" if one.right else "WRONG"
            many = f", {one.wrong:,} of {one.size:,} elements" if one.wrong else ""
            errors = f"error {one.error:.1e}, allowed {one.allowed:.1e}{many}"
            parts.append(f"{one.tensor} {word} ({errors})")
        if self.right:
            return "\n".join(parts)
        where = f"{self.tensor} of head {self.head}, row {self.row}, column {self.column}"
        who = f"{where} was never stored, so it is {self.got:.6g}"
        if self.program:
            who = f"first in program {self.program}, line {self.line}: {where} is {self.got:.6g}"
        parts.append(f"{who}; it should be {self.wanted:.6g}")
        parts += [self.step] if self.step else []
        known = f"a kernel gives these numbers if {self.mistake}"
        parts.append(known if self.mistake else "no known mistake gives these numbers")
        return "\n".join(parts)


def matrices(g: Geometry, code: int, array: np.ndarray) -> np.ndarray:
    """Return a tensor in float64: a matrix as (heads, rows, columns), a vector as (heads, rows)."""
    side = g.sides[code]
    x = float64(array)
    if x.ndim == 0:
        return x.reshape(1, 1)
    x = x.reshape(g.shapes[code])
    x = np.moveaxis(x, side.rows, -1 if side.vector else -2)
    leads, length = g.leads[code], g.lengths[code]
    return x.reshape((leads, length) if side.vector else (leads, length, x.shape[-1]))


class _Target(NamedTuple):
    """A result tensor as `matrices`: the kernel's values, the right ones, and the allowed error."""

    got: np.ndarray
    want: np.ndarray
    allowed: float


def check(g: Geometry, values: Sequence[np.ndarray], reference: Reference | None = None) -> Verdict:
    """Compare the tensors that a kernel stored with a reference (default: float64 attention)."""
    if not values:
        raise TraceError(
            "this record does not hold the tensors' values, so results cannot be checked; trace "
            "the kernel again with check=True"
        )
    p = g.problem
    inputs: dict[str, np.ndarray] = {}
    if reference is not None:
        targets = _by_reader(g, values, reference)
    else:
        arrays = {
            label: _without_padding(p, label, matrices(g, code, values[code]))
            for code, label in enumerate(g.labels)
            if g.record.tensors[code].size
        }
        p, inputs = _of_scores(p, {name: arrays[name] for name in _inputs(g)})
        targets = _of_attention(g, p, inputs, arrays)
    outputs, wrong = [], {}
    for name, target in targets.items():
        one, differs = _judged(name, target)
        holds_m = g.record.tensors[g.labels.index(name)].name.lower().startswith("m")
        if name == "L" and holds_m and not one.right and reference is None:
            base_2 = _Target(target.got, target.want * LOG2_E, target.allowed * LOG2_E)
            in_base_2, _ = _judged("L in base 2", base_2)
            if in_base_2.right:  # what Triton's own example keeps for its backward pass
                one = in_base_2
        if not one.right:
            wrong[name] = differs
        outputs.append(one)
    if not wrong:
        return Verdict(tuple(outputs))
    mistake = _mistake(g, p, inputs, targets) if reference is None else ""
    name = next(iter(wrong))
    return _located(g, Verdict(tuple(outputs), mistake, name), wrong[name], targets[name])


def _without_padding(p: Problem, name: str, x: np.ndarray) -> np.ndarray:
    """Return L or delta without padding after the last query; return any other array unchanged."""
    padded = name in ("L", "delta") and x.ndim == 2 and x.shape[1] > p.n_q
    return x[:, : p.n_q] if padded else x


def _inputs(g: Geometry) -> Iterator[str]:
    """Yield the labels of a kernel's inputs: tensors that are loaded before any store to them."""
    a = g.record.accesses
    for code, label in enumerate(g.labels):
        ops = a["op"][(a["tensor"] == code) & (a["active"] > 0)]
        if len(ops) and ops[0] == LOAD:
            yield label


def _of_scores(p: Problem, x: dict[str, np.ndarray]) -> tuple[Problem, dict[str, np.ndarray]]:
    """Return softmax(S) V as an attention problem, in which Q is S and K is the identity matrix."""
    if not {"S", "V"} <= x.keys() or {"Q", "K"} & x.keys() or p.n_kv > MAX_HEAD_DIM:
        return p, x
    keys = np.broadcast_to(np.eye(p.n_kv), (p.batch * p.kv_heads, p.n_kv, p.n_kv))
    p = replace(p, head_dim=p.n_kv, head_dim_v=x["V"].shape[-1], scale=1.0, causal=False)
    return p, {**x, "Q": x["S"], "K": keys}


def _four(p: Problem, x: np.ndarray) -> np.ndarray:
    return x.reshape(p.batch, -1, *x.shape[1:])


def _of_attention(
    g: Geometry, p: Problem, x: Mapping[str, np.ndarray], arrays: Mapping[str, np.ndarray]
) -> dict[str, _Target]:
    """Return the stored tensors that attention of the inputs `x`, or its gradients, defines."""
    stored = [g.labels[code] for code in g.record.stored]
    found: dict[str, tuple[np.ndarray, float]] = {}
    if {"Q", "K", "V"} <= x.keys():
        q, k, v = (_four(p, x[name]) for name in "QKV")
        out, lse = oracle.attention(q, k, v, p)
        if {"O", "L"} & set(stored):
            plain, plain_lse = oracle.attention(q, k, v, p, dtype=p.dtype)
            found["O"] = out, _allowed(p, plain - out, out, lse)
            with np.errstate(invalid="ignore"):  # the LSE of a row without keys is -inf
                found["L"] = lse, max(_allowed(p, plain_lse - lse, lse), 1e-5)
        if "dO" in x and {"dQ", "dK", "dV", "delta"} & set(stored):
            inputs = q, k, v, _four(p, x["dO"])
            exact = oracle.gradients(*inputs, p)
            rounded = oracle.gradients(*inputs, p, dtype=p.dtype)
            for name in ("dQ", "dK", "dV"):
                want = exact[name.lower()]
                found[name] = want, _allowed(p, rounded[name.lower()] - want, want, lse)
            if "O" in x:
                delta = (x["O"] * x["dO"]).sum(axis=-1)[None]
                found["delta"] = delta, _allowed(p, np.zeros(1), delta) + 1e-5
    if not set(stored) & found.keys():
        unknown = " or ".join(name for name in "QKV" if name not in x)
        raise TraceError(
            f"none of the stored tensors ({', '.join(stored)}) can be checked: attention "
            "computes O, L, dQ, dK or dV from Q, K, V and dO"
            + (f", but no loaded tensor is known to be {unknown}" if unknown else "")
            + ". Name the kernel's parameters by names={parameter: name} (--name PARAMETER=NAME), "
            "or pass a reference: check(lambda inputs: {'y': ...})"
        )
    targets = {}
    for name in (name for name in stored if name in found):
        got, (want, allowed) = arrays[name], found[name]
        want = want.reshape(-1, *want.shape[2:])
        if got.shape != want.shape:
            raise TraceError(
                f"{name} has shape {got.shape} (heads, rows, columns), but the problem implies "
                f"{want.shape}; pass the kernel's problem as problem=flashsim.Problem(...)"
            )
        targets[name] = _Target(got, want, allowed)
    return targets


def _allowed(
    p: Problem, error: np.ndarray, exact: np.ndarray, lse: np.ndarray | None = None
) -> float:
    """Return the allowed error: plain attention's error times TIMES, plus one rounding error.

    With `lse`, errors of exponents are allowed, too: a kernel computes P = exp(S - m) or
    exp(S - L). S, m and L are rounded numbers about as large as L, and their errors multiply P.
    Plain attention has no such error in a row of one key, for example.
    """
    bits = {"float64": 52, "float32": 23, "float16": 10, "bfloat16": 7}.get(p.dtype, 3)
    times = TIMES if bits > 16 else TIMES_16
    allowed = times * _largest(error) + _largest(exact) * 2.0**-bits
    if lse is None:
        return allowed
    bits = 52 if p.dtype == "float64" else 23  # kernels keep these three in float32
    return allowed + ROUNDINGS * 2.0**-bits * _largest(lse) * _largest(exact)


def _differs(got: np.ndarray, want: np.ndarray, allowed: float) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        near = np.abs(got - want) <= allowed
    return ~(near | (got == want) | (np.isnan(got) & np.isnan(want)))


def _judged(name: str, target: _Target) -> tuple[Output, np.ndarray]:
    """Return the check of a result tensor, and a mask of its wrong elements."""
    got, want, allowed = target
    differs = _differs(got, want, allowed)
    with np.errstate(invalid="ignore"):
        distance = np.where(got == want, 0, np.abs(got - want))
    error = float("nan") if np.isnan(distance).any() else float(distance.max(initial=0))
    return Output(name, error, allowed, int(differs.sum()), differs.size), differs


def _mistake(
    g: Geometry, p: Problem, inputs: Mapping[str, np.ndarray], targets: Mapping[str, _Target]
) -> str:
    """Return the first known mistake that explains all the wrong outputs, or "" if none does."""
    block_q, block_k = (max(sides) for sides in zip(*g.heights, strict=True))
    own = g.scale
    if own is not None and (own <= 0 or math.isclose(own, p.scale, rel_tol=1e-6)):
        own = None

    def fits(name: str, made: np.ndarray) -> bool:
        allowed = 2 * targets[name].allowed + 1e-5 * _largest(made)
        return not (_differs(targets[name].got, made, allowed) & ~np.isnan(made)).any()

    with np.errstate(all="ignore"):
        for text, make in mistakes.known(p, inputs, block_q, block_k, own):
            made = make()
            if set(made) & set(targets) and all(
                fits(name, made.get(name, one.want)) for name, one in targets.items()
            ):
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


def _located(g: Geometry, verdict: Verdict, wrong: np.ndarray, target: _Target) -> Verdict:
    """Return the verdict with the first wrong element and the program that stored the element."""
    at = tuple(np.argwhere(wrong)[0].tolist())
    head, row, column = (*at, 0)[:3]
    a, code = g.record.accesses, g.labels.index(verdict.tensor)
    mine = np.flatnonzero((a["tensor"] == code) & (a["op"] != LOAD) & (a["active"] > 0))
    holds = (g.lead[mine] == head) & (g.row[mine] <= row) & (row < g.row[mine] + g.rows[mine])
    got, wanted = float(target.got[at]), float(target.want[at])
    verdict = replace(verdict, head=head, row=row, column=column, got=got, wanted=wanted)
    if not holds.any():
        return verdict
    access = a[mine[np.flatnonzero(holds)[-1]]]
    launch = int(access["launch"])
    program = g.record.launches[launch].place(int(access["program"]))
    line = g.record.lines[int(access["line"])][1]
    return replace(verdict, launch=launch, program=program, line=line)


class _Loaded(dict[str, np.ndarray]):
    """The arrays by label; a wrong label raises an error that lists the labels."""

    def __missing__(self, label: str) -> np.ndarray:
        raise TraceError(
            f"the reference asks for {label!r}, but the kernel's tensors are {', '.join(self)}; "
            "names= gives a tensor another label"
        )


def _by_reader(
    g: Geometry, values: Sequence[np.ndarray], reference: Reference
) -> dict[str, _Target]:
    """Return the tensors that a user's reference function computes."""
    answer = reference(
        _Loaded({label: np.array(values[code]) for code, label in enumerate(g.labels)})
    )
    stored = {g.labels[code]: code for code in g.record.stored}
    if not isinstance(answer, Mapping):
        if len(stored) != 1:
            raise TraceError(
                f"the kernel stores {', '.join(stored)}, so the reference must return a dict of "
                f"arrays by these names, but it returned {shown(answer)}"
            )
        answer = {next(iter(stored)): answer}
    targets = {}
    for name, want in answer.items():
        if name not in stored:
            raise TraceError(
                f"the reference returns {name!r}, which the kernel does not store; it stores "
                f"{', '.join(stored)}"
            )
        code = stored[name]
        got, want = values[code], np.asarray(want, np.float64)
        if got.shape != want.shape:
            raise TraceError(
                f"{name} has shape {got.shape}, but the reference's {name} has shape {want.shape}; "
                "return an array of the tensor's shape"
            )
        bits = {"float64": 40, "float32": 17, "float16": 8}.get(g.record.tensors[code].dtype, 5)
        allowed = _largest(want) * 2.0**-bits
        targets[name] = _Target(matrices(g, code, got), matrices(g, code, want), allowed)
    return targets
