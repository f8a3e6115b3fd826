"""`count`: the bytes and FLOPs of attention over several ranks, without a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from flashsim.api import counting
from flashsim.counts.traffic import Traffic
from flashsim.distributed.account import Account, fields, zeros
from flashsim.distributed.group import OWN, Block, Group
from flashsim.errors import own_errors
from flashsim.problem import checks
from flashsim.problem.hardware import Device
from flashsim.problem.problem import Problem
from flashsim.schedule.tiling import Tiling


@own_errors
def count(
    problem: Problem,
    *,
    ranks: int,
    scheme: str = "zigzag",
    ulysses: int | None = None,
    direction: str = "forward",
    algorithm: str = "flash2",
    tiling: Tiling | None = None,
    device: str | Device = "H100",
) -> Account:
    """Count the bytes and FLOPs of attention over several ranks in closed form.

    The counts are integers, equal to those that `run` measures.

    Parameters
    ----------
    problem : Problem
        The whole problem, over all ranks.
    ranks, scheme, ulysses
        See `Group`.
    direction : {"forward", "backward"}
    algorithm, tiling, device
        The algorithm, tiling and device of every rank's local attention, as in `flashsim.count`.

    Raises
    ------
    ShapeError, OptionError, UnsupportedError, SramOverflow
    """
    group = Group(problem, ranks, scheme, ulysses)  # type: ignore[arg-type]  # None: filled in
    checks.one_of("direction", direction, ("forward", "backward"))
    counts = {name: zeros(group, direction) for name in ("flops", "visits", "hbm", "merge")}
    first = int(group.ulysses > 1)  # the ring's first step, after an exchange of heads
    for columns, ranks_there, block in work(group, direction):
        local = counting.count(
            block.problem, algorithm=algorithm, direction=direction, tiling=tiling, device=device
        )
        counts["flops"][:, columns][ranks_there] = local.flops("matmul")
        counts["visits"][:, columns][ranks_there] = visits(local)
        counts["hbm"][:, columns][ranks_there] = local.bytes()
    merge = _merged if direction == "forward" else _added
    counts["merge"][:] = merge(group, first)
    sent = _sent_forward(group) if direction == "forward" else _sent_backward(group)
    peak = _peak_forward(group) if direction == "forward" else _peak_backward(group)
    return Account(group, direction, **fields({"sent": sent, **counts, "peak": peak}))


def work(group: Group, direction: str) -> Iterator[tuple[slice, np.ndarray, Block]]:
    """Yield each different block of scores as (steps, mask of the ranks that compute it, block)."""
    relations, first = group.relations(), int(group.ulysses > 1)
    steps = slice(first, first + group.ring)
    if direction == "backward":
        everyone = np.ones((group.ranks, 1), bool)
        for step, part in zip((first, first + group.ring), group.own_parts, strict=True):
            if part is not None:
                yield slice(step, step + 1), everyone, part
        relations = np.where(relations == OWN, -1, relations)
    for relation, block in enumerate(group.blocks):
        there = relations == relation
        if block is not None and there.any():
            yield steps, there, block


def visits(local: Traffic) -> int:
    """Return the number of visits (one query tile times one key tile) of all heads and kernels."""
    stages = [stage for stage in local.stages if any(buffer.visit for buffer in stage.buffers)]
    walk = sum(local.schedule(stage).n_visits for stage in stages)
    return walk * local.problem.batch * local.problem.heads


class MemberSizes:
    """The bytes of `n` rows of a ring member's tensors, for the heads that one rank computes.

    `wide` is the bytes per element of an accumulator, normally a float32. In a ring of two members,
    accumulators have the input type, because results are merged only once, directly into the
    output.
    """

    def __init__(self, group: Group) -> None:
        p = self.problem = group.problem
        self.heads = p.batch * p.heads // group.ulysses
        self.kv_heads = p.batch * p.kv_heads // group.ulysses
        self.e, self.a = p.itemsize, p.compute_itemsize
        self.merges_wide = group.ring > 2 and self.e != self.a
        self.wide = self.a if self.merges_wide else self.e

    def q(self, n: int, itemsize: int) -> int:
        """Return the bytes of `n` rows of Q or dQ."""
        return self.heads * n * self.problem.head_dim * itemsize

    def out(self, n: int, itemsize: int) -> int:
        """Return the bytes of `n` rows of out or dout."""
        return self.heads * n * self.problem.head_dim_v * itemsize

    def lse(self, n: int) -> int:
        """Return the bytes of `n` rows of the LSE."""
        return self.heads * n * self.a

    def k(self, n: int, itemsize: int) -> int:
        """Return the bytes of `n` rows of K or dK."""
        return self.kv_heads * n * self.problem.head_dim * itemsize

    def v(self, n: int, itemsize: int) -> int:
        """Return the bytes of `n` rows of V or dV."""
        return self.kv_heads * n * self.problem.head_dim_v * itemsize

    def kv(self, n: int, itemsize: int) -> int:
        """Return the bytes of `n` rows of K and V together, or of dK and dV."""
        return self.k(n, itemsize) + self.v(n, itemsize)


# -- the link -------------------------------------------------------------------------------------


def _sent_forward(group: Group) -> dict[str, np.ndarray]:
    """Return the bytes that ranks send in the forward pass.

    The ranks of a team exchange heads of Q, K, V and out. The members of the ring pass on K and V
    at every step except the last.
    """
    size, sent = MemberSizes(group), _nothing(group, "forward", "Q", "K", "V", "out")
    n = group.rows_a_member
    _pass_on(group, sent, size)
    if group.ulysses > 1:
        for name, whole in (("Q", size.q), ("K", size.k), ("V", size.v)):
            sent[name][:, 0] = _others_share(group, whole(n, size.e))
        sent["out"][:, -1] = _others_share(group, size.out(n, size.e))
    return sent


def _sent_backward(group: Group) -> dict[str, np.ndarray]:
    """Return the bytes that ranks send in the backward pass.

    The members of the ring send K and V, and send dK and dV two steps later. At first, dK and dV
    are gradients of one block, in the input type; later, they are float32 sums.
    """
    size = MemberSizes(group)
    sent = _nothing(group, "backward", "dout", "K", "V", "dQ", "dK", "dV")
    n, first = group.rows_a_member, int(group.ulysses > 1)
    _pass_on(group, sent, size)
    if group.ring > 1:
        behind = slice(first + 3, first + 1 + group.ring)
        sent["dK"][:, first + 2] = _first(group, lambda b: size.k(b.n_kv, size.e))
        sent["dV"][:, first + 2] = _first(group, lambda b: size.v(b.n_kv, size.e))
        sent["dK"][:, behind] = size.k(n, size.a)
        sent["dV"][:, behind] = size.v(n, size.a)
    if group.ulysses > 1:
        sent["dout"][:, 0] = _others_share(group, size.out(n, size.e))
        for name, whole in (("dQ", size.q), ("dK", size.k), ("dV", size.v)):
            sent[name][:, -1] = _others_share(group, whole(n, size.e))
    return sent


def _pass_on(group: Group, sent: dict[str, np.ndarray], size: MemberSizes) -> None:
    first = int(group.ulysses > 1)
    steps = slice(first, first + group.ring - 1)
    sent["K"][:, steps] = size.k(group.rows_a_member, size.e)
    sent["V"][:, steps] = size.v(group.rows_a_member, size.e)


def _others_share(group: Group, whole: int) -> int:
    """Return the bytes that a rank sends to the other ranks of its team.

    `whole` is the bytes of the rank's own rows for all heads.
    """
    return whole // group.ulysses * (group.ulysses - 1)


def _nothing(group: Group, direction: str, *names: str) -> dict[str, np.ndarray]:
    return {name: zeros(group, direction) for name in names}


# -- combining ------------------------------------------------------------------------------------


def _merged(group: Group, first: int) -> np.ndarray:
    """Return the HBM bytes moved to merge the out and LSE of each step with earlier results."""
    size, n = MemberSizes(group), group.rows_a_member
    moved = zeros(group, "forward")
    if group.ring == 1:
        return moved
    merged = lambda b: 2 * size.out(b.n_q, size.wide) + size.out(b.n_q, size.e)  # noqa: E731
    later = _later(group, lambda b: merged(b) + 3 * size.lse(b.n_q))
    moved[:, first + 1 : first + group.ring] = later
    if size.merges_wide:
        turned = size.out(n, size.e) + size.out(n, size.wide)
        moved[:, first] += turned
        moved[:, first + group.ring - 1] += turned
    return moved


def _added(group: Group, first: int) -> np.ndarray:
    """Return the HBM bytes that move to sum the gradients of several blocks.

    dQ is summed over the steps of a rank; dK and dV are summed over ring members. The gradients of
    a rank's own block of scores are added last.
    """
    size, n, ring = MemberSizes(group), group.rows_a_member, group.ring
    moved = zeros(group, "backward")
    if ring == 1:
        return moved
    q = lambda b: 2 * size.q(b.n_q, size.wide) + size.q(b.n_q, size.e)  # noqa: E731
    kv = lambda b: 2 * size.kv(b.n_kv, size.a) + size.kv(b.n_kv, size.e)  # noqa: E731
    moved[:, first + 1 : first + ring] = _later(group, lambda b: q(b) + kv(b))
    moved[:, first + 1] = 0  # the sums for other members' keys start at this step
    moved[:, first + ring] = 2 * (size.q(n, size.e) + size.kv(n, size.e))
    begun_q, begun_kv = (
        _first(group, lambda b: size.q(b.n_q, size.e)),
        _first(group, lambda b: size.kv(b.n_kv, size.e), before=True),
    )
    if ring == 2:  # with two members, one block is the whole sum
        moved[:, first + ring] += begun_q + begun_kv
        return moved
    moved[:, first + ring] += size.q(n, size.wide) + size.kv(n, size.a)
    moved[:, first + 1] += size.q(n, size.wide) + _widened(size, begun_q)
    moved[:, first + 2] += size.kv(n, size.a) + _widened(size, begun_kv)
    return moved


def _widened(size: MemberSizes, nbytes: np.ndarray) -> np.ndarray:
    """Return the bytes that move if `nbytes` are loaded, and then stored in float32."""
    return nbytes + nbytes // size.e * size.a


def _first(group: Group, nbytes: Callable[[Problem], int], before: bool = False) -> np.ndarray:
    """Return `nbytes` of each rank's block of scores at ring step 1; 0 for a rank without a block.

    If `before` is true, each rank gets the value of the previous ring member.
    """
    first = _later(group, nbytes)[:, 0]
    return np.roll(first, group.ulysses) if before else first


def _later(group: Group, nbytes: Callable[[Problem], int]) -> np.ndarray:
    """Return `nbytes` of each rank's block of scores at each ring step from 1 on, 0 if none."""
    each = [0 if block is None else nbytes(block.problem) for block in group.blocks]
    return np.array(each, np.int64)[group.relations()[:, 1:]]


