"""Which tiles the portable kernels run on a GPU, and which of them is taken when none is given."""

from __future__ import annotations

from collections.abc import Callable

from flashsim.backends.families import portable_kernels
from flashsim.backends.launch.kernel import Gpu, Kernel, Variant
from flashsim.errors import TilingError
from flashsim.problem.problem import Problem
from flashsim.schedule.tiling import Tiling

#: The variant whose sizes are asked for, where tables and reports make no difference.
PLAIN = Variant(spans=True, descending=False)


def check(
    problem: Problem, tiling: Tiling, gpu: Gpu, direction: str, variant: Variant, *, fused: bool
) -> None:
    """Raise `TilingError`, with the tilings that do run, unless this one runs on this GPU."""
    try:
        need = _shared_need(problem, tiling, gpu, direction, variant, fused)
        if need <= gpu.shared_bytes:
            return
        why = f"needs {need:,} B of shared memory, and {gpu.name} gives a block "
        why += f"{gpu.shared_bytes:,} B"
    except TilingError:
        why = "is not one that the kernels are built for (sides are multiples of 16)"
    raise TilingError(
        f"{direction} at head_dim={problem.head_dim}, {problem.dtype}: a {tiling} tile {why}; "
        f"possible: {_possible(problem, gpu, direction, variant, fused)}"
    )


def fits(
    problem: Problem,
    tiling: Tiling | None,
    gpu: Gpu,
    direction: str,
    variant: Variant,
    *,
    fused: bool,
) -> bool:
    """Whether the kernels run here: with this tiling, or with a default one for None."""
    if tiling is not None:
        return _runs(problem, tiling, gpu, direction, variant, fused)
    try:
        default_tiling(problem, gpu, direction, variant, fused=fused)
    except TilingError:
        return False
    return True


def runnable(
    problem: Problem, gpu: Gpu, direction: str, variant: Variant = PLAIN, *, fused: bool
) -> list[Tiling]:
    """Every tiling that the kernels run on this GPU, smallest first."""
    return [
        tiling
        for tiling in (Tiling(q, k) for q in portable_kernels.SIDES for k in portable_kernels.SIDES)
        if _runs(problem, tiling, gpu, direction, variant, fused)
    ]


def default_tiling(
    problem: Problem, gpu: Gpu, direction: str, variant: Variant = PLAIN, *, fused: bool
) -> Tiling:
    """The fastest tiling that runs here, measured on an H200 (docs/guides/performance.md)."""
    cells = problem.block_mask
    for tiling in (Tiling(*sides) for sides in _preferred(problem, direction, variant, fused)):
        divides = cells is None or not (
            cells.block_q % tiling.block_q or cells.block_k % tiling.block_k
        )
        if divides and _runs(problem, tiling, gpu, direction, variant, fused):
            return tiling
    raise TilingError(
        f"no default tiling for {direction} at head_dim={problem.head_dim}, {problem.dtype} on "
        f"{gpu.name}; give tiling=..., one of: {_possible(problem, gpu, direction, variant, fused)}"
        + ("" if cells is None else f" that divides the block mask's {cells!r}")
    )


def _preferred(
    problem: Problem, direction: str, variant: Variant, fused: bool
) -> tuple[tuple[int, int], ...]:
    d = max(problem.head_dim, problem.head_dim_v)
    if problem.dtype == "float32" and not variant.tf32:
        return ((64, 64), (32, 32), (16, 16))
    if direction == "backward":
        smaller = ((64, 64), (32, 64), (32, 32), (16, 32), (16, 16))
        if variant.tf32 and fused and d > 80:
            return ((64, 128), (48, 128) if d <= 96 else (32, 128), *smaller)
        return ((64, 128), *smaller)
    if d <= 64:
        return ((128, 96), (128, 64), (64, 64), (32, 32), (16, 16))
    return ((128, 64), (128, 32), (64, 32), (32, 32), (16, 16))


def _possible(problem: Problem, gpu: Gpu, direction: str, variant: Variant, fused: bool) -> str:
    found = runnable(problem, gpu, direction, variant, fused=fused)
    return ", ".join(map(str, found)) or "none on this GPU"


def _runs(
    problem: Problem, tiling: Tiling, gpu: Gpu, direction: str, variant: Variant, fused: bool
) -> bool:
    try:
        need = _shared_need(problem, tiling, gpu, direction, variant, fused)
    except TilingError:
        return False
    return need <= gpu.shared_bytes


def _shared_need(
    problem: Problem, tiling: Tiling, gpu: Gpu, direction: str, variant: Variant, fused: bool
) -> int:
    kernels: list[Callable[[], Kernel]]
    if direction == "forward":
        kernels = [lambda: portable_kernels.forward_kernel(problem, tiling, variant)]
    else:
        kernels = [lambda: portable_kernels.dkdv_kernel(problem, tiling, variant, gpu, fused=fused)]
        if not fused:
            kernels.append(lambda: portable_kernels.dq_kernel(problem, tiling, variant, gpu))
    return max(make().shared_bytes for make in kernels)
