"""Read the data that plots accept: traces, counts, results, comparisons, sweeps, or lists."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flashsim.counts import traffic
from flashsim.counts.traffic import Traffic
from flashsim.errors import DTypeError, OptionError, shown
from flashsim.schedule.dataflow import ALGORITHMS
from flashsim.trace.counted import COUNTED, counted
from flashsim.trace.trace import Trace
from flashsim.viz.data.statistics import RowStatistics

#: The most characters of a label or a title.
MOST_CHARACTERS = 200
#: Algorithms' names in pictures.
NAMES = {name: algorithm.title for name, algorithm in ALGORITHMS.items()}


#: The word for how a source was obtained, by its backend; other backends are named.
HOW = {"closed form": "counted", COUNTED: "counted", "simulator": "simulated"}


def title(algorithm: str) -> str:
    """Return an algorithm's name for pictures; a user's own algorithm has its function's name."""
    return NAMES.get(algorithm, algorithm)


def direction(trace: Trace) -> str:
    """Return "forward" or "backward", with the form of the backward pass if several exist."""
    known = ALGORITHMS.get(trace.algorithm)
    return known.direction(trace.direction) if known else trace.direction


def one_trace(data: Any) -> Trace:
    """Return the trace in `data`; for a `Traffic`, return the trace that a run would record.

    A result without a recorded trace, a count that cannot be listed event by event, or any other
    object raises a `FlashSimError`.
    """
    if isinstance(data, Traffic):
        return counted(data)
    trace = getattr(data, "trace", data)
    if not isinstance(trace, Trace):
        raise DTypeError(
            "expected a Trace, a Result or Gradients with a trace, or the Traffic that "
            f"flashsim.count returns, got {type(data).__name__}"
        )
    return trace


def made_by(how: str, data: Any, has: str) -> Any:
    """Return `data` unchanged; raise an error unless the function named `how` returned `data`.

    The attribute `has` identifies the result, because this module may not import the result's
    class.
    """
    if not hasattr(data, has):
        raise DTypeError(f"the data to draw must be the result of {how}, got {shown(data)}")
    return data


def all_made_by(how: str, data: Any, has: str) -> list[Any]:
    """Return `data` as a list of results of the function `how`; raise for anything else."""
    results = list(data) if isinstance(data, (list, tuple)) else [data]
    if not results:
        raise OptionError(f"nothing to draw: pass one or more results of {how}, got none")
    return [made_by(how, one, has) for one in results]


def labelled(data: Any) -> dict[str, Trace | Traffic]:
    """Return a dict of traces and counts by label.

    `data` is a Trace, Traffic, Result, Gradients or Comparison, or a list or dict of them. If
    `data` is a dict, its keys are the labels. Without a dict, a label states the settings in which
    a trace or count differs from the others.
    """
    if isinstance(data, Mapping):
        labels = {writable("label", label): _one(source) for label, source in data.items()}
    else:
        sources = _flatten(data)
        labels = dict(zip(_labels(sources), sources, strict=True)) if sources else {}
    if not labels:
        raise OptionError("nothing to plot: the argument contains no trace; pass at least one")
    return labels


def writable(what: str, text: Any) -> str:
    """Return a label or title as a string, after checking that it can be written to a file.

    A text with more than `MOST_CHARACTERS` characters raises an `OptionError`. A text with half of
    a surrogate pair raises an `OptionError` too, because no encoding can represent it.
    """
    text = str(text)
    if len(text) > MOST_CHARACTERS:
        raise OptionError(
            f"the {what} {shown(text)} has {len(text):,} characters, which is too long; use at "
            f"most {MOST_CHARACTERS}"
        )
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise OptionError(
            f"the {what} {text!r} contains half of a character (a lone surrogate), which cannot be "
            "written to a file; remove it"
        )
    return text


def panes(
    what: str, data: Any, statistics: RowStatistics | Mapping[str, RowStatistics] | None
) -> dict[str, tuple[Trace, RowStatistics | None]]:
    """Return a dict from label to (trace, statistics of m and l) for one or two traces.

    Statistics without a label belong to the first trace. For a trace without statistics, the second
    value is None.
    """
    chosen = labelled(data)
    if len(chosen) > 2:
        raise OptionError(
            f"{what} shows at most two traces, got {len(chosen)}: {', '.join(chosen)}; pass one "
            "or two"
        )
    if isinstance(statistics, RowStatistics):
        statistics = dict.fromkeys(list(chosen)[:1], statistics)
    rows = statistics or {}
    return {label: (one_trace(source), rows.get(label)) for label, source in chosen.items()}


