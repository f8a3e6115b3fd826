"""flashsim: watch FlashAttention move its tiles, and count every byte."""

from flashsim.api import Gradients, Result, count, run
from flashsim.compare import Comparison, compare
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
from flashsim.hardware import Device
from flashsim.problem import BlockMask, Problem
from flashsim.samples import load_sample, load_sample_trace, random_inputs
from flashsim.schedule import Schedule
from flashsim.sweep import Sweep, sweep
from flashsim.tiling import Tiling
from flashsim.trace import Trace
from flashsim.traffic import Traffic
from flashsim.version import __version__

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
    "Problem",
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
    "__version__",
    "compare",
    "count",
    "load_sample",
    "load_sample_trace",
    "random_inputs",
    "run",
    "sweep",
]
