"""Four plots of bytes: by tensor, step by step, in SRAM, and the difference of two traces."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke

from flashsim import l2
from flashsim.counts.questions import OPS
from flashsim.counts.traffic import Traffic
from flashsim.errors import OptionError
from flashsim.problem import checks
from flashsim.schedule.names import CODES, COMPUTE
from flashsim.trace.steps import Steps
from flashsim.trace.trace import Trace
from flashsim.viz import style
from flashsim.viz.data import sources
from flashsim.viz.palette import Theme, tint

#: The most passes of a plot: more names overlap.
_MOST = 8


@style.themed
def traffic(data: Any, *, log: bool = False, dram: bool = False, ax: Axes, theme: Theme) -> None:
    """Draw requested HBM bytes by tensor and direction, algorithms side by side.

    Each bar shows one algorithm's reads or writes, stacked by tensor in the tensors' colours. A
    dashed line behind the bars marks the compulsory bytes: each input read once and each output
    written once. A tensor's name is written on its part of the bar if there is room, otherwise in
    the legend.

    Parameters
    ----------
    data : Trace, Traffic, Result, Gradients, Comparison, a list of them, or a dict by label
    log : bool
        Use a logarithmic axis, on which each bar shows only its total.
    dram : bool
        Also draw the bytes that DRAM reads and writes as a dotted line (`flashsim.l2.dram`).

    Raises
    ------
    OptionError
        If there are more than eight passes, whose names would overlap.
    """
    groups = sources.labelled(data)
    _few_enough(groups)
    ops = [op for op in OPS if any(s.bytes(op) for s in groups.values())]
    width = 0.8 / len(ops)
    every = [tensor for source in groups.values() for tensor in source.by_tensor()]
    middles: list[tuple[float, float, int, str]] = []
    totals: list[tuple[float, int, str]] = []
    for g, (label, source) in enumerate(groups.items()):
        for o, op in enumerate(ops):
            x = g + (o - (len(ops) - 1) / 2) * width
            total = source.bytes(op)
            if log and total:
                ax.bar(x, total, width * 0.92, color=theme.cycle[o], label=op if g == 0 else None)
            bottom = 0
            parts = source.by_tensor() if not log else {}
            for tensor in sorted(parts, key=_place):  # the same order in every bar
                by_op = parts[tensor]
                if by_op[op]:
                    ax.bar(
                        x, by_op[op], width * 0.92, bottom=bottom, linewidth=0.8,
                        gid=f"{label}/{op}/{tensor}", **style.tensor_style(tensor, theme, every),
                    )  # fmt: skip
                    name = tensor.removesuffix("_acc")
                    middles.append((x, bottom + by_op[op] / 2, by_op[op], name))
                    bottom += by_op[op]
            if total:
                totals.append((x, total, op))
    levels, alike, heights = _levels(ax, theme, list(groups.values()), dram)
    width = 40 if len(groups) < 4 else 17  # in characters, so that neighbours do not touch
    names = [
        "\n".join(
            wrap for part in label.split(", ") for wrap in textwrap.wrap(part, width) or [part]
        )
        for label in groups
    ]
    ax.set_xticks(
        range(len(groups)),
        ["\n".join([name, *words]) for name, words in zip(names, levels, strict=True)],
        fontsize=12.5 if len(groups) < 5 else min(9.5, 48 / len(groups)),
    )
    ax.tick_params(axis="x", length=0)
    ax.grid(axis="y")
    if log:
        ax.set_yscale("log")
    ax.use_sticky_edges = log  # otherwise a thin part at the top would remove the margin
    ax.margins(y=0.16)
    if not log:
        ax.set_ylim(bottom=0)
    ax.set(ylabel="requested HBM bytes")
    about = ", ".join([sources.common(groups.values()), *alike])
    style.heading(ax, theme, _message(groups), about)
    style.unit_axis(ax.yaxis)
    bars = len(groups) * len(ops)
    _name_totals(ax, theme, totals, heights, 11 if bars < 6 else 9.5 if bars < 9 else 7.6)
    small, unseen = _name_parts(ax, theme, middles, every)
    handles: list[Any] = [
        Patch(label=tensor, **style.tensor_style(tensor, theme, every))
        for tensor in sorted(small, key=_place, reverse=True)
    ]
    handles += [line for line in ax.lines if not str(line.get_label()).startswith("_")]
    if unseen:
        names_of = textwrap.fill(", ".join(sorted(unseen, key=_place)), 16)
        handles.append(Patch(alpha=0, label=f"too small to see:\n{names_of}"))
    if log:
        handles += ax.get_legend_handles_labels()[0][: len(ops)]
    style.beside_axes(ax, handles=handles)


def _few_enough(groups: Mapping[str, Any]) -> None:
    if len(groups) > _MOST:
        raise OptionError(
            f"this plot has room for at most {_MOST} passes, got {len(groups)}; draw several "
            "plots, or viz.io_curve, which has one line per algorithm"
        )


def _message(groups: Mapping[str, Trace | Traffic]) -> str:
    """Return the title: which of the drawn algorithms moves the fewest bytes."""
    moved = {_short(label, source): source.bytes() for label, source in groups.items()}
    if len(moved) < len(groups):  # labels that differ only after a comma
        moved = {label: source.bytes() for label, source in groups.items()}
    most, least = max(moved, key=lambda n: moved[n]), min(moved, key=lambda n: moved[n])
    if len(moved) == 1:
        return f"{most} move{'' if ', ' in most else 's'} {style.human(moved[most])}"
    fewer = moved[most] / moved[least]
    if fewer < 1.005:
        return f"All move {style.human(moved[most])}"
    return f"{least} moves {fewer:.{1 if fewer < 9.95 else 0}f}× fewer bytes than {most}"


def _short(label: str, source: Trace | Traffic) -> str:
    """Return a label without settings; the name of a trace of several kernels has commas."""
    name = sources.title(source.algorithm)
    return name if label.startswith(name) else label.split(",")[0]


def _place(tensor: str) -> tuple[int, str]:
    """Return the sort key of a tensor; tensors of a user's own algorithm come last."""
    return CODES.get(tensor, len(CODES)), tensor


