"""The Hopper kernels in Python: a kernel family as `flashsim.backends.portable` describes it.

`refusal` says what they do not run; there `tensor` does.
"""

from __future__ import annotations

from functools import lru_cache

from flashsim import plans
from flashsim.backends import launch
from flashsim.backends.launch import Box, Gpu, Kernel, Variant
from flashsim.backends.numba_gpu import compiler, hopper_backward, hopper_forward
from flashsim.backends.numba_gpu.hopper_work import Shared
from flashsim.backends.numba_gpu.ptx_hopper import CHUNK
from flashsim.backends.passes import Pass, tables_of, variant_of, walk_pass
from flashsim.errors import UnsupportedError
from flashsim.problem import Problem
from flashsim.schedule import KeyOrder
from flashsim.tiling import Tiling

NAME = "hopper"
load = compiler.load
CAPABILITY = (9, 0)
MAX_HEAD_DIM = {"forward": 256, "backward": 128}


def refusal(problem: Problem, tiling: Tiling | None, gpu: Gpu, direction: str) -> str | None:
    """Why these kernels do not run this; None if they do."""
    if gpu.compute_capability != CAPABILITY:
        has = ".".join(map(str, gpu.compute_capability))
        return f"they need compute capability 9.0, and {gpu.name} has {has}"
    limit = MAX_HEAD_DIM[direction]
    if max(problem.head_dim, problem.head_dim_v) > limit:
        return f"{direction}, they take a head_dim up to {limit}"
    possible = tilings(problem, gpu, direction)
    if tiling is None:
        return None if _divide(problem, possible) else "their tiles do not divide the block mask's"
    if tiling not in possible:
        return f"{tiling} tiles are none of theirs ({', '.join(map(str, possible))})"
    return None


def tilings(problem: Problem, gpu: Gpu, direction: str) -> tuple[Tiling, ...]:
    """The tilings that the kernels are built for, the best first (docs/hopper.md)."""
    d = max(problem.head_dim, problem.head_dim_v)
    if direction == "backward":
        return (Tiling(128, 128),) if d <= 64 else (Tiling(64, 128),)
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
    return tuple(t for t in best if _forward_shared(problem, t).nbytes <= gpu.shared_bytes)


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
    tiling = _tiling(problem, tiling, gpu, "forward")
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
) -> tuple[Pass, ...]:
    """As `portable.backward_passes`; dQ alone and the row-wise passes are `tensor`'s kernels."""
    fused = algorithm == "flash2-fused"
    tiling = _tiling(problem, tiling, gpu, "backward")
    passes = []
    for stage in plans.stages(problem, algorithm, "backward"):
        tables = tables_of(stage, problem, tiling, key_order)
        variant = variant_of(tables, report)
        if stage.name in ("dkdv", "fused"):
            kernel = _backward_kernel(problem, tiling, variant, fused=fused)
            passes.append(walk_pass(stage, tables, kernel, gpu, persistent=True))
        elif stage.name == "dq":
            kernel = launch.dq_kernel(problem, tiling, variant, gpu)
            passes.append(walk_pass(stage, tables, kernel, gpu))
        else:
            name = f"flash_{stage.name}"
            kernel = launch.rows_kernel(problem, tiling, variant, name, fused=fused)
            heads = problem.batch * problem.heads
            passes.append(Pass(stage, tables, kernel, (tables.tiles, heads), heads, 1))
    return tuple(passes)


def _tiling(problem: Problem, tiling: Tiling | None, gpu: Gpu, direction: str) -> Tiling:
    reason = refusal(problem, tiling, gpu, direction)
    if reason is not None:
        raise UnsupportedError(
            f"the Hopper kernels do not run this: {reason}; kernel='tensor' may, and without "
            "kernel=... whichever does is taken"
        )
    return tiling or _divide(problem, tilings(problem, gpu, direction))[0]


def _divide(problem: Problem, possible: tuple[Tiling, ...]) -> list[Tiling]:
    """The tilings that divide the block mask's cells, if there is one."""
    cells = problem.block_mask
    return [
        t
        for t in possible
        if cells is None or not (cells.block_q % t.block_q or cells.block_k % t.block_k)
    ]


# -- kernels: threads, shared memory, boxes -------------------------------------------------------


def _forward_shared(problem: Problem, tiling: Tiling) -> Shared:
    sides = launch.padded(problem.head_dim), launch.padded(problem.head_dim_v)
    return hopper_forward.shared_memory(tiling.block_q, tiling.block_k, *sides)


def _forward_kernel(problem: Problem, tiling: Tiling, variant: Variant) -> Kernel:
    threads = 128 * (tiling.block_q // 64 + 1)
    return Kernel(
        *("hopper_forward.py", "hopper_forward", threads, _forward_shared(problem, tiling).nbytes),
        launch.macros(launch.constants(problem, tiling, variant)),
        (Box("q", 64, CHUNK), Box("k", tiling.block_k, CHUNK), Box("v", tiling.block_k, CHUNK)),
    )


def _backward_kernel(problem: Problem, tiling: Tiling, variant: Variant, *, fused: bool) -> Kernel:
    bq, bk = tiling.block_q, tiling.block_k
    d = -(-max(problem.head_dim, problem.head_dim_v) // CHUNK) * CHUNK  # of Q and K as of V and dO
    values = launch.constants(problem, tiling, variant) | {"D": d, "FUSED": fused}
    threads = 128 * (bk // 64 + 1)
    return Kernel(
        "hopper_backward.py",
        "hopper_backward",
        threads,
        hopper_backward.shared_memory(bq, bk, d).nbytes,
        launch.macros(values),
        (
            *(
                Box("q", bq, CHUNK),
                Box("k", bk, CHUNK),
                Box("v", bk, CHUNK),
                Box("dout", bq, CHUNK),
            ),
            Box("dq_acc" if fused else "q", 64, 32),
        ),
    )