def _flatten(data: Any, around: tuple[int, ...] = ()) -> list[Trace | Traffic]:
    if id(data) in around:
        raise OptionError("a list that contains itself cannot be plotted; pass a list of traces")
    if hasattr(data, "rows"):
        raise DTypeError(
            "a Sweep has only totals, not the bytes of each tensor or step; draw a Sweep with "
            "viz.io_curve, viz.roofline or viz.memory_footprint"
        )
    if isinstance(data, (Trace, Traffic)) or hasattr(data, "trace"):
        return [_one(data)]
    if hasattr(data, "traces"):
        return list(data.traces)
    if isinstance(data, Iterable) and not isinstance(data, (str, bytes)):
        return [source for item in data for source in _flatten(item, (*around, id(data)))]
    raise DTypeError(
        "expected a Trace, Traffic, Result, Gradients, Comparison or a list or dict of them, "
        f"got {type(data).__name__}"
    )


def _one(source: Any) -> Trace | Traffic:
    return source if isinstance(source, Traffic) else one_trace(source)


def _labels(sources: list[Trace | Traffic]) -> list[str]:
    """Return a label for each source: the algorithm, and settings in which sources differ."""
    facts = [
        {
            "algorithm": title(s.algorithm),
            "direction": s.direction,
            "heads": heads(s.problem.batch * s.problem.heads, s.problem.batch * s.problem.kv_heads),
            "n": f"N = {s.problem.n_q:,}",
            "d": f"d = {s.problem.head_dim}",
            "dtype": s.problem.dtype,
            "causal": "causal" if s.problem.causal else "not causal",
            "window": window(s.problem.window) if s.problem.window else "no window",
            "tiling": str(s.tiling),
            "device": s.device.name,
            "backend": s.backend,
        }
        for s in sources
    ]
    differing = [
        key for key in facts[0] if key == "algorithm" or len({fact[key] for fact in facts}) > 1
    ]
    labels = [", ".join(fact[key] for key in differing) for fact in facts]
    seen: dict[str, int] = {}
    for n, label in enumerate(labels):
        seen[label] = seen.get(label, 0) + 1
        if seen[label] > 1:
            labels[n] = f"{label} ({seen[label]})"
    return labels


def places(algorithms: Iterable[str]) -> list[int]:
    """Return the style number of each series of a plot (colour, line dash and marker).

    An algorithm has the same number in every figure. If two series have the same algorithm, all
    series are numbered in order.
    """
    names = list(algorithms)
    order = [*NAMES, *dict.fromkeys(name for name in names if name not in NAMES)]
    return (
        [order.index(a) for a in names] if len(set(names)) == len(names) else [*range(len(names))]
    )


def about(source: Trace | Traffic) -> list[str]:
    """Return phrases that describe a trace or count: heads, sizes, type, mask, tiling, backend."""
    p = source.problem
    packed = p.cu_seqlens_q is not None
    # If the heads of a user's kernel differ, its trace's problem has them all in one group.
    own = getattr(source, "provenance", {}).get("heads")
    return [
        own or heads(p.batch * p.heads, p.batch * p.kv_heads),
        f"{p.n_q:,} × {p.n_kv:,}",
        f"d\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}{p.head_dim}",
        p.dtype,
        *(["causal"] if p.causal else []),
        *([window(p.window)] if p.window else []),
        *(["packed sequences"] if packed else []),
        *([f"{p.shared_prefix:,} keys shared"] if p.shared_prefix else []),
        *([f"pages of {p.page_size}"] if p.page_size else []),
        *(["with a bias"] if p.bias else []),
        *(["block-sparse"] if p.block_mask else []),
        *(["own mask"] if p.mask else []),
        f"tiles of {source.tiling}".replace(" x ", " × "),
        HOW.get(source.backend, source.backend),
    ]


def heads(queries: int, keys: int) -> str:
    """Describe heads in words: "16 / 4 heads" for 16 query heads that share 4 KV heads."""
    if queries != keys:
        return f"{queries} / {keys} heads"
    return f"{queries} heads" if queries > 1 else "1 head"


