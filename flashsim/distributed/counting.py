"""`count`: the bytes and FLOPs of attention over several ranks, without a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from flashsim.api import counting
from flashsim.counts.traffic import Traffic
from flashsim.distributed.account import QUANTITIES, Account, fields, zeros
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
    counts = {name: zeros(group, direction) for name in QUANTITIES}
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
    peak = _peak_forward(group) if direction == "forward" else _peak_backward(group)
    sent = _sent(group, direction)
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
    """Bytes of rows of a ring member's tensors, for the heads that one rank computes.

    `wide` is the bytes per element of an accumulator, normally a float32. In a ring of two members,
    accumulators have the input type, because results are merged only once, directly into the
    output.
    """

    def __init__(self, group: Group) -> None:
        p = group.problem
        heads, kv_heads = (p.batch * n // group.ulysses for n in (p.heads, p.kv_heads))
        self.e, self.a = p.itemsize, p.compute_itemsize
        self.elements = {"Q": heads * p.head_dim, "O": heads * p.head_dim_v}
        self.elements |= {"K": kv_heads * p.head_dim, "V": kv_heads * p.head_dim_v}
        self.lse = heads * self.a  # of a row
        self.merges_wide = group.ring > 2 and self.e != self.a
        self.wide = self.a if self.merges_wide else self.e

    def __call__(self, tensors: str, n: int, itemsize: int) -> int:
        """Return the bytes of `n` rows of tensors, such as "KV", or their gradients; "O": out."""
        return sum(self.elements[name] for name in tensors) * n * itemsize


# -- the link -------------------------------------------------------------------------------------


def _sent(group: Group, direction: str) -> dict[str, np.ndarray]:
    """Return the bytes that ranks send, by tensor.

    The ranks of a team exchange heads in the first and in the last step. The members of the ring
    pass on K and V at every step except the last and, in the backward pass, two steps later dK and
    dV. At first dK and dV are one block's gradients, in the input type; later they are float32
    sums.
    """
    size, n, first = MemberSizes(group), group.rows_a_member, int(group.ulysses > 1)
    letter = {"out": "O", "dout": "O", "dQ": "Q", "dK": "K", "dV": "V"}
    given, returned = ["Q", "K", "V"], ["out"]
    if direction == "backward":
        given, returned = ["dout"], ["dQ", "dK", "dV"]
    sent = {name: zeros(group, direction) for name in (*given, "K", "V", *returned)}
    for name in ("K", "V"):
        sent[name][:, first : first + group.ring - 1] = size(name, n, size.e)
        if direction == "backward" and group.ring > 1:
            back, keys = sent[f"d{name}"], _first(group, lambda b: b.n_kv)
            back[:, first + 2] = keys * size(name, 1, size.e)
            back[:, first + 3 : first + 1 + group.ring] = size(name, n, size.a)
    if group.ulysses > 1:  # each rank keeps its own share of the heads
        for step, names in ((0, given), (-1, returned)):
            for name in names:
                whole = size(letter.get(name, name), n, size.e)
                sent[name][:, step] = whole // group.ulysses * (group.ulysses - 1)
    return sent


# -- combining ------------------------------------------------------------------------------------


def _merged(group: Group, first: int) -> np.ndarray:
    """Return the HBM bytes moved to merge the out and LSE of each step with earlier results."""
    size, n = MemberSizes(group), group.rows_a_member
    moved = zeros(group, "forward")
    if group.ring == 1:
        return moved
    merged = lambda b: 2 * size("O", b.n_q, size.wide) + size("O", b.n_q, size.e)  # noqa: E731
    later = _later(group, lambda b: merged(b) + 3 * b.n_q * size.lse)
    moved[:, first + 1 : first + group.ring] = later
    if size.merges_wide:
        turned = size("O", n, size.e) + size("O", n, size.wide)
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
    q = lambda b: 2 * size("Q", b.n_q, size.wide) + size("Q", b.n_q, size.e)  # noqa: E731
    kv = lambda b: 2 * size("KV", b.n_kv, size.a) + size("KV", b.n_kv, size.e)  # noqa: E731
    moved[:, first + 1 : first + ring] = _later(group, lambda b: q(b) + kv(b))
    moved[:, first + 1] = 0  # the sums for other members' keys start at this step
    moved[:, first + ring] = 2 * size("QKV", n, size.e)
    begun_q, begun_kv = (
        _first(group, lambda b: size("Q", b.n_q, size.e)),
        _first(group, lambda b: size("KV", b.n_kv, size.e), before=True),
    )
    if ring == 2:  # with two members, one block is the whole sum
        moved[:, first + ring] += begun_q + begun_kv
        return moved
    moved[:, first + ring] += size("Q", n, size.wide) + size("KV", n, size.a)
    moved[:, first + 1] += size("Q", n, size.wide) + _widened(size, begun_q)
    moved[:, first + 2] += size("KV", n, size.a) + _widened(size, begun_kv)
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
    own = size("QKV", n, size.e)
    # If heads are exchanged, a rank's original rows stay in memory, and have as many bytes as the
    # rows that it computes.
    base = own * (2 if group.ulysses > 1 else 1)
    so_far = size("O", n, size.wide) + n * size.lse
    first = base + size("KV", n, size.e) * (ring > 1) + size("O", n, size.e) + n * size.lse
    peak = np.full(group.ranks, first + size("O", n, size.wide) * size.merges_wide)
    if ring > 1:
        part = _later(group, lambda b: size("O", b.n_q, size.e) + b.n_q * size.lse)
        held = part + base + so_far + size("KV", n, size.e)
        held[:, :-1] += size("KV", n, size.e)  # K and V of the next step
        peak = np.maximum(peak, held.max(axis=1))
    last = base + size("O", n, size.e) + n * size.lse
    if size.merges_wide:
        peak = np.maximum(peak, last + size("O", n, size.wide))
    if group.ulysses > 1:
        peak = np.maximum(peak, last + size("O", n, size.e))
    return peak


def _peak_backward(group: Group) -> np.ndarray:
    size, n, ring = MemberSizes(group), group.rows_a_member, group.ring
    e, kv = size.e, size("KV", n, size.e)
    base = size("QKVOO", n, e) + n * size.lse
    base += size("O", n, e) * (group.ulysses > 1)  # the original dout
    results = size("QKV", n, e)
    peak = np.full(group.ranks, base + results)
    if ring > 1:
        heads = group.own_parts[0].problem.kv_heads
        early = results * heads // (group.problem.kv_heads // group.ulysses)
        block = lambda b: size("Q", b.n_q, e) + size("KV", b.n_kv, e)  # noqa: E731
        dq = _first(group, lambda b: size("Q", b.n_q, e))
        going, coming = (
            _first(group, lambda b: size("KV", b.n_kv, e), before=x) for x in (False, True)
        )
        held = _later(group, block) + base + early + kv
        held[:, :-1] += kv  # K and V of the next step
        if ring > 2:  # sums of all rows in float32
            dq[:], wide = size("Q", n, size.wide), size("KV", n, size.a)
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
