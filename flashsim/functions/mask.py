"""`MaskFunction`: a traced mask function with the values of its captured arrays."""

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
    """A mask function ``mask_mod(b, h, q, k)``: its graph, and the values of its captured arrays.

    `arrays` has read-only copies of the captured arrays, because the schedule depends on their
    values; `originals` has the user's array objects. Two mask functions are equal if graphs and
    captured values are equal.
    """

    def __init__(self, graph: Graph, originals: Iterable[Any]) -> None:
        self.graph, self.originals = graph, tuple(originals)
        pairs = zip(self.originals, graph.arrays, strict=True)
        self.arrays = tuple(host_values(array, spec) for array, spec in pairs)
        self.__name__ = graph.name

    @classmethod
    def of(cls, function: Callable[..., Any]) -> MaskFunction:
        """Return a mask function as a `MaskFunction`; a `MaskFunction` is returned unchanged."""
        return function if isinstance(function, cls) else cls(*trace_mask(function))

    @property
    def traced(self) -> Traced:
        """The function's graph, and the captured arrays that the user passed, not copies."""
        return Traced(self.graph, self.originals)

    @cached_property
    def digest(self) -> str:
        """A hexadecimal hash, which is equal for equal mask functions."""
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
        """The subset of {"b", "h"} (batch entry and head) that the mask's result depends on."""
        return self.graph.uses & {"b", "h"}

    def keep(self, b: Any, h: Any, q: Any, k: Any) -> np.ndarray:
        """Return an array of booleans, True where a score is kept; index arrays are broadcast."""
        given = {"b": b, "h": h, "q": q, "k": k}
        return self.graph.evaluate(given, self.arrays, self.dtype)

    @cached_property
    def dtype(self) -> str:
        """The type of the mask's floats: float32, as in torch and on a GPU.

        With a captured array of float64, it is float64.
        """
        return "float64" if any(a.dtype == "float64" for a in self.graph.arrays) else "float32"

    @cached_property
    def _bounds(self) -> Bounds:
        return Bounds(self.graph, self.arrays, self.dtype)

    def bounds(self, batch: int, heads: int, q: Interval, k: Interval) -> Interval:
        """Return the mask's lower and upper bounds over boxes of queries and keys.

        The bounds of a box are (1, 1) if all scores are kept, (0, 0) if no score is kept, and (0,
        1) if neither is certain. `q` and `k` hold the first and last indices of each box. Each box
        covers all batch entries and heads.
        """
        zero = np.zeros((), np.int64)
        ranges = {"b": (zero, zero + batch - 1), "h": (zero, zero + heads - 1), "q": q, "k": k}
        low, high = self._bounds.of(ranges)
        shape = np.broadcast_shapes(q[0].shape, k[0].shape)
        return np.broadcast_to(low, shape), np.broadcast_to(high, shape)
