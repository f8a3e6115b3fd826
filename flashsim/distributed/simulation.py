"""`simulate`: attention over several ranks, executed with real arrays in one process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flashsim import report
from flashsim.algorithms.merge import merged
from flashsim.api import execution, inputs
from flashsim.distributed.account import Account, fields, zeros
from flashsim.distributed.group import Block, Group
from flashsim.errors import own_errors
from flashsim.problem.hardware import Device
from flashsim.problem.problem import numpy_dtype
from flashsim.schedule.names import COMPUTE
from flashsim.schedule.tiling import Tiling


@dataclass(frozen=True, eq=False)
class Spread:
    """What `simulate` returns: results in the sequence's order, and what every rank did.

    Attributes
    ----------
    out : ndarray, (batch, heads, n, head_dim_v)
    lse : ndarray, (batch, heads, n)
    account : Account
        What was executed; equal to `count`.
    """

    out: np.ndarray
    lse: np.ndarray
    account: Account
    _run: _Run = field(repr=False)

    __repr__ = report.short

    def _repr_html_(self) -> str:
        return report.card(self) + report.tabled(self.account)

    @property
    def group(self) -> Group:
        """Who held what."""
        return self.account.group

    def backward(self, dout: np.ndarray) -> SpreadGradients:
        """Gradients, by the same scheme.

        Parameters
        ----------
        dout : ndarray, like `out`

        Raises
        ------
        ShapeError, DTypeError
        """
        inputs.require_numpy("numpy", dout=dout)
        inputs.check_like("dout", dout, self.out, "out")
        return self._run.backward(dout)


@dataclass(frozen=True, eq=False)
class SpreadGradients:
    """Gradients in the sequence's order, shaped and typed like the inputs; what every rank did."""

    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    account: Account

    __repr__ = report.short

    def _repr_html_(self) -> str:
        return report.card(self) + report.tabled(self.account)


@own_errors
def simulate(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    ranks: int,
    scheme: str = "zigzag",
    ulysses: int | None = None,
    causal: bool = False,
    softcap: float = 0.0,
    scale: float | None = None,
    algorithm: str = "flash2",
    tiling: Tiling | None = None,
    device: str | Device = "H100",
    backend: str = "numpy",
) -> Spread:
    """Attention over several ranks, each of which has arrays of its own; all in this process.

    A rank sees its own rows and what it was sent, nothing else. Each block is executed by
    `flashsim.run` with a trace; blocks are merged by their LSE in float32.

    Parameters
    ----------
    q, k, v : ndarray, (batch, heads, n, head_dim), (batch, kv_heads, n, ..)
        The whole sequence, in its own order.
    ranks, scheme, ulysses
        See `Group`.
    causal, softcap, scale, algorithm, tiling, device, backend
        As in `flashsim.run`; the backend is "numpy" or "numba".

    Returns
    -------
    Spread
        With `backward(dout)`.

    Raises
    ------
    FlashSimError
    """
    absent = dict.fromkeys(
        ("window", "bias", "mask", "block_mask", "cu_seqlens_q", "cu_seqlens_k"), None
    )
    question: dict[str, Any] = {"causal": causal, "softcap": softcap, "scale": scale, **absent}
    asked = inputs.prepare(q, k, v, tiling=tiling, nan_policy="propagate", **question)
    inputs.require_numpy(backend, q=asked.q, k=asked.k, v=asked.v)
    group = Group(asked.problem, ranks, scheme, ulysses)  # type: ignore[arg-type]  # None: filled in
    how = {"algorithm": algorithm, "tiling": tiling, "device": device, "backend": backend}
    return _Run(group, how).forward(asked.q, asked.k, asked.v)


class _Rank:
    """The arrays that one rank holds, by name, and the most bytes that they ever took."""

    def __init__(self) -> None:
        self.arrays: dict[str, np.ndarray] = {}
        self.peak = 0

    def __getitem__(self, name: str) -> np.ndarray:
        return self.arrays[name]

    def __contains__(self, name: str) -> bool:
        return name in self.arrays

    def put(self, **arrays: np.ndarray) -> None:
        """Hold arrays, in place of those of the same names."""
        self.arrays |= arrays
        self.peak = max(self.peak, sum(x.nbytes for x in self.arrays.values()))

    def take(self, name: str) -> np.ndarray:
        """Hold an array no longer."""
        return self.arrays.pop(name)

    def drop(self, *names: str) -> None:
        """Hold arrays no longer."""
        for name in names:
            del self.arrays[name]


