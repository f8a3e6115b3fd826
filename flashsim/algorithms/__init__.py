"""The simulated algorithms, one module each, written to read like their papers.

Each module ends with ``ALGORITHMS``: the algorithms it implements, by name, each with its forward
and backward pass. Every module in this folder is found automatically; there is no other list.
"""

from collections.abc import Callable
from importlib import import_module
from pkgutil import iter_modules

from flashsim.algorithms.machine import Machine

Passes = tuple[Callable[[Machine], None], Callable[[Machine], None]]

#: Forward and backward pass of every algorithm.
PASSES: dict[str, Passes] = {}
for _page in iter_modules(__path__, f"{__name__}."):
    PASSES |= getattr(import_module(_page.name), "ALGORITHMS", {})

__all__ = ["PASSES", "Machine", "Passes"]
