"""flashsim: watch FlashAttention move its tiles, and count every byte."""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
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

#: Modules that are imported when first asked for, and the package that each lies in.
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


class _Late:
    """Lets import statements name a module of `_LATE` as attributes do.

    `import flashsim.predict` gives the module `flashsim.studies.predict` itself, no copy of it; and
    so it is with the modules inside.
    """

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """How to import `flashsim.X`, where X lies in another package."""
        package, _, rest = name.partition(".")
        where = _LATE.get(rest.partition(".")[0], __name__)
        if package != __name__ or where == __name__:
            return None
        return ModuleSpec(name, self, origin=f"{where}.{rest}")  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module that has another name, too."""
        module = importlib.import_module(str(spec.origin))
        spec.loader_state = module.__spec__  # Python gives the module the spec of its second name
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is left to run; the module keeps the spec of its first name."""
        if module.__spec__ is not None:
            module.__spec__ = module.__spec__.loader_state


sys.meta_path.insert(0, _Late())  # before Python's own, which would make copies of modules inside


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATE})
