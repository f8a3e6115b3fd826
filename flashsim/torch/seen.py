"""`Seen`: a model's attention calls, and their bytes with standard and flash attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any, overload

from flashsim import report
from flashsim.api.counting import count
from flashsim.counts import traffic
from flashsim.counts.questions import in_words
from flashsim.counts.traffic import Traffic
from flashsim.errors import FlashSimError, OptionError, choices
from flashsim.l2 import dram
from flashsim.problem.hardware import Device
from flashsim.problem.problem import Problem
from flashsim.schedule import plans
from flashsim.schedule.tensors import whole_bytes
from flashsim.studies.predict import predict
from flashsim.studies.roofline import Point
from flashsim.torch.calls import AttentionCall

ALGORITHMS = ("standard", "flash2")

#: The text if no call was seen.
NOTHING = (
    "nothing was seen: attention written out by hand, in another thread or process, or before or "
    "after the watch, is not"
)

#: The largest number of tiles, over all heads, that the L2 model replays for a table: 1 or 2 s.
REPLAYED = 2**20

_COLUMNS = (
    *("module", "calls", "api", "shape", "mask", "on", "pass", "algorithm"),
    *("requested B", "DRAM B", "compulsory B", "FLOPs", "matmul FLOP/B", "bound", "ms", "ms by"),
    *("measured ms", "measured on", "saved B", "scores B", "note"),
)
_SHORT = (
    *("module", "calls", "shape", "mask", "pass", "algorithm", "requested B", "DRAM B"),
    *("compulsory B", "matmul FLOP/B", "bound", "ms", "measured ms", "saved B", "scores B"),
)
_SUMMED = ("requested B", "compulsory B", "FLOPs", "saved B", "DRAM B", "ms", "measured ms")


class Seen:
    """The attention calls of a model, in the order of the calls.

    A `Seen` supports ``len``, iteration, ``seen[0]``, and look-up by module:
    ``seen["layers.3.self_attn"]``. The end of a module's name suffices if only one name ends so.

    Attributes
    ----------
    calls : list of AttentionCall
    missed : list of str
        Calls whose arguments could not be read, each with the reason.
    """

    def __init__(self, model: str) -> None:
        self.model = model
        self.calls: list[AttentionCall] = []
        self.missed: list[str] = []

    def __len__(self) -> int:
        return len(self.calls)

    def __iter__(self) -> Iterator[AttentionCall]:
        return iter(self.calls)

    @overload
    def __getitem__(self, which: int | str) -> AttentionCall: ...
    @overload
    def __getitem__(self, which: slice) -> list[AttentionCall]: ...
    def __getitem__(self, which: int | str | slice) -> AttentionCall | list[AttentionCall]:
        if not isinstance(which, str):
            return self.calls[which]
        call, *others = self.named(which)
        if others:
            raise OptionError(
                f"{which!r} made {1 + len(others)} calls, but exactly one call is needed; choose "
                f"one from the list seen.named({which!r}), such as seen.named({which!r})[0]"
            )
        return call

    def named(self, name: str) -> list[AttentionCall]:
        """Return the recorded attention calls that a module made.

        OptionError is raised if no module of that name made a call, or if the names of several
        modules end in `name`.
        """
        names = list(dict.fromkeys(call.name for call in self.calls))
        ends = [known for known in names if known == name or known.endswith(f".{name}")]
        if name in ends:
            ends = [name]
        if len(ends) > 1:
            raise OptionError(
                f"{len(ends)} modules have names that end in {name!r}; pass a full name, such as "
                f"{', '.join(ends[:4])}"
            )
        if not ends:
            where = f"choose from {choices(name, names)}" if names else NOTHING
            raise OptionError(f"no attention call was seen in {name!r}; {where}")
        return [call for call in self.calls if call.name == ends[0]]

    # -- counted ----------------------------------------------------------------------------------

    def table(self, *, device: str | Device = "H100", l2: bool | None = None) -> report.Table:
        """Return the most important columns of `full_table`."""
        full = self.full_table(device=device, l2=l2)
        measured = any(call.measured for call in self)
        short = [name for name in _SHORT if measured or name != "measured ms"]
        at = [_COLUMNS.index(name) for name in short]
        rows: list[Any] = [[row[n] for n in at] for row in full.rows]
        notes = dict.fromkeys(f"{r['module']}: {r['note']}" for r in full.records() if r["note"])
        missed = [f"not read, {one}" for one in self.missed]
        note = full.note if self.calls or self.missed else NOTHING
        return report.Table(full.title, tuple(short), rows, "\n".join([note, *notes, *missed]))

    def full_table(self, *, device: str | Device = "H100", l2: bool | None = None) -> report.Table:
        """Return a table with one row and a count per distinct call, and rows for the total.

        Each row has the figures of a single call. The rows called "total" sum all calls; a cell is
        empty if any call's figure is unknown. A backward pass that did not run has no row.

        - requested B: bytes of tiles moved between L2 and the SMs. DRAM B: bytes that miss L2, by a
          model of the cache. compulsory B: each input and output counted once.
        - matmul FLOP/B, bound: matrix FLOPs per DRAM byte, and the limit of the time. Without DRAM
          bytes, FLOPs are divided by the bytes of each kernel's tensors, counted once.
        - ms, by: the time and the time's source; "predict" is `flashsim.predict`, for
          FlashAttention-2's kernels. The source "roofline" is a lower bound from the device's
          bandwidth and arithmetic.
        - measured ms, on: with ``watch(..., measure=True)``, the mean time of the model's own
          kernels on this machine, the same for all algorithms. On a CPU, this is the time of
          torch's operators, which flashsim does not predict.
        - saved B: bytes kept for the backward pass, inputs included; the total sums all layers.
        - scores B: the bytes of all score matrices that standard attention keeps in HBM at the same
          time; in the row "total", the largest of these values.

        Parameters
        ----------
        device : str or Device
        l2 : bool, optional
            Run the L2 model for every call, or for none. Default: for calls of at most `REPLAYED`
            tiles.
        """
        device = Device.get(device)
        table = report.Table(
            f"{self._counted()} of {self.model} on {device.name}",
            _COLUMNS,
            note="figures of one call; total: of all, scores B the largest. DRAM B is empty where "
            "the L2 model was not run (l2=True runs it). ms: predicted for flash2 where its "
            "kernels run, else a roofline, which is a lower bound" + self._measured_on(),
        )
        records: list[dict[str, Any]] = []
        for calls in self.distinct():
            records += _rows(calls, device, l2)
        records += _totals(records)
        table.rows += [[record.get(name) for name in _COLUMNS] for record in records]
        return table

    def _measured_on(self) -> str:
        places = sorted({_place(call) for call in self if call.measured})
        return f"; measured ms: what was run here ({', '.join(places)})" if places else ""

    def distinct(self) -> list[list[AttentionCall]]:
        """Return groups of calls; a group's calls have the same function, sizes and options."""
        groups: dict[Any, list[AttentionCall]] = {}
        for call in self.calls:
            same = (call.api, call.sizes, call.dtype, call.device, call.pattern, call.note)
            key = (*same, call.scale, call.softcap, call.backward)
            groups.setdefault(key, []).append(call)
        return list(groups.values())

    def kernels(self) -> report.Table:
        """Return the kernels (on a CPU the operators) of each distinct call, slowest first.

        OptionError is raised if nothing was measured.
        """
        table = report.Table(
            f"kernels of {self._counted()} of {self.model}, as measured",
            ("module", "calls", "pass", "on", "kernel", "ms"),
            note="ms: of one call, the mean",
        )
        for calls in self.distinct():
            for direction in ("forward", "backward"):
                found = [call.measured[direction] for call in calls if direction in call.measured]
                mean = {
                    name: sum(times.get(name, 0) for times in found) / len(found)
                    for name in dict.fromkeys(name for times in found for name in times)
                }
                about = together([call.name for call in calls]), len(calls), direction
                table.rows += [
                    (*about, calls[0].device, name, 1e3 * mean[name])
                    for name in sorted(mean, key=mean.__getitem__, reverse=True)
                ]
        if not table.rows:
            raise OptionError(
                "no times were measured; record the calls by watch(model, measure=True)"
            )
        return table

    def rows(self, **options: Any) -> list[dict[str, report.Cell]]:
        """Return the rows of `full_table(**options)` as a list of dicts."""
        return self.full_table(**options).records()

    def csv(self, **options: Any) -> str:
        """Return `full_table` as CSV."""
        return self.full_table(**options).csv()

    def json(self, **options: Any) -> str:
        """Return `full_table` as JSON."""
        return self.full_table(**options).json()

    def to_pandas(self, **options: Any) -> Any:
        """Return `full_table` as a pandas DataFrame; raise BackendUnavailable without pandas."""
        return report.dataframe(self.rows(**options), [*_COLUMNS])

    def plot(self, *, device: str | Device = "H100", **options: Any) -> Any:
        """Plot the requested forward bytes of each distinct call, for standard and flash attention.

        `options` are those of `flashsim.viz.traffic`. OptionError is raised if no call can be
        counted.
        """
        from flashsim import viz

        bars: dict[str, Traffic] = {}
        for calls in self.distinct():
            problem = _problem(calls[0])
            if problem is not None:
                for algorithm in ALGORITHMS:
                    label = f"{together([c.name for c in calls])}\n{algorithm}"
                    label += "'" * sum(known.startswith(label) for known in bars)
                    bars[label] = count(problem, algorithm=algorithm, device=device)
        if not bars:
            raise OptionError(
                "nothing to plot: no attention call that can be counted was seen"
                if self.calls
                else f"nothing to plot: {NOTHING}"
            )
        return viz.traffic(bars, **options)

    __str__ = report.text

    def __repr__(self) -> str:
        return f"<Seen {self._counted()} of {self.model}>"

    def _counted(self) -> str:
        return f"{len(self)} attention call{'' if len(self) == 1 else 's'}"

    def _repr_html_(self) -> str:
        return self.table().html()


