"""The simulated algorithms, one module per paper, with the papers' notation.

All modules are imported automatically. Each module ends with the dict ``ALGORITHMS``, which maps an
algorithm's name to its forward and backward pass.
"""

from collections.abc import Callable
from importlib import import_module
from pkgutil import iter_modules

from flashsim.algorithms.machine import Machine

Passes = tuple[Callable[[Machine], None], Callable[[Machine], None]]

#: The forward and the backward pass of every algorithm, by name.
PASSES: dict[str, Passes] = {}
for _page in iter_modules(__path__, f"{__name__}."):
    PASSES |= getattr(import_module(_page.name), "ALGORITHMS", {})

__all__ = ["PASSES", "Machine", "Passes"]
