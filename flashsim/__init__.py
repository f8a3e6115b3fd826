"""Run FlashAttention tile by tile, and count every byte that it moves.

Each public name is imported when it is first used, so that `flashsim --version` does not import
NumPy.
"""
# ruff: noqa: F403, F405 - names are those of flashsim.api

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flashsim.version import __version__

if TYPE_CHECKING:
    from flashsim.api import *

#: Modules that are imported when first used, and the package that contains each.
_LATE = {
    "oracle": "flashsim.problem",
    **dict.fromkeys(
        (
            *("banks", "blocks", "claims", "demo", "ladder", "precision", "predict", "reproduce"),
            *("roofline", "softmax_matmul", "verify", "walkthrough"),
        ),
        "flashsim.studies",
    ),
    **dict.fromkeys(
        ("backends", "cuda", "distributed", "exercises", "jax", "l2", "torch", "triton", "viz"),
        "flashsim",
    ),
}

__all__ = [
    "BackendUnavailable",
    "BlockMask",
    "Comparison",
    "DTypeError",
    "DecodeOptions",
    "Device",
    "FlashSimError",
    "FunctionError",
    "Gradients",
    "MaskError",
    "MemoryModelError",
    "OptionError",
    "Precision",
    "Problem",
    "Quantized",
    "RankError",
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
            if error.name != f"{__name__}.{name}":  # one of its own imports failed
                raise
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    globals()[name] = found
    return found


class _Late:
    """Import finder for the short names in `_LATE`, such as `flashsim.predict`.

    `import flashsim.predict` imports the module `flashsim.studies.predict` itself, not a copy.
    """

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the import spec of `flashsim.X` if X is a short name in `_LATE`, or None."""
        package, _, rest = name.partition(".")
        where = _LATE.get(rest.partition(".")[0], __name__)
        if package != __name__ or where == __name__:
            return None
        return ModuleSpec(name, self, origin=f"{where}.{rest}")  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Import and return the module that the short name stands for."""
        module = importlib.import_module(str(spec.origin))
        spec.loader_state = module.__spec__  # Python replaces it by the short name's spec
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's own spec, which Python's import replaced; do not rerun the module.

        Submodules that are already loaded get short names too. Without a short name, importing such
        a submodule by that name would replace a function of the same name in the submodule's
        package.
        """
        second = module.__spec__
        assert second is not None
        module.__spec__ = second.loader_state
        first = f"{second.origin}."
        for name in [name for name in sys.modules if name.startswith(first)]:
            sys.modules[f"{second.name}.{name.removeprefix(first)}"] = sys.modules[name]


sys.meta_path.insert(0, _Late())  # before Python's finders, which would copy submodules


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_LATE})
