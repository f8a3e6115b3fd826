"""Recomputes the roofline, intensities, times and on-chip bytes of a write-up of Pallas attention.

The write-up counts one HBM transfer per tensor.
"""

from typing import Any, NamedTuple

from flashsim.api.execution import run
from flashsim.api.samples import random_inputs
from flashsim.counts import traffic
from flashsim.problem.hardware import KIB, PRESETS, Device
from flashsim.problem.problem import Problem
from flashsim.report import Table
from flashsim.schedule.tiling import Tiling
from flashsim.studies.reproduce.page import published
from flashsim.studies.roofline import textbook_bytes

WIDTH, LENGTHS = 64, (128, 256, 512, 1024, 2048, 4096)
#: The write-up's name of each of our algorithms. cuDNN's backward is counted as one fused pass.
KERNELS = {"naive": "standard", "flash": "flash2", "cuDNN": "flash2-fused"}
#: FLOP/B by direction and kernel, over `LENGTHS`.
INTENSITY = {
    ("forward", "naive"): (22, 33, 44, 52, 58, 61),
    ("forward", "flash"): (32, 65, 130, 260, 520, 1040),
    ("forward", "cuDNN"): (32, 65, 130, 260, 520, 1040),
    ("backward", "naive"): (26, 43, 64, 85, 102, 114),
    ("backward", "flash"): (56, 112, 224, 447, 894, 1789),
    ("backward", "cuDNN"): (40, 80, 160, 319, 639, 1278),
}
#: Milliseconds on an RTX 4000 Ada, bfloat16.
DEVICE, DTYPE = "RTX 4000 Ada", "bfloat16"
TIMES = {
    ("forward", "naive"): (0.166, 0.127, 0.235, 1.039, 4.590, 17.383),
    ("forward", "flash"): (0.116, 0.147, 0.290, 0.294, 0.746, 2.372),
    ("forward", "cuDNN"): (0.199, 0.228, 0.171, 0.335, 0.891, 2.294),
    ("backward", "naive"): (0.398, 0.462, 0.630, 2.408, 8.582, 31.144),
    ("backward", "flash"): (0.304, 0.301, 0.469, 0.943, 2.710, 9.422),
    ("backward", "cuDNN"): (0.432, 0.464, 0.493, 0.976, 2.220, 7.106),
}
#: The printed percentages of peak, at T = 4096.
PER_CENT = {
    ("forward", "flash"): 55.3,
    ("forward", "cuDNN"): 57.1,
    ("backward", "flash"): 47.8,
    ("backward", "cuDNN"): 45.2,
}
#: Milliseconds at T = 1024 with float32 only; `TIMES` has those with mixed precision.
BEFORE = {"forward": 0.642, "backward": 7.309}
#: KiB of a backward block of 64 x 64 float32 scores, by head_dim; of T x T scores in bfloat16.
BLOCK_KIB, SCORES_KIB = {64: 80, 128: 144, 256: 272}, {128: 32, 256: 128, 512: 512}
#: The tile of executed runs, and the length above which the equal closed form is used instead.
TILING, EXECUTED_TO = Tiling(64, 64), 512
_SOFTMAX = 5  # operations per score
_ROOMY = Device.get("H100")


class Textbook(NamedTuple):
    """The FLOPs and bytes of one pass of one head, counted as in the write-up."""

    flops: int
    bytes: int

    @property
    def intensity(self) -> float:
        """The arithmetic intensity in FLOPs per byte."""
        return self.flops / self.bytes


