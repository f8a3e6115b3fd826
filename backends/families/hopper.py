"""The Hopper kernels (sm_90a): what they take, which pass runs which, and how it is launched.

A kernel family like `portable`, with `refusal` besides: where it gives a reason, portable kernels
run. How the kernels got to be as they are, measured step by step: docs/notebooks/hopper.md.
"""

from __future__ import annotations

from functools import lru_cache

from flashsim.backends import launch
from flashsim.backends.families import portable_kernels
from flashsim.backends.kernels import nvrtc
from flashsim.backends.launch.kernel import Box, Gpu, Kernel, Variant
from flashsim.backends.launch.lowering import in_turns
from flashsim.backends.launch.passes import Pass, tables_of, variant_of, walk_pass
from flashsim.errors import UnsupportedError
from flashsim.problem.problem import Problem
from flashsim.schedule import plans
from flashsim.schedule.schedule import KeyOrder
from flashsim.schedule.tiling import Tiling

NAME = "hopper"
load = nvrtc.load
CAPABILITY = (9, 0)
MAX_HEAD_DIM = 256

#: Bytes of the item slots (struct Items in kernels/hopper/work.cuh) and of one mbarrier.
_ITEMS, _BARRIER = 160, 8
_CHUNK = 64  # columns of a shared-memory chunk: 128 bytes of 16-bit elements


def refusal(
    problem: Problem,
    tiling: Tiling | None,
    gpu: Gpu,
    direction: str,
    report: str,
    algorithm: str = "flash2",
) -> str | None:
    """Why the Hopper kernels do not run this; None if they do."""
    if gpu.compute_capability != CAPABILITY:
        return f"they need compute capability 9.0, and {gpu.name} has " + ".".join(
            map(str, gpu.compute_capability)
        )
    if problem.itemsize != 2:
        return f"they take float16 and bfloat16, not {problem.dtype}"
    if max(problem.head_dim, problem.head_dim_v) > MAX_HEAD_DIM:
        return f"they take a head_dim up to {MAX_HEAD_DIM}"
    possible = tilings(problem, gpu, direction, algorithm)
    if tiling is None:
        return None if _divide(problem, possible) else "their tiles do not divide the block mask's"
    if tiling not in possible:
        return f"{tiling} tiles are none of theirs ({', '.join(map(str, possible))})"
    return None


def tilings(
    problem: Problem, gpu: Gpu, direction: str, algorithm: str = "flash2"
) -> tuple[Tiling, ...]:
    """The tilings that the kernels are built for, the best first (docs/reference/hopper.md)."""
    d = max(problem.head_dim, problem.head_dim_v)
    if direction == "backward":
        if d <= 64:
            return (Tiling(128, 128),)
        if d > 128:
            return (Tiling(64, 64),)
        # By itself dQ takes 64 rows to a product; a softcap takes registers.
        if algorithm != "flash2-fused" or problem.softcap:
            return (Tiling(64, 128),)
        return (Tiling(64, 128), Tiling(80, 128))
    if d <= 64:
        best = [Tiling(192, 128), Tiling(128, 128)]
        if problem.causal and problem.n_kv <= 1024:
            best.reverse()
    elif d <= 128:
        best = [Tiling(128, 176), Tiling(128, 128)]
        if problem.softcap or (problem.causal and problem.n_kv <= 2048):
            best.reverse()
    else:
        best = [Tiling(128, 112)] if d <= 192 else [Tiling(128, 80)]
    best += [Tiling(128, 64)]  # divides common block masks
    return tuple(t for t in best if _forward_bytes(problem, t) <= gpu.shared_bytes)


def orders_dq(problem: Problem) -> bool:
    """Whether the fused backward with dQ in a fixed order is faster than three passes."""
    return max(problem.head_dim, problem.head_dim_v) <= 128


@lru_cache(maxsize=256)
def forward_passes(
    problem: Problem, tiling: Tiling | None, gpu: Gpu, key_order: KeyOrder, report: str
) -> tuple[Pass, ...]:
    """As `portable.forward_passes`.

    Raises
    ------
    UnsupportedError
        With `refusal`'s reason.
    """
    tiling = _tiling(problem, tiling, gpu, "forward", report)
    (stage,) = plans.stages(problem, "flash2", "forward")
    tables = tables_of(stage, problem, tiling, key_order)
    kernel = _forward_kernel(problem, tiling, variant_of(tables, report))
    return (walk_pass(stage, tables, kernel, gpu, persistent=True),)


@lru_cache(maxsize=256)
def backward_passes(
    problem: Problem,
    tiling: Tiling | None,
    gpu: Gpu,
    key_order: KeyOrder,
    report: str,
    algorithm: str,
    ordered: bool = False,
) -> tuple[Pass, ...]:
    """As `portable.backward_passes`; the row-wise passes are the portable ones.

    Parameters
    ----------
    ordered : bool
        "flash2-fused" only: add to dQ in a fixed order (`lowering.in_turns`).
    """
    fused = algorithm == "flash2-fused"
    tiling = _tiling(problem, tiling, gpu, "backward", report, algorithm, ordered)
    passes = []
    for stage in plans.stages(problem, algorithm, "backward"):
        tables = tables_of(stage, problem, tiling, key_order)
        variant = variant_of(tables, report)
        if stage.name in ("dkdv", "fused"):
            tables = in_turns(tables) if ordered else tables
            kernel = _backward_kernel(problem, tiling, variant, fused=fused, ordered=ordered)
            passes.append(walk_pass(stage, tables, kernel, gpu, persistent=True))
        elif stage.name == "dq":
            kernel = _dq_kernel(problem, tiling, variant)
            passes.append(walk_pass(stage, tables, kernel, gpu, persistent=True))
        else:
            name = f"flash_{stage.name}"
            kernel = portable_kernels.rows_kernel(problem, tiling, variant, name, fused=fused)
            heads = problem.batch * problem.heads
            passes.append(Pass(stage, tables, kernel, (tables.tiles, heads), heads, 1))
    return tuple(passes)


