"""Recomputes IO complexity (theorem 2 of arXiv:2205.14135, arXiv:2402.07443), and loop orders."""

from __future__ import annotations

from math import ceil, sqrt

import numpy as np

from flashsim.api.execution import run
from flashsim.counts import traffic
from flashsim.problem.hardware import KIB, MIB, Device
from flashsim.problem.problem import Problem
from flashsim.report import Table
from flashsim.schedule.tiling import Tiling
from flashsim.studies.reproduce.page import published


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
    device = Device.get("A100").with_sram(512 * KIB)
    problem = Problem(4096, head_dim=128, dtype="bfloat16")
    for tiling in (Tiling(64, 64), Tiling(128, 64), Tiling(128, 128)):
        first, second = (
            traffic.count_schedule(problem, tiling, name, "forward", device).bytes()
            for name in ("flash1", "flash2")
        )
        table.line(
            f"tile {tiling}",
            "more",
            first / second,
            "KV-outer: each visit reads Q, and reads and writes O (float32), l and m; K and V "
            "are read once",
        )
    return [table]
