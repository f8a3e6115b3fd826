"""`Account`: what each rank sends, computes, moves in HBM and holds in memory, step by step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flashsim import report
from flashsim.counts.questions import in_words
from flashsim.distributed.group import Group
from flashsim.errors import OptionError, own_errors
from flashsim.problem import checks

#: The quantities counted at every step, besides the bytes sent.
QUANTITIES = ("flops", "visits", "hbm", "merge")


@own_errors
@dataclass(frozen=True, eq=False, repr=False)
class Account(report.Tabled):
    """The byte and FLOP counts of one pass over all ranks, from a run or in closed form.

    Two `Account` objects are equal if all counts are equal.

    Attributes
    ----------
    sent : dict of str to ndarray
        By tensor, the bytes that each rank sends on a link during each step: int64, (ranks, steps).
        In each step, a rank receives as many bytes as it sends.
    flops, visits : ndarray, int64, (ranks, steps)
        FLOPs of matrix products, and visits (one query tile times one key tile), summed over all
        heads and kernels.
    hbm : ndarray, int64, (ranks, steps)
        Requested HBM bytes of the local attention (`flashsim.count`).
    merge : ndarray, int64, (ranks, steps)
        HBM bytes that a rank loads and stores to combine a step's results with earlier results.
    peak : ndarray, int64, (ranks,)
        The most bytes of tensors in a rank's memory at once: inputs, tensors in flight, partial
        results, accumulators, outputs.
    """

    group: Group
    direction: str
    sent: Mapping[str, np.ndarray]
    flops: np.ndarray
    visits: np.ndarray
    hbm: np.ndarray
    merge: np.ndarray
    peak: np.ndarray
    steps: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", self.group.steps(self.direction))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Account):
            return NotImplemented
        mine, theirs = self._counts(), other._counts()
        alike = (self.group, self.direction) == (other.group, other.direction)
        alike = alike and mine.keys() == theirs.keys()
        return alike and all(np.array_equal(x, theirs[name]) for name, x in mine.items())

    def _counts(self) -> dict[str, np.ndarray]:
        return {**self.sent, **{name: getattr(self, name) for name in (*QUANTITIES, "peak")}}

    __hash__ = None  # type: ignore[assignment]

    # -- queries --------------------------------------------------------------------------------

    def link_bytes(self, tensor: str | None = None, rank: int | None = None) -> int:
        """Return the bytes of one tensor, or of all tensors, that one rank or all ranks send."""
        if tensor is not None:
            checks.one_of("tensor", tensor, self.sent)
        if rank is not None:
            rank = checks.place("rank", rank, self.group.ranks)
        arrays = [x for name, x in self.sent.items() if tensor in (None, name)]
        return int(sum(x.sum() if rank is None else x[rank].sum() for x in arrays))

    @property
    def out_bytes(self) -> np.ndarray:
        """Return the bytes that each rank sends per step, int64 of shape (ranks, steps)."""
        nothing = np.zeros((self.group.ranks, len(self.steps)), np.int64)
        return sum(self.sent.values(), nothing)

    @property
    def idle_share(self) -> float:
        """Return the share of time that ranks would idle if only arithmetic took time.

        All ranks start each step together, because every rank waits for the K and V of another
        rank. Each step takes as long as its slowest rank, the rank with the most FLOPs.
        """
        lasts = int(self.flops.max(axis=0).sum()) * self.group.ranks
        return 1 - int(self.flops.sum()) / lasts

    def rows_to_hide(self, flop_rate: float, bandwidth: float) -> float:
        """Return how many rows per ring member make arithmetic take longer than communication.

        The FLOPs of a step grow with the square of the number of rows, but the bytes of a step grow
        only linearly. The ring attention paper calls this number of rows the "minimal block size" c
        = F / B (arXiv:2310.01889, section 3). The result is the largest number of rows that any
        step needs, among steps that compute and communicate. No arithmetic can hide steps that only
        communicate, such as the last step of the gradients.

        Parameters
        ----------
        flop_rate, bandwidth : float
            FLOP/s of a rank's matrix products; bytes per second of its link, per direction.

        Raises
        ------
        OptionError, DTypeError
            If no rank sends bytes while it computes, or a rate is not a positive number.
        """
        for name, rate in (("flop_rate", flop_rate), ("bandwidth", bandwidth)):
            if checks.number(name, rate, low=0.0) == 0:
                raise OptionError(f"{name} must be positive, got 0")
        busiest, sent = self.flops.max(axis=0), self.out_bytes.max(axis=0)
        steps = (busiest > 0) & (sent > 0)
        if not steps.any():
            raise OptionError(
                f"scheme {self.group.scheme!r} over {self.group.ranks} ranks sends nothing while "
                "it computes, so no computation can hide its communication; choose another scheme"
            )
        longest = float((sent[steps] / busiest[steps]).max())
        return self.group.rows_a_member * longest * flop_rate / bandwidth

    def destination(self, rank: int, step: int) -> tuple[int, ...]:
        """Return the ranks that a rank sends to at a step, or () if it sends nothing."""
        rank = checks.place("rank", rank, self.group.ranks)
        step = checks.place("step", step, len(self.steps))
        if not self.out_bytes[rank, step]:
            return ()
        if self.steps[step].startswith("exchange"):
            return tuple(other for other in self.group.team(rank) if other != rank)
        return (self.group.successor(rank),)

    # -- tables ---------------------------------------------------------------------------------

    def table(self) -> report.Table:
        """Return a table of each rank's rows, bytes and FLOPs, one row per rank."""
        group = self.group
        columns = ("rank", "rows", "link B", "TFLOP", "idle %", "HBM B", "merge B", "peak B")
        table = report.Table(
            f"{self.direction} by {group.scheme!r} over {group.ranks} ranks: "
            f"{in_words(group.problem)}",
            columns,
            note=f"ranks idle {100 * self.idle_share:.1f} % of the time if only arithmetic takes "
            "time; link bytes are bytes sent, and as many are received; HBM bytes are those of the "
            "local attention",
        )
        lasts, out = int(self.flops.max(axis=0).sum()), self.out_bytes
        for rank in range(group.ranks):
            sums = (x[rank].sum() for x in (out, self.flops, self.hbm, self.merge, self.peak))
            sent, flops, *rest = map(int, sums)
            idle = 100 * (1 - flops / lasts)
            table.add(rank, _spans(group.rows(rank)), sent, flops / 1e12, idle, *rest)
        return table

    def rank_table(self, rank: int) -> report.Table:
        """Return a table with one row per step of one rank: keys present, tiles, and bytes sent."""
        group, out = self.group, self.out_bytes
        checks.place("rank", rank, group.ranks)
        table = report.Table(
            f"rank {rank} of {group.ranks}, {group.scheme!r}, {self.direction}",
            ("step", "keys of", "scores", "tiles", "TFLOP", "HBM B", "sends", "to", "link B"),
        )
        for n, step in enumerate(self.steps):
            number = n - (group.ulysses > 1)
            keys = str(group.source(rank, number)) if step.startswith(("ring", "home")) else ""
            scores = _scores(self, rank, number) if keys else ""
            sends = " ".join(name for name, x in self.sent.items() if x[rank, n])
            to = self.destination(rank, n)
            table.add(
                *(step, keys, scores, int(self.visits[rank, n]), self.flops[rank, n] / 1e12),
                *(int(self.hbm[rank, n]), sends, " ".join(map(str, to)), int(out[rank, n])),
            )
        return table


