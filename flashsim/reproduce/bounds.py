"""IO complexity: theorem 2 of arXiv:2205.14135, bounds of arXiv:2402.07443, loop orders."""

from __future__ import annotations

from math import ceil, sqrt

import numpy as np

from flashsim import traffic
from flashsim.api import run
from flashsim.hardware import KIB, MIB, Device
from flashsim.problem import Problem
from flashsim.report import Table
from flashsim.reproduce.page import line, page
from flashsim.tiling import Tiling


def bounds() -> list[Table]:
    """Executed HBM accesses of FlashAttention over M, against N^2 d^2 / M and the lower bounds.

    The tile follows line 1 of Algorithm 1: B_c = ceil(M / 4 d), B_r = min(B_c, d), M in elements.
    Each count is executed on the simulated memory, not only predicted.
    """
    n, d = 256, 32
    table = Table(
        f"HBM accesses in elements, N = {n}, d = {d}, float32, FlashAttention (executed)",
        ("M elements", "tile", "accesses", "N^2 d^2 / M", "ratio", "lower bound", "of"),
        note="Theorem 2 and Saha and Ye (arXiv:2402.07443) are orders of growth: a steady ratio "
        "confirms them, its value is ours. Below M = d^2 = 1,024 the bound is N^2 d / sqrt(M), so "
        "FlashAttention is optimal only above. The ratio grows once the N d accesses that no tile "
        "saves are no longer few",
    )
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 1, 1, n, d), dtype=np.float32)
    for m in (512, 1024, 2048, 4096, 8192):
        block_k = min(ceil(m / (4 * d)), n)
        tiling = Tiling(min(block_k, d), block_k)
        device = Device.get("A100").with_sram(16 * MIB)  # the rule leaves the score tile out of M
        trace = run(q, k, v, algorithm="flash1", tiling=tiling, device=device, trace=True).trace
        assert trace is not None
        executed = trace.bytes() // 4
        upper = n * n * d * d / m
        lower = upper if m >= d * d else n * n * d / sqrt(m)
        formula = "N^2 d^2 / M" if m >= d * d else "N^2 d / sqrt(M)"
        table.rows.append((m, str(tiling), executed, upper, executed / upper, lower, formula))
    return [table]


def order() -> list[Table]:
    """Keys outside (FlashAttention) against queries outside (FlashAttention-2), same tiles."""
    table = page(
        "Forward HBM bytes, keys outside / queries outside, N = 4096, d = 128, bf16",
        "arXiv:2307.08691, section 3: the loops are swapped, so that O, l and m stay on chip",
    )
    device = Device.get("A100").with_sram(512 * KIB)
    problem = Problem(4096, head_dim=128, dtype="bfloat16")
    for tiling in (Tiling(64, 64), Tiling(128, 64), Tiling(128, 128)):
        first, second = (
            traffic.count_schedule(problem, tiling, name, "forward", device).bytes()
            for name in ("flash1", "flash2")
        )
        table.rows.append(
            line(
                f"tile {tiling}",
                "more",
                first / second,
                "Q is read, and O (float32), l, m read and written, at each visit; K and V once",
            )
        )
    return [table]
