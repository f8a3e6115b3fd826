"""Predicts times by sequence length, for FlashAttention's versions and for standard attention."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from flashsim.counts import traffic
from flashsim.errors import OptionError, TilingError, UnsupportedError, own_errors
from flashsim.problem.hardware import Device
from flashsim.problem.problem import Problem
from flashsim.report import Table
from flashsim.schedule import plans
from flashsim.schedule.tensors import whole_bytes
from flashsim.schedule.tiling import Tiling
from flashsim.studies.predict.ideal import least
from flashsim.studies.predict.model import predict
from flashsim.studies.predict.prediction import untested
from flashsim.studies.predict.unfused import PRODUCT

LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
#: The algorithm of each version, and its outer loops forward and backward.
VERSIONS = {
    "standard": ("standard", ("3 kernels", "5 kernels")),
    "FA1": ("flash1", ("keys", "keys")),
    "FA2": ("flash2-fused", ("queries", "keys")),
    "FA3": ("flash2-fused", ("queries", "keys")),
}
#: The kernel family whose time is predicted for each version; None means a library's kernels.
KERNELS = {"standard": None, "FA2": "portable", "FA3": "hopper"}
#: The oldest and the newest compute capability for which each version was written.
WRITTEN_FOR = {"FA2": ((8, 0), (99, 0), "Ampere"), "FA3": ((9, 0), (9, 0), "Hopper")}


@own_errors
def when(
    problem: Problem,
    lengths: Sequence[int] = LENGTHS,
    *,
    direction: str = "forward",
    device: str | Device = "H200",
) -> Table:
    """Compare FlashAttention's predicted times with standard attention's at each length.

    Parameters
    ----------
    problem : Problem
        `lengths` replaces its numbers of queries and keys; batch and heads stay the same.
    lengths : sequence of int
        The numbers of tokens per sequence.
    direction : {"forward", "backward"}
        The backward pass is that of "flash2-fused".
    device : str or Device

    Returns
    -------
    Table
        One row per length: milliseconds of standard attention with a library's best kernels, the
        slowest of these kernels and the unit that bounds it, milliseconds of flashsim's kernels,
        standard attention's time divided by theirs, and the lower bound `least`.

    Raises
    ------
    OptionError
        If `lengths` is empty.
    """
    lengths = [*lengths]
    if not lengths:
        raise OptionError("lengths= must contain at least one length, got none")
    device, wins = Device.get(device), None
    table = Table(
        f"When does FlashAttention win? {direction}, {problem.batch} x {problem.heads} heads, "
        f"d = {problem.head_dim}, {problem.dtype}, {device.name}",
        ("N", "standard ms", "bound", "flash ms", "times faster", "flash, ideal ms"),
    )
    for n in sorted(lengths):
        p = replace(problem, n_q=n, n_kv=n)
        standard, flash = (
            predict(p, direction=direction, algorithm=name, device=device)
            for name in ("standard", "flash2-fused")
        )
        ideal = least(flash.traffic)
        slowest = max(standard.stages, key=lambda s: s.seconds)
        ratio = standard.seconds / flash.seconds
        times = 1e3 * standard.seconds, 1e3 * flash.seconds
        table.add(
            n, times[0], f"{slowest.name}: {slowest.bound}", times[1], ratio, 1e3 * ideal.seconds
        )
        wins = n if ratio > 1 and wins is None else wins if ratio > 1 else None
    shortest = ", the shortest length" if wins == min(lengths) else ""
    found = f"faster from N = {wins:,} on{shortest}" if wins else "not faster at the longest length"
    table.note = (
        f"FlashAttention is {found}. standard: a library's best kernels, which compute every "
        "score; bound: its slowest kernel and the unit that bounds it; flash: flashsim's kernels"
        f"{untested(device)}; docs/reference/predictions.md compares both with measurements"
    )
    return table


@own_errors
def versions(problem: Problem, *, device: str | Device = "H200") -> Table:
    """Return a table of bytes, memory and times of standard attention and FlashAttention-1, -2, -3.

    The table shows requested bytes, and times of a training step. The status is "OOM" if the
    forward pass's tensors do not fit in the device's memory, and "OOM(backward)" if the backward
    pass's tensors do not. If the version was not written for the GPU, the status is "needs Ampere"
    or "needs Hopper".
    """
    device, p = Device.get(device), problem
    table = Table(
        f"Attention by version, {p.batch} x {p.heads} heads, N = {p.n_q:,}, d = {p.head_dim}, "
        f"{p.dtype}, {device.name}",
        (
            *("version", "outer loop", "requested B", "memory B"),
            *("ideal ms", "predicted ms", "status"),
        ),
        note=f"memory: tensors in use at once, of the device's {device.hbm_bytes / 2**30:.4g} GiB; "
        "ideal: lower bound with perfect overlap of all units; predicted: for standard attention a "
        "library's best kernels, for FA2 flashsim's portable kernels (FlashAttention-2's design), "
        "for FA3 its Hopper kernels (FlashAttention-3's design); the backward pass is fused"
        f"{untested(device)}",
    )
    for name, (algorithm, loops) in VERSIONS.items():
        status = "ok"
        oldest, newest, name_of = WRITTEN_FOR.get(name, ((0, 0), (99, 0), ""))
        if not oldest <= device.compute_capability <= newest:
            status = f"needs {name_of}"
        for direction, loop in zip(plans.DIRECTIONS, loops, strict=True):
            memory = traffic.live(p, algorithm)
            if direction == "forward":
                memory = traffic.saved(p, algorithm) + traffic.workspace(p, algorithm, direction)
                # The caller still has out.
                memory += whole_bytes(p, "O") * (algorithm == "standard")
            if status == "ok" and memory > device.hbm_bytes:
                status = "OOM" if direction == "forward" else "OOM(backward)"
            how = name, p, algorithm, direction, device
            nbytes, *times = _figures(*how) if status == "ok" else (None, None, None)
            table.add(f"{name} {direction}", loop, nbytes, memory, *times, status)
    return table


def _figures(
    name: str, p: Problem, algorithm: str, direction: str, device: Device
) -> tuple[int, float, float | None]:
    """Return a version's requested bytes, shortest possible ms, and predicted ms (or None)."""
    tile, predicted = PRODUCT, None
    how: dict[str, Any] = {"direction": direction, "algorithm": algorithm, "device": device}
    # There may be no such kernels for the device or the problem.
    with suppress(UnsupportedError, TilingError):
        if name in KERNELS:
            found = predict(p, kernels=KERNELS[name], **how)
            tile, predicted = found.traffic.tiling, 1e3 * found.seconds
    if predicted is None and name != "standard":
        tile = Tiling.fit(p, device, algorithm, direction)
    # On a chip that is large enough for its tiles.
    counted = traffic.Traffic(p, tile, algorithm, direction, device)
    return counted.bytes(), 1e3 * least(counted).seconds, predicted
