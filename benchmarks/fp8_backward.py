"""Measure what FP8 could gain and cost in the backward pass.

    python benchmarks/fp8_backward.py --error     # in NumPy: the gradients' errors
    python benchmarks/fp8_backward.py --bound     # cycles of a visit, calculated
    python benchmarks/fp8_backward.py --speed     # on a Hopper GPU: a lower bound of the time

The project has no FP8 backward. ``--error`` computes one head's gradients with products of rounded
operands, and compares them with float64. Sums are in float32, so FP8's own errors are a little
larger on a GPU. FP8 inputs have a scale per 128 rows, and P and dS a scale per tile of 64 x 128.
The forward is assumed to have had the same scores, so that P's rows add up to 1.

``--bound`` counts what a visit of the kernel in kernels/hopper/backward.cu, which is 64 queries by
128 keys, moves through shared memory, and the cycles of its products.

``--speed`` times that kernel after a change of its source text: some of its products become FP8
products of the same shape. Such a product reads half the bytes and has half as many instructions.
Its operands are whatever lies in shared memory, so the gradients are wrong, and only the time means
anything. An FP8 backward would also have to scale its tiles, so the time is a lower bound.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

import flashsim
from flashsim import report
from flashsim.backends.kernels import nvrtc
from flashsim.backends.launch.kernel import Kernel
from flashsim.backends.launch_policy import hopper_kernels
from flashsim.problem.precision import round_to
from flashsim.problem.rotation import random_signs, rotated, unrotated
from flashsim.studies.precision import draw

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
    # dV in slices of 32 queries
    ("BLOCK_Q == 128 ? 32 : FS_SCORE_MOD && !FS_DISTANCES ? 64 : 16", "32"),
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


class Product(NamedTuple):
    """One of a visit's five products, of two warpgroups of 64 rows each."""

    name: str
    left: str
    right: str
    columns: int
    inner: int
    from_registers: bool = False

    def kilobytes(self, itemsize: int) -> float:
        """Return the KB that both warpgroups read from shared memory."""
        rows = self.columns + (0 if self.from_registers else 64)
        return 2 * rows * self.inner * itemsize / 1024

    def cycles(self, itemsize: int) -> float:
        """Return the cycles of the tensor cores: 4,096 FP8 or 2,048 bfloat16 products a cycle."""
        return 2 * 64 * self.columns * self.inner * itemsize / 4096


#: An FP8 operand must lie with the product's inner index along its rows ("^T": the transposed copy
#: of a tensor in HBM, which a bfloat16 product does not need).
PRODUCTS = (
    Product("S^T", "K", "Q", 64, 128),
    Product("dP^T", "V", "dO", 64, 128),
    Product("dV", "P^T, registers", "dO^T", 128, 64, from_registers=True),
    Product("dK", "dS^T, registers", "Q^T", 128, 64, from_registers=True),
    Product("dQ^T", "K^T", "dS", 64, 128),
)


def bound() -> Iterator[report.Table]:
    """Yield a table of a visit's products, and one of its cycles by the products in FP8."""
    columns = ("product", "left", "right", "KB, bf16", "cycles", "KB, FP8", "cycles")
    table = report.Table("A visit of 64 queries by 128 keys, head_dim 128", columns)
    for one in PRODUCTS:
        numbers = (f"{x:.0f}" for size in (2, 1) for x in (one.kilobytes(size), one.cycles(size)))
        table.add(one.name, one.left, one.right, *numbers)
    yield table
    columns = ("in FP8", "products, KB", "other, KB", "shared memory, cycles", "products, cycles")
    table = report.Table(
        "Cycles of a visit",
        columns,
        note="other: Q and dO arrive, in FP8 also transposed; dS and float32 dQ are stored; dQ is "
        "sent; log-sum-exp and delta. Shared memory moves 128 bytes a cycle",
    )
    for part, arrive, ds in (("none", 2 * 2, 2), ("scores", 2 * 2 + 2, 2), ("all", 2 * 2, 1)):
        in_fp8 = {"none": 0, "scores": 2, "all": 5}[part]
        sizes = [1] * in_fp8 + [2] * (5 - in_fp8)
        read, products = (
            sum(getattr(one, what)(size) for one, size in zip(PRODUCTS, sizes, strict=True))
            for what in ("kilobytes", "cycles")
        )
        other = arrive * 64 * 128 / 1024 + ds * 64 * 128 / 1024 + 2 * 4 * 64 * 128 / 1024 + 32
        cells = (f"{x:.0f}" for x in (read, other, (read + other) * 1024 / 128, products))
        table.add(part, *cells)
    yield table


E4M3, E5M2, BF16 = "float8_e4m3fn", "float8_e5m2", "bfloat16"
#: Rows that share a scale, of an FP8 input and of P and dS; and the largest number of each type.
ROWS, TILE, LARGEST = 128, (64, 128), {E4M3: 448.0, E5M2: 57344.0}


class Backward(NamedTuple):
    """The types of a backward's operands: of its score products, and of its gradient products."""

    name: str
    scores: str = BF16  # Q, K and V in S = Q K^T and dP = dO V^T
    gradients: str = BF16  # Q and K in dQ = dS K and dK = dS^T Q
    dout_scores: str = BF16
    dout_gradients: str = BF16  # in dV = P^T dO
    p: str = BF16
    ds: str = BF16
    rotate: bool = False  # rows of Q, K, V and dO, by a random Hadamard matrix


