"""Every GPU kernel but the teaching ones, on small ragged problems, for NVIDIA's compute-sanitizer.

    for tool in memcheck racecheck initcheck; do
        compute-sanitizer --tool $tool --error-exitcode 1 python tests/sanitize.py
    done

Each array is an allocation of its own (no memory pool), so that a step past its end is seen.
"""

import cupy
import numpy as np

import flashsim
from flashsim import Tiling
from flashsim.problem import BlockMask, numpy_dtype

MASKS = (
    dict(causal=True),
    dict(window=(20, 3), softcap=2.0),
    dict(causal=True, cu_seqlens_q=(0, 30, 30, 77), cu_seqlens_k=(0, 50, 61, 101)),
    dict(block_mask=BlockMask(np.eye(2, dtype=bool), 64, 64)),
)


def main() -> None:
    """Forward and both backwards, traced and not."""
    cupy.cuda.set_allocator(None)
    rng = np.random.default_rng(0)
    runs = 0
    for dtype in ("bfloat16", "float16", "float32"):
        for d, dv in ((64, 64), (40, 24), (160, 128)):
            for mask in MASKS if d == 40 else MASKS[:1]:
                shapes = ((1, 4, 77, d), (1, 2, 101, d), (1, 2, 101, dv), (1, 4, 77, dv))
                q, k, v, dout = (
                    rng.standard_normal(shape).astype(numpy_dtype(dtype)) for shape in shapes
                )
                # Small tiles are the portable kernels', the default ones on a Hopper GPU Hopper's;
                # so it is in Python.
                ways = [("cupy", {"tiling": Tiling(32, 32)}), ("cupy", {})]
                if dtype != "float32":  # the kernels in Python, on tensor cores
                    ways += [("numba_cuda", {"tiling": Tiling(32, 32)}), ("numba_cuda", {})]
                for backend, tiles in ways:
                    for trace in (False, "timeline"):
                        result = flashsim.run(
                            *(q, k, v), backend=backend, trace=trace, **tiles, **mask
                        )
                        for deterministic in (True, False):
                            result.backward(dout, deterministic=deterministic, **tiles)
                            runs += 1
    print(f"{runs} forward and backward runs")


if __name__ == "__main__":
    main()
