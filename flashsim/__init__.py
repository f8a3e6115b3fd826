"""flashsim: watch FlashAttention move its tiles, and count every byte."""

from __future__ import annotations

import importlib
from typing import Any

from flashsim.api.compare import Comparison, compare
from flashsim.api.counting import count
from flashsim.api.execution import Gradients, Result, backward, run
from flashsim.api.merge import merge
from flashsim.api.quantize import Quantized, quantize
from flashsim.api.samples import load_sample, load_sample_trace, random_inputs
from flashsim.api.simulate import simulate
from flashsim.api.sweep import Sweep, sweep
from flashsim.api.warm import Warmed, warm
from flashsim.counts.traffic import Traffic
from flashsim.errors import (
    BackendUnavailable,
    DTypeError,
    FlashSimError,
    MaskError,
    MemoryModelError,
    OptionError,
    ShapeError,
    SramOverflow,
    TilingError,
    TraceError,
    UnknownArgumentError,
    UnsupportedError,
)
from flashsim.problem.hardware import Device
from flashsim.problem.masks import BlockMask
from flashsim.problem.precision import Precision
from flashsim.problem.problem import Problem
from flashsim.schedule.schedule import Schedule
from flashsim.schedule.tiling import Tiling
from flashsim.trace.trace import Trace
from flashsim.version import __version__

#: Rooms that are imported when first asked for, by the room in which they lie.
_LATE = {
    **dict.fromkeys(("oracle",), "flashsim.problem"),
    **dict.fromkeys(
        (
            "banks",
            "blocks",
            "claims",
            "demo",
            "ladder",
            "precision",
            "predict",
            "reproduce",
            "roofline",
            "softmax_matmul",
            "verify",
            "walkthrough",
        ),
        "flashsim.studies",
    ),
    **dict.fromkeys(
        ("backends", "distributed", "exercises", "jax", "l2", "torch", "viz"), "flashsim"
    ),
}

__all__ = [
    "BackendUnavailable",
    "BlockMask",
    "Comparison",
    "DTypeError",
    "Device",
    "FlashSimError",
    "Gradients",
    "MaskError",
    "MemoryModelError",
    "OptionError",
    "Precision",
    "Problem",
    "Quantized",
    "Result",
    "Schedule",
    "ShapeError",
    "SramOverflow",
    "Sweep",
    "Tiling",
    "TilingError",
    "Trace",
    "TraceError",
    "Traffic",
    "UnknownArgumentError",
    "UnsupportedError",
    "Warmed",
    "__version__",
    "backward",
    "compare",
    "count",
    "load_sample",
    "load_sample_trace",
    "merge",
    "quantize",
    "random_inputs",
    "run",
    "simulate",
    "sweep",
    "warm",
]


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{_LATE[name]}.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATE})