def about_shown(trace: Trace) -> list[str]:
    """Return the phrases of `about`; the first says how many of the heads a trace's steps show.

    A stage's loops run for one head, or for all heads of a group, one after the other or packed.
    """
    words, wide = about(trace), {stage.name: stage.stride for stage in trace.stages}
    least = min(wide.values())
    words[0] = share_of_heads(least, trace)
    words[0] += "".join(f", {n} in stage {name}" for name, n in wide.items() if n > least)
    return words


def share_of_heads(shown: int, trace: Trace) -> str:
    """Return a phrase such as "one of 16 / 4 heads", "4 of 16 / 4 heads" or "all 2 heads"."""
    total, words = trace.problem.batch * trace.problem.heads, about(trace)[0]
    if total == 1:
        return words
    return f"all {words}" if shown == total else f"{'one' if shown == 1 else shown} of {words}"


def window(sides: tuple[int, int]) -> str:
    """Describe a sliding window in words, such as "window 128:0"."""
    return f"window {sides[0]}:{sides[1]}"


def common(sources: Iterable[Trace | Traffic], *, name: bool = False) -> str:
    """Return the phrases of `about` that all sources share; `name` puts the algorithm first."""
    all_of_them = list(sources)
    words = [about(source) for source in all_of_them]
    alike = [word for word in words[0] if all(word in other for other in words)]
    if name:
        alike.insert(0, title(all_of_them[0].algorithm) + " " + all_of_them[0].direction)
    return ", ".join(alike)


def rows(data: Any) -> list[dict[str, Any]]:
    """Return one dict per point of a plot; the keys are the columns of `flashsim.sweep`.

    `data` is a Sweep, a DataFrame, a list of dicts, or any input of `labelled`.
    """
    data_rows = getattr(data, "rows", None)
    if hasattr(data, "to_dict") and hasattr(data, "columns"):
        data_rows = data.to_dict("records")
    elif isinstance(data, (list, tuple)) and data and all(isinstance(r, Mapping) for r in data):
        data_rows = data
    if data_rows is None:
        return [_row(source) for source in labelled(data).values()]
    kept = [dict(row) for row in data_rows if row.get("status", "ok") == "ok"]
    for row in kept:  # pandas reads a missing window from a file as NaN
        row["window"] = row["window"] if isinstance(row.get("window"), str) else None
    if not kept:
        raise OptionError(
            "nothing to plot: every point of this sweep failed; see the errors in the column "
            "'status'"
        )
    return kept


def fixed(rows: Sequence[dict[str, Any]], x: str) -> str:
    """Describe in words the settings that all points of a plot with x axis `x` share."""
    words = {
        "batch": "batch {}", "heads": "{}", "n_q": "N = {:,}", "head_dim": "d = {}",
        "dtype": "{}", "causal": "causal", "window": "window {}", "direction": "{}", "device": "{}",
    }  # fmt: skip
    if x.startswith("block"):
        other = {"block_q": "block_k", "block_k": "block_q"}[x]
        words[other] = f"{other} = {{}}"
    # Values that are not mentioned.
    usual = {"batch": 1, "heads": "1 head", "causal": False, "window": None, "direction": "forward"}
    distinct = {key: {row[key] for row in rows} for key in words if key in rows[0] and key != x}
    distinct["heads"] = {heads(row["heads"], row["kv_heads"]) for row in rows}
    return ", ".join(
        words[key].format(value.replace(",", ":") if key == "window" else value)
        for key, values in distinct.items()
        if len(values) == 1
        for value in values
        if value != usual.get(key)
    )


def _row(s: Trace | Traffic) -> dict[str, Any]:
    p, own = s.problem, getattr(s, "own", None)
    shape = ("n_q", "n_kv", "head_dim", "head_dim_v", "batch", "heads", "kv_heads")
    once = traffic.once(p, s.algorithm, s.direction) if own is None else own.compulsory
    return {
        **{name: getattr(s, name) for name in ("algorithm", "direction")},
        **{name: getattr(p, name) for name in (*shape, "dtype", "causal")},
        "window": p.window and f"{p.window[0]},{p.window[1]}",
        **{"device": s.device.name, "sram_bytes": s.device.sram_bytes},
        **{"block_q": s.tiling.block_q, "block_k": s.tiling.block_k},
        **traffic.figures(s),
        "once_bytes": once,
    }
