"""When FlashAttention wins: predicted times beside standard attention's, length by length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flashsim import report
from flashsim.counts.traffic import saved
from flashsim.problem import checks
from flashsim.problem.hardware import Device
from flashsim.problem.problem import Problem
from flashsim.studies.predict.model import predict

LENGTHS = tuple(128 << n for n in range(9))


def crossover(
    problem: Problem,
    lengths: Sequence[int] = LENGTHS,
    *,
    direction: str = "forward",
    device: str | Device = "H200",
) -> report.Table:
    """When FlashAttention wins, and by how much: predicted times at every length.

    Parameters
    ----------
    problem : Problem
        Its lengths are replaced by `lengths`, queries and keys alike; batch and heads stay.
    lengths : sequence of int
        Tokens of a sequence.
    direction : {"forward", "backward"}
        The backward of "flash2-fused".
    device : str or Device

    Returns
    -------
    Table
        A row a length: milliseconds of standard attention and of FlashAttention, their ratio, the
        bytes of one matrix of scores, and of HBM that standard attention keeps for the backward.
    """
    checks.instance("problem", problem, Problem, "flashsim.Problem")
    device = Device.get(device)
    table = report.Table(
        f"Standard attention and FlashAttention, {direction}, {problem.batch} x {problem.heads} "
        f"heads, d={problem.head_dim}, {problem.dtype}"
        f"{', causal' if problem.causal else ''}, on {device.name}: predicted",
        ("N", "standard ms", "flash ms", "standard / flash", "S bytes", "standard keeps bytes"),
        note="standard: one library kernel a stage, every score computed; what it leaves out, and "
        "how far both are from measurements: docs/guides/truth.md",
    )
    for n in lengths:
        one = replace(problem, n_q=n, n_kv=n)
        flash = predict(one, direction=direction, algorithm="flash2-fused", device=device).seconds
        plain = predict(one, direction=direction, algorithm="standard", device=device).seconds
        scores = one.batch * one.heads * n * n * one.itemsize
        keeps = saved(one, "standard")
        table.rows.append((n, 1e3 * plain, 1e3 * flash, plain / flash, scores, keeps))
    return table
