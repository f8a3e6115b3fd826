"""A claim, and what came of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple


class Finding(NamedTuple):
    """What a check found: in words with its figures, whether the claim holds, and why."""

    found: str
    right: bool
    why: str


@dataclass(frozen=True)
class Claim:
    """A statement as write-ups make it, in short, and the function that recomputes it."""

    name: str
    said: str
    check: Callable[[], Finding]
