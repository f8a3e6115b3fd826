"""`Group`: which rank holds which rows, and which block of scores it computes at which step.

In every scheme, the ranks form a ring of `ring` members, and each member is a team of `ulysses`
ranks:

- "ring" (Liu, Zaharia and Abbeel, arXiv:2310.01889): each member has one contiguous part of the
  rows. Members of the ring pass K and V on to the next member. At step s, a member has the K and V
  of the member that is s positions before it. Under a causal mask, the members with the first rows
  have no work in most steps.
- "zigzag" (Llama 3, arXiv:2407.21783, section 3.3.2; github.com/zhuzilin/ring-flash-attention): the
  rows are divided into 2 x ring chunks, and member j has chunks j and 2 x ring - 1 - j. In each
  step after the first, every member computes half of a block of scores.
- "striped" (Brandon et al., arXiv:2311.09431): member j has rows j, j + ring, j + 2 x ring ..., so
  every block is a causal triangle, with or without its diagonal.
- "ulysses" (Jacobs et al., arXiv:2309.14509): all ranks form one team. An all-to-all exchange gives
  each rank all rows, for some of the heads. After attention, a second exchange returns each rank's
  own rows, for all heads.
- "usp" (Fang and Zhao, arXiv:2405.07719): teams exchange heads, and form a zigzag ring.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from flashsim.errors import OptionError, ShapeError, UnsupportedError, own_errors, shown
from flashsim.problem import checks
from flashsim.problem.problem import Problem

#: The most ranks. The counts are about a dozen int64 tables of ranks x steps.
MOST_RANKS = 4096
SCHEMES = ("ring", "zigzag", "striped", "ulysses", "usp")
#: The order in which the rows are distributed over the members of the ring.
_ORDER = {"ring": "in order", "zigzag": "zigzag", "striped": "striped", "usp": "zigzag"}
#: Whose K and V a member has at a step: its own, those of an earlier member or of a later member.
OWN, BEFORE, AFTER = range(3)


class Block(NamedTuple):
    """A ring member's work in one step: the member's query rows `q` times the current keys `k`."""

    q: slice
    k: slice
    problem: Problem
    heads: slice = slice(None)
    kv_heads: slice = slice(None)


@own_errors
@dataclass(frozen=True)
class Group:
    """A problem distributed over ranks (GPUs), which form a ring of teams.

    Rank r is number ``r % ulysses`` of team ``r // ulysses``.

    Parameters
    ----------
    problem : Problem
        The whole problem, over all ranks: as many queries as keys, causal or without a mask.
    scheme : {"ring", "zigzag", "striped", "ulysses", "usp"}
    ulysses : int, optional
        For "usp": the number of ranks that exchange heads. Default: the largest number that divides
        the ranks and the key heads.

    Raises
    ------
    ShapeError
        If the number of ranks does not divide the rows or the heads as the scheme needs.
    UnsupportedError
        If the problem has a mask other than causal, packed sequences, pages, a bias, a score
        function, sinks or latent attention.
    OptionError, DTypeError
    """

    problem: Problem
    ranks: int
    scheme: str = "zigzag"
    ulysses: int = None  # type: ignore[assignment]  # filled in below

    def __post_init__(self) -> None:
        p = self.problem
        ranks = checks.positive_int("ranks", self.ranks)
        if ranks > MOST_RANKS:
            raise UnsupportedError(
                f"ranks= must be at most {MOST_RANKS:,}, because the result is a table with one "
                f"row per rank and step, got {ranks:,}"
            )
        checks.one_of("scheme", self.scheme, SCHEMES)
        object.__setattr__(self, "ranks", ranks)
        object.__setattr__(self, "ulysses", self._team_size(ranks))
        self._check_problem()
        parts = math.lcm(ranks, 2 * self.ring if self.order == "zigzag" else 1)
        if p.n_q % parts:
            raise ShapeError(
                f"scheme {self.scheme!r} over {ranks} ranks needs a sequence length divisible by "
                f"{parts}, got {p.n_q:,} rows; to fix it, {self._whole_parts(parts)}"
            )
        if p.heads % self.ulysses or p.kv_heads % self.ulysses:
            raise ShapeError(
                f"the number of ranks that exchange heads, {self.ulysses}, must divide "
                f"heads={p.heads} and kv_heads={p.kv_heads}; use 'usp' with "
                f"ulysses={math.gcd(ranks, p.kv_heads)}, or 'zigzag', which exchanges no heads"
            )

    def _whole_parts(self, parts: int) -> str:
        """Return a hint for error texts: how to make the sequence length divisible by `parts`.

        The hint recommends padding only for a causal mask, which hides the padding from real rows.
        """
        n = self.problem.n_q
        padded, cut = f"{-(-n // parts) * parts:,}", f"{n // parts * parts:,}"
        if self.problem.causal:
            return f"pad it at its end to {padded}" + f", or cut it to {cut}" * (n > parts)
        return (
            (f"cut it to {cut}" if n > parts else "use fewer ranks")
            + f"; pad it at its end to {padded} only with a causal mask: without a mask, every row "
            "would attend to the padding"
        )

    def _team_size(self, ranks: int) -> int:
        if self.scheme != "usp":
            team = ranks if self.scheme == "ulysses" else 1
            if self.ulysses not in (None, team):
                raise OptionError(
                    f"ulysses= is only for scheme 'usp', got ulysses={shown(self.ulysses)} with "
                    f"scheme {self.scheme!r}; leave out ulysses="
                )
            return team
        if self.ulysses is None:
            return math.gcd(ranks, self.problem.kv_heads)
        team = checks.positive_int("ulysses", self.ulysses)
        if ranks % team:
            raise OptionError(f"ulysses= must divide ranks=, got ulysses={team} and ranks={ranks}")
        return team

    def _check_problem(self) -> None:
        p = self.problem
        if p.fp8:
            raise UnsupportedError(
                f"attention over several ranks does not support {p.dtype}; use bfloat16"
            )
        if p.n_q != p.n_kv:
            raise ShapeError(
                f"ranks share one sequence, so n_q and n_kv must be equal, got n_q={p.n_q}, "
                f"n_kv={p.n_kv}"
            )
        fields = (
            *("window", "cu_seqlens_q", "bias", "block_mask", "mask", "page_size"),
            *("mask_mod", "score_mod", "sinks", "latent"),
        )
        present = [name for name in fields if getattr(p, name) not in (None, False)]
        if present:
            raise UnsupportedError(
                "attention over several ranks supports only a causal mask or no mask, got "
                f"{', '.join(present)}; leave these out, or use flashsim.run, which supports "
                "them on one rank"
            )

    # -- rows and neighbours of each rank -------------------------------------------------------

    @property
    def ring(self) -> int:
        """The number of members in the ring; each member is a team of ranks."""
        return self.ranks // self.ulysses

    @property
    def order(self) -> str:
        """How rows are distributed over ring members: "in order", "zigzag" or "striped"."""
        return _ORDER.get(self.scheme, "in order")

    @property
    def rows_a_rank(self) -> int:
        """The number of rows of q, k, v and out that each rank has at the start and at the end."""
        return self.problem.n_q // self.ranks

    @property
    def rows_a_member(self) -> int:
        """The number of query rows that each rank computes: all rows of the rank's team."""
        return self.problem.n_q // self.ring

    def member_rows(self, member: int) -> np.ndarray:
        """Return the positions of a ring member's rows in the sequence, as ascending int64."""
        checks.place("member", member, self.ring)
        n, ring = self.rows_a_member, self.ring
        if self.order == "striped":
            return np.arange(member, self.problem.n_q, ring)
        if self.order == "in order":
            return np.arange(member * n, (member + 1) * n)
        half = np.arange(n // 2)
        return np.concatenate([member * (n // 2) + half, (2 * ring - 1 - member) * (n // 2) + half])

    def rows(self, rank: int) -> np.ndarray:
        """Return the positions of a rank's rows in the sequence, an int64 array."""
        checks.place("rank", rank, self.ranks)
        member, number = divmod(rank, self.ulysses)
        n = self.rows_a_rank
        return self.member_rows(member)[number * n : (number + 1) * n]

    def team(self, rank: int) -> range:
        """Return the ranks of the team of `rank`; they exchange heads with each other."""
        first = rank // self.ulysses * self.ulysses
        return range(first, first + self.ulysses)

    def successor(self, rank: int) -> int:
        """Return the next rank in the ring, to which a rank sends its K and V."""
        return (rank + self.ulysses) % self.ranks

    def predecessor(self, rank: int) -> int:
        """Return the previous rank in the ring, from which a rank receives K and V."""
        return (rank - self.ulysses) % self.ranks

    def source(self, rank: int, step: int) -> int:
        """Return the rank whose K and V a rank has at a ring step."""
        return (rank - step * self.ulysses) % self.ranks

    # -- blocks of scores -----------------------------------------------------------------------

    def relation(self, rank: Any, step: Any) -> np.ndarray:
        """Return whose keys a rank has: its `OWN`, or those of a member `BEFORE` or `AFTER` it.

        For arrays of ranks and of steps, the result is an array, of type int8.
        """
        earlier = np.where(step <= rank // self.ulysses, BEFORE, AFTER)
        return np.where(step == 0, OWN, earlier).astype(np.int8)

    def relations(self) -> np.ndarray:
        """The value of `relation` for every rank and step, an int8 array of shape (ranks, ring)."""
        return self.relation(np.arange(self.ranks)[:, None], np.arange(self.ring))

    @cached_property
    def blocks(self) -> tuple[Block | None, Block | None, Block | None]:
        """The block of scores for each value of `relation`, or None for a fully masked block."""
        n = self.rows_a_member
        everything = slice(0, n)
        if not self.problem.causal:
            return (self._block(everything, everything),) * 3
        own = self._block(everything, everything, causal=True)
        if self.order == "zigzag":
            early, late = slice(0, n // 2), slice(n // 2, n)
            return own, self._block(everything, early), self._block(late, everything)
        if self.order == "striped":
            below = self._block(slice(1, n), slice(0, n - 1), causal=True) if n > 1 else None
            return own, own, below
        return own, self._block(everything, everything), None

    def _block(self, q: slice, k: slice, causal: bool = False) -> Block:
        p, team = self.problem, self.ulysses
        part = replace(
            p,
            n_q=q.stop - q.start,
            n_kv=k.stop - k.start,
            heads=p.heads // team,
            kv_heads=p.kv_heads // team,
            causal=causal,
        )
        return Block(q, k, part)

    def block(self, rank: int, step: int) -> Block | None:
        """Return a rank's block of scores in a ring step, or None if the block is fully masked."""
        return self.blocks[int(self.relation(rank, step))]

    @cached_property
    def own_parts(self) -> tuple[Block, Block | None]:
        """A member's own block of scores in the backward pass, split by heads into two parts.

        The first transfer of K and V runs while the first part is computed, and the last transfer
        of dK and dV while the second part is computed.
        """
        own = self.blocks[OWN]
        assert own is not None
        heads, group = own.problem.kv_heads, own.problem.group
        first = heads if self.ring == 1 else heads - heads // 2

        def part(start: int, stop: int) -> Block:
            n = stop - start
            cut = replace(own.problem, heads=n * group, kv_heads=n)
            return Block(*own[:2], cut, slice(start * group, stop * group), slice(start, stop))

        return part(0, first), part(first, heads) if first < heads else None

    def gradient_block(self, rank: int, step: int) -> Block | None:
        """Return the block of scores that a rank computes in a step of the backward pass.

        In the last step, number `ring`, the gradients reach the rank that owns the rows.
        """
        if step in (0, self.ring):
            return self.own_parts[step > 0]
        return self.block(rank, step)

    def steps(self, direction: str) -> tuple[str, ...]:
        """Return the names of a pass's steps: exchanges, ring steps, and return of gradients."""
        ring = tuple(f"ring {s}" for s in range(self.ring))
        home = ("home",) if direction == "backward" and self.ring > 1 else ()
        if self.ulysses == 1:
            return ring + home
        inputs, back = ("q k v", "out") if direction == "forward" else ("dout", "dq dk dv")
        return (f"exchange {inputs}", *ring, *home, f"exchange {back}")
