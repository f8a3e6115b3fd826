"""flashsim: watch FlashAttention move its tiles, and count every byte.

Every name is loaded when it is first used, so that `flashsim --version` need not wait for NumPy.
"""
# ruff: noqa: F403, F405 - names are those of flashsim.api

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from flashsim.version import __version__

if TYPE_CHECKING:
    from flashsim.api import *

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
    if name in __all__:
        found = getattr(importlib.import_module("flashsim.api"), name)
    else:
        try:
            found = importlib.import_module(f"{_LATE.get(name, __name__)}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{__name__}.{name}":  # of one of its own imports
                raise
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_LATE})
