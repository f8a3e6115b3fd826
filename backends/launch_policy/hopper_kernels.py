"""Compute each Hopper kernel's threads, shared memory (``struct OnChip``) and TMA boxes."""

from dataclasses import replace
from typing import NamedTuple

from flashsim.backends.launch import functions
from flashsim.backends.launch import kernel as launch
from flashsim.backends.launch.kernel import Box, Kernel, Variant
from flashsim.backends.launch_policy.cost_model import ROLES
from flashsim.problem.problem import Problem
from flashsim.schedule.tiling import Tiling

#: Bytes of the work-tile slots (struct Items in kernels/hopper/tile_scheduler.cuh) and of one
#: mbarrier.
_ITEMS, _BARRIER = 160, 8
_CHUNK = 64  # columns of a shared-memory chunk: 128 bytes of 16-bit elements


class Rings(NamedTuple):
    """The numbers of pipeline stages of the forward kernel's ring buffers in shared memory.

    `stages` is the number of pipeline stages for each of K and V. `tile` is the number of pipeline
    stages for a captured array, or 0 if TMA loads none.
    """

    stages: int
    tile: int = 0


def forward_kernel(
    problem: Problem, tiling: Tiling, variant: Variant, shared: int, rings: Rings, *, ahead: bool
) -> Kernel:
    """Return the Hopper forward kernel for a problem, a tiling and ring-buffer sizes.

    With `ahead`, the kernel loads captured elements in advance, or adds a linear term by a product.
    """
    threads, bk = 128 * (tiling.block_q // 64 + 1), tiling.block_k
    more = {"STAGES": rings.stages, "TURNS": take_turns(problem, tiling)} | _bounded(problem)
    more["SHARES"] = variant.shares
    boxes, tile = _boxes(("q", 64), ("k", bk), ("v", bk)), functions.tile_of(problem)
    if variant.pack > 1:
        more |= {"PACK": variant.pack}
        boxes = replace(boxes[0], heads=variant.pack), *boxes[1:]
    advance = _in_advance(problem, rings) if ahead else ""
    if advance == "tile" and tile is not None:
        size = tile.spec.itemsize
        # float32 elements would have bank conflicts; the tensor map needs whole groups of rows
        interleaved = size == 4 and tile.shape[1] % 8 == 0
        more |= {
            "TILE": rings.tile,
            "TILE_BYTES": size,
            "TILE_BF16": tile.spec.dtype == "bfloat16",
            "TILE_INTERLEAVED": interleaved,
        }
        boxes += (Box(launch.TILE, 64, 128 // size, interleaved=interleaved),)
    elif advance == "ramp":
        # without a function of each score, which would need a scaled score
        more |= {"RAMP": 1, "SCORE_MOD": 0, "SCALED": 0}
    elif advance == "distances":
        more |= {"DISTANCES": _DISTANCES, "ADDED": functions.plain_of(problem).by_distance}
    more |= _reads(problem, beside_ahead=bool(more.keys() & {"TILE", "DISTANCES"}))
    given = problem, tiling, variant
    return launch.built("hopper/forward.cu", "hopper_forward", threads, shared, given, more, boxes)


def packs_heads(problem: Problem) -> bool:
    """Return whether the forward kernel can pack the query heads of a group into row tiles.

    A TMA box of 64 rows then has all heads of some queries, so the group must divide 64. A box of
    packed sequences has no axis left for the heads. Functions and sinks expect one head per tile.
    """
    p = problem
    plain = p.banded and p.cu_seqlens_q is None and p.score_mod is None and not p.sinks
    return p.group > 1 and 64 % p.group == 0 and plain


def _in_advance(problem: Problem, rings: Rings) -> str:
    """Return what the forward kernel prepares of a score function before it has the scores.

    "tile" is a captured array that TMA loads, "ramp" is a linear term (`adds_ramp`), and
    "distances" are terms or elements by distance (`reads_distances`). "" is nothing.
    """
    if rings.tile and functions.tile_of(problem) is not None:
        return "tile"
    if adds_ramp(problem):
        return "ramp"
    return "distances" if reads_distances(problem) else ""


#: Stages of the ring buffer of elements that depend on the distance between query and key.
_DISTANCES = 2


def adds_ramp(problem: Problem) -> bool:
    """Return whether tensor cores add a linear term to the scores (Ramp in forward.cu)."""
    return functions.ramp_of(problem) is not None and max(tile_columns("forward", problem)) <= 128


def reads_distances(problem: Problem) -> bool:
    """Return whether the forward kernel has what depends on the distance in shared memory.

    It has the terms that the score function adds, if they depend on the distance alone. Otherwise
    it has the elements of an array that is read at the distance.
    """
    plain = functions.plain_of(problem)
    return plain.by_distance or plain.band is not None


#: The largest bound of scores for which the forward needs no running maximum: exponentials are then
#: between e^-60 and e^40, which bfloat16 can represent.
_LARGEST_BOUND = 50


def _bounded(problem: Problem) -> dict[str, int]:
    """Return ``{"BOUNDED": 1}`` if the forward kernel needs no running maximum, otherwise {}.

    A bfloat16 kernel needs no running maximum if scores have a small upper bound (BoundedSoftmax in
    the kernels).
    """
    bound = functions.score_bound(problem)
    return {"BOUNDED": 1} if problem.dtype == "bfloat16" and bound <= _LARGEST_BOUND else {}


def take_turns(problem: Problem, tiling: Tiling) -> bool:
    """Return whether the forward uses ping-pong scheduling (TURNS in forward.cu)."""
    wide = problem.head_dim == problem.head_dim_v == 128
    return not (wide and problem.n_kv > 16 * tiling.block_k)


def forward_bytes(problem: Problem, tiling: Tiling, rings: Rings, *, shares: bool = True) -> int:
    """Return the bytes of shared memory per thread block of the Hopper forward."""
    d, dv = tile_columns("forward", problem)
    q, kv = tiling.block_q * d, tiling.block_k * (d + dv)
    warpgroups, elements, tile = tiling.block_q // 64, 0, functions.tile_of(problem)
    more = 0  # barriers
    advance = _in_advance(problem, rings)
    if advance == "tile" and tile is not None:
        boxes = -(-tiling.block_k * tile.spec.itemsize // 128)
        elements = rings.tile * warpgroups * boxes * 64 * 128
    elif advance == "ramp":
        elements = 2048 * (warpgroups + -(-tiling.block_k // 64))
    elif advance == "distances":
        elements = _DISTANCES * 4 * (tiling.block_q + tiling.block_k)
        more += 2 * _DISTANCES
    barriers = 2 * warpgroups * (1 + rings.tile) + 4 * rings.stages + more
    return on_chip(2 * (q + rings.stages * kv) + elements, barriers, warpgroups * shares)


def backward_kernel(problem: Problem, tiling: Tiling, variant: Variant, *, ahead: bool) -> Kernel:
    """Return the KV-outer kernel for dK and dV, which in a fused backward also computes dQ.

    With `ahead`, scores may start at the log-sum-exp (`adds_statistics`) and at the score
    function's term.
    """
    fused = variant.fused
    d, bq, bk, stages = _shared_dim(problem), tiling.block_q, tiling.block_k, 2
    wide = d > 128
    staged = fused and d <= 192  # dQ is staged in shared memory
    tiles = 2 * (2 * bk * d + stages * 2 * bq * d)
    if wide:
        tiles += 2 * 2 * stages * bq * bk  # P and dS
        tiles += 4 * bq * d if staged else 0
    elif fused:
        tiles += 2 * stages * bq * bk + (2 if variant.once else 4) * bq * d  # dS and dQ
    # Log-sum-exp and delta of each stage; or, with `once`, the sums and the delta of each of 8
    # warps.
    dlse = problem.dlse and variant.once  # otherwise the delta kernel subtracts it
    rows = stages * (1 + dlse) + (stages + 1) * 8 if variant.once else 2 * stages
    score = _of_functions(problem, tiling, ahead=ahead)
    adds = ahead and adds_statistics(problem, tiling, once=variant.once)
    rows = 8 * stages if adds else rows  # 16 columns of 2 bytes
    elements = score.get("DISTANCES", 0) * (bq + bk)
    shared = on_chip(tiles + 4 * (rows * bq + elements), 2 + 2 * stages + (0 if wide else 4))
    boxes = _boxes(("q", bq), ("k", bk), ("v", bk), ("dout", bq))
    rows = bq // 2 if d == 64 else bq  # queries in a warpgroup's piece of dQ
    leaving = Box("dq", rows, _CHUNK) if variant.once else Box("dq_acc", rows, 32)
    boxes += (leaving if staged else boxes[0],)
    name = "backward_wide" if wide else "backward"
    return launch.built(
        *(f"hopper/{name}.cu", f"hopper_{name}", 384, shared, (problem, tiling, variant)),
        {"D": d, "FUSED": fused, "ORDERED": variant.ordered, "FIRST": variant.first}
        | {"CLUSTER": variant.cluster}
        | {"IN_STEP": variant.in_step, "ONCE": variant.once, "AFTER": variant.after}
        | {"MORE": variant.more, "DEFERRED": variant.deferred, "DLSE": dlse}
        | {"STATISTICS": adds}
        | score,
        boxes,
        variant.cluster,
        outer="keys",
    )


def adds_statistics(problem: Problem, tiling: Tiling, *, once: bool) -> bool:
    """Return whether a product adds the log-sum-exp and delta of rows to the scores and dP.

    See STATISTICS in kernels/hopper/kv_outer.cuh. The product's operands are bfloat16 numbers,
    which have float32's range. A softcap, a negative scale, or a score function that does more than
    adding a term needs the scores themselves. With 80 rows per tile, shared memory has no room for
    the operand.
    """
    score = problem.score_mod is None or _adds_term(problem)
    simple = not problem.softcap and score and problem.scale > 0
    room = tiling.block_q % 64 == 0 and max(problem.head_dim, problem.head_dim_v) <= 128
    return problem.dtype == "bfloat16" and simple and room and not once


def _reads(problem: Problem, *, beside_ahead: bool = False) -> dict[str, int]:
    """Return the constant READS of a kernel that does not call masks which keep ranges."""
    if problem.mask_mod is None and problem.score_mod is None:
        return {}
    return {"READS": functions.read_arrays(problem, beside_ahead=beside_ahead, ranges=True)}


def _adds_term(problem: Problem) -> bool:
    """Return whether the backward adds a score function's term to scores minus log-sum-exp.

    This is slower if the term reads an array per score, as for a bias.
    """
    graph = problem.score_mod
    assert graph is not None
    each = any(graph.side(n) == "score" for n in graph.loads)
    plain = functions.plain_of(problem)
    return plain.adds and (plain.by_distance or not each)


def _of_functions(problem: Problem, tiling: Tiling, *, ahead: bool) -> dict[str, int]:
    """Return the constants of a backward kernel for mask and score functions.

    With `ahead`, up to a head_dim of 128 and if the score function only adds a term, scores start
    at the log-sum-exp all the same. The product that brings the log-sum-exp also brings a term that
    is linear in the positions, unless arrays get gradients. Terms by distance pass through shared
    memory.
    """
    made = _reads(problem)
    if functions.plain_of(problem).poles:
        made["READS"] = 1  # at positions that exist
    if problem.score_mod is None or max(problem.head_dim, problem.head_dim_v) > 128:
        return made
    if not ahead or problem.softcap or problem.scale <= 0 or not _adds_term(problem):
        return made | ({"SCORE_LATE": 1} if tiling.block_q == 128 else {})
    adds = adds_statistics(problem, tiling, once=False)
    if adds and functions.ramp_of(problem) and not problem.score_grads:
        return made | {"RAMP": 1, "SCORE_MOD": 0, "SCALED": 0}
    made |= {"ADDED": 1, "SCALED": 0}
    if functions.plain_of(problem).by_distance and tiling.block_q % 64 == 0:
        made["DISTANCES"] = _DISTANCES
        if not problem.score_grads:  # otherwise the function is called for its gradients
            made |= _reads(problem, beside_ahead=True)
            made |= {"ADDED": 0, "SCORE_MOD": 0} if adds else {}
    return made


def roles_kernel(problem: Problem, tiling: Tiling, variant: Variant) -> Kernel:
    """Return the fused kernel for head dims of 129 to 192, whose warpgroups have separate tasks."""
    d, bq, bk, stages = _shared_dim(problem), tiling.block_q, tiling.block_k, 2
    # K, V, Q and dO, P and dS; dQ is staged.
    tiles = 2 * (2 * bk * d + (stages + 1) * bq * d + 2 * bq * bk) + 4 * bq * d
    shared = on_chip(tiles + 4 * stages * 2 * bq, 3 + 2 * stages + 2 * d // _CHUNK)
    never = dict.fromkeys(("ORDERED", "ONCE", "AFTER", "MORE", "DEFERRED", "DLSE", "STATISTICS"), 0)
    boxes = _boxes(("q", bq), ("k", bk), ("v", bk), ("dout", bq))
    return launch.built(
        *("hopper/backward_roles.cu", "hopper_backward_roles", 512, shared),
        (problem, tiling, variant),
        {"D": d, "FUSED": 1, "FIRST": variant.first, "IN_STEP": variant.in_step, **never},
        (*boxes, Box("dq_acc", bq, 32)),
        outer="keys",
    )


def dq_kernel(problem: Problem, tiling: Tiling, variant: Variant) -> Kernel:
    """Return the kernel of the third pass, which computes dQ alone."""
    d, bq, bk, stages = _shared_dim(problem), tiling.block_q, tiling.block_k, 2
    partial = 4 * 128 * (32 if bq == 64 else 1)
    shared = on_chip(2 * (2 * bq * d + stages * 2 * bk * d) + partial, 2 * bq // 64 + 2 * stages)
    boxes = _boxes(("q", 64), ("k", bk), ("v", bk), ("dout", 64))
    more = {"D": d} | _reads(problem)
    given = problem, tiling, variant
    return launch.built("hopper/dq.cu", "hopper_dq", 384, shared, given, more, boxes)


def _boxes(*rows: tuple[str, int]) -> tuple[Box, ...]:
    """Return a TMA box of 64 columns for each pair (tensor, number of rows)."""
    return tuple(Box(tensor, n, _CHUNK) for tensor, n in rows)


def on_chip(data: int, barriers: int, shares: int = 0) -> int:
    """Return the size of a ``struct OnChip`` in bytes, rounded up to a multiple of 1024.

    `shares` is the number of warpgroups that compute only a part of a work tile's visits.
    """
    items = -(-(data + barriers * _BARRIER) // 16) * 16 + _ITEMS + 2 * 16 * -(-shares // 2)
    return -(-items // 1024) * 1024


def _wide(head_dim: int) -> int:
    """Return how many columns a tile has in shared memory: head_dim rounded up to 64."""
    return -(-head_dim // _CHUNK) * _CHUNK


def tile_columns(stage: str, problem: Problem) -> tuple[int, int]:
    """Return how many columns TMA loads per tile of Q or K, and per tile of V or dO."""
    if stage == "forward":
        return _wide(problem.head_dim), _wide(problem.head_dim_v)
    return _shared_dim(problem), _shared_dim(problem)


def _shared_dim(problem: Problem) -> int:
    """Return the head_dim of the backward kernels, padded to the same size for Q, K, V and dO."""
    return _wide(max(problem.head_dim, problem.head_dim_v))


def product_columns(
    stage: str, problem: Problem, tiling: Tiling, cluster: int = 1
) -> tuple[int, int]:
    """Return the columns per product of the backward, and the padding columns of all products.

    The number of columns per product is head_dim, rounded up to a multiple of 16. If a cluster
    shares a work tile and head_dim is at most 128, head_dim is rounded up to a multiple of 32. Some
    products compute all columns of a tile in shared memory, including padding. The product dQ^T is
    padded, because its rows are the tile's columns. If the tile has at most 32 columns, the kernel
    computes dQ instead of dQ^T. Above a head_dim of 128, dK and dV are padded, because two
    warpgroups divide their columns. If one warpgroup computes all of dQ^T, rows are padded only to
    a multiple of 32.
    """
    d, whole = max(problem.head_dim, problem.head_dim_v), _shared_dim(problem)
    step = 32 if cluster > 1 and whole <= 128 else 16
    taken = -(-d // step) * step
    products = (stage == "fused" and taken > 32) + (2 if stage != "dq" and whole > 128 else 0)
    beyond = products * (whole - taken)
    if stage == "fused" and tiling == ROLES:
        beyond -= whole - -(-d // 32) * 32
    return taken, beyond
