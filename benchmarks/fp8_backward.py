"""Measure what FP8 could gain and cost in the backward pass.

    python benchmarks/fp8_backward.py --speed     # on a Hopper GPU

The project has no FP8 backward. ``--speed`` times the kernel of the bfloat16 backward after a
change of its source text: some of its products become FP8 products of the same shape. Such a
product reads half the bytes and has half as many instructions. Its operands are whatever lies in
shared memory, so the gradients are wrong, and only the time means anything. An FP8 backward would
also have to scale tiles and to transpose dS by bytes, so the time is a lower bound.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import flashsim
from flashsim.backends.kernels import nvrtc
from flashsim.backends.launch.kernel import Kernel
from flashsim.backends.launch_policy import hopper_kernels

#: The products of a visit in FP8: none, S = Q K^T and dP = dO V^T, or all five.
PARTS = ("none", "scores", "all")
_SWITCH = "FS_FP8_PRODUCTS"
#: (batch, heads, length, causal) of the timed shapes, with head_dim 128.
SHAPES = (
    *((1, 16, 16384, False), (1, 16, 16384, True), (4, 16, 4096, False)),
    *((4, 16, 4096, True), (16, 16, 1024, False)),
)
_SCORES = (
    (
        "x < COLUMNS / 16; ++x)\n        wgmma_ss<0, 0>(",
        "x < COLUMNS / 32; ++x)\n        wgmma_qk(",
    ),
)
_GRADIENTS = (
    ("BLOCK_Q == 128 ? 32 : FS_SCORE_MOD ? 64 : 16", "32"),  # dV in slices of 32 queries
    ("descriptor(visited, BLOCK_Q * 128)", "descriptor(visited, 0)"),
    ("x = first / 16; x < (first + rows) / 16", "x = first / 32; x < (first + rows) / 32"),
    (
        "wgmma_rs<1>(acc, P[x], db + down_rows(x), 1)",
        "wgmma_pv(acc, P[x], db + along_row(x, 0), 1)",
    ),
    (
        "P[e / 8][e / 2 % 4] = pack(p0, p1);\n                    if (e == first",
        "if (e % 4) P[e / 16][e / 4 % 4] = pack_fp8<false>(S[e - 2], S[e - 1], p0, p1);\n"
        "                    if (e == first",
    ),
    (
        "round_operand(dS, dP);",
        "for (int e = 0; e < BLOCK_Q / 2; e += 4) dS[e / 16][e / 4 % 4] = "
        "pack_fp8<false>(dP[e], dP[e + 1], dP[e + 2], dP[e + 3]);",
    ),
    (
        "for (int x = 0; x < BLOCK_Q / 16; ++x) {\n                const u32 at = ds_at",
        "for (int x = 0; x < BLOCK_Q / 32; ++x) {\n                const u32 at = ds_at",
    ),
    (
        "x < BLOCK_K / 16; ++x)\n        if (UPRIGHT)",
        "x < BLOCK_K / 32; ++x)\n        if (UPRIGHT)",
    ),
    (
        "descriptor(k, 0), dds = descriptor(ds, BLOCK_K * DS_WIDE * 2, DS_SWIZZLE)",
        "descriptor(k, 0), dds = descriptor(ds, 0)",
    ),
    (
        "wgmma_ss<1, 1>(dQ, dk + down_rows(x), dds + x * DS_WIDE * 2, x > 0)",
        "wgmma_qk(dQ, dk + along_row(x, 0), dds + along_row(x, 0), x > 0)",
    ),
)


def source(kernel: Kernel) -> str:
    """Return the kernel's text, with the products that the kernel's constants name in FP8."""
    text, part = nvrtc.source(kernel.file), PARTS[dict(kernel.constants).get(_SWITCH, 0)]
    if part == "none":
        return text
    header = nvrtc.source("hopper/pack_fp8.cuh") + nvrtc.source("hopper/wgmma_fp8.cuh")
    first = "constexpr int D = FS_D,"
    changes = [(first, header + first), *_SCORES, *(_GRADIENTS if part == "all" else ())]
    for old, new in changes:
        if text.count(old) != 1:
            raise RuntimeError(f"{kernel.file} changed: {old!r} is in it {text.count(old)} times")
        text = text.replace(old, new)
    return text


@contextmanager
def products(part: str) -> Iterator[None]:
    """Within the context, new launches of the fused backward have these products in FP8."""
    known = hopper_kernels.backward_kernel

    def changed(*made_for: Any) -> Kernel:
        kernel = known(*made_for)
        return replace(kernel, constants=(*kernel.constants, (_SWITCH, PARTS.index(part))))

    hopper_kernels.backward_kernel = changed
    nvrtc.text = source
    try:
        yield
    finally:
        hopper_kernels.backward_kernel = known


def speed(repetitions: int) -> None:
    """Print the µs of a backward by its FP8 products, interleaved."""
    from gpu_lab import medians, open_lab

    lab, _ = open_lab()
    print(f"{lab.name}; backward at head_dim 128, us of the call; in brackets bfloat16's / this")
    for batch, heads, n, causal in SHAPES:
        q, k, v, dout = (lab.array((batch, heads, n, 128), "bfloat16") for _ in range(4))
        works: dict[str, Callable[[], Any]] = {}
        for number, part in enumerate(PARTS):
            # A plan is kept per problem, so each has a scale of its own.
            scale = 128**-0.5 * (1 + 1e-6 * number)
            result = flashsim.run(q, k, v, backend="cupy", causal=causal, scale=scale)
            works[part] = partial(result.backward, dout, deterministic=False)
            with products(part):
                works[part]()
        took = medians(lab, works, repetitions)
        shown = (f"{part} {us:.1f} ({took['none'] / us:.2f})" for part, us in took.items())
        print(f"{batch} x {heads}, {n}{', causal' * causal}:", *shown, flush=True)


def main() -> None:
    """Run the chosen parts."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--speed", action="store_true", help="time the changed kernels on a GPU")
    parser.add_argument("--repetitions", type=int, default=7)
    chosen = parser.parse_args()
    if chosen.speed:
        speed(chosen.repetitions)


if __name__ == "__main__":
    main()
