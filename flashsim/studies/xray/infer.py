"""Infers the tiles of a kernel from its hardware counters, with the closed forms.

A forward pass reads K and V once for each query tile that needs them. So the bytes that arrive at
the SMs determine the number of query tiles. A fused backward pass adds to the dQ of each query row
once for each key tile. So the bytes added in L2 determine the size of the key tile. Some tiles move
the same bytes, so `infer` returns all plausible tiles that agree with the counters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from flashsim.errors import own_errors
from flashsim.problem.problem import Problem
from flashsim.studies.xray.candidates import Fit, candidates

#: By how much the bytes read may exceed those of a fit: as a share, and in bytes per thread block.
#: Each block also reads its arguments, tensor maps and offsets (64 to 300 B on an H100).
ABOVE, PER_BLOCK = 1e-4, 384
#: By how much the bytes read may be below those of a fit, because some sectors hit in L1.
BELOW = 1e-4
#: By how much the reduced bytes may differ from those of a fit. The counter has no other bytes.
REDUCED = 1e-4
#: By how much the bytes read may differ if tensor FLOPs agree: clusters exchange partial sums, and
#: statistics may hit in L1. Spilled registers are reloaded from L2, so the bytes stored beyond the
#: results may be read in addition.
LOOSE_ABOVE, LOOSE_BELOW = 0.1, 0.015
#: By how much tensor FLOPs may differ: a kernel multiplies only whole tiles.
FLOPS = 1e-6
#: A fused backward may defer dQ by a visit, and then discards one product per outer tile.
DEFERRED = 0.15


@dataclass(frozen=True)
class LaunchCounters:
    """The hardware counters of one kernel launch.

    The SMs read `read` bytes from L2, store `written` bytes in L2, and add `reduced` bytes in L2 by
    atomics. `blocks` is the number of thread blocks (0 if unknown), and `tensor_flops` the number
    of FLOPs on tensor cores (None if unknown).
    """

    read: float
    written: float = 0.0
    reduced: float = 0.0
    blocks: int = 0
    tensor_flops: float | None = None


@dataclass(frozen=True)
class Inference:
    """The form (such as "dq") and the tiles that agree with a kernel's counters.

    Attributes
    ----------
    form : str
        One of `FORMS`.
    fits : tuple of Fit
        All fits that agree with the counters, the closest first.
    next_q, next_k : float or None
        How far the next best query tile (key tile) is from the measurement: its bytes' relative
        difference from the measured bytes. None if there is no other tile.
    splits : int
        The number of parts into which the keys are split.
    by_grid, by_flops : bool
        Whether some tiles agree with all counters except the number of thread blocks, and whether
        the FLOPs on tensor cores are known and agree.
    """

    form: str
    fits: tuple[Fit, ...] = ()
    next_q: float | None = None
    next_k: float | None = None
    splits: int = 1
    by_grid: bool = False
    by_flops: bool = False

    def sides(self, name: str) -> tuple[int, ...]:
        """Return the possible sizes of the query ("block_q") or key tile ("block_k"), ascending."""
        return tuple(sorted({getattr(fit, name) for fit in self.fits}))

    @property
    def block_q(self) -> int | None:
        """The size of the query tile, or None unless exactly one size fits the counters."""
        return self._only("block_q")

    @property
    def block_k(self) -> int | None:
        """The size of the key tile, or None unless exactly one size fits the counters."""
        return self._only("block_k")

    def _only(self, name: str) -> int | None:
        sides = self.sides(name)
        return sides[0] if len(sides) == 1 else None


@own_errors
def infer(problem: Problem, direction: str, launches: Sequence[LaunchCounters]) -> list[Inference]:
    """Infer the form (such as "dq") and tile of each kernel of one pass of an attention call.

    `problem` is the shape and the mask of the call, and `launches` has the counters of the pass's
    kernels in the order in which they ran. The result has one `Inference` per launch. A kernel that
    matches none of the known forms (`FORMS`) gets the form "other" and no fits.
    """
    if direction != "forward":
        return _backward(problem, launches)
    found = []
    for n, seen in enumerate(launches):
        after = launches[n + 1] if n + 1 < len(launches) else None
        if not _products(problem, seen):
            before = launches[n - 1] if n else None
            parts = _parts(problem, before, seen)
            found.append(Inference("combine", splits=parts) if parts > 1 else Inference("other"))
        elif after is not None and (parts := _parts(problem, seen, after)) > 1:
            found.append(replace(_settle("split keys", problem, seen, parts), splits=parts))
        else:
            found.append(_settle("forward", problem, seen))
    return found


def _products(problem: Problem, seen: LaunchCounters) -> bool:
    """Return whether a kernel may compute matrix products; float32 needs no tensor cores."""
    return seen.tensor_flops is None or seen.tensor_flops > 0 or problem.itemsize > 2


def _parts(problem: Problem, before: LaunchCounters | None, after: LaunchCounters) -> int:
    """Return how many parts of the keys kernel `before` computed for kernel `after` to merge, or 1.

    A merging kernel reads a float32 O and an LSE for each part. The LSE of a row takes 4 to 68
    bytes: up to two more sectors of 32 bytes are read if the LSEs of neighbouring rows are not
    contiguous. If several numbers of parts fit, the function chooses one that divides the number of
    thread blocks of `before`.
    """
    if before is None or not _products(problem, before) or _products(problem, after):
        return 1
    rows = problem.batch * problem.heads * problem.n_q
    least, most = (after.read / (rows * (4 * problem.head_dim_v + lse)) for lse in (68, 4))
    counts = [*range(math.ceil(least * 0.98), int(most * 1.02) + 1)]
    heads = {problem.batch * problem.heads, problem.batch * problem.kv_heads}
    divides = [n for n in counts if any(before.blocks % (n * each) == 0 for each in heads)]
    return (divides or counts or [1])[-1]


#: Forms of a backward kernel with matrix products and without atomic additions.
_PRODUCTS = ("dkdv and dq", "dkdv", "dq")


def _backward(problem: Problem, launches: Sequence[LaunchCounters]) -> list[Inference]:
    """Infer the form and the tile of each kernel of a backward pass.

    Of two kernels with matrix products and without atomic additions, the one that stores more bytes
    computes dK and dV; the other one computes dQ. A kernel whose counters match no tile gets the
    form "other".
    """
    found = [_without_roles(problem, seen) for seen in launches]
    left = [n for n, one in enumerate(found) if one is None]
    roles: dict[int, tuple[str, ...]] = dict.fromkeys(left, _PRODUCTS)
    if len(left) == 2:
        less, more = sorted(left, key=lambda n: launches[n].written)
        roles = {less: ("dq",), more: ("dkdv",)}
    for n, forms in roles.items():
        fitting = (_settle(form, problem, launches[n]) for form in forms)
        found[n] = next((one for one in fitting if one.fits), None)
    return [one or Inference("other") for one in found]


def _without_roles(problem: Problem, seen: LaunchCounters) -> Inference | None:
    """Infer a kernel's form (such as "delta") from counters alone, or return None if ambiguous.

    The counters identify kernels with atomic additions to dQ, and kernels without matrix products,
    such as those for delta.
    """
    rows = problem.batch * problem.heads * problem.n_q
    dq = rows * problem.head_dim * 4
    if seen.reduced > dq / 2:
        return _settle("fused", problem, seen)
    if _products(problem, seen) and seen.tensor_flops is not None:
        return None
    result = dq // 4 * problem.itemsize
    if _near(seen.read, dq, 0.35) and _near(seen.written, result, 0.35):
        return Inference("convert")
    if _near(seen.read, 2 * rows * problem.head_dim_v * problem.itemsize, 0.05):
        return Inference("delta")
    return None if _products(problem, seen) else Inference("other")


def _near(value: float, wanted: float, tolerance: float) -> bool:
    return abs(value - wanted) <= tolerance * wanted


def _settle(form: str, problem: Problem, seen: LaunchCounters, splits: int = 1) -> Inference:
    """Return the tiles that explain the counters of a kernel of one form (such as "dq").

    The bytes that the kernel read must be close to the bytes that the tile requires. If no tile
    agrees in bytes and FLOPs, tiles with exactly the measured FLOPs and somewhat fewer bytes than
    measured are accepted.
    """
    tried = [
        fit
        for fit in candidates(form, problem, splits)
        if fit.cluster == 1 or fit.blocks == seen.blocks
    ]
    known = bool(seen.tensor_flops) and problem.itemsize <= 2
    exact = [fit for fit in tried if not known or _multiplies(fit, problem, seen)]
    agreeing = [fit for fit in exact if _agrees(fit, seen, ABOVE, BELOW)]
    for spills in (False, True) if known else ():
        agreeing = agreeing or [
            fit
            for fit in exact
            if _agrees(fit, seen, LOOSE_ABOVE + spills * spilled(fit, seen) / fit.read, LOOSE_BELOW)
        ]
    if not agreeing:
        return Inference(form if form == "split keys" else "other")
    launched = [fit for fit in agreeing if seen.blocks and fit.blocks == seen.blocks]
    fits = sorted(
        launched or agreeing,
        key=lambda fit: (round(abs(seen.read / fit.read - 1), 7), fit.boxes, fit.dense, fit.packed),
    )
    apart = []
    for name in ("block_q", "block_k"):
        taken = {getattr(fit, name) for fit in agreeing}
        others = [fit for fit in tried if getattr(fit, name) not in taken]
        if form == "fused":
            keys = {fit.block_k for fit in fits}
            others = [fit for fit in others if name == "block_k" or fit.block_k in keys]
        apart.append(min((_distance(fit, seen) for fit in others), default=None))
    by_grid = bool(launched) and len(launched) < len(agreeing)
    return Inference(form, tuple(fits), apart[0], apart[1], by_grid=by_grid, by_flops=known)


#: The number of matrix products per visit: forward S and O; fused S, dP, dV, dK and dQ; and so on.
_PRODUCTS_OF = {"forward": 2, "split keys": 2, "fused": 5, "dkdv": 4, "dq": 3, "dkdv and dq": 7}


def _multiplies(fit: Fit, problem: Problem, seen: LaunchCounters) -> bool:
    """Return whether a kernel with this tile would execute the measured number of FLOPs.

    For the form "dkdv and dq", a range of FLOPs is accepted, because the dK and dV pass and the dQ
    pass visit different tiles.
    """
    assert seen.tensor_flops is not None
    d = problem.head_dim
    columns = seen.tensor_flops / (2 * _PRODUCTS_OF[fit.form] * fit.scores)
    if fit.form == "dkdv and dq":
        return 0.9 * d <= columns <= 1.5 * 2 ** math.ceil(math.log2(d))
    if problem.head_dim_v != d:
        return True
    padded = {-(-d // step) * step for step in (8, 16, 32, 64)} | {2 ** math.ceil(math.log2(d))}
    if fit.form == "fused" and any(0 <= columns / each - 1 <= DEFERRED for each in padded):
        return True
    return any(abs(columns / each - 1) <= FLOPS for each in padded)


def _agrees(fit: Fit, seen: LaunchCounters, above: float, below: float) -> bool:
    more, most = (seen.read - fit.read) / fit.read, above + PER_BLOCK * seen.blocks / fit.read
    return -below <= more <= most and abs(seen.reduced - fit.reduced) <= REDUCED * fit.reduced


def spilled(fit: Fit, seen: LaunchCounters) -> float:
    """Return how many bytes a kernel stored besides its results, such as spilled registers.

    The result is 0 if partly written sectors may explain the additional bytes.
    """
    more = seen.written - fit.written
    return more if more > fit.written else 0.0


def _distance(fit: Fit, seen: LaunchCounters) -> float:
    """Return the largest relative difference between a fit's bytes and the measured bytes."""
    apart = abs(seen.read / fit.read - 1)
    return max(apart, abs(seen.reduced / fit.reduced - 1)) if fit.reduced else apart
