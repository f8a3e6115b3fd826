"""`compare`: several algorithms on the same inputs, side by side in one table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flashsim import report
from flashsim.api import array_libraries, dispatch, inputs
from flashsim.api.execution import Gradients, Result, run
from flashsim.counts import questions
from flashsim.errors import OptionError, UnknownArgumentError, choices, own_errors, shown
from flashsim.problem import checks
from flashsim.schedule import plans
from flashsim.schedule.tiling import Tiling
from flashsim.trace.trace import Trace


@own_errors
@dataclass(frozen=True, eq=False)
class Comparison:
    """Several algorithms on the same inputs; prints as one table.

    Attributes
    ----------
    results : dict of Result, by algorithm
    gradients : dict of Gradients, by algorithm
        Empty unless `dout` was given.
    """

    results: dict[str, Result]
    gradients: dict[str, Gradients]

    @property
    def traces(self) -> list[Trace]:
        """All traces, forward before backward."""
        runs: list[Result | Gradients] = [*self.results.values(), *self.gradients.values()]
        return [r.trace for r in runs if r.traced]

    def table(self) -> report.Table:
        """One row per algorithm and direction."""
        traces = self.traces
        first = traces[0]
        table = report.Table(
            f"{questions.in_words(first.problem)} on {first.device.name}",
            (
                *("algorithm", "direction", "tile", "load B", "store B", "reduce B"),
                *("requested B", "compulsory B", "x compulsory", "FLOP/B", "peak SRAM B"),
                "max |diff|",
            ),
            note="max |diff|: largest difference of out (or of a gradient) from the first row's",
        )
        for trace in traces:
            table.rows.append(
                (
                    trace.algorithm,
                    trace.direction,
                    str(trace.tiling),
                    *(trace.bytes(op) for op in questions.OPS),
                    trace.bytes(),
                    trace.compulsory(),
                    round(trace.bytes() / trace.compulsory(), 2),
                    round(trace.intensity(), 2),
                    trace.peak_sram(),
                    self._difference(trace.algorithm, trace.direction),
                )
            )
        return table

    def _difference(self, algorithm: str, direction: str) -> float:
        if direction == "forward":
            pairs = [(self.results[algorithm].out, next(iter(self.results.values())).out)]
        else:
            g, f = self.gradients[algorithm], next(iter(self.gradients.values()))
            pairs = [(g.dq, f.dq), (g.dk, f.dk), (g.dv, f.dv)]
        found = []
        for mine, first in pairs:
            _, (a, b) = array_libraries.take_anywhere(mine=mine, first=first)
            apart = np.abs(a.astype(np.float64) - b.astype(np.float64))
            found.append(float(apart.max()))
        return max(found)

    __str__ = report.text
    __repr__ = report.titled
    _repr_html_ = report.tabled


@own_errors
def compare(
    q: Any,
    k: Any,
    v: Any,
    *,
    algorithms: Sequence[str] = ("standard", "flash1", "flash2"),
    dout: Any = None,
    backward_tiling: Tiling | None = None,
    **options: Any,
) -> Comparison:
    """Run several algorithms on the same inputs, with traces, and compare them in one table.

    Parameters
    ----------
    q, k, v : array
        As in `run`.
    algorithms : sequence of str
    dout : array, optional
        Gradient of the loss with respect to `out`; if given, the backward passes also run.
    backward_tiling : Tiling, optional
        The tiling of the backward passes (`tiling` is the forward's); default: the best that fits.
    **options
        Any other keyword of `run`. Decoding options such as `splits` go only to the algorithms
        that take them. The other algorithms get the same keys as plain arrays: not in pages, and
        with V separate from K.

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
            f"compare() takes algorithms=[...], a list, got algorithm={shown(options['algorithm'])}"
        )
    if not isinstance(algorithms, (list, tuple)) or not algorithms:
        raise OptionError(
            f"algorithms must be a non-empty list of names, got {shown(algorithms)}; "
            + choices(algorithms, plans.ALGORITHMS)
        )
    for name in algorithms:
        plans.check_algorithm(name)
    inputs.check_tiling(backward_tiling)
    if backward_tiling is not None and dout is None:
        raise OptionError("backward_tiling is of the backward pass: give dout as well")
    backend = dispatch.backend_name(options.get("backend", "simulator"))
    if not inputs.check_trace_mode(options.setdefault("trace", True), backend):
        raise OptionError("compare() shows what was traced, got trace=False")
    decoding = {name: options.pop(name) for name in inputs.DECODING if name in options}
    # Options of decoding go to those that divide the keys, or to all; these first, since they check
    # what they are given.
    some, whole = any(map(plans.splits_keys, algorithms)), None
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
        results, {name: r.backward(dout, tiling=backward_tiling) for name, r in results.items()}
    )


def _without_cache(k: Any, v: Any, decoding: dict[str, Any]) -> tuple[Any, Any]:
    """Return K and V of a cache as the plain arrays that algorithms without a cache take."""
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
            f"cache_seqlens has {len(lengths)} different lengths, which only flash-decode takes; "
            "compare it alone, or give one length"
        )
    for n in lengths:
        k, v = k[..., :n, :], v[..., :n, :]
    return k, v
