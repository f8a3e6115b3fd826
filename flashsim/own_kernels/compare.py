"""Compares a kernel's bytes with a formula for its tile sizes, and explains excess bytes."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from flashsim.counts.questions import by_operation
from flashsim.counts.traffic import Traffic
from flashsim.errors import FlashSimError
from flashsim.own_kernels.geometry import Geometry
from flashsim.own_kernels.visits import visits_of
from flashsim.problem.hardware import Device
from flashsim.schedule.names import LOAD, OPS
from flashsim.schedule.schedule import Schedule
from flashsim.schedule.split import WHOLE, Split
from flashsim.schedule.tensors import ROW
from flashsim.schedule.tiling import Tiling
from flashsim.trace.timeline import numbers

#: The stage of FlashAttention-2 that stores a tensor.
_STAGE_OF = {
    **dict.fromkeys(("O", "L"), "forward"),
    "delta": "delta",
    **dict.fromkeys(("dK", "dV"), "dkdv"),
    "dQ": "dq",
}


@dataclass(frozen=True)
class Reason:
    """Excess bytes of one tensor: why the kernel moves them, and in which source lines."""

    kind: str
    text: str
    nbytes: int
    lines: tuple[int, ...]


@dataclass(frozen=True)
class ByteRow:
    """How many bytes of one tensor a kernel loads (or stores), and how many bytes are expected.

    `expected` is the bytes that FlashAttention-2 (or split-KV decoding) moves with the kernel's
    tile sizes, or None if flashsim recognizes no attention in the kernel. `compulsory` is the
    tensor's size if every kernel has to move the tensor once, else 0.
    """

    op: str
    tensor: str
    nbytes: int
    expected: int | None
    compulsory: int
    reasons: tuple[Reason, ...] = ()

    @property
    def more(self) -> int:
        """Return the bytes moved minus `expected` or, if that is None, minus `compulsory`."""
        return self.nbytes - (self.compulsory if self.expected is None else self.expected)

    @property
    def why(self) -> str:
        """Return the reasons for the excess bytes, in words, or "" if there are no excess bytes."""
        if self.more <= 0:
            return ""
        return "; ".join(reason.text for reason in self.reasons)


@dataclass(frozen=True, eq=False)
class Expected:
    """A known algorithm with which a kernel is compared: the name, the tile sizes and the bytes."""

    algorithm: str
    tiles: str
    transfers: dict[tuple[str, str], int]


def expected_of(g: Geometry, device: Device) -> Expected | None:
    """Return a known algorithm's bytes for the kernel's tile sizes, or None for other kernels."""
    stored = [_stored_in(g, n) for n in range(len(g.record.launches))]
    every = set().union(*stored)
    if not {"K", "V"} <= set(g.labels) and not every & {"delta"}:
        return None
    algorithm, direction, split = "flash2", "forward", WHOLE
    if every & {"dQ", "dK", "dV", "delta"}:
        direction = "backward"
        if not g.labels.count("dO"):
            return None
    elif "O_part" in every:
        algorithm = "flash-decode"
        whole = g.problem.batch * g.problem.heads * g.problem.n_q * g.problem.head_dim_v
        code = g.labels.index("O_part")
        split = Split(max(1, g.record.tensors[code].size // whole))
    elif "O" not in every:
        return None
    total: Counter[tuple[str, str]] = Counter()
    tiles: list[str] = []
    for launch, names in enumerate(stored):
        tiling = Tiling(*g.heights[launch])
        try:
            counted = Traffic(g.problem, tiling, algorithm, direction, device, "ascending", split)
        except FlashSimError:
            return None
        stages = {_STAGE_OF[name] for name in names if name in _STAGE_OF}
        if algorithm == "flash-decode":
            stages = {"split"} if names & {"O_part"} else {"combine"}
        if "dkdv" in stages and "dq" in stages:
            return None  # dK, dV and dQ in one pass: not FlashAttention-2's three-pass backward
        total.update(by_operation(counted.transfers, stages))
        if stages - {"delta", "combine"}:
            tiles.append(str(tiling))
    title = algorithm + (" backward" if direction == "backward" else "")
    if algorithm == "flash-decode":
        title += f", {split.splits} splits"
    return Expected(title, ", ".join(dict.fromkeys(tiles)), dict(total)) if total else None


def _stored_in(g: Geometry, launch: int) -> set[str]:
    a = g.record.accesses
    mine = (a["launch"] == launch) & (a["op"] != LOAD) & (a["active"] > 0)
    return {g.labels[code] for code in np.unique(a["tensor"][mine]).tolist()}


def rows_of(
    g: Geometry, expected: Expected | None, compulsory: Callable[[str], tuple[int, int]]
) -> list[ByteRow]:
    """Return a `ByteRow` per operation and tensor, given each tensor's `compulsory` bytes."""
    a, asked = g.record.accesses, g.record.bytes_asked
    found = []
    masked = masked_visits(g)
    for code, label in enumerate(g.labels):
        mine = (a["tensor"] == code) & (a["active"] > 0)
        read, written = compulsory(label)
        for op in np.unique(a["op"][mine]).tolist():
            nbytes = int(asked[mine & (a["op"] == op)].sum())
            want = None
            if expected is not None and label in {t for _, t in expected.transfers}:
                want = expected.transfers.get((OPS[op], label), 0)
            why = tuple(_reasons(g, op, code, masked))
            least = read if op == LOAD else written
            found.append(ByteRow(OPS[op], label, nbytes, want, least, why))
    return found


