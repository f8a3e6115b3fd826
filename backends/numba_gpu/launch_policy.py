"""The kernels in Python as families: `TENSOR` by `mma.sync`, `HOPPER` by Hopper's own instructions.

Passes, tiles, threads and shared memory of `TENSOR` are those of the CUDA C++ kernels, but for what
`launch.Variant` says; what differs is the language, and so the compiler.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from flashsim.backends import launch
from flashsim.backends.launch.device_tables import Lowered
from flashsim.backends.launch.kernel import Gpu, Kernel, Variant
from flashsim.backends.launch_policy import hopper, hopper_kernels, portable_kernels
from flashsim.backends.launch_policy.family import PLAIN
from flashsim.backends.launch_policy.portable import Portable
from flashsim.backends.numba_gpu import compiler
from flashsim.backends.numba_gpu.hopper.smem_layout import DqAlone, KeysOutside, OnChip
from flashsim.problem.problem import Problem
from flashsim.schedule import plans
from flashsim.schedule.tiling import Tiling

#: The head_dim up to which there is a backward with Hopper's own instructions.
WIDEST_BACKWARD = 128


@dataclass(frozen=True)
class PythonHopper(hopper.Hopper):
    """There is no backward above `WIDEST_BACKWARD`; row-wise kernels are `TENSOR`'s."""

    def refusal(
        self,
        problem: Problem,
        tiling: Tiling | None,
        gpu: Gpu,
        direction: str,
        algorithm: str = "flash2",
    ) -> str | None:
        """See `Family`."""
        widest = max(problem.head_dim, problem.head_dim_v)
        if direction == "backward" and widest > WIDEST_BACKWARD:
            return f"their backward takes a head_dim up to {WIDEST_BACKWARD}"
        if direction == "backward" and algorithm == "flash2-once":
            return "they add dQ up in memory"
        return super().refusal(problem, tiling, gpu, direction, algorithm)

    def tilings(
        self, problem: Problem, gpu: Gpu, direction: str, algorithm: str = "flash2"
    ) -> tuple[Tiling, ...]:
        """See `Family`; of the C++ kernel's those that were tried in Python."""
        every = super().tilings(problem, gpu, direction, algorithm)
        if direction == "backward":  # whose products take no fewer columns at 80 than at 128
            return tuple(sorted(every, key=lambda t: t.block_q))
        return tuple(t for t in every if t.block_k <= 176)

    def in_step(self, stage: plans.Stage, tables: Lowered, clump: int, gpu: Gpu) -> bool:
        """See `Family`; they go through a group's heads one after the other."""
        return False

    def forward_bytes(self, problem: Problem, tiling: Tiling, stages: int = 2) -> int:
        """Shared memory of the forward's blocks."""
        sides = launch.padded_dims(problem)
        return OnChip(tiling.block_q, tiling.block_k, *sides, stages).nbytes

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
        variant = replace(variant, overlap=True)
        if stage in ("dkdv", "fused"):
            made = hopper_kernels.backward_kernel(
                problem, tiling, variant, fused=fused, ordered=ordered
            )
            d = dict(made.constants)["FS_D"]
            sides = tiling.block_q, tiling.block_k, d
            shared = KeysOutside(*sides, fused=fused, deferred=variant.deferred).nbytes
            made = replace(made, file="hopper_backward.py", shared_bytes=shared)
        elif stage == "dq":
            made = hopper_kernels.dq_kernel(problem, tiling, variant)
            shared = DqAlone(tiling.block_q, tiling.block_k, dict(made.constants)["FS_D"]).nbytes
            made = replace(made, file="hopper_dq.py", shared_bytes=shared)
        elif stage == "forward":
            stages = self.stages(problem, tiling, gpu)
            shared = self.forward_bytes(problem, tiling, stages)
            own = {"STAGES": stages, "TURNS": hopper_kernels.take_turns(problem, tiling)}
            made = Kernel(
                *("hopper_forward.py", "hopper_forward", 128 * (tiling.block_q // 64 + 1), shared),
                launch.macros(launch.constants(problem, tiling, variant) | own),
                hopper_kernels.forward_boxes(tiling),
            )
        else:
            made = portable_kernels.rows_kernel(problem, tiling, variant, stage, fused=fused)
        return replace(made, overlaps=True)


TENSOR = Portable("tensor", compiler.load, replace(PLAIN, python=True))
HOPPER = PythonHopper("hopper", compiler.load, instead="tensor")
