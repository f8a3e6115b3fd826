"""`XRay`: a report on a program's attention kernels, with their bytes and inferred tiles."""

from __future__ import annotations

import html
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from flashsim import report
from flashsim.counts.questions import in_words
from flashsim.counts.traffic import compulsory
from flashsim.errors import own_errors
from flashsim.problem.hardware import Device
from flashsim.problem.problem import Problem
from flashsim.studies.xray.candidates import FORMS, SIDES, candidates
from flashsim.studies.xray.infer import Inference, infer, spilled
from flashsim.studies.xray.record import Profile, ProfiledLaunch, machine

#: Forms that have a tile.
TILED = ("forward", "split keys", "fused", "dkdv", "dq", "dkdv and dq")
_COLUMNS = (
    *("call", "times", "pass", "kernel", "form", "query tile", "key tile", "read B", "written B"),
    *("reduced B", "read / compulsory", "DRAM read B", "DRAM written B", "tensor FLOPs", "ms"),
    *("TFLOP/s", "of roof"),
)
_SHORT = (
    *("call", "times", "pass", "kernel", "form", "query tile", "key tile", "read B"),
    *("read / compulsory", "DRAM read B", "ms", "of roof"),
)


@dataclass(frozen=True)
class ProfiledKernel:
    """One kernel of one pass of an attention call.

    `found` has the form and the tiles that agree with the counters. The pass ran `times` times on
    the same shape, with the same kernels.
    """

    launch: ProfiledLaunch
    problem: Problem | None
    found: Inference
    times: int = 1

    @property
    def name(self) -> str:
        """The kernel's name, without namespaces, template arguments and parameters."""
        head = self.launch.kernel.removeprefix("void ").partition("<")[0].partition("(")[0]
        name = head.rpartition("::")[2] or self.launch.kernel
        return name if len(name) <= 40 else f"{name[:24]}...{name[-13:]}"

    def side(self, name: str) -> str:
        """Return the possible sizes of the query or key tile as a text, such as "64 or 128"."""
        if not self.found.fits or self.problem is None:
            return ""
        sides, extent = self.found.sides(name), _extent(self.problem, name)
        if len(sides) == 1:
            return str(sides[0]) if sides[0] < extent else "all"
        return "?" if _any(sides, extent) else " or ".join(map(str, sides))

    def sentences(self) -> Iterator[str]:
        """Yield sentences that say what the kernel's hardware counters show."""
        found, p = self.found, self.problem
        if p is None or found.form not in TILED:
            return
        if not found.fits:
            yield (
                f"No tile explains {self.launch.seen.read:,.0f} B read as "
                f"{FORMS[found.form]}, so the tile is unknown."
            )
            return
        read = self.launch.seen.read
        best = min(found.fits, key=lambda fit: spilled(fit, self.launch.seen))
        loose = read > 1.002 * best.read
        for name, what, apart in (
            ("block_q", "query tile", found.next_q),
            ("block_k", "key tile", found.next_k),
        ):
            sides, extent = found.sides(name), _extent(p, name)
            if len(sides) == 1 and sides[0] >= extent:
                yield f"The {what} covers all {extent}."
            elif len(sides) == 1:
                other = (
                    "" if apart is None or loose else f"; the next {what} differs by {apart:.2%}"
                )
                yield f"{what.capitalize()} {sides[0]}{other}."
            elif _any(sides, extent):
                yield f"The {what} cannot be inferred: {_advice(p, name)}"
            else:
                yield f"{what.capitalize()}: {', '.join(map(str, sides))} fit equally."
        if extra := spilled(best, self.launch.seen):
            more = (
                f", and reloads them: it reads {read - best.read:,.0f} B more than this tile needs"
            )
            yield (
                f"It stores {extra:,.0f} B beyond its results, so it spills registers"
                f"{more if read > best.read else ''}."
            )
        elif loose:
            yield (
                f"Its FLOPs are exactly this tile's. It reads {read / best.read - 1:.1%} more "
                "bytes, which clusters of thread blocks or spilled registers can cause."
            )
        if best.cluster > 1:
            yield f"Clusters of {best.cluster} thread blocks share a key tile."
        if best.dense:
            yield "It visits fully masked tiles."
        if best.packed:
            yield "The query heads of a key head share the rows of a tile."
        if found.splits > 1:
            yield f"The keys are split into {found.splits} parts."
        if found.by_grid:
            yield "The number of thread blocks excluded other tiles."


def _extent(p: Problem, name: str) -> int:
    return p.n_q if name == "block_q" else p.n_kv


