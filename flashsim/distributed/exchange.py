"""Simulates ranks: the arrays in their memories, the transfers between them, and all counts."""

from collections.abc import Callable
from typing import Any

import numpy as np

from flashsim.distributed.account import QUANTITIES, Account, fields, zeros
from flashsim.distributed.group import Group
from flashsim.schedule.names import COMPUTE


class Rank(dict[str, np.ndarray]):
    """The arrays in one rank's memory by name; `peak` is the most bytes that they ever took."""

    peak = 0

    def put(self, **arrays: np.ndarray) -> None:
        """Add arrays to the rank's memory; an array of an existing name replaces the old one."""
        self.update(arrays)
        self.peak = max(self.peak, sum(x.nbytes for x in self.values()))

    def rename(self, name: str, to: str) -> None:
        """Rename an array; it replaces any array that has the new name."""
        self[to] = self.pop(name)

    def drop(self, *names: str) -> None:
        """Remove the arrays of these names from the rank's memory."""
        for name in names:
            del self[name]


class Ranks:
    """All ranks of a `Group` at step `now` of a pass, and their counts for each step so far."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.wide = np.dtype(group.problem.compute_dtype)
        self.ranks = [Rank() for _ in range(group.ranks)]

    def begin(self, direction: str, *tensors: str) -> None:
        """Start a pass in which the ranks send these tensors to each other."""
        self.made = {name: zeros(self.group, direction) for name in QUANTITIES}
        self.sent = {name: zeros(self.group, direction) for name in tensors}
        self.now = 0

    def account(self, direction: str) -> Account:
        """Return the `Account` (byte and FLOP counts) of all steps since `begin` was called."""
        peak = np.array([rank.peak for rank in self.ranks], np.int64)
        return Account(
            self.group, direction, **fields({"sent": self.sent, **self.made, "peak": peak})
        )

    def note(self, number: int, trace: Any) -> None:
        """Add the FLOPs, visits (tile pairs) and HBM bytes of a rank's kernels to its counts."""
        here = number, self.now
        self.made["flops"][here] += trace.flops("matmul")
        for stage in trace.stages:
            visits = (stage.events["op"] == COMPUTE) & (stage.events["visit"] >= 0)
            self.made["visits"][here] += int(visits.sum()) * stage.repeat
        self.made["hbm"][here] += trace.bytes()

    def touch(self, number: int, *arrays: np.ndarray) -> None:
        """Add to a rank's counts the bytes that it loads or stores in order to combine results."""
        self.made["merge"][number, self.now] += sum(x.nbytes for x in arrays)

    def add(self, number: int, total: np.ndarray, part: np.ndarray) -> None:
        """Add `part` to `total` in float32, and count the bytes that the addition moves."""
        total[:] = total.astype(self.wide) + part.astype(self.wide)
        self.touch(number, total, total, part)

    def convert(self, number: int, name: str, dtype: np.dtype) -> None:
        """Convert a rank's array to another type, and count the bytes that the conversion moves."""
        rank = self.ranks[number]
        rank.put(converted=rank[name].astype(dtype))
        self.touch(number, rank[name], rank["converted"])
        rank.rename("converted", name)

    def send(self, tensor: str, source: str, target: str) -> None:
        """Send each rank's array `source`, if it has one, to the next rank as `target`."""
        for number, rank in enumerate(self.ranks):
            if source in rank:
                self.sent[tensor][number, self.now] += rank[source].nbytes
                to = self.ranks[self.group.successor(number)]
                to.put(**{target: rank[source].copy()})

    def exchange(self, names: dict[str, str], before: str) -> None:
        """Exchange arrays in each team: send the n-th piece of an array to the n-th rank.

        If `before` is "given", each rank has some rows of all heads, and gets all rows of some
        heads; if it is "heads", the reverse. The old arrays stay in memory, under names that begin
        with the text `before`.
        """
        team, (split, join) = self.group.ulysses, (1, 2) if before == "given" else (2, 1)
        if team == 1:
            return
        for name, tensor in names.items():
            pieces = [np.split(rank[name], team, axis=split) for rank in self.ranks]
            for number, rank in enumerate(self.ranks):
                members = self.group.team(number)
                for other in members:
                    if other != number:
                        self.sent[tensor][other, self.now] += pieces[other][number % team].nbytes
                rank[f"{before}_{name}"] = rank[name]
                parts = [pieces[other][number % team] for other in members]
                rank.put(**{name: np.concatenate(parts, axis=join)})
        self.now += 1

    def gather(self, name: str, rows_of: Callable[[int], np.ndarray], *, heads: bool) -> np.ndarray:
        """Return one array of the whole sequence, assembled from all ranks' rows and heads."""
        p, first = self.group.problem, self.ranks[0][name]
        each, team = first.shape[1], self.group.ulysses if heads else 1
        whole = np.empty((p.batch, each * team, p.n_q, *first.shape[3:]), first.dtype)
        for number, rank in enumerate(self.ranks):
            there = slice(number % team * each, (number % team + 1) * each)
            whole[:, there, rows_of(number // team)] = rank[name]
        return whole