_ALL = {"scores": E4M3, "gradients": E4M3, "p": E4M3}
BACKWARDS = (
    Backward("bfloat16"),
    Backward("all, dO and dS e5m2", **_ALL, dout_scores=E5M2, dout_gradients=E5M2, ds=E5M2),
    Backward("all, dO e4m3, dS e5m2", **_ALL, dout_scores=E4M3, dout_gradients=E4M3, ds=E5M2),
    Backward("all, e4m3", **_ALL, dout_scores=E4M3, dout_gradients=E4M3, ds=E4M3),
    Backward("S and dP, dO e5m2", scores=E4M3, dout_scores=E5M2),
    Backward("S and dP, e4m3", scores=E4M3, dout_scores=E4M3),
    Backward("dQ, dK and dV, e4m3", gradients=E4M3, dout_gradients=E4M3, p=E4M3, ds=E4M3),
    Backward("dV, e4m3", dout_gradients=E4M3, p=E4M3),
    Backward("dQ and dK, e4m3", gradients=E4M3, ds=E4M3),
)


def rounded(x: np.ndarray, dtype: str, tile: tuple[int, int] | None = None) -> np.ndarray:
    """Return x rounded to a type: FP8 with a scale per 128 rows, or per tile; as float32."""
    x = x.astype("f4")
    if dtype == BF16:
        return round_to(x, dtype)
    rows, columns = tile or (ROWS, x.shape[1])
    blocks = x.reshape(x.shape[0] // rows, rows, x.shape[1] // columns, columns)
    scale = np.abs(blocks).max((1, 3), keepdims=True) / np.float32(LARGEST[dtype])
    scale[scale == 0] = 1
    at_most = np.float32(LARGEST[dtype])  # a quotient may come out one rounding above
    return (round_to((blocks / scale).clip(-at_most, at_most), dtype) * scale).reshape(x.shape)


def gradients(
    how: Backward | None, q: np.ndarray, k: np.ndarray, v: np.ndarray, dout: np.ndarray
) -> dict[str, np.ndarray]:
    """Return one head's gradients, each (n, head_dim); None computes everything in float64."""
    d, turn, back = q.shape[1], lambda x: x, lambda x: x
    if how is None:
        operand = lambda x, *_: x  # noqa: E731
        how = Backward("float64")
    else:
        operand = rounded
        if how.rotate:
            signs = random_signs(d, seed=0)
            turn, back = partial(rotated, signs=signs), partial(unrotated, signs=signs)
    q, k, v, dout = (turn(x) for x in (q, k, v, dout))
    S = operand(q, how.scores) @ operand(k, how.scores).T * d**-0.5
    P = np.exp(S - S.max(1, keepdims=True))
    P /= P.sum(1, keepdims=True)
    dP = operand(dout, how.dout_scores) @ operand(v, how.scores).T
    dS = P * (dP - (P * dP).sum(1, keepdims=True))  # delta is the sum
    P, dS = operand(P, how.p, TILE), operand(dS, how.ds, TILE)
    dq = dS @ operand(k, how.gradients) * d**-0.5
    dk = dS.T @ operand(q, how.gradients) * d**-0.5
    dv = P.T @ operand(dout, how.dout_gradients)
    return {"dq": back(dq), "dk": back(dk), "dv": back(dv)}


def errors(lengths: tuple[int, ...], heads: int) -> Iterator[report.Table]:
    """Yield a table of the gradients' errors for each kind of input and each length."""
    rotations = [how._replace(rotate=True, name=how.name + ", rotated") for how in BACKWARDS[1:]]
    for kind in ("normal", "outliers"):
        for n in lengths:
            inputs = draw(kind, n, 128, heads=heads)
            wrong: dict[str, dict[str, float]] = {}
            truth = [gradients(None, *(x[0, h] for x in inputs)) for h in range(heads)]
            for how in (*BACKWARDS, *rotations):
                found = [gradients(how, *(x[0, h] for x in inputs)) for h in range(heads)]
                wrong[how.name] = {
                    name: _relative([one[name] for one in found], [one[name] for one in truth])
                    for name in ("dq", "dk", "dv")
                }
            columns = ("products in FP8", "dQ", "dK", "dV", "x bf16: dQ", "dK", "dV")
            table = report.Table(f"Relative RMSE, {kind}, N = {n:,}, d = 128", columns)
            for name, one in wrong.items():
                own = wrong["bfloat16"]
                cells = (f"{e:.2e}" for e in one.values())
                table.add(name, *cells, *(f"{one[g] / own[g]:.1f}" for g in one))
            yield table


def _relative(found: list[np.ndarray], truth: list[np.ndarray]) -> float:
    """Return the root mean square of the errors, relative to that of the truth."""
    return float(np.linalg.norm(np.subtract(found, truth)) / np.linalg.norm(truth))


@contextmanager
def products(part: str) -> Iterator[None]:
    """Within the context, new launches of the fused backward have these products in FP8."""
    known, text = hopper_kernels.backward_kernel, nvrtc.text

    def changed(*made_for: Any) -> Kernel:
        kernel = known(*made_for)
        return replace(kernel, constants=(*kernel.constants, (_SWITCH, PARTS.index(part))))

    hopper_kernels.backward_kernel = changed
    nvrtc.text = source
    try:
        yield
    finally:
        hopper_kernels.backward_kernel, nvrtc.text = known, text


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
    parser.add_argument("--error", action="store_true", help="compute the gradients' errors")
    parser.add_argument("--bound", action="store_true", help="calculate cycles of a visit")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--heads", type=int, default=1)
    parser.add_argument("--speed", action="store_true", help="time the changed kernels on a GPU")
    parser.add_argument("--repetitions", type=int, default=7)
    chosen = parser.parse_args()
    if chosen.error:
        for table in errors(tuple(chosen.lengths), chosen.heads):
            print(table.text(width=120), flush=True)
    for table in bound() if chosen.bound else ():
        print(table.text(width=120), flush=True)
    if chosen.speed:
        speed(chosen.repetitions)


if __name__ == "__main__":
    main()