# -- memory ---------------------------------------------------------------------------------------


def _peak_forward(group: Group) -> np.ndarray:
    size, n, ring = MemberSizes(group), group.rows_a_member, group.ring
    own = size.q(n, size.e) + size.kv(n, size.e)
    # If heads are exchanged, a rank's original rows stay in memory, and have as many bytes as the
    # rows that it computes.
    base = own * (2 if group.ulysses > 1 else 1)
    so_far = size.out(n, size.wide) + size.lse(n)
    first = base + size.kv(n, size.e) * (ring > 1) + size.out(n, size.e) + size.lse(n)
    peak = np.full(group.ranks, first + size.out(n, size.wide) * size.merges_wide)
    if ring > 1:
        part = _later(group, lambda b: size.out(b.n_q, size.e) + size.lse(b.n_q))
        peak = np.maximum(peak, _largest(part + base + so_far, size.kv(n, size.e)))
    last = base + size.out(n, size.e) + size.lse(n)
    if size.merges_wide:
        peak = np.maximum(peak, last + size.out(n, size.wide))
    if group.ulysses > 1:
        peak = np.maximum(peak, last + size.out(n, size.e))
    return peak


def _peak_backward(group: Group) -> np.ndarray:
    size, n, ring = MemberSizes(group), group.rows_a_member, group.ring
    e, kv = size.e, size.kv(n, size.e)
    base = size.q(n, e) + kv + 2 * size.out(n, e) + size.lse(n)
    base += size.out(n, e) * (group.ulysses > 1)  # the original dout
    results = size.q(n, e) + kv
    peak = np.full(group.ranks, base + results)
    if ring > 1:
        heads = group.own_parts[0].problem.kv_heads
        early = results * heads // (group.problem.kv_heads // group.ulysses)
        block = lambda b: size.q(b.n_q, e) + size.kv(b.n_kv, e)  # noqa: E731
        dq = _first(group, lambda b: size.q(b.n_q, e))
        going, coming = (
            _first(group, lambda b: size.kv(b.n_kv, e), before=x) for x in (False, True)
        )
        held = _later(group, block) + base + early + kv
        held[:, :-1] += kv  # K and V of the next step
        if ring > 2:  # sums of all rows in float32
            dq[:], wide = size.q(n, size.wide), size.kv(n, size.a)
            held += dq[:, None]
            held[:, 1] += going + coming + wide
            held[:, 2:] += 2 * wide
            going[:] = coming[:] = wide
        home = base + results + dq + coming
        peak = np.maximum(held.max(axis=1), base + kv + early)
        peak = np.maximum(peak, home + np.maximum(going, results))
    if group.ulysses > 1:
        peak = np.maximum(peak, base + 2 * results)
    return peak


def _largest(held: np.ndarray, visitor: int) -> np.ndarray:
    """Return the most bytes that each rank holds in any ring step from step 1 on.

    At each step except the last, a rank holds the K and V of that step and of the next one.
    """
    held[:, :-1] += 2 * visitor
    held[:, -1] += visitor
    return held.max(axis=1)
