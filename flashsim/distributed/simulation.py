"""`run`: attention over several ranks, executed with real arrays in one process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flashsim import report
from flashsim.algorithms.merge import merged
from flashsim.api import array_libraries, dispatch, execution, inputs
from flashsim.api.arrays import check_like, expand, require_numpy, squeeze
from flashsim.distributed.account import Account
from flashsim.distributed.exchange import Rank, Ranks
from flashsim.distributed.group import Block, Group
from flashsim.errors import own_errors
from flashsim.problem.hardware import Device
from flashsim.problem.problem import numpy_dtype
from flashsim.schedule.tiling import Tiling


def _card(result: Spread | SpreadGradients) -> str:
    return report.card(result) + report.tabled(result.account)


@own_errors
@dataclass(frozen=True, eq=False)
class Spread:
    """The result of `run`: out and LSE in the sequence's order, and the `Account` of all ranks.

    `out` has the shape of q with v's head_dim, and `lse` has q's shape without its last axis.
    `account` has the bytes and FLOPs of the run, equal to the result of `count`.
    """

    out: Any
    lse: Any
    account: Account
    _run: _SpreadRun = field(repr=False)

    __repr__ = report.short
    _repr_html_ = _card

    @property
    def group(self) -> Group:
        """The `Group`, with the rows of each rank."""
        return self.account.group

    def backward(self, dout: Any) -> SpreadGradients:
        """Compute the gradients for `dout`, distributed over ranks as in the forward pass.

        Raises
        ------
        ShapeError, DTypeError
        """
        (dout,) = array_libraries.take(self._run.host, dout=dout)
        check_like("dout", dout, self.out, "out")
        require_numpy("simulator", dout=dout)
        return self._run.backward(expand(dout))


@dataclass(frozen=True, eq=False)
class SpreadGradients:
    """Gradients in the sequence's order, shaped and typed like the inputs, and their `Account`."""

    dq: Any
    dk: Any
    dv: Any
    account: Account

    __repr__ = report.short
    _repr_html_ = _card


@own_errors
def run(
    q: Any,
    k: Any,
    v: Any,
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
    backend: str = "simulator",
) -> Spread:
    """Run attention over several simulated ranks, all in this process, each with its own arrays.

    A rank can access only its own rows and the arrays sent to it. `flashsim.run` computes each
    rank's block of scores with a trace. The results of a rank's blocks of scores are merged by
    their LSE, in float32.

    Parameters
    ----------
    q, k, v : array, (batch, heads, n, head_dim), (batch, kv_heads, n, ..)
        The whole sequence, in its own order, in CPU memory; the first axes may be missing, as in
        `flashsim.run`. Results are arrays of the same library, with as many axes.
    ranks, scheme, ulysses
        See `Group`.
    causal, softcap, scale, algorithm, tiling, device, backend
        As in `flashsim.run`; the backend is "simulator" or "numba".

    Raises
    ------
    FlashSimError
    """
    host = array_libraries.host_of(q)
    q, k, v = array_libraries.take(host, q=q, k=k, v=v)
    request = inputs.Request(causal=causal, softcap=softcap, scale=scale, tiling=tiling)
    asked = inputs.prepare(q, k, v, request)
    backend = dispatch.backend_name(backend)
    require_numpy(backend, q=asked.q, k=asked.k, v=asked.v)
    group = Group(asked.problem, ranks, scheme, ulysses)  # type: ignore[arg-type]  # None: filled in
    how = {"algorithm": algorithm, "tiling": tiling, "device": device, "backend": backend}
    return _SpreadRun(group, how, host, asked.ndim).forward(asked.q, asked.k, asked.v)