def _levels(
    ax: Axes, theme: Theme, groups: list[Trace | Traffic], dram: bool
) -> tuple[list[list[str]], list[str], list[float]]:
    """Draw lines behind each group of bars: compulsory bytes and, if `dram`, DRAM bytes.

    The function returns three lists: the texts of each group, the texts that all groups share, and
    the heights of all lines.
    """
    levels = {"compulsory": [source.compulsory() for source in groups]}
    if dram:
        counted = (s if isinstance(s, Traffic) else s.predicted() for s in groups)
        levels["DRAM"] = [l2.dram(source).bytes() for source in counted]
    words: list[list[str]] = [[] for _ in groups]
    alike: list[str] = []
    for name, ls in zip(levels, ((0, (5, 2)), (0, (1, 1))), strict=False):
        values = levels[name]
        for g, value in enumerate(values):
            label = name if g == 0 else None
            ax.plot(
                [g - 0.46, g + 0.46], [value] * 2, color=theme.text, ls=ls, lw=1.8, label=label,
                zorder=0.9,
            )  # fmt: skip
        texts = [f"{name}\n{style.human(value)}" for value in values]
        if len(set(texts)) == 1:
            alike.append(texts[0].replace("\n", " "))
        else:
            for own, text in zip(words, texts, strict=True):
                own.append(text)
    return words, alike, [value for values in levels.values() for value in values]


def _name_totals(
    ax: Axes,
    theme: Theme,
    totals: list[tuple[float, int, str]],
    lines: Sequence[float],
    size: float,
) -> None:
    """Write each bar's total above the bar, or higher if a dashed line would cross the number."""
    inches = ax.figure.canvas.figure.get_size_inches() * ax.get_position().size
    wide, high = size / 72 / inches  # of the axes: a letter's width and height
    room = 2.9 * high * ax.get_ylim()[1]
    across = 0.62 * wide * (ax.get_xlim()[1] - ax.get_xlim()[0])
    before, there = -np.inf, 0.0
    for x, total, op in totals:
        base = float(total)
        if ax.get_yscale() == "linear":
            base = max([base, *(y for y in lines if total < y < total + room)])
            if x - before < across * len(style.human(total)) and abs(base - there) < room:
                base = there + room  # above the neighbouring bar's total
        before, there = x, base
        look: dict[str, Any] = {"ha": "center", "va": "bottom", "fontsize": size, "zorder": 4}
        text = style.note(ax, f"{op}\n{style.human(total)}", (x, base), (0, 3), **look)
        text.set_path_effects([withStroke(linewidth=3, foreground=theme.background)])


#: Least height of a part of a bar, relative to the axes: to be named on the bar, and to be visible.
_NAMED, _SEEN = 0.045, 0.008


def _name_parts(
    ax: Axes, theme: Theme, parts: list[tuple[float, float, int, str]], every: list[str]
) -> tuple[set[str], set[str]]:
    """Write tensor names on bar parts that are high enough, to be readable without colour.

    The function returns two sets of tensors: those with a visible but unnamed part, and those
    without a visible part.
    """
    low, high = ax.get_ylim()
    named = {tensor for *_, nbytes, tensor in parts if nbytes > _NAMED * (high - low)}
    seen = {tensor for *_, nbytes, tensor in parts if nbytes > _SEEN * (high - low)}
    for x, y, nbytes, tensor in parts:
        if nbytes > _NAMED * (high - low):
            shade = tint(tensor, theme.name, every)
            text = ax.text(
                x, y, tensor, ha="center", va="center", fontsize=11, fontweight="bold",
                color=style.ink_on(shade),
            )  # fmt: skip
            text.set_path_effects([withStroke(linewidth=3.5, foreground=shade)])  # over a hatch
    return seen - named, {tensor for *_, tensor in parts} - seen


