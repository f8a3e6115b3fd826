"""Every GPU kernel but the teaching ones, on small ragged problems, for NVIDIA's compute-sanitizer.

    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/sanitize.py portable

Families: portable, tf32, python, and what a Hopper GPU runs by default, hopper and python-hopper;
all of them if none is named. Each array is an allocation of its own (no memory pool), so that a
step past its end is seen.
`tests/gpu_check.py sanitize` runs every family under every tool.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

import flashsim
from flashsim import Problem, Tiling
from flashsim.problem import BlockMask

FAMILIES = ("portable", "tf32", "hopper", "python", "python-hopper")
#: (head_dim, head_dim_v, what else): padded rows; scores that cross warps, halves of a wide row; a
#: walk that is listed tile by tile. Ragged all of them, and with two query heads to a key head.
SHAPES = (
    (37, 24, dict(causal=True, cu_seqlens_q=(0, 30, 30, 150), cu_seqlens_k=(0, 50, 61, 190))),
    (80, 128, dict(causal=True)),
    (160, 128, dict(window=(20, 3), softcap=2.0)),
    (64, 64, dict(block_mask=BlockMask(np.eye(2, dtype=bool), 128, 128))),
)
_CUPY = {"backend": "cupy"}
_PORTABLE = {**_CUPY, "kernel": "portable"}
_NUMBA = {"backend": "numba_cuda"}
_SMALL = {"tiling": Tiling(32, 32)}
#: What a family runs: element types, what both passes take, what is for `run` alone.
WAYS: dict[str, tuple[tuple[str, ...], dict[str, Any], dict[str, Any]]] = {
    "portable": (("bfloat16", "float32"), _SMALL, _PORTABLE),
    "tf32": (("float32",), _SMALL, {**_PORTABLE, "allow_tf32": True}),
    "hopper": (("float16",), {}, _CUPY),
    "python": (("bfloat16",), _SMALL, {**_NUMBA, "kernel": "tensor"}),
    "python-hopper": (("bfloat16",), {}, _NUMBA),
}


def problems(family: str) -> list[Problem]:
    """What a family is run on."""
    sizes = {"n_q": 150, "n_kv": 190, "heads": 2, "kv_heads": 1}
    return [
        Problem(head_dim=d, head_dim_v=dv, dtype=dtype, **sizes, **more)
        for dtype in WAYS[family][0]
        for d, dv, more in SHAPES
    ]


def check(family: str) -> int:
    """Forward and both backwards of each problem, the last one traced; how many ran."""
    from cupy_checks import make, options

    _, tiles, how = WAYS[family]
    every = problems(family)
    for problem in every:
        x = make(problem)
        trace = "timeline" if problem is every[-1] else False
        given = {**options(problem), **tiles, **how}
        result = flashsim.run(x["q"], x["k"], x["v"], trace=trace, **given)
        for deterministic in (True, False):
            result.backward(x["dout"], deterministic=deterministic, **tiles)
    return 3 * len(every)


def main(families: Sequence[str]) -> None:
    """Check the families, each allocation on its own."""
    import cupy

    cupy.cuda.set_allocator(None)
    for family in families:
        print(f"{family}: {check(family)} passes", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or FAMILIES)
