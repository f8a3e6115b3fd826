"""Choose the tile sizes of the portable kernels, which run on GPUs from sm_80 on."""

from dataclasses import dataclass, replace

from flashsim.backends.kernels import nvrtc
from flashsim.backends.launch.kernel import Gpu, Kernel, Variant
from flashsim.backends.launch_policy import portable_kernels as kernels
from flashsim.backends.launch_policy.family import PLAIN, Family, PassRequest
from flashsim.errors import TilingError
from flashsim.problem.problem import Problem
from flashsim.schedule.tiling import Tiling


@dataclass(frozen=True)
class Portable(Family):
    """A family of kernels that run on every GPU from sm_80 on."""

    def why_not(self, asked: PassRequest, tiling: Tiling | None) -> str | None:
        """Return the reason why these kernels cannot run this pass, or None if they can."""
        problem, gpu, direction, algorithm = asked[:4]
        if direction == "backward" and algorithm in ("flash2-once", "flash2-fused-first"):
            widest = 128 if algorithm == "flash2-once" else 192
            return (
                f"the portable kernels have no algorithm={algorithm!r}, since they accumulate dQ "
                "in memory that starts at 0; Hopper's have it (float16 and bfloat16, head_dim up "
                f"to {widest}); use algorithm='flash2-fused' here"
            )
        what = f"{direction} at head_dim={problem.head_dim}, {problem.dtype}"
        if tiling is None:
            if self.fastest(asked):
                return None
            possible = self._listed(asked)
            why = f"there is no default tiling for {what} on {gpu.name}"
            why += (
                f"; pass tiling=, one of: {possible}" if possible else ", and no tile is possible"
            )
        else:
            need = self._shared_need(asked, tiling)
            if need is None:
                why = "has no compiled kernel (sides must be multiples of 16)"
            elif need > gpu.shared_bytes:
                why = f"needs {need:,} B of shared memory, but {gpu.name} has "
                why += f"{gpu.shared_bytes:,} B per thread block"
            else:
                return None
            possible = self._listed(asked) or "none on this GPU"
            why = f"{what}: a {tiling} tile {why}; possible tiles: {possible}"
        if tiling is None and problem.block_mask is not None:
            why += f" (a tiling must divide the cells of the block mask, {problem.block_mask!r})"
        return why

    def _listed(self, asked: PassRequest) -> str:
        """Return all possible tilings as text; trying each takes more than a millisecond."""
        return ", ".join(map(str, self.possible(asked)))

    def possible(self, asked: PassRequest) -> tuple[Tiling, ...]:
        """Return all tilings with which the kernels run on this GPU, smallest first."""
        every = (Tiling(q, k) for q in kernels.SIDES for k in kernels.SIDES)
        return tuple(t for t in every if self._runs(asked, t))

    def fastest(self, asked: PassRequest) -> Tiling | None:
        """Return this GPU's fastest tiling (docs/notebooks/speed_gpu.md), or None if unknown."""
        preferred = (Tiling(*sides) for sides in self._preferred(asked))
        mask = asked.problem.block_mask
        return next((t for t in preferred if t.divides(mask) and self._runs(asked, t)), None)

    def kernel(
        self, stage: str, problem: Problem, tiling: Tiling, variant: Variant, gpu: Gpu
    ) -> Kernel:
        """Return the portable kernel that runs a stage of a pass."""
        if stage in kernels.WALKING:
            return kernels.WALKING[stage](problem, tiling, variant, gpu)
        return kernels.rows_kernel(stage, problem, tiling, variant)

    def _preferred(self, asked: PassRequest) -> tuple[tuple[int, int], ...]:
        d, tf32 = asked.wide, self.like.tf32
        if asked.problem.dtype == "float32" and not tf32:
            return ((64, 64), (32, 32), (16, 16))
        if asked.direction == "backward":
            smaller = ((64, 64), (32, 64), (32, 32), (16, 32), (16, 16))
            if tf32 and asked.fused and d > 80:
                return ((64, 128), (48, 128) if d <= 96 else (32, 128), *smaller)
            return ((64, 128), *smaller)
        if d <= 64:
            return ((128, 96), (128, 64), (64, 64), (32, 32), (16, 16))
        return ((128, 64), (128, 32), (64, 32), (32, 32), (16, 16))

    def _runs(self, asked: PassRequest, tiling: Tiling) -> bool:
        need = self._shared_need(asked, tiling)
        return need is not None and need <= asked.gpu.shared_bytes

    def _shared_need(self, asked: PassRequest, tiling: Tiling) -> int | None:
        """Return the largest kernel's bytes of shared memory, or None if a kernel is impossible."""
        if asked.direction == "forward":
            stages: tuple[str, ...] = ("forward",)
        else:
            stages = ("dkdv",) if asked.fused else ("dkdv", "dq")
        variant = replace(self.like, fused=asked.fused)
        made = (asked.problem, tiling, variant, asked.gpu)
        try:
            return max(self.kernel(stage, *made).shared_bytes for stage in stages)
        except TilingError:
            return None


PORTABLE = Portable("portable", nvrtc.load, takes_functions=True)
#: float32 products on tensor cores, their operands rounded to tf32.
TF32 = Portable("portable, tf32", nvrtc.load, replace(PLAIN, tf32=True), takes_functions=True)