def together(names: list[str]) -> str:
    """Return one name that stands for several modules, such as "layers.0-79.self_attn"."""
    names = list(dict.fromkeys(names))
    if len(names) == 1:
        return names[0] or "(no module)"
    parts = [name.split(".") for name in names]
    if len({len(p) for p in parts}) == 1:
        places = list(zip(*parts, strict=True))
        differ = [n for n, place in enumerate(places) if len(set(place)) > 1]
        if len(differ) == 1 and all(x.isdecimal() for x in places[differ[0]]):
            numbers = sorted(map(int, places[differ[0]]))
            if numbers == [*range(numbers[0], numbers[-1] + 1)]:
                first = parts[0]
                first[differ[0]] = f"{numbers[0]}-{numbers[-1]}"
                return ".".join(first)
    return f"{names[0]} and {len(names) - 1} more"


def _problem(call: AttentionCall) -> Problem | None:
    try:
        return call.problem
    except FlashSimError:
        return None


def _rows(calls: list[AttentionCall], device: Device, l2: bool | None) -> list[dict[str, Any]]:
    call, problem = calls[0], _problem(calls[0])
    about = {
        "module": together([c.name for c in calls]),
        "calls": len(calls),
        "api": call.api,
        "mask": call.pattern.kind,
        "on": call.device,
        "note": call.note,
    }
    if problem is None:
        return [about | {"shape": str(tuple(call.sizes[:7]))}]
    about["shape"] = in_words(replace(problem, causal=False, window=None))
    return [
        about | _measured(calls, direction) | _figures(problem, algorithm, direction, device, l2)
        for direction in ("forward", "backward")[: 1 + call.backward]
        for algorithm in ALGORITHMS
    ]


