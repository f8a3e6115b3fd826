"""Recomputes figure 2 and table 21 of the FlashAttention paper.

The paper is Dao, Fu, Ermon, Rudra, Ré, arXiv:2205.14135.
"""

from __future__ import annotations

from dataclasses import replace

from flashsim import l2
from flashsim.counts import traffic
from flashsim.counts.traffic import Traffic
from flashsim.problem.hardware import MIB, Device
from flashsim.problem.problem import Problem
from flashsim.report import Table
from flashsim.schedule.tiling import Tiling
from flashsim.studies.reproduce.page import published

#: Figure 2: GPT-2 medium on an A100, N = 1024, d = 64, 16 heads, batch 64, half precision.
FIGURE_2 = Problem(1024, head_dim=64, batch=64, heads=16, dtype="float16")
#: GFLOPs and GB read and written, forward and backward: (standard, FlashAttention).
KINDS = ("standard", "FlashAttention")
PAPER_GFLOPS, PAPER_GB = (66.6, 75.2), (40.3, 4.4)

#: Table 21, MB, by length: 16 x 8 heads, d = 64, half precision, forward and backward.
LENGTHS = (128, 256, 512, 1024, 2048, 4096)
PYTORCH_MB = (36, 104, 336, 1184, 4416, 17024)
FLASH_MB = (22, 44, 104, 209, 418, 836)


def _both(algorithm: str, tiling: Tiling, device: Device) -> tuple[Traffic, Traffic]:
    forward, backward = (
        traffic.count_schedule(FIGURE_2, tiling, algorithm, direction, device)
        for direction in ("forward", "backward")
    )
    return forward, backward


def hbm() -> list[Table]:
    """Recompute figure 2 of the paper: bytes and FLOPs, and how they depend on the block size."""
    # Only bytes are counted, also for tiles that are too wide for the device.
    roomy = replace(Device.get("A100"), sram_bytes=4 * MIB)
    p, source = FIGURE_2, "arXiv:2205.14135, figure 2: N = 1024, d = 64, 16 heads, batch 64, A100"
    left = published("Figure 2 (left): forward and backward", source)
    scores = p.batch * p.heads * p.n_q * p.n_kv * p.itemsize
    standard, flash = (_both(name, Tiling(128, 256), roomy) for name in ("standard", "flash1"))
    whys = (
        f"the paper's bytes are {PAPER_GB[0] * 1e9 / scores:.1f} passes over N x N scores, ours "
        f"{sum(t.bytes(tensor=x) for t in standard for x in ('S', 'P', 'dP', 'dS')) / scores:.0f}; "
        "its program also masks, scales and applies dropout",
        "ours has tiles of 128 x 256; the paper does not print its tiles",
    )
    after = (
        "from the L2 model, calibrated on an H200, not on an A100; the paper's may be from a DRAM "
        "counter"
    )
    for name, pair, paper, why in zip(KINDS, (standard, flash), PAPER_GB, whys, strict=True):
        left.line(f"HBM, {name}, GB", paper, sum(t.bytes() for t in pair) / 1e9, why)
        dram = sum(l2.dram(t).bytes() for t in pair) / 1e9
        left.line(f"DRAM, {name}, GB", paper, dram, after)
    flops = [sum(t.flops("matmul") for t in pair) / 1e9 for pair in (standard, flash)]
    note = "ours: 12 and 14 N^2 d for 1,024 heads; the paper's do not follow from that shape"
    for name, ours, printed in zip(KINDS, flops, PAPER_GFLOPS, strict=True):
        left.line(f"matmul GFLOPs, {name}", printed, ours, note)
    left.line(
        "FLOPs, FlashAttention / standard",
        PAPER_GFLOPS[1] / PAPER_GFLOPS[0],
        flops[1] / flops[0],
        "ours counts only products: 14 / 12",
    )
    middle = published("Figure 2 (middle): forward, over the width of a key block B_c", source)
    for block in (64, 128, 256, 512):
        counted = traffic.count_schedule(p, Tiling(64, block), "flash1", "forward", roomy)
        why = "printed as a curve; falls as 1 / B_c" if block == 64 else ""
        middle.line(f"HBM, B_c = {block}, GB", "curve", counted.bytes() / 1e9, why)
    return [left, middle]


def memory() -> list[Table]:
    """Recompute table 21 of the paper: the memory of standard attention and FlashAttention."""
    table = published(
        "Table 21: memory footprint, MiB (printed as MB)",
        "arXiv:2205.14135, table 21, 16 x 8 heads, d = 64. The paper's PyTorch figures are exactly "
        "4 S + 10 T, where S is an N x N matrix and T a tensor such as q; its FlashAttention "
        "figures are 11 T up to N = 256, and 13 T + 2 statistics beyond",
    )
    for n, pytorch, flash in zip(LENGTHS, PYTORCH_MB, FLASH_MB, strict=True):
        p = Problem(n, head_dim=64, batch=16, heads=8, dtype="float16")
        tensor = p.batch * p.heads * n * p.head_dim * p.itemsize
        for name, printed, algorithm in (
            ("PyTorch", pytorch, "standard"),
            ("FlashAttention", flash, "flash1"),
        ):
            ours = traffic.live(p, algorithm)
            rest = printed * MIB - ours
            table.line(f"{name}, N = {n}", printed, ours / MIB, _missing(p, rest, tensor))
    return [table]


def _missing(p: Problem, rest: int, tensor: int) -> str:
    """Return a text that explains why the paper's program needs more memory."""
    scores = p.batch * p.heads * p.n_q * p.n_kv * p.itemsize
    matrices = 1 if rest >= scores + tensor else 0
    more = f"{(rest - matrices * scores) / tensor:.2g} T"
    if matrices:
        return f"1 S and {more} more: its program stores P before and after dropout, and copies"
    return f"{more} more: copies that its program stores"
