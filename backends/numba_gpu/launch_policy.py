"""Define the families of Python kernels, `TENSOR` and `HOPPER`.

`TENSOR` uses the instruction `mma.sync`, and `HOPPER` uses instructions that only Hopper has.
`TENSOR` has the passes, tiles, threads and shared memory of the portable CUDA C++ kernels, except
for the differences in `launch.Variant`.
"""

from dataclasses import dataclass, replace

from flashsim.backends.launch import kernel as launch
from flashsim.backends.launch.functions import has_known_slope
from flashsim.backends.launch.kernel import Gpu, Kernel, Variant
from flashsim.backends.launch_policy import hopper
from flashsim.backends.launch_policy.family import PLAIN, PassRequest, Walked
from flashsim.backends.launch_policy.hopper_kernels import Rings
from flashsim.backends.launch_policy.portable import Portable
from flashsim.backends.numba_gpu import compiler
from flashsim.backends.numba_gpu.hopper import smem_layout
from flashsim.problem.problem import Problem
from flashsim.schedule.tiling import Tiling

#: Forms of the backward that only the C++ kernels have.
_ONLY_IN_CPP = ("flash2-fused-first", "flash2-once")


@dataclass(frozen=True)
class PythonHopper(hopper.Hopper):
    """The family of Hopper kernels in Python, which share `TENSOR`'s row-wise kernels."""

    def why_not(self, asked: PassRequest, tiling: Tiling | None) -> str | None:
        """Return why the Python Hopper kernels cannot run this pass, or None if they can."""
        if asked.direction == "backward" and asked.algorithm in _ONLY_IN_CPP:
            return (
                f"they have no algorithm={asked.algorithm!r}, since they accumulate dQ in memory "
                "that starts at 0"
            )
        return super().why_not(asked, tiling)

    def possible(self, asked: PassRequest) -> tuple[Tiling, ...]:
        """Return the C++ kernels' tilings that were tested with the Python kernels as well."""
        every = super().possible(asked)
        if asked.direction == "backward":
            p = asked.problem
            if asked.wide <= 64 and p.score_mod and (p.score_grads or not has_known_slope(p)):
                return (Tiling(64, 128),)  # gradients of functions use registers
            # with 80 columns, products cost as much as with 128; other rows for dQ are untried
            every = tuple(t for t in every if not t.dq_rows)
            return tuple(sorted(every, key=lambda t: t.block_q))
        untried = (80, 96) if 128 < asked.wide <= 192 else (144,)
        return tuple(t for t in every if t.block_k <= 176 and t.block_k not in untried)

    def in_step(self, walk: Walked, clump: int) -> bool:
        """Return False: these kernels process a group's heads one after another."""
        return False

    def forward_bytes(
        self, problem: Problem, tiling: Tiling, rings: Rings, *, shares: bool = False
    ) -> int:
        """Return the bytes of shared memory per thread block of the forward."""
        sides = launch.padded_dims(problem)
        return smem_layout.OnChip(tiling.block_q, tiling.block_k, *sides, rings.stages).nbytes

    def kernel(
        self, stage: str, problem: Problem, tiling: Tiling, variant: Variant, gpu: Gpu
    ) -> Kernel:
        """Return the C++ kernel's launch, with the shared memory of the Python kernel."""
        kernel = super().kernel(stage, problem, tiling, variant, gpu)
        if not kernel.boxes:
            return kernel
        shared, sides = kernel.shared_bytes, (tiling.block_q, tiling.block_k)
        if stage == "dq":
            shared = smem_layout.DqAlone(*sides, dict(kernel.constants)["FS_D"]).nbytes
        elif stage != "forward":
            shared = _keys_outside(kernel, tiling, variant).nbytes
        return replace(kernel, file=f"{kernel.name}.py", shared_bytes=shared)


def _keys_outside(kernel: Kernel, tiling: Tiling, variant: Variant) -> smem_layout.ByKeys:
    """Return the shared-memory layout of a KV-outer backward kernel."""
    known = dict(kernel.constants)
    sides = (tiling.block_q, tiling.block_k, known["FS_D"])
    if kernel.name == "hopper_backward_wide":
        return smem_layout.ColumnsDivided(*sides, bool(variant.fused))
    if kernel.name == "hopper_backward_roles":
        wide = smem_layout.columns_taken(known["FS_HEAD_DIM"], known["FS_HEAD_DIM_V"], 32)
        return smem_layout.Roles(*sides, wide)
    return smem_layout.KeysOutside(*sides, fused=variant.fused, deferred=variant.deferred)


TENSOR = Portable("tensor", compiler.load, replace(PLAIN, python=True), takes_functions=True)
HOPPER = PythonHopper(
    "hopper",
    compiler.load,
    takes_functions=True,
    instead="tensor",
)