def textbook(direction: str, kernel: str, n: int, dtype: str = "float32") -> Textbook:
    """Return the FLOPs and bytes of one pass with n queries and keys, as the write-up counts them.

    Elements count as 4 bytes by default, because only this size gives the printed figures.
    In the forward pass, the products have 4 T^2 d FLOPs, and the softmax 5 T^2. In the backward
    pass, the products have 8 T^2 d FLOPs (naive), 14 T^2 d (two kernels) or 10 T^2 d (one kernel).
    Each of q, k, v and out is transferred once, and so is each gradient in the backward pass. The
    naive kernel also transfers P; kernels without P in HBM transfer one float32 logsumexp per row.
    """
    problem, algorithm = Problem(n, head_dim=WIDTH, dtype=dtype), KERNELS[kernel]
    counted = traffic.count_schedule(problem, TILING, algorithm, direction, _ROOMY)
    softmax = _SOFTMAX * n * n if direction == "forward" else 0
    statistic = 0 if algorithm == "standard" else n * problem.compute_itemsize
    nbytes = textbook_bytes(problem, algorithm, direction) + statistic
    return Textbook(counted.flops("matmul") + softmax, nbytes)


def pallas() -> list[Table]:
    """Return tables that compare every figure in the write-up with the figure computed here."""
    return [_intensities(), _executed(), _speeds(), _overflow(), _scores_on_chip()]


def _cells() -> list[tuple[str, str, int, int]]:
    """Return (direction, kernel, length, the length's index) for the write-up's 36 intensities."""
    return [(*key, n, at) for key in INTENSITY for at, n in enumerate(LENGTHS)]


def _intensities() -> Table:
    table = published(
        "Intensity, FLOP/B, one head, d = 64, each tensor once",
        "A roofline of attention in Pallas; forward 4 T^2 d + 5 T^2 FLOPs, backward 8, 14 or 10 "
        "T^2 d. The write-up labels them bfloat16, but only 4 B per element give its figures",
    )
    for direction, kernel, n, at in _cells():
        if (direction, kernel) == ("forward", "cuDNN"):
            continue
        name = "flash and cuDNN" if (direction, kernel) == ("forward", "flash") else kernel
        printed, ours = INTENSITY[direction, kernel][at], textbook(direction, kernel, n).intensity
        narrow = textbook(direction, kernel, n, DTYPE).intensity
        why = f"{'rounded' if round(ours) == printed else 'differs'}; with 2 B {narrow:,.0f}"
        table.line(f"{direction}, {name}, T = {n:,}", printed, ours, why)
    return table


def _executed() -> Table:
    table = published(
        "Intensity as executed: matrix FLOP/B requested, bfloat16, d = 64, tiles 64 x 64",
        f"up to T = {EXECUTED_TO} from runs on the simulated memory, beyond from the equal closed "
        "form. K and V are read once per row tile, so the intensity stops growing with T; "
        "`flashsim roofline` shows what the L2 cache saves",
    )
    whys = {
        "naive": "S and P are transferred four times in all, not once",
        "flash": "K and V (backward also Q and dO) are read once per outer tile, not once",
        "cuDNN": "as flash; in the backward pass, each tile also adds dQ into HBM",
    }
    executed = {n: _run(n) for n in LENGTHS if n <= EXECUTED_TO}
    for direction, kernel, n, at in _cells():
        p = Problem(n, head_dim=WIDTH, dtype=DTYPE)
        counted = traffic.count_schedule(p, TILING, KERNELS[kernel], direction, _ROOMY)
        moved = executed[n][kernel, direction] if n in executed else counted.bytes()
        printed, ours = INTENSITY[direction, kernel][at], counted.flops("matmul") / moved
        why = whys[kernel] if at == 0 else ""
        table.line(f"{direction}, {kernel}, T = {n:,}", printed, ours, why)
    return table


def _run(n: int) -> dict[tuple[str, str], int]:
    """Return the bytes that the simulator moves at one length, by kernel and direction."""
    moved: dict[tuple[str, str], int] = {}
    q, k, v, dout = random_inputs(Problem(n, head_dim=WIDTH, dtype=DTYPE))
    for kernel, algorithm in KERNELS.items():
        result = run(q, k, v, algorithm=algorithm, tiling=TILING, trace=True)
        traces: list[Any] = [result.trace, result.backward(dout, tiling=TILING).trace]
        moved |= {(kernel, trace.direction): trace.bytes() for trace in traces}
    return moved


