"""Work spread over a GPU (flash-decoding) and over several (ring attention)."""

from __future__ import annotations

from flashsim.counts import traffic
from flashsim.problem.hardware import Device
from flashsim.problem.problem import Problem
from flashsim.report import Table
from flashsim.schedule.tiling import Tiling
from flashsim.studies.reproduce.page import line, page

#: Ring attention, table 2: host, TFLOP/s, link GB/s, smallest block and sequence in thousands.
RING = (
    ("A100 NVLink", 312, 300.0, 1.0, 6.2),
    ("A100 InfiniBand", 312, 12.5, 24.5, 149.5),
    ("TPU v3", 123, 112.0, 1.1, 6.6),
    ("TPU v4", 275, 268.0, 1.0, 6.2),
    ("TPU v5e", 196, 186.0, 1.1, 6.3),
)


def decoding() -> list[Table]:
    """How many SMs a decoding step keeps busy, and what splitting the keys costs in bytes."""
    table = page(
        "Decoding on an A100, one query, 64 Ki keys, d = 128, half precision",
        "Dao, Haziza, Massa and Sizov, Flash-Decoding, 2023",
    )
    device, tiling = Device.get("A100"), Tiling(1, 128)
    problem = Problem(1, 65_536, head_dim=128, dtype="float16")
    counted = traffic.count_schedule(problem, tiling, "flash2", "forward", device)
    blocks = counted.schedule(counted.stages[0]).t_r * problem.batch * problem.heads
    share = 100 * blocks / device.sm_count
    table.rows.append(
        line(
            "SMs at work, one head, batch 1, %",
            "< 1",
            share,
            f"{blocks} thread block on {device.sm_count} SMs; the blog counts a batch entry as one",
        )
    )
    many = 100 * 32 / device.sm_count
    table.rows.append(
        line("the same with 32 heads, %", "not said", many, "heads are blocks of their own")
    )
    splits = device.sm_count
    partial = splits * (problem.head_dim + 1) * 4 * 2
    table.rows.append(
        line(
            f"extra bytes of {splits} splits, % of all",
            "small",
            100 * partial / counted.bytes(),
            "each split writes, and the reduction reads, O and LSE in float32",
        )
    )
    return [table]


def ring() -> list[Table]:
    """Table 2: block size at which sending K and V hides behind arithmetic, c = FLOP/s / (B/s).

    A block of c queries and keys takes 4 d c^2 FLOPs; its K and V are 4 d c bytes in half
    precision. So arithmetic covers the transfer from c = F / B on, whatever d is.
    """
    table = page(
        "Smallest block and sequence a device, in thousands of tokens",
        "Liu, Zaharia and Abbeel, arXiv:2310.01889, table 2: s = 6 c (six blocks are held)",
    )
    for name, tera, giga, block, sequence in RING:
        problem = Problem(1024, head_dim=128, dtype="float16")
        counted = traffic.count_schedule(
            problem, Tiling(1024, 1024), "flash2", "forward", Device.get("H100").with_sram(1 << 24)
        )
        per_token = counted.flops("matmul") / problem.n_q  # of one block, grows with its length
        sent = (counted.bytes("load", "K") + counted.bytes("load", "V")) / problem.n_kv
        # per_token / 1024 * c tokens of arithmetic take as long as `sent` bytes of transfer:
        ours = sent / (giga * 1e9) * tera * 1e12 / (per_token / problem.n_kv) / 1e3
        for what, paper, mine in (("block", block, ours), ("sequence", sequence, 6 * ours)):
            rounded = abs(mine - paper) <= 0.05
            why = "rounded" if rounded else f"F / B of the paper's own columns is {ours:.2f}"
            table.rows.append(line(f"{name}: {what}", paper, mine, why))
    return [table]
