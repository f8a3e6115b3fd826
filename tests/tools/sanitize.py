"""Run every GPU kernel on small ragged problems, for NVIDIA's compute-sanitizer.

    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/tools/sanitize.py portable

Families: portable, tf32, python, teaching, decode, softmax-matmul, and the default kernels of a
Hopper GPU: hopper, hopper-once, python-hopper, fp8 and latent; all of them if none is named. Each
array has its own allocation (no memory pool), so that accesses past its end are detected.
`tests/tools/gpu_check.py sanitize` runs every family under every tool.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from decode_cases import Case

import flashsim
from flashsim import Problem, Tiling
from flashsim.backends.launch_policy.cost_model import HOPPER_FORWARD, HOPPER_FORWARD_WIDE
from flashsim.problem.masks import BlockMask

#: (head_dim, head_dim_v, options): padded rows; scores that warps exchange, in halves of a wide
#: row; a loop whose visits are listed. All are ragged, with two query heads per KV head. Some row
#: tiles have two visits, since otherwise "flash2-once" would run.
SHAPES = (
    (37, 24, dict(causal=True, cu_seqlens_q=(0, 30, 30, 150), cu_seqlens_k=(0, 50, 61, 190))),
    (80, 128, dict(causal=True)),
    (160, 128, dict(window=(20, 3), softcap=2.0)),
    (64, 64, dict(block_mask=BlockMask(np.tri(2, dtype=bool), 128, 128))),
)
#: Further cases for Hopper's kernels: the widest rows, which have another backward kernel.
WIDEST = (256, 256, {})
#: Enough work tiles for the fused backward to select its tile with more keys.
MANY = (160, 128, dict(n_kv=96, heads=140, kv_heads=70))
#: Row tiles with one visit.
ONE_VISIT = ((48, 64, dict(n_kv=120)), (128, 100, dict(n_kv=120)))


@dataclass(frozen=True)
class Way:
    """Options for running a family.

    `both` are options of forward and backward, and `how` those of `run` alone. `forms` are the
    backwards of `shapes`, by `deterministic` or by name. For `tiles`, head_dims with a tiling each,
    only the forward runs. The last problem is traced.
    """

    dtypes: tuple[str, ...]
    how: dict[str, Any]
    both: dict[str, Any] = field(default_factory=dict)
    shapes: tuple[tuple[int, int, dict[str, Any]], ...] = SHAPES
    tiles: tuple[tuple[int, Tiling | None], ...] = ()
    forms: tuple[bool | str | None, ...] = (True, False)
    trace: bool | str = "timeline"


FORWARDS = HOPPER_FORWARD, HOPPER_FORWARD_WIDE
_SMALL = {"tiling": Tiling(32, 32)}
_CUPY, _NUMBA = {"backend": "cupy"}, {"backend": "numba_cuda"}
_PORTABLE = {**_CUPY, "kernel": "portable"}
WAYS = {
    "portable": Way(("bfloat16", "float32"), _PORTABLE, _SMALL),
    "tf32": Way(("float32",), {**_PORTABLE, "allow_tf32": True}, _SMALL),
    # Three passes; dQ in a fixed order, if there is such a form; in any order.
    "hopper": Way(
        *(("float16",), _CUPY),
        shapes=(WIDEST, MANY, *SHAPES),
        tiles=tuple((d, t) for known in FORWARDS for d, times in known.items() for t in times),
        forms=(None, True, False),
    ),
    "hopper-once": Way(("float16",), _CUPY, shapes=ONE_VISIT, forms=("flash2-once",)),
    "python": Way(("bfloat16",), {**_NUMBA, "kernel": "tensor"}, _SMALL),
    # For wide rows the backward is that of family `python`, at the default tiles.
    "python-hopper": Way(
        *(("bfloat16",), {**_NUMBA, "kernel": "hopper"}),
        tiles=((64, Tiling(192, 128)), (128, Tiling(128, 176)), (256, None)),
        forms=(None, True, False),
    ),
    # Each process compiles anew, so there is one problem, with 8 rows, since each thread works on
    # one.
    "teaching": Way(
        ("float16",),
        {**_NUMBA, "kernel": "teaching"},
        {"tiling": Tiling(8, 8)},
        shapes=SHAPES[:1],
        trace=True,
    ),
}
_GROUPED = {"heads": 4, "kv_heads": 2, "dtype": "bfloat16"}
#: Caches, decoded with 1, 3, 4 (on Hopper a cluster) and the default number of splits: padded rows;
#: several row tiles; pages, whose unused entries lie outside the pool; a shared prefix; latent
#: attention.
DECODED = (
    Case(Problem(1, 700, 37, 24, batch=3, **_GROUPED), (0, 700, 333)),
    Case(Problem(20, 500, 128, batch=2, causal=True, **_GROUPED), (500, 77)),
    Case(Problem(4, 500, 256, batch=2, window=(90, 0), **_GROUPED), (490, 77), page=3),
    Case(Problem(1, 500, 64, batch=2, softcap=2.0, **_GROUPED), (490, 77), page=16),
    Case(Problem(4, 900, 128, batch=3, causal=True, **_GROUPED), (900, 640, 899), 16, 624),
    Case(Problem(2, 300, 576, 512, batch=2, heads=70, kv_heads=1, dtype="float16", latent=True),
         (300, 77), page=16),
)  # fmt: skip
FAMILIES = (*WAYS, "fp8", "decode", "latent", "softmax-matmul")


def problems(family: str) -> list[tuple[Problem, tuple[bool | str | None, ...], Tiling | None]]:
    """Return a family's problems, each with the forms of its backward, and a tiling or None."""
    way = WAYS[family]
    sizes = {"n_q": 150, "n_kv": 190, "heads": 2, "kv_heads": 1}
    cases = [
        *((d, d, {}, (), tiling) for d, tiling in way.tiles),
        *((*shape, way.forms, way.both.get("tiling")) for shape in way.shapes),
    ]
    return [
        (Problem(head_dim=d, head_dim_v=dv, dtype=dtype, **{**sizes, **more}), forms, tiling)
        for d, dv, more, forms, tiling in cases
        for dtype in way.dtypes
    ]


