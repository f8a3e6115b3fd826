"""`Curve`: DRAM traffic as a function of L2's size, exact for every size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from flashsim import report
from flashsim.errors import OptionError, own_errors, shown
from flashsim.l2.requests import Stream
from flashsim.problem import checks
from flashsim.schedule.names import LOAD, STORE


@own_errors
@dataclass(frozen=True)
class Curve:
    """DRAM reads and writes of a fully associative LRU cache, as a function of its size.

    The reads are computed from stack distances: Mattson, Gecsei, Slutz and Traiger, "Evaluation
    techniques for storage hierarchies", 1970. The writes follow Thompson and Smith, "Efficient
    (stack) algorithms for analysis of write-back and sector memories", 1989.

    Attributes
    ----------
    steps : int64 (n,)
        The cache sizes, in bytes and in ascending order, at which the number of hits increases.
    saved : int64 (n,)
        For each k, how many bytes fewer are read from DRAM with a cache of ``steps[k]`` bytes than
        without a cache.
    most : int
        The bytes that are read from DRAM if there is no cache.
    write_steps, write_saved, most_written
        Like `steps`, `saved` and `most`, for the dirty bytes that evictions write to DRAM.
    """

    steps: np.ndarray
    saved: np.ndarray
    most: int
    write_steps: np.ndarray
    write_saved: np.ndarray
    most_written: int

    __repr__ = report.short
    _repr_html_ = report.card

    @classmethod
    def measure(cls, stream: Stream, size: np.ndarray) -> Curve:
        """Compute the curve in one pass over a kernel's requests."""
        from flashsim.l2.distances import COLD, distances

        near, strayed = distances(stream.ids, stream.codes, size)
        op, nbytes = stream.codes & 3, size[stream.ids]
        reads = op != STORE
        again = reads & (near != COLD)
        written = op != LOAD
        return cls(
            *_cumulative(near[again], nbytes[again]),
            int(nbytes[reads].sum()),
            *_cumulative(strayed[written], nbytes[written]),
            int(nbytes[written].sum()),
        )

    def reads(self, l2_bytes: Any) -> Any:
        """Return the bytes that are read from DRAM if L2 has `l2_bytes` (a number or an array)."""
        return self._at(l2_bytes, self.steps, self.saved, self.most)

    def writes(self, l2_bytes: Any) -> Any:
        """Return the dirty bytes that an L2 of `l2_bytes` bytes evicts while the kernel runs."""
        return self._at(l2_bytes, self.write_steps, self.write_saved, self.most_written)

    @property
    def cold(self) -> int:
        """The bytes that are read from DRAM if L2 has unlimited size."""
        return int(self.most - (self.saved[-1] if len(self.saved) else 0))

    def enough(self) -> int:
        """Return the smallest L2, in bytes, with which each tile is read from DRAM only once."""
        return int(self.steps[-1]) if len(self.steps) else 0

    @staticmethod
    def _at(l2_bytes, steps: np.ndarray, saved: np.ndarray, most: int):
        sizes = checks.as_array("l2_bytes", l2_bytes)
        if sizes.dtype.kind not in "iuf" or not (sizes >= 0).all():
            raise OptionError(f"the size of L2 must be at least 0 B, got {shown(l2_bytes)}")
        hits = np.concatenate([[0], saved])[np.searchsorted(steps, sizes, side="right")]
        result = most - hits
        return int(result) if result.ndim == 0 else result


def _cumulative(at: np.ndarray, nbytes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct values of `at`, ascending, and the cumulative sums of `nbytes`."""
    from flashsim.l2.distances import tally

    steps, sums = tally(at, nbytes)
    order = np.argsort(steps)
    return steps[order], np.cumsum(sums[order])
