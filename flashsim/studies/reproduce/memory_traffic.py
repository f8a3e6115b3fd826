"""Recomputes memory traffic: of FlashAttention (arXiv:2205.14135), its bounds, and loop orders."""

from dataclasses import replace
from math import ceil, sqrt

import numpy as np

from flashsim import l2
from flashsim.api.execution import run
from flashsim.counts import traffic
from flashsim.problem.hardware import KIB, MIB, Device
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


def hbm() -> list[Table]:
    """Recompute figure 2 of the paper: bytes and FLOPs, and how they depend on the block size."""
    # Only bytes are counted, also for tiles that are too wide for the device.
    roomy = replace(Device.get("A100"), sram_bytes=4 * MIB)
    p, source = FIGURE_2, "arXiv:2205.14135, figure 2: N = 1024, d = 64, 16 heads, batch 64, A100"
    left = published("Figure 2 (left): forward and backward", source)
    scores = p.batch * p.heads * p.n_q * p.n_kv * p.itemsize
    tile, passes = Tiling(128, 256), ("forward", "backward")
    standard, flash = (
        [traffic.count_schedule(p, tile, name, direction, roomy) for direction in passes]
        for name in ("standard", "flash1")
    )
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
    paper, note = PAPER_GFLOPS[1] / PAPER_GFLOPS[0], "ours counts only products: 14 / 12"
    left.line("FLOPs, FlashAttention / standard", paper, flops[1] / flops[0], note)
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


def bounds() -> list[Table]:
    """Compare FlashAttention's HBM accesses with N^2 d^2 / M and lower bounds, for SRAM sizes M.

    The tile sizes follow line 1 of Algorithm 1: B_c = ceil(M / 4 d), B_r = min(B_c, d), with M in
    elements. A simulated run counts the accesses.
    """
    n, d = 256, 32
    shape = f"N = {n}, d = {d}, float32, executed"
    above = published(
        f"Theorem 2: FlashAttention's HBM accesses, elements, over M; {shape}",
        "arXiv:2205.14135, theorem 2: O(N^2 d^2 / M), an order of growth. A constant ratio "
        "confirms it; the constant depends on the algorithm. The ratio grows once the N d accesses "
        "that no tile avoids are a large share",
    )
    below = published(
        f"Lower bounds on any attention's HBM accesses, elements, over M; {shape}",
        "arXiv:2402.07443 (Saha and Ye), also orders of growth: N^2 d^2 / M for M >= d^2 = "
        f"{d * d:,}, and N^2 d / sqrt(M) for smaller M, so FlashAttention is optimal only for M >= "
        "d^2",
    )
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 1, 1, n, d), dtype=np.float32)
    for m in (512, 1024, 2048, 4096, 8192):
        block_k = min(ceil(m / (4 * d)), n)
        tiling = Tiling(min(block_k, d), block_k)
        # Algorithm 1's tile rule ignores the score tile.
        device = Device.get("A100").with_sram(16 * MIB)
        trace = run(q, k, v, algorithm="flash1", tiling=tiling, device=device, trace=True).trace
        executed, name = trace.bytes() // 4, f"M = {m:,}, tile {tiling}"
        order = n * n * d * d / m
        above.line(name, order, executed, _parts(n, d, m, order))
        if m >= d * d:
            below.line(name, order, executed, "N^2 d^2 / M: reached, up to a constant")
        else:
            why = f"N^2 d / sqrt(M): sqrt(M) / d = {sqrt(m) / d:.2f} of N^2 d^2 / M"
            below.line(name, n * n * d / sqrt(m), executed, why)
    return [above, below]


def _parts(n: int, d: int, m: int, order: float) -> str:
    """Return a text with the HBM accesses of Algorithm 1 by tensor, divided by N^2 d^2 / M."""
    visits = n * 4 * n * d / m  # row visits: N rows of Q, each with T_c = 4 N d / M key tiles
    matrices, statistics, once = 3 * d * visits, 4 * visits, n * (3 * d + 2)
    return (
        f"{matrices / order:g} for Q read, O read and written at each of {visits / n:.0f} tiles of "
        f"keys, {statistics / order:g} for m and l, {once / order:.2g} for K, V read and O, m, l "
        "set to start once"
    )


def order() -> list[Table]:
    """Compare KV-outer (FlashAttention) with Q-outer loops (FlashAttention-2) on the same tiles."""
    table = published(
        "Forward HBM bytes, KV-outer / Q-outer, N = 4096, d = 128, bf16",
        "arXiv:2307.08691, section 3: the loops are swapped, so O, l and m stay on chip",
    )
    why = (
        "KV-outer: each visit reads Q, and reads and writes O (float32), l and m; K and V are read "
        "once"
    )
    device = Device.get("A100").with_sram(512 * KIB)
    problem = Problem(4096, head_dim=128, dtype="bfloat16")
    for tiling in (Tiling(64, 64), Tiling(128, 64), Tiling(128, 128)):
        first, second = (
            traffic.count_schedule(problem, tiling, name, "forward", device).bytes()
            for name in ("flash1", "flash2")
        )
        table.line(f"tile {tiling}", "more", first / second, why)
    return [table]


#: The paper states 24 MiB of L2 without partitions; NVIDIA's data sheet states 48 SMs.
GB10 = Device(
    *("GB10", 99 * KIB, 100 * KIB),
    sm_count=48,
    l2_bytes=24 * MIB,
    hbm_bytes=128 * 10**9,
    hbm_bandwidth=273e9,
    source="arXiv:2601.16032; NVIDIA DGX Spark data sheet",
)


def sawtooth() -> list[Table]:
    """Compare the L2 misses of straight and sawtooth loops over keys that exceed L2."""
    table = published(
        "Share of L2 misses that sawtooth loops save, %, one head, d = 64, half precision",
        "arXiv:2601.16032 (abstract: 50 % or more on GB10). Ours: the L2 model, tiles of 64 x 64, "
        "one block per SM, all at the same speed, a fully associative cache; misses without the "
        "first reads",
    )
    for n in (65_536, 131_072, 163_840):
        problem = Problem(n, head_dim=64, dtype="float16")
        counted = traffic.count_schedule(problem, Tiling(64, 64), "flash2", "forward", GB10)
        keys = 2 * n * problem.head_dim * problem.itemsize
        straight, alternating = (
            l2.dram(counted, l2.L2Model(walk=walk, ways=None, blocks_per_sm=1)).bytes("read")
            for walk in ("straight", "sawtooth")
        )
        beyond_first = straight - 3 * n * problem.head_dim * problem.itemsize  # Q, K, V
        saved = 100 * (straight - alternating) / beyond_first if beyond_first else None
        paper = ">= 50" if keys > GB10.l2_bytes else "no misses to save"
        why = (
            f"K and V are {keys / MIB:.0f} MiB, {keys / GB10.l2_bytes:.2f} x L2; about "
            "the share L2 / (K and V) of the misses can be saved"
        )
        table.line(f"N = {n:,}", paper, saved, why)
    return [table]