@style.themed
def cumulative(
    data: Any, *, quantity: str = "bytes", log: bool = False, ax: Axes, theme: Theme
) -> None:
    """Draw the running total of one head's HBM bytes or FLOPs, step by step.

    If a stage's loops run for a group of heads, the totals are those of the group in all stages.

    Parameters
    ----------
    data : Trace, Result, Gradients, Comparison, a list of them, or a dict by label
    quantity : {"bytes", "flops"}
    log : bool
        Use a logarithmic step axis, for traces of very different lengths.

    Raises
    ------
    OptionError
        If there are more than eight passes, or the quantity is unknown.
    """
    checks.one_of("quantity", quantity, ("bytes", "flops"))
    groups = {label: sources.one_trace(source) for label, source in sources.labelled(data).items()}
    _few_enough(groups)
    positions = sources.places(trace.algorithm for trace in groups.values())
    unit, ends = "B" if quantity == "bytes" else "FLOP", []
    wide = max(stage.stride for trace in groups.values() for stage in trace.stages)
    for n, (label, trace) in zip(positions, groups.items(), strict=True):
        walk = Steps(trace)
        steps = np.arange(1, len(walk) + 1)
        total = walk.hbm_bytes.sum(axis=1) if quantity == "bytes" else walk.flops
        runs = wide / np.array([stage.stride for stage in trace.stages])
        total = np.cumsum(np.diff(total, prepend=0) * runs[walk.stage])
        look = style.series_style(theme, n)
        ax.plot(steps, total, label=label, **{**look, "marker": ""})
        ax.plot(steps[-1:], total[-1:], ms=9, zorder=3, **{**look, "ls": ""})
        ends.append((int(steps[-1]), int(total[-1]), label, look["color"]))
    ax.set_ylim(0, ax.dataLim.y1 * 1.15)
    if log:
        ax.set_xscale("log")
    ax.margins(x=0.02)
    last, most = max(end[0] for end in ends), max(end[1] for end in ends)
    many = len(ends) > 3  # names beside the marks would overlap
    wider = (1.1 if log else 1.02) if many else (8 if log else 1.35)  # room for the names
    ax.set_xlim(1 if log else 0, last * wider)
    what = "FLOPs" if quantity == "flops" else "requested HBM bytes"
    ax.set(xlabel="step (visit of a tile, or end of a row or column)", ylabel=f"{what} so far")
    least = min(ends, key=lambda end: end[1])
    title = f"{least[2]} ends at {style.human(least[1], unit)}"
    if most > least[1]:
        title += f", {max(ends, key=lambda end: end[1])[2]} at {style.human(most, unit)}"
    about = sources.common(groups.values())
    heads = {(sources.share_of_heads(wide, t), sources.about(t)[0]) for t in groups.values()}
    share, every = min(heads)
    about = about.replace(every, share, 1) if len(heads) == 1 else f"{wide} of the heads, {about}"
    style.heading(ax, theme, title, about)
    style.unit_axis(ax.yaxis, unit)
    ax.grid()
    names = [f"{label}: {style.human(y, unit)}" for _, y, label, _ in ends]
    if many:
        labels = [name.replace(", ", "\n", 1) for name in names]
        style.beside_axes(ax, handles=ax.lines[::2], labels=labels)
    else:
        marks = [(*end[:2], name, end[3]) for end, name in zip(ends, names, strict=True)]
        style.name_marks(ax, marks)