class _Run:
    """Both passes of one question: ranks keep from the first what the second wants."""

    def __init__(self, group: Group, how: dict[str, Any]) -> None:
        self.group, self.how = group, how
        p = group.problem
        self.wide = np.dtype(p.compute_dtype)
        self.narrow = np.dtype(numpy_dtype(p.dtype)) != self.wide
        # Two members merge once, straight to the result.
        self.merges_wide = group.ring > 2 and self.narrow
        self.ranks = [_Rank() for _ in range(group.ranks)]

    # -- forward --------------------------------------------------------------------------------

    def forward(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Spread:
        """All ranks, step by step."""
        group = self.group
        self._begin("forward", "Q", "K", "V", "out")
        for number, rank in enumerate(self.ranks):
            rows = group.rows(number)
            rank.put(**{name: x[:, :, rows] for name, x in zip("qkv", (q, k, v), strict=True)})
        self._to_heads({"q": "Q", "k": "K", "v": "V"})
        for step in range(group.ring):
            if step < group.ring - 1:
                self._pass_keys(step)
            for number, rank in enumerate(self.ranks):
                self._forward_step(number, rank, step)
            self._arrive(step)
            self.now += 1
        for rank in self.ranks:
            if self.merges_wide:
                self._narrow(rank, "out", q.dtype, -1)
        lse = self._gather("lse", group.member_rows, heads=True)
        self._to_rows({"out": "out"})
        out = self._gather("out", group.rows, heads=False)
        account = self._account("forward")
        for rank in self.ranks:
            kept = {name: rank[name] for name in ("q", "k", "v", "lse")}
            rank.arrays = {**kept, "out": rank.arrays.get("heads_out", rank["out"])}
        return Spread(out, lse, account, self)

    def _forward_step(self, number: int, rank: _Rank, step: int) -> None:
        block = self.group.block(number, step)
        if block is None:
            return
        k, v = self._visiting(rank, step)
        ran = execution.run(
            *(rank["q"][:, :, block.q], k[:, :, block.k], v[:, :, block.k]),
            **self._question(block),
        )
        self._note(number, ran.trace)
        if step == 0:
            rank.put(out=ran.out, lse=ran.lse)
            if self.merges_wide:
                self._widen(rank, "out", number)
            return
        rank.put(part=ran.out, part_lse=ran.lse)
        old, old_lse = rank["out"][:, :, block.q], rank["lse"][:, :, block.q]
        new, new_lse = merged(old.astype(self.wide), old_lse, ran.out.astype(self.wide), ran.lse)
        self.made["merge"][number, self.now] += 2 * (old.nbytes + old_lse.nbytes)
        self.made["merge"][number, self.now] += ran.out.nbytes + ran.lse.nbytes
        old[:], old_lse[:] = new, new_lse
        rank.drop("part", "part_lse")

    # -- backward -------------------------------------------------------------------------------

    def backward(self, dout: np.ndarray) -> SpreadGradients:
        """All ranks, step by step; dK and dV of others' keys follow them, and end at home."""
        group = self.group
        self._begin("backward", "dout", "K", "V", "dQ", "dK", "dV")
        for number, rank in enumerate(self.ranks):
            kept = {name: rank[name] for name in ("q", "k", "v", "out", "lse")}
            rank.arrays, rank.peak = kept, 0
            rank.put(dout=dout[:, :, group.rows(number)])
        self._to_heads({"dout": "dout"})
        for step in range(group.ring + (group.ring > 1)):
            if step < group.ring - 1:
                self._pass_keys(step)
            if step > 1:
                self._pass_gradients()
            for number, rank in enumerate(self.ranks):
                self._backward_step(number, rank, step)
            self._arrive(step)
            self.now += 1
        self.now -= 1  # a part of the last step
        for number, rank in enumerate(self.ranks) if group.ring > 1 else ():
            self._come_home(number, rank)
        self.now += 1
        self._to_rows({"dq": "dQ", "dk": "dK", "dv": "dV"})
        dq, dk, dv = (self._gather(name, group.rows, heads=False) for name in ("dq", "dk", "dv"))
        return SpreadGradients(dq, dk, dv, self._account("backward"))

    def _backward_step(self, number: int, rank: _Rank, step: int) -> None:
        block, ring = self.group.gradient_block(number, step), self.group.ring
        made = None if block is None else self._gradients(number, rank, step, block)
        parts = {} if made is None else {"dq": made.dq, "dk": made.dk, "dv": made.dv}
        if ring == 1:
            rank.put(**parts)
        elif step in (0, ring):
            rank.put(**{f"own{step}_{name}": x for name, x in parts.items()})
        elif step == 1:  # dk and dv set out as they are
            rank.put(**parts)
            if ring > 2:
                self._begin_sums(number, rank, "dq")
        else:
            rank.put(**{f"part_{name}": x for name, x in parts.items()})
            if step == 2:
                self._begin_sums(number, rank, "dk", "dv")
            if block is not None:
                for name, part in parts.items():
                    rows = block.q if name == "dq" else block.k
                    self._add(number, rank[name][:, :, rows], part)
        names = [f"part_{name}" for name in ("dq", "dk", "dv")]
        rank.drop(*(name for name in (*names, "dk_sent", "dv_sent") if name in rank))

    def _begin_sums(self, number: int, rank: _Rank, *names: str) -> None:
        """What one block gave, if any, as sums to add to: all rows, float32."""
        for name in names:
            total = np.zeros(rank[name[1:]].shape, self.wide)
            rank.put(**{f"sum_{name}": total})
            self._touch(number, total)
            if name in rank:
                there = total[:, :, self._given_rows(number, name)]
                there[:] = rank[name]
                self._touch(number, rank[name], there)
        for name in names:
            rank.arrays[name] = rank.take(f"sum_{name}")

    def _given_rows(self, number: int, name: str) -> slice:
        """Of which rows the first block after a member's own gives a gradient: it, or to it."""
        group = self.group
        block = group.block(number if name == "dq" else group.predecessor(number), 1)
        assert block is not None
        return block.q if name == "dq" else block.k

    def _gradients(self, number: int, rank: _Rank, step: int, block: Block) -> Any:
        k, v = self._visiting(rank, step if step < self.group.ring else 0)
        q, out, lse, dout = (
            rank[name][:, block.heads, block.q] for name in ("q", "out", "lse", "dout")
        )
        k, v = (x[:, block.kv_heads, block.k] for x in (k, v))
        made = execution.backward(q, k, v, out, lse, dout, **self._question(block))
        self._note(number, made.trace)
        return made

    def _come_home(self, number: int, rank: _Rank) -> None:
        """To what other blocks gave the own one is added, of whose heads each part has some."""
        ring = self.group.ring
        parts = [part for part in (0, ring) if f"own{part}_dq" in rank]
        for name in ("dq", "dk", "dv"):
            total = np.concatenate([rank[f"own{part}_{name}"] for part in parts], axis=1)
            self._touch(number, total, total)
            if name in rank:
                rows = self._given_rows(number, name) if ring == 2 else slice(None)
                there = total[:, :, rows]
                there[:] = rank[name].astype(self.wide) + there.astype(self.wide)
                self._touch(number, rank[name])
            rank.put(**{f"total_{name}": total})
        for name in ("dq", "dk", "dv"):
            rank.drop(*(f"own{part}_{name}" for part in parts))
            rank.arrays[name] = rank.take(f"total_{name}")

    def _add(self, number: int, total: np.ndarray, part: np.ndarray) -> None:
        """Add a part to a sum, in float32."""
        total[:] = total.astype(self.wide) + part.astype(self.wide)
        self._touch(number, total, total, part)

    def _touch(self, number: int, *arrays: np.ndarray) -> None:
        """Count arrays that combining loads or stores."""
        self.made["merge"][number, self.now] += sum(x.nbytes for x in arrays)

    def _question(self, block: Block) -> dict[str, Any]:
        p = block.problem
        asked = {"causal": p.causal, "softcap": p.softcap, "scale": p.scale, "trace": True}
        return {**asked, **self.how}

    # -- what is on its way ---------------------------------------------------------------------

    def _visiting(self, rank: _Rank, step: int) -> tuple[np.ndarray, np.ndarray]:
        """The K and V of a step: a rank's own, or a visitor's."""
        return (rank["k"], rank["v"]) if step == 0 else (rank["visiting_k"], rank["visiting_v"])

    def _pass_keys(self, step: int) -> None:
        """Every rank sends on the K and V that it computes with now."""
        for name, tensor in (("k", "K"), ("v", "V")):
            self._send(tensor, f"visiting_{name}" if step else name, f"incoming_{name}")

    def _pass_gradients(self) -> None:
        """Every rank sends the dK and dV that it has, if it has any."""
        for name, tensor in (("dk", "dK"), ("dv", "dV")):
            for rank in self.ranks:
                if name in rank:
                    rank.arrays[f"{name}_sent"] = rank.take(name)
            self._send(tensor, f"{name}_sent", name)

    def _send(self, tensor: str, source: str, target: str) -> None:
        for number, rank in enumerate(self.ranks):
            if source in rank:
                self.sent[tensor][number, self.now] += rank[source].nbytes
                to = self.ranks[self.group.successor(number)]
                to.put(**{target: rank[source].copy()})

    def _arrive(self, step: int) -> None:
        """What came in during a step is what the next one computes with."""
        for rank in self.ranks:
            for name in ("k", "v"):
                rank.arrays.pop(f"visiting_{name}", None)
                if f"incoming_{name}" in rank:
                    rank.arrays[f"visiting_{name}"] = rank.take(f"incoming_{name}")

    def _to_heads(self, names: dict[str, str]) -> None:
        """All to all in each team: from some rows of all heads to all rows of some heads."""
        self._exchange(names, "given", split=1, join=2)

    def _to_rows(self, names: dict[str, str]) -> None:
        """The way back."""
        self._exchange(names, "heads", split=2, join=1)

    def _exchange(self, names: dict[str, str], before: str, split: int, join: int) -> None:
        """Each rank's n-th piece along one axis goes to its team's n-th, to be joined in order.

        What was there stays, under a name that begins with `before`.
        """
        team = self.group.ulysses
        if team == 1:
            return
        for name, tensor in names.items():
            pieces = [np.split(rank[name], team, axis=split) for rank in self.ranks]
            for number, rank in enumerate(self.ranks):
                members = self.group.team(number)
                for other in members:
                    if other != number:
                        self.sent[tensor][other, self.now] += pieces[other][number % team].nbytes
                rank.arrays[f"{before}_{name}"] = rank[name]
                parts = [pieces[other][number % team] for other in members]
                rank.put(**{name: np.concatenate(parts, axis=join)})
        self.now += 1

    # -- types and counts -----------------------------------------------------------------------

    def _widen(self, rank: _Rank, name: str, number: int) -> None:
        narrow = rank[name]
        rank.put(widened=narrow.astype(self.wide))
        self.made["merge"][number, self.now] += narrow.nbytes + rank["widened"].nbytes
        rank.arrays[name] = rank.take("widened")

    def _narrow(self, rank: _Rank, name: str, dtype: np.dtype, step: int) -> None:
        """To the type of the result; counted `step` steps from the one that comes next."""
        wide = rank[name]
        rank.put(narrowed=wide.astype(dtype))
        number = self.ranks.index(rank)
        self.made["merge"][number, self.now + step] += wide.nbytes + rank["narrowed"].nbytes
        rank.arrays[name] = rank.take("narrowed")

    def _begin(self, direction: str, *tensors: str) -> None:
        names = ("flops", "visits", "hbm", "merge")
        self.made = {name: zeros(self.group, direction) for name in names}
        self.sent = {name: zeros(self.group, direction) for name in tensors}
        self.now = 0

    def _note(self, number: int, trace: Any) -> None:
        here = number, self.now
        self.made["flops"][here] += trace.flops("matmul")
        for stage in trace.stages:
            visits = (stage.events["op"] == COMPUTE) & (stage.events["visit"] >= 0)
            self.made["visits"][here] += int(visits.sum()) * stage.repeat
        self.made["hbm"][here] += trace.bytes()

    def _account(self, direction: str) -> Account:
        peak = np.array([rank.peak for rank in self.ranks], np.int64)
        return Account(
            self.group, direction, **fields({"sent": self.sent, **self.made, "peak": peak})
        )

    def _gather(self, name: str, rows_of: Any, *, heads: bool) -> np.ndarray:
        """The whole array, from every rank's rows (and, in a team, heads)."""
        p, team = self.group.problem, self.group.ulysses
        first = self.ranks[0][name]
        n_heads = first.shape[1] * (team if heads else 1)
        whole = np.empty((p.batch, n_heads, p.n_q, *first.shape[3:]), first.dtype)
        for number, rank in enumerate(self.ranks):
            if heads:
                each = first.shape[1]
                place = slice(number % team * each, (number % team + 1) * each)
                whole[:, place, rows_of(number // team)] = rank[name]
            else:
                whole[:, :, rows_of(number)] = rank[name]
        return whole