def _any(sides: Sequence[int], extent: int) -> bool:
    """Return whether nearly every tile size fits: the counters then do not determine the size."""
    tried = [side for side in SIDES if side < extent] or [SIDES[0]]
    return len(sides) > 0.8 * len([side for side in tried if side <= 256])


def _advice(p: Problem, name: str) -> str:
    if p.causal or p.window is not None:
        return "measure lengths that are no multiples of the tile."
    if name == "block_k":
        return (
            "without a mask, the bytes of K and V are the same for every key tile. Measure a "
            "causal run with a length that is no multiple of the tile."
        )
    return "without a mask, the bytes of Q and dO are the same for every query tile."


@own_errors
class XRay(report.Tabled):
    """The attention kernels of a program, from hardware counters; prints as a table.

    The argument `record` is the result of `measure`, `measure_kernels` or `Profile.load`.
    """

    def __init__(self, record: Profile) -> None:
        self.record = record
        self.device: Device | None = machine(record)

    @cached_property
    def kernels(self) -> tuple[ProfiledKernel, ...]:
        """The program's attention kernels, in the order in which they first ran.

        If a pass ran several times on the same shape, its kernels occur once.
        """
        passes: dict[tuple[int, str], list[ProfiledLaunch]] = {}
        for launch in self.record.launches:
            passes.setdefault((launch.call, launch.direction), []).append(launch)
        seen: dict[Any, list[ProfiledKernel]] = {}
        for (call, direction), launches in passes.items():
            p = self.record.problem(call)
            about = self.record.calls[call]
            key = (p, about["api"], direction, tuple((x.kernel, x.blocks) for x in launches))
            if key in seen:
                seen[key] = [replace(one, times=one.times + 1) for one in seen[key]]
                continue
            found = [Inference("other")] * len(launches)
            if p is not None:
                found = infer(p, direction, [launch.seen for launch in launches])
            pairs = zip(launches, found, strict=True)
            seen[key] = [ProfiledKernel(launch, p, one) for launch, one in pairs]
        return tuple(kernel for those in seen.values() for kernel in those)

    def table(self) -> report.Table:
        """Return the main columns of `full_table`, for the kernels with matrix products."""
        full = self.full_table()
        at = [_COLUMNS.index(name) for name in _SHORT]
        form = _COLUMNS.index("form")
        known = {FORMS[name] for name in TILED}
        rows: list[Any] = [
            [row[n] for n in at]
            for row, kernel in zip(full.rows, self.kernels, strict=True)
            if row[form] in known or (kernel.launch.seen.tensor_flops or 0) > 0
        ]
        return report.Table(full.title, _SHORT, rows, "\n".join([full.note, *self.words()]))

    def words(self) -> list[str]:
        """Return sentences that say what the counters show about each kernel with tiles."""
        said = []
        for kernel in self.kernels:
            text = " ".join(kernel.sentences())
            if text:
                said.append(f"call {kernel.launch.call}, {kernel.name}: {text}")
        return list(dict.fromkeys(said))

    def full_table(self) -> report.Table:
        """Return a table with one row per kernel.

        - read B, written B, reduced B: the bytes between the SMs and L2, from hardware counters. L2
          counts a partly written sector of 32 bytes as a whole sector.
        - query tile, key tile: the inferred tile. The tile is "?" if the counters do not depend on
          it. Tiles that fit equally well are joined by "or".
        - compulsory: the bytes of all inputs and outputs of the pass, each counted once.
        - of roof: the shortest possible time divided by the measured time. The shortest possible
          time is what the DRAM bytes or the tensor FLOPs need at the device's peak.
        """
        table = report.Table(
            f"X-ray of {self.record.program} on {self.record.device}",
            _COLUMNS,
            note="read, written, reduced: bytes between the SMs and L2, from hardware counters. "
            "Tiles are inferred from them, not read from the kernel",
        )
        for kernel in self.kernels:
            launch, p = kernel.launch, kernel.problem
            c, seen = launch.counters, launch.seen
            seconds = c.get("seconds")
            least = None if p is None else compulsory(p, launch.direction)
            table.add(
                f"{launch.call}: {'unknown shape' if p is None else in_words(p)}",
                *(kernel.times, launch.direction, kernel.name, FORMS[kernel.found.form]),
                *(kernel.side("block_q"), kernel.side("block_k")),
                *(int(seen.read), int(seen.written), int(seen.reduced)),
                seen.read / least if least else None,
                *map(_whole, (c.get("DRAM read"), c.get("DRAM write"), seen.tensor_flops)),
                None if seconds is None else seconds * 1e3,
                seen.tensor_flops / seconds / 1e12 if seen.tensor_flops and seconds else None,
                self._of_roof(kernel),
            )
        return table

    def _of_roof(self, kernel: ProfiledKernel) -> float | None:
        c, p = kernel.launch.counters, kernel.problem
        flops, seconds = kernel.launch.seen.tensor_flops, c.get("seconds")
        if self.device is None or p is None or not seconds or "DRAM read" not in c:
            return None
        moved = c["DRAM read"] + c.get("DRAM write", 0.0)
        least = max(moved / self.device.hbm_bandwidth, (flops or 0) / self.device.peak(p.dtype))
        return least / seconds

    def candidates(self, kernel: ProfiledKernel) -> report.Table:
        """Return a table of the ten candidate tiles with bytes closest to the measured bytes."""
        seen, p = kernel.launch.seen, kernel.problem
        table = report.Table(
            f"{kernel.name}: {seen.read:,.0f} B read",
            ("query tile", "key tile", "read B", "reduced B", "measured / predicted", "fits"),
            note="the ten closest candidates, with ragged tiles at the ends of sequences",
        )
        if p is None or kernel.found.form not in TILED:
            return table
        fits = {(fit.block_q, fit.block_k) for fit in kernel.found.fits}
        tried = {
            (fit.block_q, fit.block_k, fit.read, fit.reduced): fit
            for fit in candidates(kernel.found.form, p, kernel.found.splits)
            if not (fit.boxes or fit.dense)
        }
        close = sorted(tried.values(), key=lambda fit: abs(seen.read / fit.read - 1))
        for fit in close[:10]:
            pair = fit.block_q, fit.block_k
            table.add(*pair, fit.read, fit.reduced, seen.read / fit.read, pair in fits)
        return table

    def rows(self) -> list[dict[str, report.Cell]]:
        """Return the rows of `full_table` as dicts, one per attention kernel."""
        return self.full_table().records()

    def plot(self, **options: Any) -> Any:
        """Plot the bytes read against the tile size, with each kernel's measurement.

        The options are passed to `flashsim.viz.tile_evidence`.
        """
        from flashsim import viz

        return viz.tile_evidence(self.evidence(), **options)

    def evidence(self) -> list[dict[str, Any]]:
        """Return the data of `flashsim.viz.tile_evidence`: each kernel's curve and measurement.

        The curve is over query tiles, or over key tiles if the kernel's outer loop runs over keys.
        """
        data = []
        for kernel in self.kernels:
            p, found = kernel.problem, kernel.found
            if p is None or found.form not in TILED or not found.fits:
                continue
            by_key, best = found.form in ("fused", "dkdv"), found.fits[0]
            side, other = ("block_k", "block_q") if by_key else ("block_q", "block_k")
            alike = [getattr(best, other), False, False, best.packed]
            curve = {
                getattr(fit, side): fit.read
                for fit in candidates(found.form, p, found.splits)
                if [getattr(fit, other), fit.boxes, fit.dense, fit.packed] == alike
            }
            data.append(
                {
                    "name": kernel.name,
                    "title": f"call {kernel.launch.call}, {kernel.launch.direction}",
                    "side": "keys in a tile" if by_key else "query rows in a tile",
                    "curve": sorted(curve.items()),
                    "measured": kernel.launch.seen.read,
                    "found": found.sides(side),
                }
            )
        return data

    def page(self, path: Path) -> None:
        """Write an HTML page without scripts, with the tables, the sentences and the plot."""
        table = self.full_table()
        title = html.escape(table.title)
        parts = [f"<h1>{title}</h1>", table.html()]
        parts += [f"<p>{html.escape(text)}</p>" for text in self.words()]
        if self.evidence():
            drawn = io.StringIO()
            self.plot().figure.savefig(drawn, format="svg", bbox_inches="tight")
            parts.append(drawn.getvalue()[drawn.getvalue().index("<svg") :])
        parts += [
            self.candidates(kernel).html() for kernel in self.kernels if kernel.found.form in TILED
        ]
        style = "body{font:16px/1.5 sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem}"
        text = (
            '<!doctype html><html lang="en"><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width">'
            f"<title>{title}</title><style>{style} "
            "div,table{overflow-x:auto;display:block}svg{max-width:100%;height:auto}</style>"
            + "\n".join(parts)
        )
        with report.beside(path) as part:
            part.write_text(text)


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