class _SpreadRun(Ranks):
    """Runs both passes of a problem; ranks keep the tensors that the backward pass needs."""

    def __init__(
        self, group: Group, how: dict[str, Any], host: array_libraries.Host, ndim: int
    ) -> None:
        super().__init__(group)
        self.how, self.host, self.ndim = how, host, ndim
        # Two members merge once, directly into the result.
        self.merges_wide = group.ring > 2 and numpy_dtype(group.problem.dtype) != self.wide

    # -- forward --------------------------------------------------------------------------------

    def forward(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Spread:
        """Run the forward pass of all ranks, step by step."""
        group = self.group
        self.begin("forward", "Q", "K", "V", "out")
        for number, rank in enumerate(self.ranks):
            rows = group.rows(number)
            rank.put(**{name: x[:, :, rows] for name, x in zip("qkv", (q, k, v), strict=True)})
        self.exchange({"q": "Q", "k": "K", "v": "V"}, "given")
        for step in range(group.ring):
            if step < group.ring - 1:
                self._pass_keys(step)
            for number, rank in enumerate(self.ranks):
                self._forward_step(number, rank, step)
            self._arrive()
            self.now += 1
        self.now -= 1  # a part of the last step
        for number in range(group.ranks) if self.merges_wide else ():
            self.convert(number, "out", q.dtype)
        self.now += 1
        lse = self.gather("lse", group.member_rows, heads=True)
        self.exchange({"out": "out"}, "heads")
        out = self.gather("out", group.rows, heads=False)
        account = self.account("forward")
        for number, rank in enumerate(self.ranks):
            kept = {name: rank[name] for name in ("q", "k", "v", "lse")}
            self.ranks[number] = Rank(kept, out=rank.get("heads_out", rank["out"]))
        return Spread(self._give(out), self._give(lse, self.ndim - 1), account, self)

    def _give(self, array: np.ndarray, ndim: int | None = None) -> Any:
        """Return an array in the user's library, with as many axes as the inputs."""
        return self.host.give(squeeze(array, self.ndim if ndim is None else ndim))

    def _forward_step(self, number: int, rank: Rank, step: int) -> None:
        block = self.group.block(number, step)
        if block is None:
            return
        k, v = self._visiting(rank, step)
        ran = execution.run(
            *(rank["q"][:, :, block.q], k[:, :, block.k], v[:, :, block.k]), **self._question(block)
        )
        self.note(number, ran.trace)
        if step == 0:
            rank.put(out=ran.out, lse=ran.lse)
            if self.merges_wide:
                self.convert(number, "out", self.wide)
            return
        rank.put(part=ran.out, part_lse=ran.lse)
        old, old_lse = rank["out"][:, :, block.q], rank["lse"][:, :, block.q]
        new, new_lse = merged(old.astype(self.wide), old_lse, ran.out.astype(self.wide), ran.lse)
        self.touch(number, *(old, old_lse) * 2, ran.out, ran.lse)
        old[:], old_lse[:] = new, new_lse
        rank.drop("part", "part_lse")

    # -- backward -------------------------------------------------------------------------------

    def backward(self, dout: np.ndarray) -> SpreadGradients:
        """Run the backward pass of all ranks, step by step.

        The dK and dV of a member's keys follow these keys round the ring until they reach the rank
        that owns the keys.
        """
        group = self.group
        self.begin("backward", "dout", "K", "V", "dQ", "dK", "dV")
        for number, rank in enumerate(self.ranks):
            self.ranks[number] = Rank({name: rank[name] for name in ("q", "k", "v", "out", "lse")})
            self.ranks[number].put(dout=dout[:, :, group.rows(number)])
        self.exchange({"dout": "dout"}, "given")
        for step in range(group.ring + (group.ring > 1)):
            if step < group.ring - 1:
                self._pass_keys(step)
            if step > 1:
                self._pass_gradients()
            for number, rank in enumerate(self.ranks):
                self._backward_step(number, rank, step)
            self._arrive()
            self.now += 1
        self.now -= 1  # a part of the last step
        for number, rank in enumerate(self.ranks) if group.ring > 1 else ():
            self._come_home(number, rank)
        self.now += 1
        self.exchange({"dq": "dQ", "dk": "dK", "dv": "dV"}, "heads")
        dq, dk, dv = (
            self._give(self.gather(name, group.rows, heads=False)) for name in ("dq", "dk", "dv")
        )
        return SpreadGradients(dq, dk, dv, self.account("backward"))

    def _backward_step(self, number: int, rank: Rank, step: int) -> None:
        block, ring = self.group.gradient_block(number, step), self.group.ring
        parts = {} if block is None else self._gradients(number, rank, step, block)
        if ring == 1:
            rank.put(**parts)
        elif step in (0, ring):
            rank.put(**{f"own{step}_{name}": x for name, x in parts.items()})
        elif step == 1:  # the first dk and dv are sent in the input type
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
                    self.add(number, rank[name][:, :, rows], part)
        for name in ("part_dq", "part_dk", "part_dv", "dk_sent", "dv_sent"):
            rank.pop(name, None)

    def _begin_sums(self, number: int, rank: Rank, *names: str) -> None:
        """Create float32 zeros for all rows, to which gradients of several blocks are added."""
        for name in names:
            total = np.zeros(rank[name[1:]].shape, self.wide)
            rank.put(**{f"sum_{name}": total})
            self.touch(number, total)
            if name in rank:
                there = total[:, :, self._given_rows(number, name)]
                there[:] = rank[name]
                self.touch(number, rank[name], there)
        for name in names:
            rank.rename(f"sum_{name}", name)

    def _given_rows(self, number: int, name: str) -> slice:
        """Return the rows whose gradients get terms from a block of scores at ring step 1.

        For dQ, this is the member's block; for dK and dV, it is the previous member's block.
        """
        group = self.group
        block = group.block(number if name == "dq" else group.predecessor(number), 1)
        assert block is not None
        return block.q if name == "dq" else block.k

    def _gradients(self, number: int, rank: Rank, step: int, block: Block) -> dict[str, np.ndarray]:
        k, v = self._visiting(rank, step if step < self.group.ring else 0)
        q, out, lse, dout = (
            rank[name][:, block.heads, block.q] for name in ("q", "out", "lse", "dout")
        )
        k, v = (x[:, block.kv_heads, block.k] for x in (k, v))
        gradients = execution.backward(q, k, v, out, lse, dout, **self._question(block))
        self.note(number, gradients.trace)
        return {"dq": gradients.dq, "dk": gradients.dk, "dv": gradients.dv}

    def _come_home(self, number: int, rank: Rank) -> None:
        """Add the gradients of other blocks to those of a rank's own block of scores."""
        ring = self.group.ring
        parts = [part for part in (0, ring) if f"own{part}_dq" in rank]
        for name in ("dq", "dk", "dv"):
            total = np.concatenate([rank[f"own{part}_{name}"] for part in parts], axis=1)
            self.touch(number, total, total)
            if name in rank:
                rows = self._given_rows(number, name) if ring == 2 else slice(None)
                there = total[:, :, rows]
                there[:] = rank[name].astype(self.wide) + there.astype(self.wide)
                self.touch(number, rank[name])
            rank.put(**{f"total_{name}": total})
        for name in ("dq", "dk", "dv"):
            rank.drop(*(f"own{part}_{name}" for part in parts))
            rank.rename(f"total_{name}", name)

    def _question(self, block: Block) -> dict[str, Any]:
        p = block.problem
        asked = {"causal": p.causal, "softcap": p.softcap, "scale": p.scale, "trace": True}
        return {**asked, **self.how}

    # -- transfers between ranks ----------------------------------------------------------------

    def _visiting(self, rank: Rank, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the K and V that a rank has at a step: its own or another ring member's."""
        return (rank["k"], rank["v"]) if step == 0 else (rank["visiting_k"], rank["visiting_v"])

    def _pass_keys(self, step: int) -> None:
        """Let every rank send its K and V of this step to the next rank in the ring."""
        for name in ("k", "v"):
            self.send(name.upper(), f"visiting_{name}" if step else name, f"incoming_{name}")

    def _pass_gradients(self) -> None:
        """Let every rank send its dK and dV, if it has any, to the next rank in the ring."""
        for name, tensor in (("dk", "dK"), ("dv", "dV")):
            for rank in self.ranks:
                if name in rank:
                    rank.rename(name, f"{name}_sent")
            self.send(tensor, f"{name}_sent", name)

    def _arrive(self) -> None:
        """Make the K and V that arrived during a step the current K and V of the next step."""
        for rank in self.ranks:
            for name in ("k", "v"):
                rank.pop(f"visiting_{name}", None)
                if f"incoming_{name}" in rank:
                    rank.rename(f"incoming_{name}", f"visiting_{name}")
