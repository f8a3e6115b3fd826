"""One point of a sweep: its parameters, the method of counting, and its row in a table or file."""

import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import islice, product
from operator import length_hint
from typing import Any

import numpy as np

from flashsim.api import counting, execution
from flashsim.api.cost import Estimate, cost
from flashsim.api.samples import random_inputs
from flashsim.api.scales import UNSCALED
from flashsim.api.sweepfile import Row
from flashsim.counts.traffic import Traffic, figures
from flashsim.errors import DTypeError, FlashSimError, OptionError, choices, shown
from flashsim.problem import checks
from flashsim.problem.hardware import Device
from flashsim.problem.problem import Problem
from flashsim.report import Cell
from flashsim.schedule import plans
from flashsim.schedule.presets import PRESETS
from flashsim.schedule.schedule import KEY_ORDERS
from flashsim.schedule.split_kv import choose
from flashsim.schedule.tiling import Tiling
from flashsim.trace.trace import Trace

METHODS = ("count", "run")

#: The largest number of a sweep's points, and of an axis's values; a point takes about 2 kB.
MOST_POINTS = 1_000_000
#: Parameters whose default is the value of another one.
SAME = {"kv_heads": "heads", "head_dim_v": "head_dim", "n_kv": "n_q"}
#: The columns that are measured. Bytes are of all heads.
FIGURES = (
    *("block_q", "block_k", "load_bytes", "store_bytes", "reduce_bytes", "requested_bytes"),
    *("compulsory_bytes", "flops", "matmul_flops", "intensity", "peak_sram_bytes"),
    *("saved_bytes", "workspace_bytes"),
)
Key = tuple[Cell, ...]


@dataclass(frozen=True)
class SweepPoint:
    """One combination of a sweep's parameters; `tiling` is a `Tiling`, a preset's name or "fit"."""

    method: str
    algorithm: str
    direction: str
    dtype: str
    causal: bool
    window: tuple[int, int] | None
    softcap: float
    key_order: str
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    n_q: int
    n_kv: int
    device: Device
    sram_bytes: int | None
    tiling: Tiling | str

    @property
    def machine(self) -> Device:
        """Return the device, with this point's on-chip capacity."""
        return self.device if self.sram_bytes is None else self.device.with_sram(self.sram_bytes)

    @property
    def key(self) -> Key:
        """Return the values that identify this point."""
        return key_of(self.parameters())

    def parameters(self) -> Row:
        """Return the parameters as plain values, for the first columns of the point's row."""
        return {
            **{name: getattr(self, name) for name in PARAMETERS},
            "window": None if self.window is None else f"{self.window[0]},{self.window[1]}",
            "device": self.device.name,
            "sram_bytes": self.machine.sram_bytes,
            "tiling": str(self.tiling),
        }

    def problem(self) -> Problem:
        """Return the point's `Problem`; raise if the point's sizes contradict each other."""
        shared = (name for name in PARAMETERS if name in Problem.__dataclass_fields__)
        return Problem(**{name: getattr(self, name) for name in shared})

    def tile(self, problem: Problem) -> Tiling:
        """Return this point's tiling; raise if no tiling fits, or if the preset has none."""
        if isinstance(self.tiling, Tiling):
            return self.tiling
        if self.tiling == "fit":
            if self.direction == "forward":  # decoding packs heads, and its tiles must fit so
                return choose(problem, None, self.machine, self.algorithm)[0]
            return Tiling.fit(problem, self.machine, self.algorithm, self.direction)
        return Tiling.preset(self.tiling, self.head_dim, causal=self.causal)


#: The columns that identify a point, and all columns.
PARAMETERS = tuple(field.name for field in fields(SweepPoint))
COLUMNS = (*PARAMETERS, *FIGURES, "status")


def seconds(point: SweepPoint) -> float:
    """Estimate how many seconds `measure` takes: 0 for an impossible point."""
    if point.method == "count":
        return 1e-3
    try:
        problem = point.problem()
        return _cost(point, problem, point.tile(problem)).seconds
    except (FlashSimError, MemoryError):
        return 0.0


