"""Choose the launch of the FP8 forward for Hopper (kernels/hopper/forward_fp8.cu)."""

from dataclasses import dataclass

from flashsim.backends.kernels import nvrtc
from flashsim.backends.launch import kernel as launch
from flashsim.backends.launch.kernel import Box, Gpu, Kernel, Variant
from flashsim.backends.launch_policy import hopper, hopper_kernels
from flashsim.backends.launch_policy.cost_model import makespan
from flashsim.backends.launch_policy.family import Family, PassRequest, Walked
from flashsim.errors import UnsupportedError
from flashsim.problem.problem import Problem
from flashsim.schedule.tiling import Tiling

#: Tilings per head_dim, the fastest first (docs/notebooks/hopper.md).
TILINGS: dict[int, tuple[Tiling, ...]] = {
    64: (Tiling(192, 128), Tiling(128, 128)),
    128: (Tiling(192, 128), Tiling(128, 128)),
    256: (Tiling(128, 128),),
}
_STAGES = (4, 3, 2)
#: ``enum Scales`` of the kernel.
_TENSOR, _HEAD, _BLOCK, _NONE = range(4)


@dataclass(frozen=True)
class HopperFp8(Family):
    """The kernel family of FlashAttention-3's FP8 forward, which has no backward kernels."""

    def why_not(self, asked: PassRequest, tiling: Tiling | None) -> str | None:
        """Return the reason why these kernels cannot run this pass, or None if they can."""
        p, gpu = asked.problem, asked.gpu
        if gpu.compute_capability != hopper.CAPABILITY:
            has = ".".join(map(str, gpu.compute_capability))
            return f"they need compute capability 9.0, and {gpu.name} has {has}"
        if asked.direction != "forward":
            return "they have no backward pass"
        if p.head_dim != p.head_dim_v or p.head_dim not in TILINGS:
            dims = ", ".join(map(str, TILINGS))
            return (
                f"head_dim must be one of {dims}, and head_dim_v equal to it, got {p.head_dim} "
                f"and {p.head_dim_v}"
            )
        if p.cu_seqlens_q is not None:
            return "they do not support packed sequences"
        if p.softcap or p.scale <= 0:
            return "they do not support softcap, and scale must be above 0"
        possible = TILINGS[p.head_dim]
        if tiling is not None and tiling not in possible:
            return f"they have no {tiling} tiles, only {', '.join(map(str, possible))}"
        tiles = possible if tiling is None else (tiling,)
        if not any(t.divides(p.block_mask) for t in tiles):
            return "their tiles do not divide the block mask's cells"
        if not any(_one_scale_a_tile(p, t) for t in tiles):
            return (
                "each 64 rows of Q, and each tile of K and V, need one scale, but scales cover "
                f"blocks of {p.scales} rows of (Q, K), and tiles are {', '.join(map(str, tiles))}"
            )
        return None

    def possible(self, asked: PassRequest) -> tuple[Tiling, ...]:
        """Return all tilings that the FP8 kernel supports for this head_dim."""
        return TILINGS[asked.problem.head_dim]

    def fastest(self, asked: PassRequest) -> Tiling | None:
        """Return the FP8 kernel's fastest tiling for this pass, or None if no tiling fits."""
        p = asked.problem
        fit = (t for t in self.possible(asked) if t.divides(p.block_mask))
        return next((t for t in fit if _one_scale_a_tile(p, t)), None)

    def refused(self, reason: str) -> UnsupportedError:
        """Return the error to raise if `why_not` returned `reason`."""
        return UnsupportedError(f"the FP8 kernels do not run this: {reason}; {self.elsewhere}")

    def clump(self, walk: Walked, cluster: int = 1) -> int:
        """Return how many heads form a head group, which run together.

        The result is the 16-bit kernels' number or, if faster, the next smaller divisor of the
        number of heads.
        """
        size, group, walks = hopper.HOPPER.clump(walk, cluster), walk.problem.group, walk.walks
        if walk.alike:
            return size
        even = next((n for n in range(size - 1, 0, -1) if n % group == walks % n == 0), size)
        items = walk.tables.visits + 1  # the start and end of a work tile take as long as a visit
        return min(size, even, key=lambda n: makespan(items, walks, walk.gpu.multiprocessors, n))

    def kernel(
        self, stage: str, problem: Problem, tiling: Tiling, variant: Variant, gpu: Gpu
    ) -> Kernel:
        """Return the FP8 kernel that runs the forward pass."""
        p = problem
        stages = next(n for n in _STAGES if shared_bytes(p, tiling, n) <= gpu.shared_bytes)
        shared = shared_bytes(p, tiling, stages)
        kind, (queries, keys) = _scales(p)
        threads, made_for = 128 * (tiling.block_q // 64 + 1), (p, tiling, variant)
        v = Box("v", p.head_dim_v, 128, transposed=True)
        return launch.built(
            *("hopper/forward_fp8.cu", "hopper_forward_fp8", threads, shared, made_for),
            {"BYTES": p.result_itemsize, "BF16": True, "E5M2": p.dtype == "float8_e5m2"}
            | {"STAGES": stages, "SLICE": 128 if p.head_dim_v <= 128 else 64}
            | {"SCALES": kind, "SCALE_QUERIES": queries, "SCALE_KEYS": keys},
            (Box("q", 64, 128), Box("k", tiling.block_k, 128), v),
        )


HOPPER_FP8 = HopperFp8(
    "hopper, fp8",
    nvrtc.load,
    elsewhere="use backend='simulator', or convert the arrays to bfloat16",
)


def shared_bytes(problem: Problem, tiling: Tiling, stages: int) -> int:
    """Return the bytes of a block's ``struct OnChip``, whose rows are padded to 128 bytes."""
    d, dv = -(-problem.head_dim // 128) * 128, problem.head_dim_v
    groups = tiling.block_q // 64
    tiles = tiling.block_q * d + stages * tiling.block_k * (d + dv)
    return hopper_kernels.on_chip(tiles, 3 * groups + 5 * stages)


def _scales(problem: Problem) -> tuple[int, tuple[int, int]]:
    """Return the scales' granularity, and how many rows of Q, and of K, share a scale."""
    if problem.scales is None:
        return _NONE, (1, 1)
    if isinstance(problem.scales, str):
        return (_TENSOR if problem.scales == "tensor" else _HEAD), (1, 1)
    return _BLOCK, problem.scales


def _one_scale_a_tile(problem: Problem, tiling: Tiling) -> bool:
    """Return whether each K tile, V tile and warpgroup (64 rows of Q) has a single scale."""
    kind, (queries, keys) = _scales(problem)
    rows = queries % tiling.block_q == 0 or (queries % 64 == 0 and tiling.block_q % queries == 0)
    return kind != _BLOCK or (rows and keys % tiling.block_k == 0)
