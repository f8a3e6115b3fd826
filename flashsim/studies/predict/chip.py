"""A GPU as the time model wants it, from what its units were measured to do.

The constants of `calibration` are shares of an H200's data sheet. Another chip's figures are those
of the H200 times what its units did, measured alone, over what the H200's did: so a chip that is an
H200 in all its units gets an H200's times, and one with half of its bandwidth half of that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from flashsim.errors import TraceError
from flashsim.problem.hardware import Device

#: What one H200's units did (docs/data/units-h200.csv), in the units of `rates`.
H200 = {
    "tensor": 4096.4 * 1.97028e9,
    "float32": 2 * 124.37 * 1.97028e9,
    "HBM": 4.45995e12,
    "L2": 8.85999e12,
}


def rates(units: Mapping[str, float]) -> dict[str, float]:
    """Of an SM: FLOP/s of its tensor cores and of its CUDA cores; of the chip: HBM's and L2's B/s.

    Parameters
    ----------
    units : mapping of float
        From `flashsim.backends.cupy_gpu.units.measure`, by name.

    Raises
    ------
    TraceError
        If a unit is missing.
    """
    wanted = {"tensor": ("wgmma", "mma.sync"), "float32": ("multiply-adds",)}
    wanted |= {"HBM": ("HBM",), "L2": ("L2 reads",), "clock": ("SM clock",)}
    best = {}
    for name, prefixes in wanted.items():
        found = [value for unit, value in units.items() if unit.startswith(prefixes)]
        if not found:
            raise TraceError(f"no unit begins with {prefixes[0]!r}; was all of it measured?")
        best[name] = max(found)
    hertz = best.pop("clock")
    return best | {"tensor": best["tensor"] * hertz, "float32": 2 * best["float32"] * hertz}


def calibrated(gpu: Device, units: Mapping[str, float]) -> Device:
    """The device to give to `predict`: its capacities, and figures in an H200's terms.

    Parameters
    ----------
    gpu : Device
        Name, SMs and capacities; its peaks and bandwidths are not looked at.
    units : mapping of float
        As in `rates`.
    """
    sheet, found = Device.get("H200"), rates(units)
    share = {name: value / H200[name] for name, value in found.items()}
    sms = gpu.sm_count / sheet.sm_count
    return replace(
        gpu,
        tensor_flops={k: v * share["tensor"] * sms for k, v in sheet.tensor_flops.items()},
        cuda_flops={k: v * share["float32"] * sms for k, v in sheet.cuda_flops.items()},
        hbm_bandwidth=sheet.hbm_bandwidth * share["HBM"],
        l2_bandwidth=sheet.l2_bandwidth * share["L2"],
        source="flashsim study calibrate: units measured, in shares of an H200's",
    )
