"""Recomputes the effect of sawtooth loops over keys (Zhu, Pan and Ding, arXiv:2601.16032)."""

from __future__ import annotations

from flashsim import l2
from flashsim.counts import traffic
from flashsim.problem.hardware import KIB, MIB, Device
from flashsim.problem.problem import Problem
from flashsim.report import Table
from flashsim.schedule.tiling import Tiling
from flashsim.studies.reproduce.page import published

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
