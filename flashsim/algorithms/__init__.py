"""The simulated algorithms, one page each, reading like their papers.

A page ends with ``ALGORITHMS``: the algorithms it carries out, by name, each with its forward and
its backward pass. The folder is the list: a page is found because it lies here.
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