def _scores(account: Account, rank: int, step: int) -> str:
    """Return a text that describes the block of scores that a rank computes at a step."""
    group = account.group
    block_of = group.block if account.direction == "forward" else group.gradient_block
    block = block_of(rank, step)
    if block is None:
        return "none"
    shape = f"{block.problem.n_q:,} x {block.problem.n_kv:,}"
    return f"{shape} causal" if block.problem.causal else shape


def _spans(rows: np.ndarray) -> str:
    """Return positions in a sequence as text: "0:4 28:32", or "1::8" for every eighth position."""
    if len(rows) > 1 and len(steps := np.unique(np.diff(rows))) == 1 and steps[0] > 1:
        return f"{rows[0]}::{steps[0]}"
    breaks = np.flatnonzero(np.diff(rows) != 1) + 1
    return " ".join(f"{part[0]}:{part[-1] + 1}" for part in np.split(rows, breaks))


def zeros(group: Group, direction: str) -> np.ndarray:
    """Return zeros of shape (ranks, steps), to count bytes, FLOPs or the like."""
    return np.zeros((group.ranks, len(group.steps(direction))), np.int64)


def fields(counts: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of an `Account` as a dict, without the tensors that no rank sends."""
    return counts | {"sent": {name: x for name, x in counts["sent"].items() if x.any()}}