def _reasons(g: Geometry, op: int, code: int, masked: np.ndarray) -> Iterator[Reason]:
    """Yield reasons for excess bytes: masked tiles, repeated loads, tiles that cross heads."""
    a = g.record.accesses
    mine = np.flatnonzero((a["tensor"] == code) & (a["op"] == op) & (a["active"] > 0))
    # Offsets and lengths are integers: loading such a number again costs nothing.
    if op != LOAD or g.record.tensors[code].dtype.startswith(("int", "uint")):
        return
    rest, skipped = mine, mine[masked[mine]]
    inner = (g.sides[code].axis != ROW) == (g.outer[int(a["launch"][mine[0]])] == "queries")
    if len(skipped) and inner:
        yield _masked(g, code, skipped)
        rest = mine[~masked[mine]]
    again = _repeated(g, rest)
    if len(again):
        yield _again(g, code, rest, again)
    beyond = mine[g.spans[mine] > 1]
    if len(beyond) and g.leads[code] > 1:
        lines = _lines(g, beyond)
        text = f"rows of the next head are also loaded, in {said(lines)}"
        yield Reason("next head", text, 0, lines)


def _lines(g: Geometry, accesses: np.ndarray) -> tuple[int, ...]:
    numbers = np.unique(g.record.accesses["line"][accesses]).tolist()
    return tuple(sorted(g.record.lines[n][1] for n in numbers))


def _masked(g: Geometry, code: int, accesses: np.ndarray) -> Reason:
    label, lines = g.labels[code], _lines(g, accesses)
    programs = len(np.unique(g.record.accesses["program"][accesses]))
    text = (
        f"{len(accesses)} {label} tiles whose scores are all masked are loaded, by {programs} "
        f"program{'s' * (programs != 1)}, {said(lines)}: limit the loop to tiles that the mask "
        "keeps"
    )
    return Reason("masked tiles", text, int(g.record.bytes_asked[accesses].sum()), lines)


def _tiles(g: Geometry, accesses: np.ndarray) -> np.ndarray:
    """Return a number per access; one program's accesses to the same tile get the same number."""
    its = g.record.accesses[accesses]
    return numbers(*(its[x] for x in ("launch", "program", "tensor", "first", "last")))


def _repeated(g: Geometry, accesses: np.ndarray) -> np.ndarray:
    """Return the accesses that repeat an earlier access of the same program to the same tile."""
    _, first = np.unique(_tiles(g, accesses), return_index=True)
    repeats = np.ones(len(accesses), bool)
    repeats[first] = False
    return accesses[repeats]


def _again(g: Geometry, code: int, accesses: np.ndarray, again: np.ndarray) -> Reason:
    counts = np.bincount(_tiles(g, accesses))
    times = int(np.median(counts[counts > 1]))
    word = {2: "twice", 3: "three times"}.get(times, f"{times} times")
    lines = _lines(g, again)
    others = tuple(x for x in _lines(g, accesses) if x not in lines)
    programs = np.unique(g.record.accesses["program"][again])
    total = g.record.launches[int(g.record.accesses["launch"][again[0]])].programs
    who = "every program" if len(programs) == total else f"{len(programs)} of {total} programs"
    before = f" (first in {said(others)})" if others else ""
    label = g.labels[code]
    text = f"each {label} tile is loaded {word} by {who}, {said(lines)}{before}"
    if not (counts > 1).all():
        many = int((counts > 1).sum())
        text = f"{many} tiles of {label} are loaded {word}, by {who}, {said(lines)}{before}"
    return Reason("loaded again", text, int(g.record.bytes_asked[again].sum()), lines)


def said(lines: tuple[int, ...]) -> str:
    """Return source lines in words, such as "line 41" or "lines 41 and 47"."""
    if not lines:
        return "no line"
    if len(lines) == 1:
        return f"line {lines[0]}"
    return f"lines {', '.join(map(str, lines[:-1]))} and {lines[-1]}"


def masked_visits(g: Geometry) -> np.ndarray:
    """Return a boolean per access: True if all scores of the access's tile pair are masked.

    Without a named tensor of queries, a program's row tiles are not known, and no access is True.
    """
    found = np.zeros(len(g.record.accesses), bool)
    p = g.problem
    if not (p.causal or p.window is not None) or not {"Q", "O", "dQ", "dO"} & set(g.labels):
        return found
    for launch in range(len(g.record.launches)):
        cut = visits_of(g, launch)
        if cut.inner.max(initial=-1) < 0:
            continue
        schedule = Schedule(p, Tiling(cut.block_q, cut.block_k))
        seen = np.zeros((schedule.t_r, schedule.t_c), bool)
        ptr, col, _ = schedule.row_csr
        seen[np.repeat(np.arange(schedule.t_r), np.diff(ptr)), col] = True
        visiting = (cut.inner >= 0) & (cut.visit >= 0)
        i, j = (cut.tile, cut.inner) if cut.outer == "queries" else (cut.inner, cut.tile)
        inside = visiting & (i < schedule.t_r) & (j < schedule.t_c)
        found[cut.at[inside]] = ~seen[i[inside], j[inside]]
    return found
