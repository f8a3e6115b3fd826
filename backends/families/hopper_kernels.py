"""The Hopper kernels' launches: threads, shared memory (struct OnChip of each), boxes, columns.

`families.hopper` says which of them runs a stage.
"""

from __future__ import annotations

from flashsim.backends import launch
from flashsim.backends.families.tile_times import ROLES
from flashsim.backends.launch.kernel import Box, Kernel, Variant
from flashsim.problem.problem import Problem
from flashsim.schedule.tiling import Tiling

#: Bytes of the item slots (struct Items in kernels/hopper/work.cuh) and of one mbarrier.
_ITEMS, _BARRIER = 160, 8
_CHUNK = 64  # columns of a shared-memory chunk: 128 bytes of 16-bit elements


def forward_kernel(
    problem: Problem, tiling: Tiling, variant: Variant, shared: int, stages: int, *, turns: bool
) -> Kernel:
    """The forward, with rings of so many stages; `turns`: see TURNS in forward.cu."""
    values = launch.constants(problem, tiling, variant)
    return Kernel(
        *("hopper/forward.cu", "hopper_forward", 128 * (tiling.block_q // 64 + 1), shared),
        launch.macros(values | {"SMEM_BYTES": shared, "STAGES": stages, "TURNS": turns}),
        forward_boxes(tiling),
    )


def take_turns(problem: Problem, tiling: Tiling) -> bool:
    """Whether the forward's warpgroups queue their products in turn: see TURNS in forward.cu."""
    wide = problem.head_dim == problem.head_dim_v == 128
    return not (wide and problem.n_kv > 16 * tiling.block_k)


def forward_boxes(tiling: Tiling) -> tuple[Box, ...]:
    """What the forward orders of the copy engine."""
    k = tiling.block_k
    return Box("q", 64, _CHUNK), Box("k", k, _CHUNK), Box("v", k, _CHUNK)


def backward_kernel(
    problem: Problem, tiling: Tiling, variant: Variant, *, fused: bool, ordered: bool
) -> Kernel:
    """The pass with keys outside; `fused`, it makes dQ as well."""
    d, bq, bk, stages = _shared_dim(problem), tiling.block_q, tiling.block_k, 2
    wide = d > 128
    staged = fused and d <= 192  # dQ on its way out
    tiles = 2 * (2 * bk * d + stages * 2 * bq * d)
    if wide:
        tiles += 2 * 2 * stages * bq * bk  # P and dS
        tiles += 4 * bq * d if staged else 0
    elif fused:
        tiles += 2 * stages * bq * bk + (2 if variant.once else 4) * bq * d  # dS and dQ
    # Log-sum-exp and delta of each stage; or 8 warps' sums instead, and each one's delta.
    dlse = problem.dlse and variant.once  # otherwise it is taken off delta
    rows = stages * (1 + dlse) + (stages + 1) * 8 if variant.once else 2 * stages
    shared = on_chip(tiles + 4 * rows * bq, 2 + 2 * stages + (0 if wide else 4))
    values = launch.constants(problem, tiling, variant)
    boxes: tuple[Box, ...] = (
        *(Box("q", bq, _CHUNK), Box("k", bk, _CHUNK), Box("v", bk, _CHUNK)),
        Box("dout", bq, _CHUNK),
    )
    rows = bq // 2 if d == 64 else bq  # of a warpgroup's piece of dQ
    leaving = Box("dq", rows, _CHUNK) if variant.once else Box("dq_acc", rows, 32)
    boxes += (leaving if staged else boxes[0],)
    name = "backward_wide" if wide else "backward"
    return Kernel(
        f"hopper/{name}.cu",
        f"hopper_{name}",
        384,
        shared,
        launch.macros(
            values
            | {"SMEM_BYTES": shared, "D": d, "FUSED": fused, "ORDERED": ordered}
            | {"CLUSTER": variant.cluster, "IN_STEP": variant.in_step, "ONCE": variant.once}
            | {"DLSE": dlse}
            | {"AFTER": variant.after, "MORE": variant.more, "DEFERRED": variant.deferred}
        ),
        boxes,
        variant.cluster,
    )


def roles_kernel(problem: Problem, tiling: Tiling, variant: Variant) -> Kernel:
    """The fused pass of 129 to 192 columns, whose consumers make different products."""
    d, bq, bk, stages = _shared_dim(problem), tiling.block_q, tiling.block_k, 2
    # K, V, Q and dO, P and dS; dQ on its way out.
    tiles = 2 * (2 * bk * d + (stages + 1) * bq * d + 2 * bq * bk) + 4 * bq * d
    shared = on_chip(tiles + 4 * stages * 2 * bq, 3 + 2 * stages + 2 * d // _CHUNK)
    values = launch.constants(problem, tiling, variant) | {"SMEM_BYTES": shared, "D": d}
    return Kernel(
        *("hopper/backward_roles.cu", "hopper_backward_roles", 512, shared),
        launch.macros(
            values
            | {"FUSED": True, "ORDERED": False, "IN_STEP": variant.in_step, "ONCE": False}
            | {"AFTER": False, "MORE": False, "DEFERRED": False, "DLSE": False}
        ),
        (
            *(Box("q", bq, _CHUNK), Box("k", bk, _CHUNK), Box("v", bk, _CHUNK)),
            *(Box("dout", bq, _CHUNK), Box("dq_acc", bq, 32)),
        ),
    )


def dq_kernel(problem: Problem, tiling: Tiling, variant: Variant) -> Kernel:
    """dQ alone, the last of three passes."""
    d, bq, bk, stages = _shared_dim(problem), tiling.block_q, tiling.block_k, 2
    partial = 4 * 128 * (32 if bq == 64 else 1)
    shared = on_chip(2 * (2 * bq * d + stages * 2 * bk * d) + partial, 2 * bq // 64 + 2 * stages)
    values = launch.constants(problem, tiling, variant)
    return Kernel(
        "hopper/dq.cu",
        "hopper_dq",
        384,
        shared,
        launch.macros(values | {"SMEM_BYTES": shared, "D": d}),
        (
            *(Box("q", 64, _CHUNK), Box("k", bk, _CHUNK), Box("v", bk, _CHUNK)),
            Box("dout", 64, _CHUNK),
        ),
    )


def on_chip(data: int, barriers: int) -> int:
    """Bytes of a ``struct OnChip``: tiles and rows, mbarriers, item slots; a multiple of 1024."""
    items = -(-(data + barriers * _BARRIER) // 16) * 16
    return -(-(items + _ITEMS) // 1024) * 1024


def _wide(head_dim: int) -> int:
    """Columns of a tile in shared memory: whole chunks."""
    return -(-head_dim // _CHUNK) * _CHUNK


def tile_columns(stage: str, problem: Problem) -> tuple[int, int]:
    """Columns of a tile of Q or K, and of V or dO, that the copy engine delivers: whole boxes."""
    if stage == "forward":
        return _wide(problem.head_dim), _wide(problem.head_dim_v)
    return _shared_dim(problem), _shared_dim(problem)


def _shared_dim(problem: Problem) -> int:
    """The head_dim that the backward kernels compute with, for Q and K as for V and dO."""
    return _wide(max(problem.head_dim, problem.head_dim_v))


def product_columns(
    stage: str, problem: Problem, tiling: Tiling, cluster: int = 1
) -> tuple[int, int]:
    """Columns that a backward's products take: of both head dims, and beyond them, all products'.

    Whole sixteens, or thirty-twos where a cluster shares an item. A tile's whole columns are taken
    by dQ^T, whose rows they are (up to 32 columns dQ itself is computed), and beyond a head_dim of
    128, where warpgroups share them out, by dK and dV too. With one warpgroup for dQ it takes
    thirty-twos.
    """
    step = 32 if cluster > 1 else 16
    d = max(problem.head_dim, problem.head_dim_v)
    taken, whole = -(-d // step) * step, _shared_dim(problem)
    products = (stage == "fused" and taken > 32) + (2 if stage != "dq" and whole > 128 else 0)
    beyond = products * (whole - taken)
    if stage == "fused" and tiling == ROLES:
        beyond -= whole - -(-d // 32) * 32
    return taken, beyond