def measure(point: SweepPoint) -> Row:
    """Count or run a point; return its row: parameters, figures, and status "ok" or an error."""
    row: Row = {**point.parameters(), **dict.fromkeys(FIGURES)}
    try:
        problem = point.problem()
        tiling = point.tile(problem)
        row.update(block_q=tiling.block_q, block_k=tiling.block_k)
        counted = (_count if point.method == "count" else _run)(point, problem, tiling)
        row.update(figures(counted))
    except (FlashSimError, MemoryError) as error:
        message = " ".join(str(error).split())  # always one line
        return {**row, "status": f"{type(error).__name__}: {message}"}
    return {**row, "status": "ok"}


def _count(point: SweepPoint, problem: Problem, tiling: Tiling) -> Traffic:
    return counting.count(
        problem,
        algorithm=point.algorithm,
        direction=point.direction,
        tiling=tiling,
        device=point.machine,
        key_order=point.key_order,
    )


def _cost(point: SweepPoint, problem: Problem, tiling: Tiling) -> Estimate:
    """Estimate the time and memory of simulating a point, including its forward pass."""
    passes = [_count(point, problem, tiling)]
    if point.direction == "backward":
        forward = replace(point, direction="forward")
        fitting = Tiling.fit(problem, point.machine, point.algorithm, "forward")
        passes.append(_count(forward, problem, fitting))
    return cost(passes)


def _run(point: SweepPoint, problem: Problem, tiling: Tiling) -> Trace:
    """Simulate a point on random inputs; the traffic does not depend on their values."""
    forward = point.direction == "forward"
    _cost(point, problem, tiling)  # raises if there is too little memory
    q, k, v, dout = random_inputs(problem)
    meant: dict[str, Any] = {"scales": UNSCALED} if problem.fp8 else {}  # numbers as drawn
    meant |= {name: getattr(point, name) for name in ("algorithm", "causal", "window", "softcap")}
    meant |= {"device": point.machine, "key_order": point.key_order, "trace": forward}
    # A backward tile may be wrong for the forward pass.
    result = execution.run(q, k, v, tiling=tiling if forward else None, **meant)
    return result.trace if forward else result.backward(dout, tiling=tiling, trace=True).trace


# -- axes -----------------------------------------------------------------------------------------


def axis(name: str, value: Any) -> list[Any]:
    """Check the values of one axis of a sweep, and return them as `SweepPoint` stores them."""
    pair = name == "window" and isinstance(value, (tuple, list)) and len(value) == 2
    if pair and not any(isinstance(x, (tuple, list)) or x is None for x in value):
        value = [tuple(value)]  # one window, not two values
    if isinstance(value, (bytes, Mapping)):
        raise DTypeError(
            f"{name} cannot have the type {type(value).__name__}; pass one value or a list of "
            f"values, got {shown(value)}"
        )
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    single = isinstance(value, (str, Tiling, Device)) or not isinstance(value, Iterable)
    _few_enough(name, 1 if single else _length(value))  # before anything is listed
    values = [value] if single else list(islice(value, MOST_POINTS + 1))
    _few_enough(name, len(values))
    if not values:
        raise OptionError(
            f"{name} has no values, so the sweep has no points; pass at least one value"
        )
    return [_CHECKS.get(name, _size)(name, item) for item in values]


def _length(values: Iterable[Any]) -> int:
    """Return the number of values if it is known without listing them, and otherwise 0."""
    try:
        return length_hint(values)
    except OverflowError:  # a range of 2^63 values or more
        return sys.maxsize


def _few_enough(name: str, number: int) -> None:
    if number > MOST_POINTS:
        raise OptionError(
            f"{name} has more than {MOST_POINTS:,} points, the most of one sweep; use larger steps "
            "or fewer axes, or run several sweeps"
        )


