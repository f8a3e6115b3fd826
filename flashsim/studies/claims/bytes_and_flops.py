"""Checks write-ups' claims about bytes, FLOPs, times and on-chip sizes, by computing them."""

from __future__ import annotations

from math import isqrt

from flashsim.problem.hardware import KIB, MIB, Device
from flashsim.problem.problem import Problem
from flashsim.schedule.tensors import whole_bytes
from flashsim.schedule.tiling import Tiling
from flashsim.studies.claims.finding import Claim, Finding
from flashsim.studies.reproduce import pallas


def _intensity() -> Finding:
    said = 52
    narrow, wide = (
        pallas.textbook("forward", "naive", 1024, dtype).intensity
        for dtype in ("bfloat16", "float32")
    )
    return Finding(
        f"{narrow:.0f} in bfloat16, {wide:.0f} in float32",
        round(narrow) == said,
        "the write-up counted 4 B per element, but bfloat16 has 2 B, which doubles the intensity",
    )


def _faster_backward() -> Finding:
    mine, theirs = (pallas.TIMES["backward", kernel][-1] for kernel in ("flash", "cuDNN"))
    credited = [pallas.speed("backward", kernel, -1) / 1e12 for kernel in ("flash", "cuDNN")]
    alike = credited[1] * theirs / mine  # both credited with the work of one pass
    return Finding(
        f"{mine} ms versus cuDNN's {theirs} ms: {mine / theirs:.2f} times as long",
        mine < theirs,
        f"the {credited[0]:.0f} TFLOP/s count 14 N² d FLOPs, cuDNN's {credited[1]:.0f} count 10 N² "
        f"d; with the same count it is {alike:.0f} versus cuDNN's {credited[1]:.0f}",
    )


def _beyond_the_peak() -> Finding:
    said, a100, h100 = 335e12, *(Device.get(name).peak("float16") for name in ("A100", "H100"))
    return Finding(
        f"its peak is {a100 / 1e12:g} TFLOP/s, so 335 would be {said / a100:.0%} of it",
        said <= a100,
        f"FlashAttention-2's paper (section 4.1) reports 335 TFLOP/s on an H100, {said / h100:.0%} "
        f"of its peak of {h100 / 1e12:g}",
    )


def _blocks() -> Finding:
    """Check B = sqrt(M / c) for square tiles: side B, on-chip memory M, and two element sizes c."""
    side, printed = 128, (64, 45)
    ours = side, isqrt(side**2 // 2)
    quarter = isqrt(side**2 // 4), isqrt(side**2 // 8)
    device = Device.get("A100")
    fitting = [_largest_square(device, dtype) for dtype in ("float16", "float32")]
    return Finding(
        f"the formula gives {ours[0]} and {ours[1]}",
        printed == ours,
        f"{quarter[0]} and {quarter[1]} result from a quarter of the memory; with all buffers "
        f"counted, the largest square tile of an A100 thread block at d = 64 is {fitting[0]} in "
        f"float16 and {fitting[1]} in float32",
    )


def _largest_square(device: Device, dtype: str) -> int:
    problem, side = Problem(1 << 20, head_dim=64, dtype=dtype), 1
    while Tiling(side + 1, side + 1).footprint(problem) <= device.sram_bytes:
        side += 1
    return side


def _scores() -> Finding:
    problem = Problem(2048)
    each = [whole_bytes(problem, name) / MIB for name in ("S", "P")]
    return Finding(
        f"{each[0]:g} MiB each",
        each == [32, 32],
        f"each has 2,048 x 2,048 x {problem.itemsize} B; both together have {sum(each):g} MiB",
    )


def _ratio() -> Finding:
    scores, kept = whole_bytes(Problem(4096), "S"), 256 * KIB
    mixed = (scores / 1e6) / (kept / MIB)
    return Finding(
        f"{scores // kept} times",
        scores // kept == 268,
        f"{scores // MIB} MiB are {scores / 1e6:.1f} MB: dividing MB by MiB gives {mixed:.0f}",
    )


def _reread() -> Finding:
    seconds = 64e6 / 2e12
    device = Device.get("A100-80GB")
    exact = whole_bytes(Problem(4096), "P") / device.hbm_bandwidth
    return Finding(
        f"{seconds * 1e6:g} µs",
        round(seconds * 1e6, 6) == 32,
        f"4,096 x 4,096 float32 at an {device.name}'s {device.hbm_bandwidth / 1e12:g} TB/s: "
        f"{exact * 1e6:.1f} µs per head each time that P is read",
    )


def _whole_row() -> Finding:
    row, said = 4, 16_384
    fits = {n: Device.get(n).sram_bytes // row for n in ("T4", "A100", "H100")}
    return Finding(
        ", ".join(f"{name} {longest:,}" for name, longest in fits.items()),
        fits["T4"] == said,
        "the limit is one float32 row in the shared memory of a thread block: 16,384 scores in 64 "
        "KiB, and more on GPUs with more; `flashsim study ladder --rungs whole-row` prints it",
    )


CLAIMS = (
    Claim("bf16-52", "naive attention, T = 1,024, d = 64, bfloat16: 52 FLOP/B", _intensity),
    Claim("faster-backward", "51 TFLOP/s backward outperform cuDNN's 48", _faster_backward),
    Claim("a100-335", "335 TFLOP/s on an A100", _beyond_the_peak),
    Claim("blocks-64-45", "the block formula gives 64 and 45", _blocks),
    Claim("scores-32", "S and P of 2,048 x 2,048 in float32: 32 MiB each", _scores),
    Claim("268-times", "64 MiB of scores against 256 KiB: 268 times less", _ratio),
    Claim("reread-32us", "reading 64 MB again at 2 TB/s costs 32 µs", _reread),
    Claim("row-16k", "a softmax that keeps its row on chip stops at 16k", _whole_row),
)