def check(family: str) -> int:
    """Run each problem's forward and backwards, the last one traced; return how many ran."""
    from cupy_checks import gradients, make, options

    way, every = WAYS[family], problems(family)
    for problem, forms, tiling in every:
        x = make(problem)
        trace = way.trace if problem is every[-1][0] else False
        given = {**options(problem), **way.both, **way.how, "tiling": tiling}
        result = flashsim.run(x["q"], x["k"], x["v"], trace=trace, **given)
        for form in forms:
            gradients(result, x["dout"], form, **way.both)
    return sum(1 + len(forms) for _, forms, _ in every)


def check_decode(*, latent: bool = False) -> int:
    """Decode every cache of `DECODED`, or every latent one; return the number of calls."""
    decoded = [case for case in DECODED if case.problem.latent == latent]
    for case in decoded:
        x = case.make()
        p = case.problem
        given = {name: getattr(p, name) for name in ("causal", "window", "softcap")}
        given |= {"cache_seqlens": case.lengths, "algorithm": "flash-decode", "backend": "cupy"}
        if case.page:
            given["block_table"] = x["table"]
        if case.prefix:
            given["shared_prefix"] = case.prefix
        if p.latent:
            given["head_dim_v"] = p.head_dim_v
        for splits in (1, 3, 4, "auto"):
            result = flashsim.run(x["q"], x["k"], x.get("v"), splits=splits, **given)
            case.check(x, result.out, result.lse)
    return 4 * len(decoded)


def check_softmax_matmul() -> int:
    """Compute softmax(X) V with ragged ends, for each block size; return the number of launches."""
    from flashsim import softmax_matmul

    rng = np.random.default_rng(0)
    x, v = (rng.standard_normal(size, np.float32) for size in ((2, 150, 190), (2, 190, 72)))
    blocks = (16, 32, 64)
    want = softmax_matmul.run(x, v).out
    for block in blocks:
        found = softmax_matmul.run(x, v, block=block, backend="cupy").out
        np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-5)
    return len(blocks)


def check_fp8() -> int:
    """Run every tile of the FP8 forward on inputs quantised here, V plain and transposed."""
    import cupy

    from flashsim.backends.launch_policy.hopper_fp8 import TILINGS

    rng, ways = np.random.default_rng(0), (("block", "hadamard"), ("head", None))
    cases = [(d, tile, way) for d, tiles in TILINGS.items() for tile in tiles for way in ways]
    for d, tile, (granularity, rotate) in cases:
        shapes = (1, 4, 150, d), (1, 2, 190, d), (1, 2, 190, d)
        given = (cupy.asarray(rng.standard_normal(s).astype(np.float16)) for s in shapes)
        x = flashsim.quantize(*given, granularity=granularity, rotate=rotate, backend="cupy")
        how = {"causal": True, "tiling": tile, "backend": "cupy"}
        flashsim.run(x.q, x.k, x.v, **how, **x.options)
        plain = {name: a for name, a in x.options.items() if name != "v_transposed"}
        flashsim.run(x.q, x.k, x.v, trace="timeline", **how, **plain)
    return 2 * len(cases)


def main(families: Sequence[str]) -> None:
    """Check the families, with a separate allocation per array."""
    import cupy

    cupy.cuda.set_allocator(None)
    for family in families:
        own = {"decode": check_decode, "softmax-matmul": check_softmax_matmul, "fp8": check_fp8}
        own["latent"] = partial(check_decode, latent=True)
        passes = own[family]() if family in own else check(family)
        print(f"{family}: {passes} passes", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or FAMILIES)
