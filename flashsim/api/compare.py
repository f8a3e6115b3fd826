"""`compare`: several algorithms on the same inputs, side by side in one table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from flashsim import report
from flashsim.api import array_libraries, dispatch, inputs
from flashsim.api.decode_options import with_fields
from flashsim.api.execution import Gradients, Result, run
from flashsim.counts import questions
from flashsim.errors import (
    FlashSimError,
    OptionError,
    UnknownArgumentError,
    choices,
    own_errors,
    shown,
)
from flashsim.problem import checks
from flashsim.problem.problem import Problem
from flashsim.schedule import plans
from flashsim.schedule.tiling import Tiling
from flashsim.trace.trace import Trace


@own_errors
@dataclass(frozen=True, eq=False, repr=False)
class Comparison(report.Tabled):
    """Results of several algorithms on the same inputs; printing them shows one table.

    Attributes
    ----------
    results : dict of Result, by algorithm
    gradients : dict of Gradients, by algorithm
        Empty unless `dout` was passed.
    """

    results: dict[str, Result]
    gradients: dict[str, Gradients]

    @property
    def traces(self) -> list[Trace]:
        """Return all recorded traces, first of the forward passes, then of the backward passes."""
        runs: list[Result | Gradients] = [*self.results.values(), *self.gradients.values()]
        return [r.trace for r in runs if r.traced]

    def table(self) -> report.Table:
        """Return a table with one row per algorithm and direction."""
        traces = self.traces
        table = side_by_side(traces)
        table.columns = (*table.columns, "max |diff|")
        table.rows = [
            (*row, self._difference(trace.algorithm, trace.direction))
            for row, trace in zip(table.rows, traces, strict=True)
        ]
        difference = "max |diff|: largest difference of out (or of a gradient) from the first row's"
        table.note = f"{difference} · {table.note}"
        return table

    def _difference(self, algorithm: str, direction: str) -> float:
        if direction == "forward":
            pairs = [(self.results[algorithm].out, next(iter(self.results.values())).out)]
        else:
            g, f = self.gradients[algorithm], next(iter(self.gradients.values()))
            pairs = [(g.dq, f.dq), (g.dk, f.dk), (g.dv, f.dv)]
        differences = []
        for mine, first in pairs:
            _, (a, b) = array_libraries.take_anywhere(mine=mine, first=first)
            apart = np.abs(a.astype(np.float64) - b.astype(np.float64))
            differences.append(float(apart.max()))
        return max(differences)


def side_by_side(sources: Sequence[questions.Answers]) -> report.Table:
    """Return a table with one row per trace or count: its bytes, intensity and peak SRAM."""
    first = sources[0]
    tiles = dict.fromkeys(str(source.tiling) for source in sources)
    table = report.Table(
        f"{questions.in_words(first.problem)} on {first.device.name}",
        (
            *("algorithm", "direction", "tile", "load B", "store B", "reduce B"),
            *("requested B", "compulsory B", "x compulsory", "FLOP/B", "peak SRAM B"),
        ),
        note=(
            f"tiles of {first.tiling} in every row"
            if len(tiles) == 1
            else f"tiles differ: {', '.join(tiles)}"
        ),
    )
    for source in sources:
        table.add(
            source.algorithm,
            source.direction,
            str(source.tiling),
            *(source.bytes(op) for op in questions.OPS),
            source.bytes(),
            source.compulsory(),
            round(source.bytes() / source.compulsory(), 2),
            round(source.intensity(), 2),
            source.peak_sram(),
        )
    return table


@own_errors
def compare(
    q: Any,
    k: Any,
    v: Any,
    *,
    algorithms: Sequence[str] = ("standard", "flash1", "flash2"),
    dout: Any = None,
    tiling: Tiling | Literal["fit"] | None = None,
    backward_tiling: Tiling | Literal["fit"] | None = None,
    **options: Any,
) -> Comparison:
    """Run several algorithms on the same inputs, with traces, and compare them in one table.

    Unless `tiling` is "fit", all algorithms get the same tiling, so that only the algorithm
    differs.

    Parameters
    ----------
    q, k, v : array
        As in `run`.
    algorithms : sequence of str
    dout : array, optional
        Gradient of the loss with respect to `out`; with it, the backward passes also run.
    tiling, backward_tiling : Tiling or "fit", optional
        The tiling of the forward passes, and of the backward passes. "fit": for each algorithm, the
        tiling of `Tiling.fit`. Default: on the CPU `Tiling.common`, one for
        all algorithms and both directions; "fit" on a GPU, with options of decoding, `scales` or a
        block mask.
    **options
        Any other keyword of `run`. `decode`, and decoding options such as `splits`, go only to the
        algorithms that take them. The other algorithms get the same keys as plain arrays: not in
        pages, and with V separate from K.

    Raises
    ------
    OptionError
        If no algorithm is named, tracing is turned off, or `cache_seqlens` differ and one of the
        algorithms has no cache; otherwise as `run`.
    UnknownArgumentError
        For ``algorithm=``.
    """
    if "algorithm" in options:
        raise UnknownArgumentError(
            "compare() takes a list of algorithms, algorithms=[...], got "
            f"algorithm={shown(options['algorithm'])}"
        )
    if not isinstance(algorithms, (list, tuple)) or not algorithms:
        raise OptionError(
            f"algorithms must be a non-empty list of names, got {shown(algorithms)}; "
            f"choose from {choices(algorithms, plans.ALGORITHMS)}"
        )
    for name in algorithms:
        plans.check_algorithm(name)
    if backward_tiling is not None and dout is None:
        raise OptionError(
            "backward_tiling= is for the backward pass, which needs dout=; pass dout=, or leave "
            "out backward_tiling="
        )
    backend = dispatch.backend_name(options.get("backend", "simulator"))
    if not inputs.check_trace_mode(options.setdefault("trace", True), backend):
        raise OptionError(
            "compare() always records traces, because it compares them; leave out trace=False"
        )
    options = {**with_fields(options, options.pop("decode", None), algorithms)}
    decoding = {name: options.pop(name) for name in inputs.DECODING if name in options}
    # Options of decoding go to the algorithms that split the keys, or to all if none does. Those
    # run first, since they check the options.
    some, whole = any(map(plans.splits_keys, algorithms)), None
    if None in (tiling, backward_tiling) and _plain(backend, {**decoding, **options}):
        directions = ("forward",) if dout is None else ("forward", "backward")
        common = _common(q, k, v, algorithms, directions, options.get("device", "H100"))
        tiling, backward_tiling = tiling or common, backward_tiling or common
    for tile in (tiling, backward_tiling):
        if tile != "fit":
            inputs.check_tiling(tile)
    options["tiling"] = None if tiling == "fit" else tiling
    backward_tile = None if backward_tiling == "fit" else backward_tiling
    results: dict[str, Any] = dict.fromkeys(algorithms)  # in this order
    for name in sorted(results, key=lambda name: not plans.splits_keys(name)):
        if some and not plans.splits_keys(name):
            whole = whole or _without_cache(k, v, decoding)
            results[name] = run(q, *whole, algorithm=name, **options)
        else:
            results[name] = run(q, k, v, algorithm=name, **options, **decoding)
    if dout is None:
        return Comparison(results, {})
    return Comparison(
        results, {name: r.backward(dout, tiling=backward_tile) for name, r in results.items()}
    )


def _plain(backend: str, options: Mapping[str, Any]) -> bool:
    """Return whether the possible tile sizes depend only on the sizes of the problem."""
    deciding = (*inputs.DECODING, "scales", "block_mask")
    return backend in dispatch.ON_CPU and all(options.get(name) is None for name in deciding)


def _common(
    q: Any, k: Any, v: Any, algorithms: Sequence[str], directions: Sequence[str], device: Any
) -> Tiling | None:
    """Return a tiling that fits all algorithms, or None if `run` will refuse the arrays."""
    try:
        sides = (q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1])
        n_q, n_kv, head_dim, head_dim_v = map(int, sides)
        dtype = str(q.dtype).rpartition(".")[2]
        problem = Problem(n_q, n_kv, head_dim, head_dim_v, dtype=dtype)
        return Tiling.common(problem, device, algorithms, directions)
    except (FlashSimError, AttributeError, IndexError, TypeError, ValueError):
        return None  # `run` raises the error


def _without_cache(k: Any, v: Any, decoding: dict[str, Any]) -> tuple[Any, Any]:
    """Return a KV cache's K and V as plain arrays, for algorithms that do not support a cache."""
    if v is None:
        v = k[..., : decoding["head_dim_v"]]
    if (table := decoding.get("block_table")) is not None:
        host, (k, v) = array_libraries.take_anywhere(k=k, v=v)
        pages = checks.as_array("block_table", table)
        pools = (x[pages].swapaxes(1, 2) for x in (k, v))
        k, v = (host.give(x.reshape(*x.shape[:2], -1, x.shape[-1])) for x in pools)
    lengths = {int(n) for n in decoding.get("cache_seqlens", ())}
    if len(lengths) > 1:
        raise OptionError(
            f"cache_seqlens has {len(lengths)} different lengths, which only algorithm "
            "'flash-decode' supports; pass algorithms=['flash-decode'], or make all lengths "
            "equal"
        )
    for n in lengths:
        k, v = k[..., :n, :], v[..., :n, :]
    return k, v
