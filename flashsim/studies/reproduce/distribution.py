"""Recomputes numbers about work distributed over SMs (flash-decoding) and GPUs (ring attention)."""

from dataclasses import replace
from typing import Any

from flashsim.api.samples import random_inputs
from flashsim.counts import traffic
from flashsim.distributed import run
from flashsim.problem.hardware import Device
from flashsim.problem.problem import Problem
from flashsim.report import Table
from flashsim.schedule.tiling import Tiling
from flashsim.studies.predict import predict, spread
from flashsim.studies.reproduce.page import published

#: Ring attention, table 2: host, TFLOP/s, link GB/s, smallest block and sequence in thousands.
RING = (
    ("A100 NVLink", 312, 300.0, 1.0, 6.2),
    ("A100 InfiniBand", 312, 12.5, 24.5, 149.5),
    ("TPU v3", 123, 112.0, 1.1, 6.6),
    ("TPU v4", 275, 268.0, 1.0, 6.2),
    ("TPU v5e", 196, 186.0, 1.1, 6.3),
)


def decoding() -> list[Table]:
    """Return a table of the SMs that decoding uses, and of the bytes that splitting keys adds."""
    table = published(
        "Decoding on an A100, one query, 64 Ki keys, d = 128, half precision",
        "Dao, Haziza, Massa and Sizov, Flash-Decoding, 2023",
    )
    device, tiling = Device.get("A100"), Tiling(1, 128)
    problem = Problem(1, 65_536, head_dim=128, dtype="float16")
    counted = traffic.count_schedule(problem, tiling, "flash2", "forward", device)
    blocks = counted.schedule(counted.stages[0]).t_r * problem.batch * problem.heads
    share = 100 * blocks / device.sm_count
    why = (
        f"{blocks} thread block on {device.sm_count} SMs; the post counts one block per batch entry"
    )
    table.line("SMs at work, one head, batch 1, %", "< 1", share, why)
    many = 100 * 32 / device.sm_count
    table.line("the same with 32 heads, %", "not stated", many, "each head has its own block")
    splits = device.sm_count
    partial = splits * (problem.head_dim + 1) * 4 * 2
    why = "each split writes, and the reduction reads, O and LSE in float32"
    name = f"additional bytes of {splits} splits, % of all bytes"
    table.line(name, "small", 100 * partial / counted.bytes(), why)
    return [table]


def ring() -> list[Table]:
    """Recompute table 2: the block size c = F / B at which computing takes as long as sending K, V.

    The rate F is in FLOP/s and the bandwidth B in bytes per second. A block of c queries and keys
    has 4 d c^2 FLOPs, and its K and V have 4 d c bytes in half precision. So computing takes longer
    than the transfer if c > F / B, for any d. The ratio F / B comes from a run of ring attention on
    four ranks.
    """
    table = published(
        "Smallest block and sequence per device, in thousands of tokens",
        "Liu, Zaharia and Abbeel, arXiv:2310.01889, table 2: s = 6 c (six blocks are in memory)",
    )
    problem = Problem(64, head_dim=16, dtype="float16")
    account = run(*random_inputs(problem)[:3], ranks=4, scheme="ring").account
    for name, tera, giga, block, sequence in RING:
        ours = account.rows_to_hide(tera * 1e12, giga * 1e9) / 1e3
        for what, paper, mine in (("block", block, ours), ("sequence", sequence, 6 * ours)):
            rounded = abs(mine - paper) <= 0.05
            why = "rounded" if rounded else f"F / B of the paper's own columns is {ours:.2f}"
            table.line(f"{name}: {what}", paper, mine, why)
    return [table, efficiency()]


#: From ring-flash-attention's README, for a sequence of 64 Ki on 8 x H800, 32 query heads on 8 key
#: heads, d = 128, causal: % of FlashAttention-2's rate on one GPU at 8 Ki, forward, and forward
#: with backward.
README = {"ring": (52.1, 53.9), "zigzag": (85.2, 90.2), "striped": (74.4, 82.9)}
_WHY = {
    "ring": "in both figures, ranks wait for half of the time",
    "zigzag": "the prediction leaves out the host's work and the SMs that NCCL uses",
    "striped": "FlashAttention-2 is slower on causal blocks, and striped has only such blocks; "
    "their code also copies all rows when it merges",
}


def efficiency() -> Table:
    """Compare published parallel efficiencies on eight GPUs with the time model's predictions."""
    table = published(
        "Eight GPUs, % of the ideal: 8 x the rate of one GPU at 8 Ki, causal, 8 Ki per GPU",
        "github.com/zhuzilin/ring-flash-attention, README, H800; ours: flashsim.predict.spread, "
        "portable kernels (mma.sync, as FlashAttention-2)",
    )
    # Attention of Llama 3.1 8B, on one GPU.
    local = Problem(8192, head_dim=128, heads=32, kv_heads=8, dtype="bfloat16", causal=True)
    how: dict[str, Any] = {"algorithm": "flash2-fused", "kernels": "portable", "device": "H100"}
    for scheme, papers in README.items():
        ideal = ours = 0.0
        for direction, paper, what in zip(
            ("forward", "backward"), papers, ("forward", "with backward"), strict=True
        ):
            ideal += 8 * predict(local, direction=direction, **how).seconds  # 64 x the work, on 8
            together: dict[str, Any] = {"ranks": 8, "scheme": scheme, "link": "NVLink 4 (H800)"}
            whole = replace(local, n_q=65536, n_kv=65536)
            ours += spread(whole, direction=direction, **together, **how).seconds
            table.line(f"{scheme}: {what}", paper, 100 * ideal / ours, _WHY[scheme])
    return table
