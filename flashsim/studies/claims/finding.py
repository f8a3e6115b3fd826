"""A claim, and the finding of its check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple


class Finding(NamedTuple):
    """The result of a check: the figures in words, whether the claim holds, and why."""

    found: str
    right: bool
    why: str


@dataclass(frozen=True)
class Claim:
    """A statement from write-ups, shortened, and the function that recomputes it."""

    name: str
    said: str
    check: Callable[[], Finding]