def heads() -> int:
    """Return batch size times heads, computed from the write-up's times and percentages."""
    peak = Device.get(DEVICE).peak(DTYPE)
    (number,) = {
        round(share / 100 * peak * TIMES[key][-1] / 1e3 / textbook(*key, LENGTHS[-1]).flops)
        for key, share in PER_CENT.items()
    }
    return number


def speed(direction: str, kernel: str, at: int) -> float:
    """Return a kernel's FLOP/s: FLOPs counted as in the write-up, divided by the printed time."""
    counted = textbook(direction, kernel, LENGTHS[at])
    return heads() * counted.flops / (TIMES[direction, kernel][at] / 1e3)


def _speeds() -> Table:
    peak = Device.get(DEVICE).peak(DTYPE)
    table = published(
        f"Percentage of the peak of {peak / 1e12:g} TFLOP/s, {DEVICE}, d = 64, from printed times",
        f"the printed percentages follow from {heads()} heads in all, which the write-up does not "
        "print. The FLOP/s of each kernel count its own products, so a backward pass in two "
        "kernels (14 T^2 d) looks faster than cuDNN's (10 T^2 d), but takes longer: see `flashsim "
        "study claims`",
    )
    for direction, kernel, n, at in _cells():
        ours = speed(direction, kernel, at)
        printed = PER_CENT.get((direction, kernel)) if n == LENGTHS[-1] else None
        why = f"{TIMES[direction, kernel][at]:g} ms, {ours / 1e12:.1f} TFLOP/s"
        table.line(f"{direction}, {kernel}, T = {n:,}", printed, 100 * ours / peak, why)
    for direction, before in BEFORE.items():
        after = TIMES[direction, "flash"][LENGTHS.index(1024)]
        why = f"{before:g} to {after:g} ms, times"
        table.line(f"{direction}, mixed precision", None, before / after, why)
    return table


def _overflow() -> Table:
    rule = [min(64, max(32, 16384 // d)) for d in BLOCK_KIB]
    table = published(
        "On-chip KiB of a backward block, 64 x 64 scores, float32",
        "4 tiles of 64 x d and one of scores; the write-up states 48 to 96 KB per SM. Its rule for "
        f"the block, min(64, max(32, 16384 // C)), gives {', '.join(map(str, rule))} for these d, "
        "so blocks of the largest d are still too large",
    )
    for d, printed in BLOCK_KIB.items():
        held = TILING.buffers(Problem(4096, head_dim=d), "flash2", "backward")["dkdv"]
        four = sum(held[name] for name in ("Q", "K", "V", "dO", "S"))
        whole = sum(held.values())
        why = f"with dK, dV, dP, L, delta {whole / KIB:.4g}, which fits {_fitting(whole)}"
        table.line(f"Q, K, V, dO, S at d = {d}", printed, four / KIB, why)
    return table


def _scores_on_chip() -> Table:
    table = published(
        "Do T x T scores fit on chip? KiB in bfloat16",
        "the write-up says: only at T = 128; `flashsim study devices` lists a block's capacity",
    )
    for n, printed in SCORES_KIB.items():
        size = n * n * Problem(n, dtype=DTYPE).itemsize
        why = f"fits {_fitting(size)}; with float32 scores, as in kernels: {_fitting(2 * size)}"
        table.line(f"T = {n}", printed, size / KIB, why)
    return table


def _fitting(size: int) -> str:
    """Return the names of the devices whose thread blocks can use `size` bytes on chip."""
    names = [name for name, device in PRESETS.items() if device.sram_bytes >= size]
    if len(names) in (0, len(PRESETS)):
        return "every device" if names else "no device"
    lacking = [name for name in PRESETS if name not in names]
    return f"all except {', '.join(lacking)}" if len(lacking) <= len(names) else ", ".join(names)


def series() -> dict[str, list[tuple[str, float, float]]]:
    """Return measured points for `viz.roofline_series`: (length, FLOP/B in bfloat16, FLOP/s)."""
    return {
        f"{key[1]}, {key[0]}": [
            (f"T = {n}", textbook(*key, n, DTYPE).intensity, speed(*key, at))
            for at, n in enumerate(LENGTHS)
        ]
        for key in TIMES
    }
