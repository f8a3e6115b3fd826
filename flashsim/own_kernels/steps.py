"""Compares one program's m, l and accumulator with the right values after each key tile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from flashsim.own_kernels.check import Verdict, matrices
from flashsim.problem.oracle import keep_matrix
from flashsim.schedule.names import LOAD

if TYPE_CHECKING:
    from flashsim.own_kernels.geometry import Geometry

#: A callback for each access of a program that runs again. Its arguments: operation, tensor code,
#: element offsets, and a function that returns the program's current variables by name.
Look = Callable[[int, int, np.ndarray, "Variables"], None]
Variables = Callable[[], Mapping[str, np.ndarray]]
#: Runs a verdict's program again, and calls a `Look` for each of its accesses.
Again = Callable[[Verdict, Look], None]

#: Usual variable names of m, l and the accumulator. They are used if a program is wrong from its
#: first tile on, so that values cannot identify the variables.
_USUAL = {
    "m": ("m", "m_i", "m_ij", "m_prev", "row_max", "max_i"),
    "l": ("l", "l_i", "d_i", "row_sum", "sum_i"),
    "acc": ("acc", "acc_o", "o", "o_i", "O_i", "out", "acc_i"),
}


@dataclass
class Follower:
    """Computes FlashAttention-2's m, l and O after each key tile, for one program's rows.

    Attributes
    ----------
    scores : scaled scores, float64 (rows, n_kv), with -inf where the mask removes a score
    v : float64 (n_kv, d_v)
    first_row : query index of the first row
    relative : allowed error of a variable, relative to its largest expected value
    """

    scores: np.ndarray
    v: np.ndarray
    first_row: int
    relative: float
    names: dict[str, str] = field(default_factory=dict)
    seen: list[tuple[int, int]] = field(default_factory=list)
    found: str = ""

    def tile(self, first: int, last: int, variables: Mapping[str, np.ndarray]) -> None:
        """Check a program's `variables` after a complete key tile, as the next tile is loaded."""
        if self.seen and self.seen[-1] == (first, last):
            return  # the same tile is loaded again
        if self.seen and not self.found:
            self._compare(variables, ended=False)
        self.seen.append((first, last))

    def end(self, variables: Mapping[str, np.ndarray]) -> None:
        """Check the program's variables when the program stores the output."""
        if self.seen and not self.found:
            self._compare(variables, ended=True)

    def _compare(self, variables: Mapping[str, np.ndarray], *, ended: bool) -> None:
        keys = np.unique(np.concatenate([np.arange(a, b) for a, b in self.seen]))
        keys = keys[keys < len(self.v)]
        s = self.scores[:, keys]
        m = s.max(axis=1, initial=-np.inf)
        e = np.exp(s - np.where(np.isneginf(m), 0, m)[:, None])
        l, acc = e.sum(axis=1), e @ self.v[keys]
        right: dict[str, list[np.ndarray]] = {
            "m": [m, m * np.log2(np.e)],
            "l": [l],
            "acc": [acc, acc / np.where(l == 0, 1, l)[:, None]] if ended else [acc],
        }
        rows = np.isfinite(m)
        if not self.names:
            self._name(right, rows, variables)
            if not self.names:
                return
        wrong: list[str] = []
        good: list[str] = []
        row = 0
        for what, name in self.names.items():
            if name not in variables or variables[name].shape[:1] != m.shape:
                continue
            off = [self._off(variables[name], want, rows) for want in right[what]]
            best = min(off, key=lambda one: int(one.sum()))
            if best.any() and not wrong:
                row = self.first_row + int(np.argmax(best))
            (wrong if best.any() else good).append(name)
        if wrong:
            last = " and ".join(good), "are" if len(good) > 1 else "is"
            first, end = self.seen[-1]
            self.found = (
                f"the program's first wrong step is step {len(self.seen)}, keys {first} to "
                f"{end - 1}: {' and '.join(wrong)} {'are' if len(wrong) > 1 else 'is'} wrong from "
                f"row {row} on" + ("; {} {} still right".format(*last) if good else "")
            )

    def _name(self, right: Mapping[str, list[np.ndarray]], rows: np.ndarray, its: Mapping) -> None:
        """Find the variables that hold m, l and the accumulator, by comparing values."""
        for what, possible in right.items():
            for name, value in its.items():
                same = [want for want in possible if want.shape == value.shape]
                fits = any(not self._off(value, want, rows).any() for want in same)
                if fits and name not in self.names.values():
                    self.names[what] = name
                    break
            else:
                usual = [n for n in _USUAL[what] if n in its][:1]
                if usual and its[usual[0]].shape == possible[0].shape:
                    self.names[what] = usual[0]

    def _off(self, value: np.ndarray, want: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Return a mask of the rows in which a variable differs from the right value."""
        if value.shape != want.shape:
            return rows
        scale = np.abs(want[rows]).max(initial=1e-3)
        near = np.abs(np.asarray(value, np.float64) - want) <= self.relative * scale
        return ~near.reshape(len(rows), -1).all(axis=1) & rows


def followed(
    g: Geometry, values: tuple[np.ndarray, ...], verdict: Verdict, again: Again
) -> Verdict:
    """Return the verdict; add the first wrong step if a forward pass stored a wrong O or L."""
    p = g.problem
    usual = {"Q", "K", "V"} <= set(g.labels) and verdict.tensor in ("O", "L") and verdict.program
    if not usual or p.n_q == 1:
        return verdict
    x = {n: matrices(g, g.labels.index(n), values[g.labels.index(n)]) for n in "QKV"}
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
    stored, over = False, False

    def look(op: int, code: int, offsets: np.ndarray, variables: Variables) -> None:
        nonlocal stored, over
        label = g.labels[code] if code >= 0 else ""
        stored |= op != LOAD and label in ("O", "L")
        over |= stored and op == LOAD and label == "Q"  # a persistent program's next row tile
        if over or label not in (("K",) if op == LOAD else ("O", "L")):
            return
        found = {name: x[: len(rows)] for name, x in variables().items()}
        if op != LOAD:
            follower.end(found)
            return
        index, _ = g.record.tensors[code].coordinates(offsets)
        along = index[g.sides[code].rows]
        follower.tile(int(along.min()), int(along.max()) + 1, found)

    again(verdict, look)
    return replace(verdict, step=follower.found)
