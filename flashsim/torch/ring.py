"""`ring_attention`: attention over a process group in which each rank stores a share of the rows.

`flashsim.distributed.Group` decides which blocks of scores each rank computes at each step, and
which tensors each rank sends where.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from inspect import unwrap
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from flashsim.api import dispatch, execution
from flashsim.distributed.group import SCHEMES, Block, Group
from flashsim.errors import DTypeError, ShapeError, UnsupportedError, reject_unknown, shown
from flashsim.problem import checks
from flashsim.problem.problem import Problem
from flashsim.torch import functional, ops
from flashsim.torch.combining import NOTHING, Share, merge_into
from flashsim.torch.process_group import DTYPES, Member, Parcel, Pending, parcel, room


@torch.compiler.disable
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    scheme: str = "zigzag",
    ulysses: int | None = None,
    causal: bool = False,
    softcap: float = 0.0,
    scale: float | None = None,
    algorithm: str = "flash2",
    deterministic: bool | None = None,
    backend: str | None = None,
    **unknown: Any,
) -> Tensor:
    """Compute attention, with a gradient, over a sequence divided among the ranks of a group.

    Every rank calls this function with its own rows (`shard`). Ranks send K and V to the next rank
    while the kernels of `attention` compute; some schemes exchange heads. The outputs of blocks of
    scores are merged by their LSE in float32. The backward pass also sends dK and dV, in float32,
    after K and V. Autocast casts q, k and v; ``torch.compile`` breaks the graph at the call.

    Parameters
    ----------
    q : Tensor, (batch, heads, n / ranks, head_dim)
        This rank's rows of the sequence, in the order of `scheme`.
    k, v : Tensor, (batch, kv_heads, n / ranks, ..)
    group : ProcessGroup, optional
        Default: all processes. Its backend must support the tensors' device: NCCL or gloo.
    scheme, ulysses
        See `flashsim.distributed.Group`. Without a mask, "ring" does the same as "zigzag".
    causal, softcap, scale, algorithm, deterministic, backend
        As in `attention`.

    Returns
    -------
    Tensor, like q with v's head_dim

    Raises
    ------
    RankError
        On every rank, if ranks disagree, or if one rejects its tensors, dies, or does not answer
        within the group's timeout.
    FlashSimError
        For a problem that cannot be divided among the ranks.
    """
    reject_unknown(unknown, unwrap(ring_attention).__kwdefaults__, "ring_attention")
    link = Member(group)
    try:
        q, k, v = functional.taken(q=q, k=k, v=v)
        spread = link.ranks, scheme, ulysses
        plan = _plan(q, k, v, spread, causal=causal, softcap=softcap, scale=scale)
        if algorithm not in functional.ALGORITHMS:
            raise UnsupportedError(
                f"ring_attention runs {', '.join(functional.ALGORITHMS)}, not {algorithm!r}; "
                "pass one of these as algorithm="
            )
        backend = functional.default_backend(q) if backend is None else backend
        dispatch.engine(backend)
        if deterministic is not None:
            checks.flag("deterministic", deterministic)
    except Exception as error:  # the other ranks must be told of any error
        link.ask(dict.fromkeys(_AGREED, 0), error).settle()
        raise AssertionError from error
    question = link.ask(_asked(plan, q))
    later = q.is_cuda and question.familiar  # the GPU gets its work before the ranks have answered
    if not later:
        question.settle()
    p = plan.problem
    how = {
        "softcap": p.softcap, "scale": p.scale, "algorithm": algorithm, "backend": backend,
    }  # fmt: skip
    out = _RingAttention.apply(q, k, v, _Part(plan, link, how, deterministic))
    if later:
        question.settle()
    return out


def shard(
    x: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    scheme: str = "zigzag",
    ulysses: int | None = None,
    dim: int = -2,
) -> Tensor:
    """Return this rank's rows, in the order of `scheme`, of a tensor with the complete sequence.

    Parameters
    ----------
    x : Tensor
        A tensor with the sequence along `dim`: q, k or v, but also token ids or positions.
    group, scheme, ulysses
        As in `ring_attention`; "usp" needs `ulysses`.

    Raises
    ------
    ShapeError
        If the sequence cannot be divided.
    """
    link = Member(group)
    if not isinstance(x, Tensor):
        raise DTypeError(f"x must be a torch.Tensor, got {type(x).__name__}")
    if not checks.is_int(dim) or not -x.ndim <= dim < x.ndim:
        raise ShapeError(
            f"dim= must be an axis of x, whose shape is {tuple(x.shape)}, got {shown(dim)}"
        )
    if scheme == "usp" and ulysses is None:
        raise ShapeError(
            "scheme 'usp' needs the number of ranks that exchange heads, which shard cannot "
            "derive from x; pass it as ulysses="
        )
    heads = link.ranks if scheme == "ulysses" else ulysses or 1
    whole = Group(Problem(x.shape[dim], heads=heads), link.ranks, scheme, ulysses)  # type: ignore[arg-type]
    rows = torch.from_numpy(whole.rows(link.rank)).to(x.device)
    return x.index_select(dim, rows)


#: Ranks, scheme, and how many ranks exchange heads.
_Spread = tuple[int, str, int | None]


def _plan(q: Tensor, k: Tensor, v: Tensor, spread: _Spread, **scores: Any) -> Group:
    """Return the `Group` for the complete problem, derived from the tensors of this rank."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ShapeError(
                f"{name} must be (batch, heads, rows of this rank, head_dim), got {tuple(x.shape)}"
            )
    if not q.dtype == k.dtype == v.dtype:
        raise DTypeError(
            f"q, k and v must have the same dtype, got {q.dtype}, {k.dtype}, {v.dtype}"
        )
    if q.is_meta:
        raise DTypeError(
            "tensors on the meta device have no numbers to send; use "
            "flashsim.distributed.count, which counts the bytes that would be sent and needs no "
            "tensors"
        )
    (batch, heads, n, d), (*lead, n_kv, d_k), dv = q.shape, k.shape, v.shape[-1]
    if lead[0] != batch or v.shape[:-1] != k.shape[:-1] or n_kv != n or d_k != d:
        raise ShapeError(
            "q, k and v must be (batch, heads, n, d), (batch, kv_heads, n, d) and (batch, "
            f"kv_heads, n, dv), got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    dtype = str(q.dtype).removeprefix("torch.")
    return _whole((n, d, dv, batch, heads, lead[1]), dtype, spread, **scores)


@lru_cache(maxsize=256)
def _whole(sizes: tuple[int, ...], dtype: str, spread: _Spread, **scores: Any) -> Group:
    (n, d, dv, batch, heads, kv_heads), (ranks, scheme, ulysses) = sizes, spread
    problem = Problem(n * ranks, n * ranks, d, dv, batch, heads, kv_heads, dtype, **scores)
    return Group(problem, ranks, scheme, ulysses)  # type: ignore[arg-type]  # None: filled in


_AGREED = (
    *("batch", "heads", "kv_heads", "rows", "head_dim", "head_dim_v", "dtype", "causal"),
    *("scheme", "ulysses", "scale and softcap"),
)


def _asked(plan: Group, q: Tensor) -> dict[str, int]:
    """Return the values that must be equal on all ranks, each as an integer."""
    p = plan.problem
    values = (
        *(p.batch, p.heads, p.kv_heads, q.shape[2], p.head_dim, p.head_dim_v),
        *(DTYPES.index(q.dtype), int(p.causal), SCHEMES.index(plan.scheme), plan.ulysses),
        hash((p.scale, p.softcap)),  # a hash of numbers is the same in every process
    )
    return dict(zip(_AGREED, values, strict=True))


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, one: _Part) -> Tensor:
        q, k, v = one.to_heads(Q=q, K=k, V=v)
        out, lse = one.forward(q, k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.one = one
        (out,) = one.to_rows(out=out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dout: Tensor) -> tuple[Tensor | None, ...]:
        one = ctx.one
        (given,) = one.to_heads(dout=dout[0])
        dq, dk, dv = one.backward(*ctx.saved_tensors, given)
        return (*one.to_rows(dQ=dq, dK=dk, dV=dv), None)


@dataclass(frozen=True)
class _Part:
    """Computes one rank's part of the forward and backward pass of ring attention."""

    plan: Group
    link: Member
    how: Mapping[str, Any]
    deterministic: bool | None

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Run the forward pass, and return out and the LSE of this rank's rows (and heads)."""
        plan, ring = self.plan, self.plan.ring
        keys = parcel(K=k, V=v)
        out = lse = None
        for step in range(ring):
            going = keys if step < ring - 1 else {}
            keys = room(going)
            pending = self.pass_on(step, (going, keys))
            block = plan.block(self.link.rank, step)
            if block is not None:
                part, part_lse = self.attention(block, q, k, v)
                if out is None or lse is None:
                    out, lse = part.float() if self.sums_wide(q) else part, part_lse
                else:
                    merge_into(out[:, :, block.q], lse[:, :, block.q], part, part_lse)
            pending.wait()
            if keys:
                k, v = keys.values()
        assert out is not None  # a rank sees its own keys
        assert lse is not None
        return out.to(q.dtype), lse

    def attention(self, block: Block, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Compute attention in one block of scores, and return its out and LSE."""
        ran = execution.run(
            *(q[:, :, block.q], k[:, :, block.k], v[:, :, block.k]),
            causal=block.problem.causal,
            **self.how,
        )
        return ran.out, ran.lse

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run the backward pass, and return the gradients of this rank's rows.

        Gradients of keys that another rank owns follow the keys around the ring to the owner. One
        block's dK and dV have the type in which the block was computed; sums of two or more are
        float32. The owner adds the gradients of the owner's block of scores, and rounds the sum
        once.
        """
        plan, ring = self.plan, self.plan.ring
        rows, (own_k, own_v) = (dout, out, lse, q), (k, v)
        if ring == 1:
            return self.gradients(plan.own_parts[0], *rows, k, v)
        keys, others, passing = parcel(K=k, V=v), NOTHING, NOTHING
        own: list[tuple[Block, Tensor, Tensor, Tensor]] = []
        for step in range(ring + 1):
            going = keys if step < ring - 1 else {}
            keys, arriving = room(going), self.arriving(step, own_k, own_v)
            pending = self.pass_on(step, (going, keys), (passing.parts, arriving.parts))
            block = plan.gradient_block(self.link.rank, step)
            visitors, passed = NOTHING, NOTHING
            if block is not None:
                dq, dk, dv = self.gradients(block, *rows, k, v)
                if step in (0, ring):
                    own.append((block, dq, dk, dv))
                else:
                    visitors = Share({"dQ": dq}, block.q)
                    passed = Share(parcel(dK=dk, dV=dv), block.k)
            pending.wait()
            k, v = keys.values() if keys else (own_k, own_v)
            if step == 1:
                others = visitors.widened(dQ=q) if ring > 2 else visitors
                passing = passed
            elif step > 1:
                passing = arriving
                if ring > step == 2:
                    passing = passing.widened(dK=own_k, dV=own_v)
                passing.add(passed)
                others.add(visitors)
        return (
            others.plus("dQ", q, [(block.heads, dq) for block, dq, _, _ in own]),
            passing.plus("dK", own_k, [(block.kv_heads, dk) for block, _, dk, _ in own]),
            passing.plus("dV", own_v, [(block.kv_heads, dv) for block, _, _, dv in own]),
        )

    def arriving(self, step: int, k: Tensor, v: Tensor) -> Share:
        """Allocate tensors that receive dK and dV: gradients of one block, or float32 sums."""
        everything = slice(0, k.shape[2])
        block = self.plan.block(self.plan.predecessor(self.link.rank), 1)
        if step < 2 or (step == 2 and block is None):
            return NOTHING
        if step > 2 or block is None:
            wide = torch.promote_types(k.dtype, torch.float32)
            return Share(
                {n: x.new_empty(x.shape, dtype=wide) for n, x in (("dK", k), ("dV", v))}, everything
            )
        of = lambda x: x.new_empty((*x.shape[:2], block.problem.n_kv, x.shape[3]))  # noqa: E731
        return Share({"dK": of(k), "dV": of(v)}, block.k)

    def gradients(
        self, block: Block, dout: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dQ, dK and dV of one block of scores, in the inputs' type."""
        q, out, lse, dout = (x[:, block.heads, block.q] for x in (q, out, lse, dout))
        k, v = (x[:, block.kv_heads, block.k] for x in (k, v))
        made = execution.backward(
            *(q, k, v, out, lse.contiguous(), dout),
            causal=block.problem.causal,
            deterministic=self.deterministic,
            **self.how,
        )
        return made.dq, made.dk, made.dv

    def sums_wide(self, q: Tensor) -> bool:
        """Return True if gradients of more than two blocks of scores are summed in float32.

        The gradients of two blocks are added and rounded at once, without a stored sum.
        """
        return self.plan.ring > 2 and q.dtype not in (torch.float32, torch.float64)

    # -- the link -------------------------------------------------------------------------------

    def pass_on(self, step: int, *parcels: tuple[Parcel, Parcel]) -> Pending:
        """Start to send parcels to the ring's next rank, and to receive from the previous one."""
        plan, rank = self.plan, self.link.rank
        after, before = plan.successor(rank), plan.predecessor(rank)
        names = " ".join(name for going, coming in parcels for name in going | coming)
        return self.link.exchange(
            [(going, after) for going, _ in parcels],
            [(coming, before) for _, coming in parcels],
            f"step {step}, {names} to rank {after} and from rank {before}",
        )

    def to_heads(self, **tensors: Tensor) -> list[Tensor]:
        """Swap this rank's rows of all heads for all rows of this rank's heads, in a team."""
        return self._all_to_all(tensors, split=1, join=2)

    def to_rows(self, **tensors: Tensor) -> list[Tensor]:
        """Swap all rows of this rank's heads for this rank's rows of all heads, in a team."""
        return self._all_to_all(tensors, split=2, join=1)

    def _all_to_all(self, tensors: dict[str, Tensor], split: int, join: int) -> list[Tensor]:
        """Cut tensors along axis `split`; send piece n to team rank n; join received pieces."""
        team, rank = self.plan.team(self.link.rank), self.link.rank
        if len(team) == 1:
            return [ops.readable(x) for x in tensors.values()]
        pieces = {name: x.chunk(len(team), dim=split) for name, x in tensors.items()}
        parcels = [
            parcel(**{name: those[n] for name, those in pieces.items()}) for n in range(len(team))
        ]
        going = [(parcel, to) for parcel, to in zip(parcels, team, strict=True) if to != rank]
        what = f"exchanging heads of {' '.join(tensors)} among ranks {team[0]} to {team[-1]}"
        coming = [(room(x), by) for x, by in going]
        self.link.exchange(going, coming, what).wait()
        came = [x for x, _ in coming]
        came.insert(rank - team[0], parcels[rank - team[0]])
        return [torch.cat([x[name] for x in came], dim=join) for name in tensors]
