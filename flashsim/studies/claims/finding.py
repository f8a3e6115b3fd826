"""A claim from a write-up, and the finding of its check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple


class Finding(NamedTuple):
    """The result of checking a claim: the computed figures, whether the claim is right, and why."""

    found: str
    right: bool
    why: str


@dataclass(frozen=True)
class Claim:
    """A shortened statement from a write-up, and the function that checks it by recomputing it."""

    name: str
    said: str
    check: Callable[[], Finding]
