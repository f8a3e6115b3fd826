"""The portable kernels (sm_80 and later): which tiles they run, and which one if none is given."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flashsim.backends.families import portable_kernels as kernels
from flashsim.backends.families.family import PLAIN, Family
from flashsim.backends.kernels import nvrtc
from flashsim.backends.launch.kernel import Gpu, Kernel, Variant
from flashsim.errors import TilingError
from flashsim.problem.problem import Problem
from flashsim.schedule.tiling import Tiling


@dataclass(frozen=True)
class Portable(Family):
    """The family whose kernels are compiled for `like`, but for what a walk and a report ask."""

    def refusal(
        self,
        problem: Problem,
        tiling: Tiling | None,
        gpu: Gpu,
        direction: str,
        algorithm: str = "flash2",
    ) -> str | None:
        """See `Family`."""
        if direction == "backward" and algorithm == "flash2-once":
            return (
                "the portable kernels add dQ up in memory; Hopper's store it after one visit "
                "(float16 and bfloat16, head_dim up to 128), and algorithm='flash2-fused' runs here"
            )
        given = problem, gpu, direction, algorithm
        what = f"{direction} at head_dim={problem.head_dim}, {problem.dtype}"
        if tiling is None:
            if self.default(*given):
                return None
            why = f"no default tiling for {what} on {gpu.name}; give tiling=..., one of: "
        else:
            need = self._shared_need(tiling, *given)
            if need is None:
                why = "is not one that the kernels are built for (sides are multiples of 16)"
            elif need > gpu.shared_bytes:
                why = f"needs {need:,} B of shared memory, and {gpu.name} gives a block "
                why += f"{gpu.shared_bytes:,} B"
            else:
                return None
            why = f"{what}: a {tiling} tile {why}; possible: "
        why += ", ".join(map(str, self.tilings(*given))) or "none on this GPU"
        if tiling is None and problem.block_mask is not None:
            why += f" that divides the block mask's {problem.block_mask!r}"
        return why

    def tilings(
        self, problem: Problem, gpu: Gpu, direction: str, algorithm: str = "flash2"
    ) -> tuple[Tiling, ...]:
        """Every tiling that the kernels run on this GPU, smallest first."""
        every = (Tiling(q, k) for q in kernels.SIDES for k in kernels.SIDES)
        return tuple(t for t in every if self._runs(t, problem, gpu, direction, algorithm))

    def kernel(
        self,
        stage: str,
        problem: Problem,
        tiling: Tiling,
        variant: Variant,
        gpu: Gpu,
        *,
        fused: bool,
        ordered: bool,
    ) -> Kernel:
        """See `Family`."""
        if stage == "forward":
            return kernels.forward_kernel(problem, tiling, variant)
        if stage in ("dkdv", "fused"):
            return kernels.dkdv_kernel(problem, tiling, variant, gpu, fused=fused)
        if stage == "dq":
            return kernels.dq_kernel(problem, tiling, variant, gpu)
        return kernels.rows_kernel(problem, tiling, variant, stage, fused=fused)

    def default(
        self, problem: Problem, gpu: Gpu, direction: str, algorithm: str, ordered: bool = False
    ) -> Tiling | None:
        """See `Family`; docs/notebooks/speed_gpu.md."""
        for sides in self._preferred(problem, direction, fused=algorithm == "flash2-fused"):
            tiling = Tiling(*sides)
            if tiling.divides(problem.block_mask) and self._runs(
                tiling, problem, gpu, direction, algorithm
            ):
                return tiling
        return None

    def _preferred(
        self, problem: Problem, direction: str, *, fused: bool
    ) -> tuple[tuple[int, int], ...]:
        d, tf32 = max(problem.head_dim, problem.head_dim_v), self.like.tf32
        if problem.dtype == "float32" and not tf32:
            return ((64, 64), (32, 32), (16, 16))
        if direction == "backward":
            smaller = ((64, 64), (32, 64), (32, 32), (16, 32), (16, 16))
            if tf32 and fused and d > 80:
                return ((64, 128), (48, 128) if d <= 96 else (32, 128), *smaller)
            return ((64, 128), *smaller)
        if d <= 64:
            return ((128, 96), (128, 64), (64, 64), (32, 32), (16, 16))
        return ((128, 64), (128, 32), (64, 32), (32, 32), (16, 16))

    def _runs(
        self, tiling: Tiling, problem: Problem, gpu: Gpu, direction: str, algorithm: str
    ) -> bool:
        need = self._shared_need(tiling, problem, gpu, direction, algorithm)
        return need is not None and need <= gpu.shared_bytes

    def _shared_need(
        self, tiling: Tiling, problem: Problem, gpu: Gpu, direction: str, algorithm: str
    ) -> int | None:
        """Shared memory of the largest kernel of a pass, in bytes; None: not built for the tile."""
        fused = algorithm == "flash2-fused"
        stages = ("dkdv",) if fused else ("dkdv", "dq")
        try:
            return max(
                self.kernel(
                    *(stage, problem, tiling, self.like, gpu), fused=fused, ordered=False
                ).shared_bytes
                for stage in (("forward",) if direction == "forward" else stages)
            )
        except TilingError:
            return None


PORTABLE = Portable("portable", nvrtc.load)
#: float32 products on tensor cores, their operands rounded to tf32.
TF32 = Portable("portable, tf32", nvrtc.load, replace(PLAIN, tf32=True))
