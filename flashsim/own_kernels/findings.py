"""Warnings about a kernel, each with its source line and program."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from flashsim.own_kernels.geometry import Geometry
from flashsim.own_kernels.record import ATOMIC, SECTOR
from flashsim.schedule.names import LOAD, OPS

#: An access is uncoalesced if its sectors hold at least this many times the bytes that it uses.
UNCOALESCED = 2.0


@dataclass(frozen=True)
class KernelFinding:
    """One warning about a kernel, with its source line and program.

    Attributes
    ----------
    kind : "outside", "next head", "two stores", "race", "never stored", "uncoalesced" or
        "masked lanes"
    text : the warning in words, with line and program
    line : the line in the user's file; 0 if the warning concerns no single line
    program : grid coordinates of the first program that the warning concerns, or ()
    tensor : the tensor's name
    """

    kind: str
    text: str
    line: int = 0
    program: tuple[int, ...] = ()
    tensor: str = ""

    def __str__(self) -> str:
        return self.text


def findings_of(g: Geometry) -> list[KernelFinding]:
    """Return all warnings about a kernel, the most serious kinds first."""
    return [*_outside(g), *_next_head(g), *_clashes(g), *_unstored(g), *_sectors(g), *_masked(g)]


def _groups(g: Geometry, chosen: np.ndarray) -> Iterator[tuple[int, int, int, np.ndarray]]:
    """Group the `chosen` accesses; yield (line, operation, tensor code, accesses) per group."""
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
        what = (
            "read other memory or NaN in this simulation" if op == LOAD else "are not carried out"
        )
        yield KernelFinding(
            "outside",
            f"line {line}: {_word(op)} outside of {label} {tuple(shape)}: {each} of {total} lanes "
            f"in program {first}, {lanes:,} lanes in all. They {what}; on a GPU the behaviour is "
            "undefined: mask these lanes",
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
            f"line {line}: {_word(op)} of {g.labels[code]} goes past its head's last row, into the "
            f"next head, in program {first}{more}: mask rows from {g.lengths[code]} on",
            *(line, first, g.labels[code]),
        )


def _clashes(g: Geometry) -> Iterator[KernelFinding]:
    for clash in g.record.clashes:
        launch, label = g.record.launches[clash.launch], g.labels[clash.tensor]
        tensor = g.record.tensors[clash.tensor]
        index = tuple(int(x) for x in np.unravel_index(clash.element, tensor.shape or (1,)))
        line, second = g.record.lines[clash.line][1], launch.place(clash.second)
        first = "another" if clash.first < 0 else f"{launch.place(clash.first)}"
        if clash.kind == "two stores":
            text = (
                f"line {line}: programs {first} and {second} both store {label}{list(index)} in "
                "one launch, without atomic operations: either value may remain"
            )
        else:
            text = (
                f"line {line}: in one launch, one of programs {second} and {first} loads "
                f"{label}{list(index)} and the other stores it. A GPU does not order them; use "
                "two launches"
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
            f"first {label}{first}; compare the grid and the store's mask with the tensor's shape",
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
            "used): let neighbouring lanes access neighbouring elements",
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
                    f"program {_where(g, int(at[0]))}: these programs or iterations have no effect",
                    *(line, _where(g, int(at[0])), label),
                )
            continue
        yield KernelFinding(
            "masked lanes",
            f"line {line}: {masked:,} of {lanes:,} lanes of the {_word(op)} of {label} are masked "
            f"off ({masked / lanes:.0%}): the tile is larger than the rest of the tensor",
            *(line, _where(g, int(at[0])), label),
        )
