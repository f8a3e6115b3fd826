"""The length from which FlashAttention is faster, by time; and its versions side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

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
#: Which algorithm a version is, and its outer loops forward and backward.
VERSIONS = {
    "standard": ("standard", ("3 kernels", "5 kernels")),
    "FA1": ("flash1", ("keys", "keys")),
    "FA2": ("flash2-fused", ("queries", "keys")),
    "FA3": ("flash2-fused", ("queries", "keys")),
}
#: Which kernels are predicted; None: a library's.
KERNELS = {"standard": None, "FA2": "portable", "FA3": "hopper"}
#: The oldest compute capability, and the newest, that a version was written for.
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
        `lengths` replaces its numbers of queries and keys; batch and heads stay.
    lengths : sequence of int
        Tokens per sequence.
    direction : {"forward", "backward"}
        The backward pass is that of "flash2-fused".
    device : str or Device

    Returns
    -------
    Table
        One row per length: milliseconds of standard attention with a library's kernels at their
        best, its slowest kernel and that kernel's bound; milliseconds of flashsim's kernels;
        standard attention's time divided by theirs; and the lower bound from units (`least`).

    Raises
    ------
    OptionError
        If `lengths` is empty.
    """
    lengths = [*lengths]
    if not lengths:
        raise OptionError("lengths is empty; give one or more")
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
        table.rows.append(
            (n, times[0], f"{slowest.name}: {slowest.bound}", times[1], ratio, 1e3 * ideal.seconds)
        )
        wins = n if ratio > 1 and wins is None else wins if ratio > 1 else None
    shortest = ", the shortest asked" if wins == min(lengths) else ""
    found = f"faster from N = {wins:,} on{shortest}" if wins else "not faster at the longest"
    table.note = (
        f"{found}. standard: a library's kernels at best, every score computed; bound: its "
        f"slowest kernel and what that waits for; flash: flashsim's kernels{untested(device)}; "
        "how far both are from measurements: docs/reference/predictions.md"
    )
    return table


@own_errors
def versions(problem: Problem, *, device: str | Device = "H200") -> Table:
    """Compare standard attention and FlashAttention-1, -2, -3: bytes, memory, training-step times.

    The status is "OOM" if the forward pass's tensors do not fit in the device's memory, and
    "OOM(backward)" if the backward pass's do not. On a GPU that a version was not written for it
    is "needs Ampere" or "needs Hopper". A version that cannot run has no bytes and no times.
    """
    device, p = Device.get(device), problem
    table = Table(
        f"Attention by version, {p.batch} x {p.heads} heads, N = {p.n_q:,}, d = {p.head_dim}, "
        f"{p.dtype}, {device.name}",
        (
            *("version", "outer loop", "requested B", "memory B"),
            *("ideal ms", "predicted ms", "status"),
        ),
        note=f"memory: live tensors, of {device.hbm_bytes / 2**30:.4g} GiB; ideal: the least that "
        "units allow, perfect overlap; predicted: a library's kernels at best, FA2 by flashsim's "
        "portable ones (FlashAttention-2's design), FA3 by its Hopper ones (FlashAttention-3's); "
        f"backward fused{untested(device)}",
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
                memory += whole_bytes(p, "O") * (algorithm == "standard")  # the caller's alone
            if status == "ok" and memory > device.hbm_bytes:
                status = "OOM" if direction == "forward" else "OOM(backward)"
            figures: tuple[float | None, ...] = (None, None, None)
            if status == "ok":
                figures = _figures(name, p, algorithm, direction, device)
            nbytes, *times = figures
            table.rows.append((f"{name} {direction}", loop, nbytes, memory, *times, status))
    return table


def _figures(
    name: str, p: Problem, algorithm: str, direction: str, device: Device
) -> tuple[int, float, float | None]:
    """Requested bytes, ideal and predicted milliseconds; the last only where kernels exist."""
    found = None
    if name in KERNELS:
        try:
            found = predict(
                p, direction=direction, algorithm=algorithm, kernels=KERNELS[name], device=device
            )
        except (UnsupportedError, TilingError):  # a device or a problem without such kernels
            found = None
    if found is not None:
        tile = found.traffic.tiling
    else:
        tile = PRODUCT if name == "standard" else Tiling.fit(p, device, algorithm, direction)
    counted = _counted(p, tile, algorithm, direction, device)
    predicted = None if found is None else 1e3 * found.seconds
    return counted.bytes(), 1e3 * least(counted).seconds, predicted


def _counted(
    p: Problem, tile: Tiling, algorithm: str, direction: str, device: Device
) -> traffic.Traffic:
    """The counts of one algorithm on a chip that its tiles fit, as a library's tiles fit theirs."""
    return traffic.Traffic(p, tile, algorithm, direction, device, "ascending")
