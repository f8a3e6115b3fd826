"""Describes a GPU for the time model, from measured rates of the GPU's units.

The constants in `calibration` are shares of the rates in an H200's data sheet. Another chip's rate
is the H200's rate times the ratio of the two chips' measured rates.
"""

from collections.abc import Mapping
from dataclasses import replace

from flashsim.errors import TraceError
from flashsim.problem.hardware import Device

#: The measured rates of one H200's units (docs/data/units-h200.csv), in the units of `rates`.
H200 = {
    "tensor": 4096.4 * 1.97028e9,
    "float32": 2 * 124.37 * 1.97028e9,
    "HBM": 4.45995e12,
    "L2": 8.85999e12,
}


def rates(units: Mapping[str, float]) -> dict[str, float]:
    """Return measured rates: FLOP/s of one SM's tensor and CUDA cores, bytes/s of HBM and L2.

    `units` is the result of `flashsim.backends.cupy_gpu.units.measure`. If `units` lacks a unit,
    the function raises a `TraceError`.
    """
    wanted = {"tensor": ("wgmma", "mma.sync"), "float32": ("multiply-adds",)}
    wanted |= {"HBM": ("HBM",), "L2": ("L2 reads",), "clock": ("SM clock",)}
    best = {}
    for name, prefixes in wanted.items():
        found = [value for unit, value in units.items() if unit.startswith(prefixes)]
        if not found:
            raise TraceError(
                f"the table of units has no row whose name begins with {prefixes[0]!r}; measure "
                "the units again with `flashsim study calibrate`"
            )
        best[name] = max(found)
    hertz = best.pop("clock")
    return best | {"tensor": best["tensor"] * hertz, "float32": 2 * best["float32"] * hertz}


def calibrated(gpu: Device, units: Mapping[str, float]) -> Device:
    """Return a `Device` with measured rates, relative to an H200's rates, for `predict`.

    The returned device has the name, the number of SMs and the capacities of `gpu`. `units` is the
    result of `flashsim.backends.cupy_gpu.units.measure`.
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
