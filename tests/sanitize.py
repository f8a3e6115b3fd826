"""Every GPU kernel but the teaching ones, on small ragged problems, for NVIDIA's compute-sanitizer.

    for tool in memcheck racecheck initcheck; do
        compute-sanitizer --tool $tool --error-exitcode 1 python tests/sanitize.py [FAMILY ...]
    done

Families: portable, tf32, hopper (what a Hopper GPU runs by default), python; all of them if none is
named. Each array is an allocation of its own (no memory pool), so that a step past its end is seen.
"""

import sys
from collections.abc import Iterator, Sequence

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


FAMILIES = ("portable", "tf32", "hopper", "python")


def ways(dtype: str, families: Sequence[str]) -> Iterator[tuple[dict, dict]]:
    """How to run: what the backward pass takes, too, and what is for `run` alone."""
    small = {"tiling": Tiling(32, 32)}
    if "portable" in families:
        yield small, {"backend": "cupy", "kernel": "portable"}
    if "tf32" in families and dtype == "float32":
        yield small, {"backend": "cupy", "kernel": "portable", "allow_tf32": True}
    if "hopper" in families:
        yield {}, {"backend": "cupy"}
    if "python" in families and dtype != "float32":  # on tensor cores
        yield small, {"backend": "numba_cuda"}
        yield {}, {"backend": "numba_cuda"}  # on a Hopper GPU, its own instructions


def main(families: Sequence[str]) -> None:
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
                for tiles, how in ways(dtype, families):
                    for trace in (False, "timeline"):
                        result = flashsim.run(q, k, v, trace=trace, **tiles, **how, **mask)
                        for deterministic in (True, False):
                            result.backward(dout, deterministic=deterministic, **tiles)
                            runs += 1
    print(f"{runs} forward and backward runs")


if __name__ == "__main__":
    main(sys.argv[1:] or FAMILIES)
