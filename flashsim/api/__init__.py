"""Contains all public functions and classes, which the package `flashsim` loads from here."""
# ruff: noqa: F401 - flashsim.__all__ lists these names

from flashsim.api.compare import Comparison, compare
from flashsim.api.counting import count
from flashsim.api.decode_options import DecodeOptions
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
    FunctionError,
    MaskError,
    MemoryModelError,
    OptionError,
    RankError,
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
