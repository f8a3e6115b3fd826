"""`predict`: units, overlap, waves and tails."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

import numpy as np

from flashsim.api import counting, inputs
from flashsim.backends.families.family import Family
from flashsim.backends.families.hopper import HOPPER
from flashsim.backends.families.portable import PORTABLE
from flashsim.backends.launch import Gpu
from flashsim.backends.launch.passes import KernelPass
from flashsim.counts.traffic import Traffic
from flashsim.errors import DTypeError, OptionError, shown
from flashsim.problem import checks
from flashsim.problem.hardware import Device
from flashsim.problem.problem import Problem
from flashsim.schedule import plans
from flashsim.schedule.split import check_splits
from flashsim.schedule.splitting import RESERVED
from flashsim.schedule.tiling import Tiling
from flashsim.studies.predict import decode
from flashsim.studies.predict.calibration import CALIBRATED, HBM_SHARE, LAUNCH, Constants
from flashsim.studies.predict.finish import finish
from flashsim.studies.predict.prediction import Prediction, StageTime
from flashsim.studies.predict.unfused import predict_standard
from flashsim.studies.predict.units import once_bytes, visit_seconds

FAMILIES: dict[str, Family] = {"hopper": HOPPER, "portable": PORTABLE}


def predict(
    problem: Problem,
    *,
    direction: str = "forward",
    algorithm: str = "flash2",
    kernels: str | None = None,
    tiling: Tiling | None = None,
    device: str | Device = "H200",
    constants: Mapping[str, Constants] | None = None,
    heads_in_group: Mapping[str, int] | None = None,
    splits: int | str = "auto",
) -> Prediction:
    """How long the kernels of `backend="cupy"` take, or a library's for standard attention.

    Blocks start in the kernels' own order, the longest first, and the next one takes the place of
    the first that ends. No data, no GPU.

    Parameters
    ----------
    problem : Problem
    direction : {"forward", "backward"}
    algorithm : {"flash2", "flash2-fused", "flash-decode", "standard"}
        "standard" takes no kernels, tiling, constants or heads_in_group.
    kernels : {"hopper", "portable"}, optional
        The kernel family; default: the one made for the device.
    tiling : Tiling, optional
        Default: the family's own.
    device : str or Device
        The constants were fitted on an H200; for another device they are taken over, untested.
    constants : mapping of Constants, optional
        By stage; default: the calibrated ones.
    heads_in_group : mapping of int, optional
        By stage, how many heads are worked on together; default: the kernels' own (`clump_size`).
    splits : int or "auto"
        "flash-decode": over how many blocks the keys of a sequence are spread; the kernel's choice.
        Its keys come from HBM, at random if they lie in pages.

    Raises
    ------
    OptionError, UnsupportedError, TilingError
        If there is no such family, or its kernels do not run this.
    """
    device = Device.get(device)
    plans.check_algorithm(algorithm)
    check_splits(splits)
    if algorithm == "standard":
        own = {"kernels": kernels, "tiling": tiling, "constants": constants}
        for name, value in (own | {"heads_in_group": heads_in_group}).items():
            if value is not None:
                raise OptionError(
                    f"{name} is FlashAttention's; standard attention's time is a library's, got "
                    f"{name}={shown(value)}"
                )
        plans.stages(problem, algorithm, direction)  # or say what there is
        return predict_standard(problem, direction, device)
    if algorithm == decode.ALGORITHM:
        for name, given in (
            ("kernels", None if kernels == "portable" else kernels),
            *(("tiling", tiling), ("constants", constants), ("heads_in_group", heads_in_group)),
        ):
            if given is not None:
                raise OptionError(f"the decode kernel is one, portable: leave {name} out")
        return decoding(problem, direction, splits, device)
    if splits != "auto":
        raise OptionError(f"{algorithm!r} splits no keys; algorithm='flash-decode' does")
    if kernels is None:
        kernels = "hopper" if device.compute_capability == (9, 0) else "portable"
    checks.one_of("kernels", kernels, CALIBRATED)
    plans.stages(problem, algorithm, direction)  # or say what there is
    inputs.check_tiling(tiling)
    for what, mapping, kind in (
        ("constants", constants, Constants),
        ("heads_in_group", heads_in_group, (int, np.integer)),
    ):
        if mapping is None:
            continue
        if not isinstance(mapping, Mapping) or not all(
            isinstance(value, kind) and not isinstance(value, bool) for value in mapping.values()
        ):
            raise DTypeError(f"{what} must be a mapping by stage, got {shown(mapping)}")
    passes, traffic = _prepare(problem, direction, algorithm, kernels, tiling, device)
    known = CALIBRATED[kernels] if constants is None else constants
    for name, heads in (heads_in_group or {}).items():
        if heads < 1:
            raise OptionError(f"heads_in_group must be at least 1, got {heads!r} for {name!r}")
        passes = tuple(replace(x, clump=heads) if x.stage.name == name else x for x in passes)
    return Prediction(traffic, kernels, tuple(_stage(one, traffic, known) for one in passes))


def decoding(problem: Problem, direction: str, splits: int | str, device: Device) -> Prediction:
    """The prediction of `algorithm="flash-decode"`."""
    plans.stages(problem, decode.ALGORITHM, direction)  # or say what there is
    made = decode.launch(problem, splits, device)
    found = decode.stages(made, problem.page_size, device)
    return Prediction(decode.traffic(problem, made, device), "portable", found)


@lru_cache(maxsize=128)
def _prepare(
    problem: Problem,
    direction: str,
    algorithm: str,
    kernels: str,
    tiling: Tiling | None,
    device: Device,
) -> tuple[tuple[KernelPass, ...], Traffic]:
    """What would be launched, and its traffic."""
    if algorithm not in ("flash2", "flash2-fused"):
        raise OptionError(
            f"times of flash2, flash2-fused, flash-decode and standard are predicted, not of "
            f"{algorithm!r}"
        )
    family = FAMILIES[kernels]
    gpu = Gpu(
        *(device.name, device.compute_capability, device.sram_bytes, device.l2_bytes),
        multiprocessors=device.sm_count,
    )
    passes = (
        family.forward_passes(problem, tiling, gpu, "ascending", "")
        if direction == "forward"
        else family.backward_passes(problem, tiling, gpu, "ascending", "", algorithm)
    )
    traffic = counting.count(
        problem,
        algorithm=algorithm,
        direction=direction,
        tiling=passes[0].tables.schedule.tiling,
        device=replace(device, sram_bytes=device.sram_per_sm + device.registers_per_sm),
    )
    return passes, traffic


def _stage(one: KernelPass, traffic: Traffic, constants: Mapping[str, Constants]) -> StageTime:
    device, name = traffic.device, one.stage.name
    hbm = once_bytes(traffic, name) / (device.hbm_bandwidth * HBM_SHARE)
    if name not in constants:  # row by row: it streams
        return StageTime(name, LAUNCH + hbm, {"HBM": hbm}, 1.0, 0.0)
    each = visit_seconds(traffic, one.stage, rows_a_reader(one))
    members = traffic.problem.group if one.stage.per == "group" else 1
    visits = np.diff(one.tables.ptr)[one.tables.order] * members
    blocks = blocks_per_sm(one, device)
    slots = blocks * device.sm_count
    chosen = constants[name]
    inside = [t for unit, t in each.items() if unit != "L2"]  # copies run beside the arithmetic
    mixed = chosen.busiest * max(inside) + chosen.others * (sum(inside) - max(inside))
    a_visit = blocks * max(mixed, each["L2"])
    durations = visits * a_visit + chosen.item
    last, mean = finish(durations, one.walks, one.clump, slots)
    seconds = LAUNCH + max(last, hbm)
    total = int(visits.sum()) * one.walks
    units = {unit: t * total / device.sm_count for unit, t in each.items()} | {"HBM": hbm}
    waves = len(visits) * one.walks / slots
    return StageTime(name, seconds, units, waves, 1 - mean / last)


def rows_a_reader(one: KernelPass) -> int:
    """Rows of the outer tile for which a warp, or a Hopper warpgroup, reads the visited tiles."""
    tiling = one.tables.schedule.tiling
    outer = tiling.block_q if one.stage.outer == "queries" else tiling.block_k
    if one.kernel.boxes:  # one warpgroup of four warps loads, the others compute
        return max(64, outer // (one.kernel.threads // 128 - 1))
    return outer // (one.kernel.threads // 32)


def blocks_per_sm(one: KernelPass, device: Device) -> int:
    """Thread blocks that fit on an SM by shared memory; one of a persistent kernel."""
    if one.kernel.boxes:
        return 1
    return max(1, device.sram_per_sm // (one.kernel.shared_bytes + RESERVED))