def points(method: str, axes: Mapping[str, list[Any]]) -> list[SweepPoint]:
    """Return the Cartesian product of checked axes (see `axis`), each point once."""
    _few_enough("a sweep", math.prod(map(len, axes.values())))
    names = [device.name for device in dict.fromkeys(axes["device"])]
    if twice := [name for name in names if names.count(name) > 1]:
        raise OptionError(
            f"device has different devices with one name, {twice[0]!r}, but rows tell devices "
            "apart by name; give each its own name: dataclasses.replace(device, name=...)"
        )
    unique: dict[Key, SweepPoint] = {}
    for values in product(*axes.values()):
        point = dict(zip(axes, values, strict=True))
        for name, same in SAME.items():
            point[name] = point[same] if point[name] is None else point[name]
        candidate = SweepPoint(method=method, **point)
        unique.setdefault(candidate.key, candidate)
    return list(unique.values())


def _size(name: str, value: Any) -> int | None:
    if value is None and name in (*SAME, "sram_bytes"):
        return None
    if not checks.is_int(value):
        raise DTypeError(
            f"{name} must be an integer or a list of integers, got {shown(value)} "
            f"({type(value).__name__})"
        )
    if not 1 <= value <= checks.LARGEST:
        bound = "at least 1" if value < 1 else "at most 2**63 - 1"
        raise OptionError(f"{name} must be {bound}, got {shown(value)}")
    return int(value)


def _field(name: str, value: Any) -> Any:
    """Return a field's value as checked by a float64 `Problem`, which accepts the most values."""
    return getattr(Problem(n_q=1, **{"dtype": "float64", name: value}), name)


def _tiling(name: str, value: Any) -> Tiling | str:
    if value is None or isinstance(value, Tiling):
        return value or "fit"
    names = ("fit", *PRESETS)
    if not isinstance(value, str) or value not in names:
        raise OptionError(
            f"{name} must hold flashsim.Tiling(block_q, block_k) or names, got {shown(value)}; "
            f"choose from {choices(value, names)}"
        )
    return value


_CHECKS: Mapping[str, Any] = {
    "algorithm": partial(checks.one_of, possible=plans.ALGORITHMS),
    "direction": partial(checks.one_of, possible=plans.DIRECTIONS),
    "key_order": partial(checks.one_of, possible=KEY_ORDERS),
    **dict.fromkeys(("dtype", "causal", "window", "softcap"), _field),
    "device": lambda _, value: Device.get(value),
    "tiling": _tiling,
}


# -- rows in a file -------------------------------------------------------------------------------


def key_of(row: Mapping[str, Cell]) -> Key:
    """Return the parameters in a row of a sweep; they identify the row's point."""
    return tuple(row[name] for name in PARAMETERS)


def parse_row(text: Mapping[str, str]) -> Row:
    """Parse a row from the text of its cells; ValueError if `measure` cannot return such a row."""
    row = {name: _cell(name, cell) for name, cell in text.items()}
    if lacks := [name for name in PARAMETERS if row[name] is None and name != "window"]:
        raise ValueError(f"the row lacks the columns {', '.join(lacks)}")
    status = str(row["status"])
    if status == "ok":
        if lacks := [name for name in FIGURES if row[name] is None]:
            raise ValueError(f"the row's status is ok, but it lacks values of {', '.join(lacks)}")
    elif status.partition(":")[0] not in _FAILURES:
        raise ValueError(
            f"the row's status must be 'ok' or an error's name and text, got {status[:40]!r}"
        )
    return row


def _cell(name: str, text: str) -> Cell:
    if name in ("softcap", "intensity"):
        return float(text) if text else None
    if name == "causal":
        if text not in ("True", "False"):
            raise ValueError(
                f"the row must have True or False in a column of truth values, got {text!r}"
            )
        return text == "True"
    if name in _TEXT:
        return text or None
    return int(text) if text else None


_TEXT = {
    *("method", "algorithm", "direction", "dtype", "window", "key_order", "device", "tiling"),
    "status",
}


def _kinds(kind: type[Exception]) -> set[str]:
    return {kind.__name__}.union(*map(_kinds, kind.__subclasses__()))


#: The names with which a status other than "ok" begins; see `measure`.
_FAILURES = _kinds(FlashSimError) | _kinds(MemoryError)