@style.themed
def sram_timeline(
    data: Any, *, stage: str | None = None, steps: tuple[int, int] = (0, 24), ax: Axes, theme: Theme
) -> None:
    """Draw the bytes that one thread block keeps on chip, event by event, stacked by buffer.

    The dashed line is the shared memory that one block can use. If tiles use only a small part of
    the shared memory, a number at the top replaces the dashed line. A GPU kernel may keep more
    bytes on chip than the dashed line shows, because a block also has registers.

    Parameters
    ----------
    data : Trace, Result or Gradients
    stage : str, optional
        Default: the stage with the most visits.
    steps : (int, int)
        First and last step shown. A step ends when a tile has been computed. The axis shows order,
        not time.
    """
    trace = sources.one_trace(data)
    part = trace.main_stage if stage is None else trace.stage(stage)
    names, held = trace.sram_timeline(part.name)
    ends = np.flatnonzero(part.events["op"] == COMPUTE)
    first, last = max(steps[0], 0), min(steps[1], len(ends))
    if not first < last:
        raise OptionError(
            f"steps= must be a range (first, last) within 0 to {len(ends)}, because stage "
            f"{part.name!r} has {len(ends)} steps, got {steps}"
        )
    where = np.interp(np.arange(len(held)), np.concatenate([[-1], ends]), np.arange(len(ends) + 1))
    # Buffers that live longest are at the bottom, so that they form a level base.
    lasting = np.argsort(-(held > 0).sum(axis=0), kind="stable")
    names, held = [names[n] for n in lasting], held[:, lasting]
    inside = (where >= first) & (where <= last)
    x, levels = where[inside], np.cumsum(held[inside], axis=1)
    base = np.zeros(len(x))
    for column, name in enumerate(names):
        top, look = levels[:, column], style.tensor_style(name, theme, trace.tensors)
        ax.fill_between(x, base, top, step="post", lw=0.3, label=name, **look)
        base = top
    peak, limit = int(levels.max()), trace.device.sram_bytes
    device = f"{trace.device.name}: {limit:,} B per block"
    ax.set_ylim(0, peak * 1.12)
    if limit < 3 * peak:
        ax.set_ylim(0, max(limit, peak) * 1.1)
        ax.axhline(limit, color=theme.text, ls=(0, (5, 3)), lw=1.6, zorder=3)
        above = peak > limit  # then the label lies on the buffers
        style.note(
            ax, f"{device}, without registers" if above else device, (last, limit), (-4, 4),
            ha="right", va="bottom", zorder=4,
            bbox={"facecolor": theme.background, "edgecolor": "none", "pad": 3} if above else None,
        )  # fmt: skip
    else:
        share = f"{peak / limit:.0%} of {device}"
        style.note(ax, share, (1, 1), (-4, -4), "axes fraction", ha="right", va="top")
    ax.set(xlabel="step (each computes a tile)", ylabel="bytes on chip", xlim=(first, last))
    title = f"SRAM of one block, stage {part.name}: peak {peak:,} B"
    style.heading(ax, theme, title, sources.common([trace], name=True))
    style.unit_axis(ax.yaxis)
    style.beside_axes(ax, title="buffer", reverse=True)


@style.themed
def diff(first: Any, second: Any = None, *, ax: Axes, theme: Theme) -> None:
    """Draw the difference in bytes between two traces, or between a trace and its prediction.

    Each bar is the requested bytes of `second` minus those of `first`, for one stage, direction and
    tensor.

    Parameters
    ----------
    first, second : Trace, Traffic, Result or Gradients
        Without `second`, `first` holds both: a Comparison, a list or a dict by label.

    Raises
    ------
    OptionError
        If there are not exactly two sources.
    """
    labels = list(sources.labelled(first if second is None else [first, second]).items())
    if len(labels) != 2:
        raise OptionError(f"diff takes two traces, got {len(labels)}: {', '.join(dict(labels))}")
    (first_label, a), (other, b) = labels
    stages = list(dict.fromkeys(stage for stage, _, _ in [*a.transfers, *b.transfers]))
    keys = sorted(
        {*a.transfers, *b.transfers},
        key=lambda key: (stages.index(key[0]), OPS.index(key[1]), _place(key[2])),
    )
    changes = {key: b.transfers.get(key, 0) - a.transfers.get(key, 0) for key in keys}
    shown = {key: change for key, change in changes.items() if change}
    size = min(12.5, 240 / max(len(shown), 1))  # as high as a bar on a slide
    every = [tensor for _, _, tensor in keys]
    for y, ((stage, op, tensor), change) in enumerate(shown.items()):
        look = style.tensor_style(tensor, theme, every)
        ax.barh(y, change, gid=f"{stage}/{op}/{tensor}", **look)
        sign, right, ha = ("+", 5, "left") if change > 0 else ("−", -5, "right")
        text = f"{sign}{style.human(abs(change))}"
        style.note(ax, text, (change, y), (right, 0), va="center", ha=ha, fontsize=size)
    names = [f"{stage}: {op} {tensor}" for stage, op, tensor in shown]
    ax.set_yticks(range(len(shown)), names, fontsize=size)
    ax.invert_yaxis()
    ax.axvline(0, color=theme.text, lw=1.2)
    ax.margins(x=0.2)
    ax.grid(axis="x")
    same = len(keys) - len(shown)
    equal = f"{same} transfers are equal; " if same else ""
    ax.set_xlabel("requested HBM bytes, difference")
    whole = f"{other} minus {first_label}"
    title = whole if len(whole) < 50 else f"{other}\nminus {first_label}"
    style.heading(ax, theme, title, equal + sources.common([a, b]))
    style.unit_axis(ax.xaxis)
    if not shown:
        ax.set_yticks([])
        ax.set_xlim(-1, 1)
        ax.text(0.5, 0.5, "equal, byte for byte", transform=ax.transAxes, ha="center", fontsize=20)
