"""Computes numbers behind FlashAttention: the delta identity, divisions of O, re-reads of P."""

from __future__ import annotations

import numpy as np

from flashsim.api.samples import random_inputs
from flashsim.counts import traffic
from flashsim.errors import own_errors
from flashsim.problem.hardware import PRESETS, Device
from flashsim.problem.oracle import attention
from flashsim.problem.problem import Problem
from flashsim.report import Table
from flashsim.schedule.tensors import whole_bytes
from flashsim.schedule.tiling import Tiling

MOST_ROWS = 8


@own_errors
def delta(n: int = 32, head_dim: int = 4, *, seed: int = 0) -> Table:
    """Return a table that compares rowsum(P dP) with rowsum(O dO), computed in float64.

    The backward pass of softmax needs sum_j P_ij dP_ij. With dP = dO V^T, this sum equals dO_i ·
    (sum_j P_ij V_j) = dO_i · O_i (arXiv:2307.08691, section 2.3.2), which needs no scores.
    """
    problem = Problem(n, head_dim=head_dim, dtype="float64")
    inputs = random_inputs(problem, seed)
    results = attention(*inputs[:3], problem)
    q, k, v, dout, out, lse = (x[0, 0] for x in (*inputs, *results))
    P = np.exp(problem.scale * q @ k.T - lse[:, None])
    scores, outputs = (P * (dout @ v.T)).sum(axis=1), (out * dout).sum(axis=1)
    table = Table(
        f"D = rowsum(P dP) = rowsum(O dO), {n} x {n} scores, d = {head_dim}",
        ("row", "rowsum(P dP)", "rowsum(O dO)", "difference"),
        note=f"rowsum(P dP) sums {n} products per row, from N x N matrices that FlashAttention "
        f"does not store; rowsum(O dO) sums {head_dim}, from two stored tensors. Largest "
        f"difference over all {n} rows "
        f"{np.abs(scores - outputs).max():.1g}",
    )
    for i in range(min(n, MOST_ROWS)):
        each = float(scores[i]), float(outputs[i])
        table.add(str(i), *each, abs(each[0] - each[1]))
    return table


@own_errors
def corrections(n: int = 4096, head_dim: int = 64, *, tiling: Tiling | None = None) -> Table:
    """Return a table that counts FlashAttention-1's and -2's operations outside matrix products.

    FlashAttention-1 divides O by l at every key tile, and multiplies O by l at the next key tile.
    FlashAttention-2 divides O by l once, after the last tile (arXiv:2307.08691, section 3.1.1).
    """
    tiling, problem = tiling or Tiling(64, 64), Problem(n, head_dim=head_dim, dtype="bfloat16")
    table = Table(
        f"Divisions of O: {n:,} queries and keys, d = {head_dim}, tiles {tiling}",
        ("algorithm", "divisions", "per row", "multiplications", "others", "total"),
        note="one head, forward: operations that do not run on tensor cores; others: exp, max, "
        f"add. FlashAttention-1 divides {head_dim} columns of O at each tile of a row, "
        "FlashAttention-2 once per row",
    )
    for name in ("flash1", "flash2"):
        counted = traffic.count_schedule(problem, tiling, name, "forward", Device.get("H100"))
        divide, multiply = counted.flops("divide"), counted.flops("multiply")
        others = sum(counted.flops(kind) for kind in ("exp", "max", "add"))
        whole = divide + multiply + others
        table.add(name, divide, divide // n, multiply, others, whole)
    return table


@own_errors
def reread(n: int = 4096, *, head_dim: int = 64, dtype: str = "float32") -> Table:
    """Return a table of the time that each device needs to read P from HBM.

    The table also has the time to store and load both S and P once.
    """
    problem = Problem(n, head_dim=head_dim, dtype=dtype)
    size = whole_bytes(problem, "P")
    flops = traffic.Traffic(
        problem, Tiling(n, n), "standard", "forward", Device.get("H100"), "ascending"
    ).flops("matmul")
    table = Table(
        f"P of {n:,} x {n:,} in {dtype}, one head: {size:,} B",
        ("device", "HBM GB/s", "P once, µs", "S and P, µs", "products, µs"),
        note="standard attention stores and loads S and P, which is four passes; products: the "
        f"time of 4 N^2 d FLOPs at the peak for {dtype}, d = {head_dim}",
    )
    for name, device in PRESETS.items():
        if dtype not in {**device.tensor_flops, **device.cuda_flops}:
            continue
        once = 1e6 * size / device.hbm_bandwidth
        products = 1e6 * flops / device.peak(dtype)
        table.add(name, device.hbm_bandwidth / 1e9, once, 4 * once, products)
    return table
