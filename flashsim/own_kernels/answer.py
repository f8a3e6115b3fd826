"""The terminal report on a user's kernel: mistakes and bytes, in at most 32 lines."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from flashsim.counts.questions import in_words
from flashsim.errors import FlashSimError
from flashsim.own_kernels.compare import said
from flashsim.own_kernels.record import SECTOR

if TYPE_CHECKING:
    from flashsim.own_kernels.kernel_trace import KernelTrace

LINES, WIDTH = 32, 100
#: The report's blocks of findings in order: the word in the margin, and the kinds of findings.
_KINDS = {
    "bounds": ("outside", "next head"),
    "stored": ("never stored",),
    "races": ("two stores", "race"),
    "sectors": ("uncoalesced",),
}
_CLEAN = {
    "bounds": "every lane that is not masked off accesses an element of its tensor",
    "stored": "every element of every output is stored",
    "races": "no two programs of a launch race",
}


def answer(
    traced: KernelTrace, files: Sequence[str] = (), note: str = "", most: int = LINES
) -> str:
    """Return the text of the terminal report on a user's kernel, in at most `most` lines.

    The last lines list the files written (`files`). If results were not checked, `note` says why.
    """
    programs = sum(one.programs for one in traced.record.launches)
    head = (
        f"{traced.name}: {in_words(traced.problem)}; {programs:,} programs, {traced.record.source}"
    )
    refusals = traced.record.refusals
    notes = [note for note in traced.record.notes if note not in refusals]
    unseen = "registers, bank conflicts, the compiler's own reuse, real time"
    blocks = [
        _wrapped("", head),
        _wrapped("results", *_results(traced, note)),
        _wrapped("compile", *refusals),
        _bytes(traced),
        *[_wrapped(word, *_findings(traced, word)) for word in _KINDS],
        _wrapped("on chip", *_sram(traced)),
        _wrapped("time", _time(traced)),
        _wrapped("unseen", unseen),
        [line for text in notes for line in _wrapped("note", text)],
        [line for file in files for line in _wrapped("written", file)],
    ]
    return "\n".join(_fitting(blocks, most))


def _fitting(blocks: list[list[str]], most: int) -> list[str]:
    """Shorten the longest blocks of lines until all fit; note how many lines each block lost."""
    lost = [0] * len(blocks)
    # A block that was cut ends in one more line, which says so.
    while sum(len(b) + bool(x) for b, x in zip(blocks, lost, strict=True)) > most:
        longest = max(range(len(blocks)), key=lambda n: len(blocks[n]))
        blocks[longest].pop()
        lost[longest] += 1
    lines = []
    for block, cut in zip(blocks, lost, strict=True):
        lines += block
        if cut:
            lines.append(f"{'':9}... and {cut} more lines: --all shows them")
    return lines


def _wrapped(word: str, *texts: str) -> list[str]:
    """Wrap each text into lines, with `word` in the margin of the first line."""
    if not word:
        return [line for text in texts for line in textwrap.wrap(text, WIDTH)]
    lines: list[str] = []
    for text in texts:
        margin = f"{'' if lines else word:9}"
        lines += textwrap.wrap(
            text,
            WIDTH,
            initial_indent=margin,
            subsequent_indent=" " * 9,
            break_on_hyphens=False,
        )
    return lines


def _results(traced: KernelTrace, note: str) -> list[str]:
    if traced.verdict is None:
        return [f"not checked: {note}" if note else "not checked"]
    lines = str(traced.verdict).splitlines()
    outputs = [line for line in lines if " (error " in line]
    return ["; ".join(outputs), *(line for line in lines if line not in outputs)]


def _bytes(traced: KernelTrace) -> list[str]:
    expected = traced.expected
    needs = "needs" if expected is None else f"{expected.algorithm} needs"
    tiles = "" if expected is None else f", tiles {expected.tiles}"
    head = f"{'bytes':9}{'':13}{'yours':>14}{needs:>30}{'compulsory':>14}{tiles}"
    lines = [head[:WIDTH]]
    for row in traced.byte_rows:
        want = "-" if row.expected is None else f"{row.expected:,}"
        lines.append(
            f"{'':9}{row.op + ' ' + row.tensor:13}{row.nbytes:>14,}{want:>30}{row.compulsory:>14,}"
        )
        if row.why:
            lines += _wrapped(" ", row.why)
    return lines


def _findings(traced: KernelTrace, word: str) -> list[str]:
    found = [one.text for one in traced.findings if one.kind in _KINDS[word]]
    if word == "sectors":
        used = traced.sectors()
        share = f"{_distinct(traced) / used:.0%} are used"
        return [f"{used:,} B moved in sectors of {SECTOR} B; {share}", *found]
    found = found or [_CLEAN[word]]
    lines = tuple(sorted({one.line for one in traced.findings if one.kind == "masked lanes"}))
    if word == "bounds" and lines:
        a = traced.record.accesses
        masked, lanes = int(a["masked"].sum()), int((a["masked"] + a["active"]).sum())
        found.append(f"{masked / lanes:.0%} of all lanes are masked off, mostly in {said(lines)}")
    return found


def _distinct(traced: KernelTrace) -> int:
    a, tensors = traced.record.accesses, traced.record.tensors
    return sum(int(a["distinct"][a["tensor"] == t.code].sum()) * t.itemsize for t in tensors)


def _sram(traced: KernelTrace) -> list[str]:
    launch = max(traced.record.launches, key=lambda one: sum(n for _, n in one.held.values()))
    if not launch.held:
        return []
    sizes = sorted(launch.held.items(), key=lambda item: -item[1][1])
    parts = [f"{name} {' x '.join(map(str, shape))}" for name, (shape, _) in sizes[:6]]
    more = f" and {len(sizes) - 6} more" if len(sizes) > 6 else ""
    held, device = traced.trace.peak_sram(), traced.device
    return [
        f"at most about {held:,} B per program (estimated from its values: loaded tiles, "
        f"{', '.join(parts)}{more}), {held / device.sram_bytes:.0%} of the "
        f"{device.sram_bytes:,} B of a block on {device.name}"
    ]


def _time(traced: KernelTrace) -> str:
    try:
        roof = traced.roofline()
    except FlashSimError as error:
        return f"not predicted: {error}"
    device, dtype = traced.device, traced.problem.dtype
    bounds = {
        "products": roof["requested"].flops / device.peak(dtype),
        "HBM": roof["dram"].bytes / device.hbm_bandwidth,
    }
    if device.l2_bandwidth:
        bounds["L2"] = roof["requested"].bytes / device.l2_bandwidth
    slowest = max(bounds, key=lambda name: bounds[name])
    return (
        f"at least {bounds[slowest] * 1e6:,.2f} us on {device.name}, limited by {slowest}; the L2 "
        f"model predicts {roof['dram'].bytes:,} B of DRAM traffic"
    )
