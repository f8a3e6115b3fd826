"""Warnings about a kernel, each with its line and program."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from flashsim.own_kernels.geometry import Geometry
from flashsim.own_kernels.record import ATOMIC, SECTOR
from flashsim.schedule.names import LOAD, OPS

#: A request of a warp is uncoalesced from this many times the sectors that its bytes need.
UNCOALESCED = 2.0


@dataclass(frozen=True)
class KernelFinding:
    """One thing to look at.

    Attributes
    ----------
    kind : str
        "outside", "next head", "two stores", "race", "never stored", "uncoalesced", "masked lanes".
    text : str
        The sentence for the reader, with line and program.
    line : int
        In the reader's file; 0 if it has none.
    program : tuple of int
        The first program, by its place in the grid; () if it has none.
    tensor : str
    """

    kind: str
    text: str
    line: int = 0
    program: tuple[int, ...] = ()
    tensor: str = ""

    def __str__(self) -> str:
        return self.text


def findings_of(g: Geometry) -> list[KernelFinding]:
    """Return everything that was found, the worst first."""
    return [*_outside(g), *_next_head(g), *_clashes(g), *_unstored(g), *_sectors(g), *_masked(g)]


def _groups(g: Geometry, chosen: np.ndarray) -> Iterator[tuple[int, int, int, np.ndarray]]:
    """Group accesses by line, operation and tensor: line, operation, tensor, accesses."""
    for line, op, code, at in g.record.by_line(chosen):
        yield g.record.lines[line][1], op, code, at


def _where(g: Geometry, access: int) -> tuple[int, ...]:
    a = g.record.accesses[access]
    return g.record.launches[int(a["launch"])].place(int(a["program"]))


def _word(op: int) -> str:
    return "atomic operation" if op == ATOMIC else OPS[op]


def _outside(g: Geometry) -> Iterator[KernelFinding]:
    a = g.record.accesses
    for line, op, code, at in _groups(g, a["outside"] > 0):
        lanes, first = int(a["outside"][at].sum()), _where(g, int(at[0]))
        each = int(a["outside"][at[0]])
        total = each + int(a["active"][at[0]]) + int(a["masked"][at[0]])
        label = g.labels[code] if code >= 0 else "a tensor"
        shape = g.record.tensors[code].shape if code >= 0 else ()
        what = "get what is not its own, or NaN" if op == LOAD else "do not arrive in it"
        yield KernelFinding(
            "outside",
            f"line {line}: {_word(op)} outside of {label} {tuple(shape)}: {each} of {total} lanes "
            f"in program {first}, {lanes:,} lanes in all. They {what}; on a GPU anything may "
            "happen: mask them",
            *(line, first, label),
        )


def _next_head(g: Geometry) -> Iterator[KernelFinding]:
    a = g.record.accesses
    for line, op, code, at in _groups(g, (g.spans > 1) & (a["active"] > 0)):
        alone = (a["tensor"] == code) & (a["op"] == op) & (g.spans == 1) & (a["active"] > 0)
        if not alone.any() or g.leads[code] < 2:
            continue
        first = _where(g, int(at[0]))
        more = f" and in {len(at) - 1} more accesses" if len(at) > 1 else ""
        yield KernelFinding(
            "next head",
            f"line {line}: {_word(op)} of {g.labels[code]} runs past the last row of its head into "
            f"the next one, in program {first}{more}: mask rows from {g.lengths[code]} on",
            *(line, first, g.labels[code]),
        )


def _clashes(g: Geometry) -> Iterator[KernelFinding]:
    for clash in g.record.clashes:
        launch, label = g.record.launches[clash.launch], g.labels[clash.tensor]
        tensor = g.record.tensors[clash.tensor]
        index = tuple(int(x) for x in np.unravel_index(clash.element, tensor.shape or (1,)))
        line, second = g.record.lines[clash.line][1], launch.place(clash.second)
        first = "others" if clash.first < 0 else f"{launch.place(clash.first)}"
        if clash.kind == "two stores":
            text = (
                f"line {line}: programs {first} and {second} both store {label}{list(index)} in "
                "one launch, and not by atomic operations: which one stays is chance"
            )
        else:
            text = (
                f"line {line}: in one launch, program {second} and program {first} read and store "
                f"{label}{list(index)}: on a GPU nothing orders them; use two launches"
            )
        kind = "two stores" if clash.kind == "two stores" else "race"
        yield KernelFinding(kind, text, line, second, label)


def _unstored(g: Geometry) -> Iterator[KernelFinding]:
    for code, mask in g.record.stored.items():
        if mask.all():
            continue
        tensor, label = g.record.tensors[code], g.labels[code]
        missing = np.argwhere(~mask)
        first = [int(x) for x in missing[0]]
        yield KernelFinding(
            "never stored",
            f"{label} {tensor.shape}: {len(missing):,} of {mask.size:,} elements are never stored, "
            f"the first is {label}{first}; compare the grid and the store's mask with the shape",
            tensor=label,
        )


def _sectors(g: Geometry) -> Iterator[KernelFinding]:
    a = g.record.accesses
    sizes = np.array([t.itemsize for t in g.record.tensors] + [1])
    for line, op, code, at in _groups(g, (a["active"] > 0) & (a["tensor"] >= 0)):
        sectors = int(a["sectors"][at].sum()) * SECTOR
        needed = int((a["distinct"][at] * sizes[code]).sum())
        one = a[at[0]]
        least = -(-int(one["distinct"]) * int(sizes[code]) // SECTOR)
        if sectors < UNCOALESCED * needed or int(one["sectors"]) <= least + 1:
            continue
        yield KernelFinding(
            "uncoalesced",
            f"line {line}: {_word(op)} of {g.labels[code]} touches {int(one['sectors'])} sectors "
            f"of 32 B for {int(one['distinct']) * int(sizes[code]):,} B ({needed / sectors:.0%} "
            "used): neighbouring lanes should take neighbouring elements",
            *(line, _where(g, int(at[0])), g.labels[code]),
        )


def _masked(g: Geometry) -> Iterator[KernelFinding]:
    a = g.record.accesses
    for line, op, code, at in _groups(g, a["masked"] > 0):
        masked = int(a["masked"][at].sum())
        label = g.labels[code] if code >= 0 else "a tensor"
        same = (a["line"] == a["line"][at[0]]) & (a["op"] == op) & (a["tensor"] == code)
        lanes = int((a["masked"] + a["active"])[same].sum())
        if code < 0 or masked < 0.25 * lanes:
            if code < 0 and len(at):
                yield KernelFinding(
                    "masked lanes",
                    f"line {line}: {len(at)} {_word(op)}s with every lane masked off, the first in "
                    f"program {_where(g, int(at[0]))}: these programs or iterations do nothing",
                    *(line, _where(g, int(at[0])), label),
                )
            continue
        yield KernelFinding(
            "masked lanes",
            f"line {line}: {masked:,} of {lanes:,} lanes of the {_word(op)} of {label} are masked "
            f"off ({masked / lanes:.0%}): the tile is larger than what is left of the tensor",
            *(line, _where(g, int(at[0])), label),
        )


__all__ = ["KernelFinding", "findings_of"]