def _tiling(
    problem: Problem,
    tiling: Tiling | None,
    gpu: Gpu,
    direction: str,
    report: str,
    algorithm: str = "flash2",
    ordered: bool = False,
) -> Tiling:
    reason = refusal(problem, tiling, gpu, direction, report, algorithm)
    if reason is not None:
        raise UnsupportedError(
            f"the Hopper kernels do not run this: {reason}; kernel='portable' may, and without "
            "kernel=... whichever does is taken"
        )
    possible = _divide(problem, tilings(problem, gpu, direction, algorithm))
    return tiling or possible[-1 if ordered else 0]  # the fewer row tiles, the fewer turns to wait


def _divide(problem: Problem, possible: tuple[Tiling, ...]) -> list[Tiling]:
    """The tilings that divide the block mask's cells, if there is one."""
    cells = problem.block_mask
    return [
        t
        for t in possible
        if cells is None or not (cells.block_q % t.block_q or cells.block_k % t.block_k)
    ]


# -- kernels: threads, shared memory (struct OnChip of each), boxes --------------------------------


def _forward_kernel(problem: Problem, tiling: Tiling, variant: Variant) -> Kernel:
    values = launch.constants(problem, tiling, variant)
    return Kernel(
        "hopper/forward.cu",
        "hopper_forward",
        128 * (tiling.block_q // 64 + 1),
        shared := _forward_bytes(problem, tiling),
        launch.macros(values | {"SMEM_BYTES": shared, "STAGES": 2}),
        (
            Box("q", 64, _CHUNK),
            Box("k", tiling.block_k, _CHUNK),
            Box("v", tiling.block_k, _CHUNK),
        ),
    )


def _forward_bytes(problem: Problem, tiling: Tiling) -> int:
    groups, stages = tiling.block_q // 64, 2
    q = tiling.block_q * _wide(problem.head_dim)
    kv = tiling.block_k * (_wide(problem.head_dim) + _wide(problem.head_dim_v))
    return _on_chip(2 * (q + stages * kv), 2 * groups + 4 * stages)


def _backward_kernel(
    problem: Problem, tiling: Tiling, variant: Variant, *, fused: bool, ordered: bool
) -> Kernel:
    d, bq, bk, stages = _shared_dim(problem), tiling.block_q, tiling.block_k, 2
    wide = d > 128
    tiles = 2 * (2 * bk * d + stages * 2 * bq * d)
    if wide:
        tiles += 2 * 2 * stages * bq * bk  # P and dS
    elif fused:
        tiles += 2 * stages * bq * bk + 4 * bq * d  # dS, and dQ on its way out
    shared = _on_chip(tiles + 4 * stages * 2 * bq, 2 + 2 * stages)
    values = launch.constants(problem, tiling, variant)
    boxes: tuple[Box, ...] = (
        *(Box("q", bq, _CHUNK), Box("k", bk, _CHUNK), Box("v", bk, _CHUNK)),
        Box("dout", bq, _CHUNK),
    )
    if not wide:
        boxes += (Box("dq_acc", bq if d == 128 else bq // 2, 32) if fused else boxes[0],)
    name = "backward_wide" if wide else "backward"
    return Kernel(
        f"hopper/{name}.cu",
        f"hopper_{name}",
        384,
        shared,
        launch.macros(values | {"SMEM_BYTES": shared, "D": d, "FUSED": fused, "ORDERED": ordered}),
        boxes,
    )


def _dq_kernel(problem: Problem, tiling: Tiling, variant: Variant) -> Kernel:
    d, bq, bk, stages = _shared_dim(problem), tiling.block_q, tiling.block_k, 2
    partial = 4 * 128 * (32 if bq == 64 else 1)
    shared = _on_chip(2 * (2 * bq * d + stages * 2 * bk * d) + partial, 2 * bq // 64 + 2 * stages)
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


def _on_chip(data: int, barriers: int) -> int:
    """Bytes of a ``struct OnChip``: tiles and rows, mbarriers, item slots; a multiple of 1024."""
    items = -(-(data + barriers * _BARRIER) // 16) * 16
    return -(-(items + _ITEMS) // 1024) * 1024


def _wide(head_dim: int) -> int:
    """Columns of a tile in shared memory: whole chunks."""
    return -(-head_dim // _CHUNK) * _CHUNK


def _shared_dim(problem: Problem) -> int:
    """The head_dim that the backward kernels compute with, for Q and K as for V and dO."""
    return _wide(max(problem.head_dim, problem.head_dim_v))
