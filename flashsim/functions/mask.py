"""`MaskFunction`: a traced mask with the values of its captured arrays, and what it keeps."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

import numpy as np

from flashsim.functions.graph import Graph
from flashsim.functions.intervals import Bounds, Interval
from flashsim.functions.tracing import Traced, host_values, trace_mask


class MaskFunction:
    """A mask ``mask_mod(b, h, q, k)`` as a graph, and the values of the arrays that it captured.

    The schedule depends on these values, so they are copied. Two masks are equal if their graphs
    and values are.

    Attributes
    ----------
    graph : Graph
    arrays : tuple of ndarray
        Read-only copies of the captured arrays.
    originals : tuple of array
        The arrays as the user gave them.
    """

    def __init__(self, graph: Graph, originals: Iterable[Any]) -> None:
        self.graph, self.originals = graph, tuple(originals)
        pairs = zip(self.originals, graph.arrays, strict=True)
        self.arrays = tuple(host_values(array, spec) for array, spec in pairs)
        self.__name__ = graph.name

    @classmethod
    def of(cls, function: Callable[..., Any]) -> MaskFunction:
        """Trace a function; a `MaskFunction` is returned as it is."""
        return function if isinstance(function, cls) else cls(*trace_mask(function))

    @property
    def traced(self) -> Traced:
        """The graph and the captured arrays as the user gave them."""
        return Traced(self.graph, self.originals)

    @cached_property
    def digest(self) -> str:
        """Hexadecimal digits that equal masks share."""
        found = hashlib.sha256(self.graph.digest.encode())
        for array in self.arrays:
            found.update(np.ascontiguousarray(array).view(np.uint8).data)
        return found.hexdigest()[:24]

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, MaskFunction) and self.digest == other.digest)

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"MaskFunction({self.graph.name})"

    def __reduce__(self) -> Any:
        return MaskFunction, (self.graph, self.arrays)

    @property
    def per_head(self) -> frozenset[str]:
        """Which of "b" and "h" the mask depends on."""
        return self.graph.uses & {"b", "h"}

    def keep(self, b: Any, h: Any, q: Any, k: Any) -> np.ndarray:
        """Booleans of index arrays that broadcast against each other."""
        given = {"b": b, "h": h, "q": q, "k": k}
        return self.graph.evaluate(given, self.arrays)

    @cached_property
    def _bounds(self) -> Bounds:
        return Bounds(self.graph, self.arrays)

    def bounds(self, batch: int, heads: int, q: Interval, k: Interval) -> Interval:
        """For boxes of queries and keys: 1, 1 if all is kept, 0, 0 if nothing is, 0, 1 if unknown.

        `q` and `k` are the first and last indices of each box; a box holds all batch entries and
        heads.
        """
        zero = np.zeros((), np.int64)
        ranges = {"b": (zero, zero + batch - 1), "h": (zero, zero + heads - 1), "q": q, "k": k}
        low, high = self._bounds.of(ranges)
        shape = np.broadcast_shapes(q[0].shape, k[0].shape)
        return np.broadcast_to(low, shape), np.broadcast_to(high, shape)
