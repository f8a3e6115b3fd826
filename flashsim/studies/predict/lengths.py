"""From which length FlashAttention is faster, by time; and the versions of it, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flashsim.counts import traffic
from flashsim.errors import OptionError, TilingError, UnsupportedError
from flashsim.problem.hardware import Device
from flashsim.problem.problem import Problem
from flashsim.report import Table
from flashsim.schedule import plans
from flashsim.schedule.tensors import whole_bytes
from flashsim.schedule.tiling import Tiling
from flashsim.studies.predict.ideal import least
from flashsim.studies.predict.model import predict
from flashsim.studies.predict.prediction import untested

LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
#: A tile as libraries have them for products of whole matrices.
PRODUCT = Tiling(128, 128)
#: Which algorithm a version is, and its outer loops forward and backward.
VERSIONS = {
    "standard": ("standard", ("3 kernels", "5 kernels")),
    "FA1": ("flash1", ("keys", "keys")),
    "FA2": ("flash2-fused", ("queries", "keys")),
    "FA3": ("flash2-fused", ("queries", "keys")),
}
KERNELS = {"FA2": "portable", "FA3": "hopper"}
#: The oldest compute capability, and the newest, that a version was written for.
WRITTEN_FOR = {"FA2": ((8, 0), (99, 0), "Ampere"), "FA3": ((9, 0), (9, 0), "Hopper")}


def when(
    problem: Problem,
    lengths: Sequence[int] = LENGTHS,
    *,
    direction: str = "forward",
    device: str | Device = "H200",
) -> Table:
    """Standard attention at its least, beside flashsim's own FlashAttention-2 kernels, over N.

    Standard attention is three kernels forward (products, softmax, products); none is modelled,
    only what its units need (`least`), which favours it. FlashAttention's time is `predict`'s.
    """
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
        flash = predict(p, direction=direction, device=device)
        tile = flash.traffic.tiling
        standard = least(_counted(p, PRODUCT, "standard", direction, device))
        ideal = least(_counted(p, tile, "flash2", direction, device))
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
        f"{found}. standard: at least this, each kernel as fast as its busiest unit; bound: "
        "its slowest kernel and what that waits for; flash: predicted for flashsim's kernels"
        f"{untested(device)}"
    )
    return table


def versions(problem: Problem, *, device: str | Device = "H200") -> Table:
    """Standard attention and FlashAttention-1, -2, -3: bytes, memory and times of a training step.

    Where the forward pass's tensors do not fit in the device's memory the status is "OOM", where
    the backward pass's do not "OOM(backward)"; on a GPU that a version was not written for it is
    "needs Ampere" or "needs Hopper". What cannot run has no bytes and no times.
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
        "units allow, perfect overlap; predicted: FA2 by flashsim's portable kernels "
        "(FlashAttention-2's design), FA3 by its Hopper kernels (FlashAttention-3's), backward "
        f"fused{untested(device)}",
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
    """Requested bytes, ideal and predicted milliseconds; the last where there are kernels."""
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
    """Counts of one algorithm, on a chip that its tiles fit: a library's kernels hold their own."""
    return traffic.Traffic(p, tile, algorithm, direction, device, "ascending")