def _measured(calls: list[AttentionCall], direction: str) -> dict[str, Any]:
    """Return the mean measured time of calls in ms, and whether kernels or operators were timed."""
    times = [sum(call.measured[direction].values()) for call in calls if direction in call.measured]
    if not times:
        return {"measured ms": None}
    return {"measured ms": 1e3 * sum(times) / len(times), "measured on": _place(calls[0])}


def _place(call: AttentionCall) -> str:
    """Return the label of a measured time, such as "cuda, kernels" or "cpu, operators"."""
    return f"{call.place}, {'kernels' if call.place == 'cuda' else 'operators'}"


@lru_cache(maxsize=1024)
def _figures(
    problem: Problem, algorithm: str, direction: str, device: Device, l2: bool | None
) -> dict[str, Any]:
    """Return the figures of one attention call's forward or backward pass, by column name."""
    about = {"pass": direction, "algorithm": algorithm}
    try:
        counted = count(problem, algorithm=algorithm, direction=direction, device=device)
    except FlashSimError as error:
        return about | {"note": f"not counted: {error}"}
    replayed = dram(counted).bytes() if l2 or (l2 is None and _tiles(counted) <= REPLAYED) else None
    leaves = replayed or traffic.once(problem, algorithm, direction)
    flops = counted.flops("matmul")
    point = Point(algorithm, direction, "dram", flops, leaves, device, problem.dtype)
    bound, milliseconds, by = _time(counted, point)
    return about | {
        "requested B": counted.bytes(),
        "DRAM B": replayed,
        "compulsory B": counted.compulsory(),
        "FLOPs": counted.flops(),
        "matmul FLOP/B": point.intensity,
        "bound": bound,
        "ms": milliseconds,
        "ms by": by if replayed or by == "predict" else f"{by}, each kernel's tensors once",
        "saved B": traffic.saved(problem, algorithm) if direction == "forward" else None,
        "scores B": _scores(problem, algorithm, direction),
    }


