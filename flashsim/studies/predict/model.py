"""Predicts how long a GPU kernel of attention takes; the main function is `predict`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from flashsim.api import counting, inputs
from flashsim.api.decode_options import DecodeOptions, counted_fields, with_fields
from flashsim.api.kv_cache import live_problem
from flashsim.backends.launch.kernel import Gpu
from flashsim.backends.launch.passes import KernelPass
from flashsim.backends.launch_policy.family import Family, fastest_backward
from flashsim.backends.launch_policy.hopper import HOPPER
from flashsim.backends.launch_policy.hopper_fp8 import HOPPER_FP8
from flashsim.backends.launch_policy.portable import PORTABLE
from flashsim.counts.traffic import Traffic
from flashsim.errors import DTypeError, OptionError, UnsupportedError, own_errors, shown
from flashsim.problem import checks
from flashsim.problem.hardware import Device
from flashsim.problem.problem import Problem
from flashsim.schedule import plans
from flashsim.schedule.split import check_splits
from flashsim.schedule.tiling import Tiling
from flashsim.studies.predict import decode_time
from flashsim.studies.predict.calibration import CALIBRATED, Constants
from flashsim.studies.predict.prediction import Prediction
from flashsim.studies.predict.stage_time import stage_times
from flashsim.studies.predict.unfused import predict_standard

#: The kernels in Python are imported only when needed, because they need numba-cuda.
FAMILIES: dict[str, Family] = {"hopper": HOPPER, "portable": PORTABLE}


@own_errors
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
    decode: DecodeOptions | None = None,
    deterministic: bool | None = None,
    pack_gqa: bool | None = None,
) -> Prediction:
    """Predict the time of an attention pass on a GPU, by flashsim's kernels or standard attention.

    Flashsim's kernels are those of `backend="cupy"`; standard attention is assumed to run a
    library's kernels. A prediction needs neither input tensors nor a GPU.

    Parameters
    ----------
    problem : Problem
        For FP8 inputs, only the forward pass can be predicted, with the 16-bit forward's constants.
        Score functions cannot be predicted. Mask functions can: they change the tiles that are
        visited, and their evaluation takes no time in this model.
    direction : {"forward", "backward"}
    algorithm : str
        "flash2", "flash2-fused", "flash2-fused-first", "flash2-once", "flash-decode" or "standard".
        "flash2-fused-first" and "flash2-once" exist for Hopper's kernels only. With "standard", do
        not pass kernels, tiling, constants or heads_in_group.
    kernels : {"hopper", "portable", "python"}, optional
        The kernel family; default: the one that `backend="cupy"` chooses for the device and the
        problem. "python" means the kernels of `backend="numba_cuda"` on a Hopper GPU (backward:
        ``kernel="tensor"``); it needs numba-cuda.
    tiling : Tiling, optional
        Default: the family's own choice.
    device : str or Device
        The constants were fitted on an H100 (Hopper's kernels) and an H200, and were not tested on
        other devices.
    constants : mapping of Constants, optional
        Constants by stage; default: the calibrated constants.
    heads_in_group : mapping of int, optional
        The number of heads that are processed together, by stage; default: the kernels' own choice
        (`clump_size`).
    splits : int or "auto"
        For "flash-decode": the number of blocks that share the keys of a sequence; "auto" is the
        kernel's choice. The model reads the keys from HBM once per row tile, in random order if the
        cache is paged, and ignores that L2 may serve some reads of several row tiles.
    decode : DecodeOptions, optional
        `splits` and `cache_seqlens` in one object, as in `flashsim.run`. Its other fields cannot be
        predicted, except a `block_table`, if the problem has a `page_size`.
    deterministic : bool, optional
        For a backward pass, as in `Result.backward`. With False, the prediction is for the pass
        that `backward(deterministic=False)` runs on this device: fused, three passes, or
        single-KV-tile. Its name is the prediction's `traffic.algorithm`. Default: the algorithm's
        own form.
    pack_gqa : bool, optional
        For a forward pass: whether the query heads of a KV head share row tiles, as in
        `flashsim.run`. Default: the kernels' own choice. The decode kernel always packs them.

    Raises
    ------
    OptionError, UnsupportedError, TilingError
        If the family is unknown, or its kernels cannot run this problem.
    """
    device = Device.get(device)
    plans.stages(problem, algorithm, direction)  # or say what there is
    if deterministic is not None:
        if direction != "backward":
            raise OptionError(
                "deterministic= chooses between backward passes; use direction='backward', or "
                "leave out deterministic="
            )
        algorithm = _form(problem, algorithm, deterministic, tiling, kernels, device)
    others = algorithm in ("standard", decode_time.ALGORITHM) or kernels not in (None, "hopper")
    if problem.fp8 and others:
        raise UnsupportedError(
            f"for {problem.dtype} inputs, only the time of the forward pass of Hopper's FP8 "
            "kernel can be predicted; pass float16 or bfloat16 inputs, or use `flashsim.count`, "
            "which counts bytes"
        )
    if problem.score_mod is not None:
        raise UnsupportedError(
            "the time of a score function cannot be predicted, because its operations and array "
            "accesses were not calibrated; use flashsim.count for bytes and FLOPs, or leave out "
            "score_mod to get the time without it"
        )
    check_splits(splits)
    if pack_gqa is not None:
        pack_gqa = checks.flag("pack_gqa", pack_gqa)
    if decode is not None:
        fields: dict[str, Any] = {} if splits == "auto" else {"splits": splits}
        fields |= {} if pack_gqa is None else {"pack_gqa": pack_gqa}
        fields = counted_fields(problem, with_fields(fields, decode, [algorithm]))
        splits, pack_gqa = fields.pop("splits", "auto"), fields.pop("pack_gqa", None)
        problem = live_problem(problem, fields)[0] if fields else problem
    own: dict[str, Any] = {"tiling": tiling, "constants": constants}
    own["heads_in_group"] = heads_in_group
    if algorithm == "standard":
        own |= {"kernels": kernels, "splits": None if splits == "auto" else splits}
        own["pack_gqa"] = pack_gqa
        _refuse(own, "the time of standard attention is that of a library's kernels")
        return predict_standard(problem, direction, device)
    if algorithm == decode_time.ALGORITHM:
        own["kernels"] = None if kernels == "portable" else kernels
        _refuse(own, "there is only one decode kernel, 'portable'")
        if pack_gqa is False and problem.group > 1:
            raise UnsupportedError(
                "the GPU's decode kernel always packs the query heads of a KV head into one tile, "
                "so only the time of pack_gqa=True can be predicted; leave out pack_gqa="
            )
        made = decode_time.launch(problem, splits, device)
        found = decode_time.stages(made, problem.page_size, device)
        return Prediction(decode_time.traffic(problem, made, device), "portable", found)
    if splits != "auto":
        raise OptionError(
            f"{algorithm!r} cannot split keys; use algorithm='flash-decode', or leave out splits="
        )
    inputs.check_tiling(tiling)
    kernels = family_name(kernels, problem, tiling, device, direction, algorithm)
    if pack_gqa and direction == "backward":
        raise OptionError("a backward pass packs no query heads; leave out pack_gqa=")
    how = direction, algorithm, kernels, tiling, device, pack_gqa
    passes, traffic = _prepare(problem, *how)
    known = CALIBRATED[kernels] if constants is None else constants
    for name, heads in ({} if heads_in_group is None else heads_in_group).items():
        checks.one_of("stage in heads_in_group=", name, [x.stage.name for x in passes])
        if not checks.is_int(heads):
            raise DTypeError(f"heads_in_group= must have integers, got {shown(heads)} for {name!r}")
        if heads < 1:
            raise OptionError(
                f"heads_in_group= must be at least 1 for every stage, got {heads!r} for {name!r}"
            )
        passes = tuple(replace(x, clump=heads) if x.stage.name == name else x for x in passes)
    return Prediction(traffic, kernels, stage_times(passes, traffic, known))


def _refuse(options: Mapping[str, Any], why: str) -> None:
    """Raise an `OptionError` if one of these options is not None."""
    for name, value in options.items():
        if value is not None:
            raise OptionError(f"{name}={shown(value)} cannot be used: {why}; leave out {name}=")


def _form(
    problem: Problem,
    algorithm: str,
    deterministic: bool,
    tiling: Tiling | None,
    kernels: str | None,
    device: Device,
) -> str:
    """Return the algorithm that `Result.backward(deterministic)` runs on the device."""
    named = family_name(kernels, problem, tiling, device, "backward", algorithm)
    family, gpu = _family(named, "backward"), Gpu.like(device)
    form, ordered = fastest_backward(
        problem, gpu, lambda _: family, algorithm, deterministic, tiled=tiling is not None
    )
    if ordered:
        raise UnsupportedError(
            "for this problem, the kernels run a fused backward pass in a fixed order, whose "
            "time cannot be predicted; leave out deterministic= and use algorithm='flash2' to "
            "get the time of the three passes"
        )
    return form


@lru_cache(maxsize=128)
def _prepare(
    problem: Problem,
    direction: str,
    algorithm: str,
    kernels: str,
    tiling: Tiling | None,
    device: Device,
    pack_gqa: bool | None = None,
) -> tuple[tuple[KernelPass, ...], Traffic]:
    """Return the kernels that `run` would launch for a pass, and the pass's `Traffic`."""
    if algorithm not in ("flash2", *plans.FUSED, "flash2-once"):
        raise OptionError(
            f"the time of {algorithm!r} cannot be predicted; pass 'flash2', 'flash2-fused', "
            "'flash2-fused-first', 'flash2-once', 'flash-decode' or 'standard' as algorithm="
        )
    # FP8 kernels use the constants of the 16-bit forward.
    family = HOPPER_FP8 if problem.fp8 else _family(kernels, direction)
    gpu = Gpu.like(device)
    passes = (
        family.forward_passes(problem, tiling, gpu, "ascending", "", pack_gqa)
        if direction == "forward"
        else family.backward_passes(problem, tiling, gpu, "ascending", "", algorithm)
    )
    traffic = counting.count(
        problem,
        algorithm=algorithm,
        direction=direction,
        tiling=Tiling.joined({x.stage.name: x.tables.schedule.tiling for x in passes}),
        pack_gqa=passes[0].tables.schedule.split.pack_gqa or None,
        device=replace(device, sram_bytes=device.sram_per_sm + device.registers_per_sm),
    )
    return passes, traffic


def family_name(
    kernels: str | None, problem: Problem, tiling: Tiling | None, device: Device, *asked: str
) -> str:
    """Return the kernel family that the caller named, or the one that the backend chooses."""
    if kernels is not None:
        return checks.one_of("kernels", kernels, CALIBRATED)
    if device.compute_capability != (9, 0):
        return "portable"
    only = problem.fp8 or {"flash2-once", "flash2-fused-first"} & {*asked}
    possible = only or not HOPPER.refusal(problem, tiling, Gpu.like(device), *asked)
    return "hopper" if possible else "portable"


def _family(kernels: str, direction: str) -> Family:
    if kernels != "python":
        return FAMILIES[kernels]
    from flashsim.backends.numba_gpu import launch_policy

    return launch_policy.HOPPER if direction == "forward" else launch_policy.TENSOR