def _tiles(counted: Traffic) -> int:
    p = counted.problem
    visits = sum(counted.schedule(stage).sums.visits for stage in counted.stages)
    return visits * p.batch * p.heads


def _time(counted: Traffic, point: Point) -> tuple[str, float | None, str]:
    """Return the limit of a pass (memory or arithmetic), the time in ms, and the time's source."""
    try:
        attainable, bound = point.attainable, point.bound
    except FlashSimError:  # the device has no number for this type
        return "unknown", None, ""
    if counted.algorithm == "flash2":
        try:
            prediction = predict(
                counted.problem, direction=counted.direction, device=counted.device
            )
        except FlashSimError:  # no kernel supports it
            pass
        else:
            return bound, 1e3 * prediction.seconds, "predict"
    return bound, 1e3 * point.flops / attainable if attainable else None, "roofline"


def _scores(problem: Problem, algorithm: str, direction: str) -> int:
    """Return the bytes of the N x N score matrices that a pass writes to HBM."""
    written = plans.tensors_of(problem, algorithm, direction, "store")
    return sum(whole_bytes(problem, name) for name in {*written} & {"S", "P", "dP", "dS"})


def _totals(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row of totals per pass and algorithm; an unknown figure makes a total empty."""
    totals = []
    for direction, algorithm in dict.fromkeys(
        (r["pass"], r["algorithm"]) for r in records if "requested B" in r
    ):
        mine = [
            r
            for r in records
            if (r.get("pass"), r.get("algorithm")) == (direction, algorithm) and "FLOPs" in r
        ]
        total: dict[str, Any] = {"module": "total", "calls": sum(r["calls"] for r in mine)}
        total |= {"pass": direction, "algorithm": algorithm}
        for name in _SUMMED:
            known = all(r[name] is not None for r in mine)
            total[name] = sum(r["calls"] * r[name] for r in mine) if known else None
        total["ms by"] = " and ".join(sorted({r["ms by"] for r in mine}))
        total["scores B"] = max(r["scores B"] for r in mine)
        totals.append(total)
    return totals
