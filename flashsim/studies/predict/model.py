"""Predicts how long a GPU kernel of attention takes; the main function is `predict`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from flashsim.api import counting, inputs
from flashsim.api.decode_options import DecodeOptions, counted_fields, with_fields
from flashsim.api.kv_cache import live_problem
from flashsim.backends.launch.kernel import Gpu
from flashsim.backends.launch.passes import KernelPass
from flashsim.backends.launch_policy import cost_model
from flashsim.backends.launch_policy.family import Family
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
from flashsim.schedule.tensors import whole_bytes
from flashsim.schedule.tiling import Tiling
from flashsim.studies.energy import joules
from flashsim.studies.predict import calibration, decode_time
from flashsim.studies.predict.blocks import in_launches, makespan
from flashsim.studies.predict.calibration import CALIBRATED, Constants
from flashsim.studies.predict.prediction import Prediction, StageTime
from flashsim.studies.predict.unfused import predict_standard
from flashsim.studies.predict.units import (
    PAIR,
    SCALED,
    UNITS,
    Work,
    bytes_again,
    is_hopper_in_cpp,
    once_bytes,
    use_of,
    work_of,
    zeros,
)

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
        The kernel family; default: the family for the device. "python" means the kernels of
        `backend="numba_cuda"` on a Hopper GPU (backward: ``kernel="tensor"``); it needs numba-cuda.
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
    kernels = _named(kernels, device)
    inputs.check_tiling(tiling)
    if pack_gqa and direction == "backward":
        raise OptionError("a backward pass packs no query heads; leave out pack_gqa=")
    how = direction, algorithm, kernels, tiling, device, pack_gqa
    passes, traffic = _prepare(problem, *how)
    known = CALIBRATED[kernels] if constants is None else constants
    for name, heads in ({} if heads_in_group is None else heads_in_group).items():
        if not checks.is_int(heads):
            raise DTypeError(f"heads_in_group= must have integers, got {shown(heads)} for {name!r}")
        if heads < 1:
            raise OptionError(
                f"heads_in_group= must be at least 1 for every stage, got {heads!r} for {name!r}"
            )
        passes = tuple(replace(x, clump=heads) if x.stage.name == name else x for x in passes)
    return Prediction(traffic, kernels, stage_times(passes, traffic, known))


def stage_times(
    passes: tuple[KernelPass, ...], traffic: Traffic, constants: Mapping[str, Constants]
) -> tuple[StageTime, ...]:
    """Return the predicted time of each kernel of a pass."""
    found = tuple(_stage(one, traffic, constants) for one in passes)
    if passes[-1].kernel.boxes and found[-1].name == "dq":
        found = (*found[:-1], _beside(found[-1], passes[-2:], traffic, constants))
    return found


def _refuse(options: Mapping[str, Any], why: str) -> None:
    """Raise an `OptionError` if one of these options is not None."""
    for name, value in options.items():
        if value is not None:
            raise OptionError(f"{name}={shown(value)} cannot be used: {why}; leave out {name}=")


def _beside(
    dq: StageTime,
    passes: tuple[KernelPass, ...],
    traffic: Traffic,
    constants: Mapping[str, Constants],
) -> StageTime:
    """Return the time that Hopper's dQ kernel adds to the pass, after the kernel for dK and dV.

    The dQ kernel is launched while the kernel for dK and dV runs, and does not wait for that
    kernel's results. So the dQ kernel's blocks start on SMs that the first kernel leaves free,
    without a launch's latency. A block's number determines its first work tile: while a block waits
    for an SM, no other block can take that tile.
    """
    device, runs = traffic.device, []
    for one in passes:
        c = _constants(one, traffic, constants)
        shared, waiting, grid, places = _blocks(work_of(one, traffic), c)
        runs.append((cost_model.Queue((shared + waiting).tolist(), *grid), places))
    (before, places), (queue, _) = runs
    # Some SMs cannot run a cluster; they are free from the beginning.
    done = cost_model.ends(before, [0.0] * places) + [0.0] * (device.sm_count - places)
    alone = max(cost_model.ends(queue, [0.0] * len(done)))
    gained = alone + max(done) - _held_back(queue, done)
    adds = max(0.0, dq.seconds - c.launch - gained)
    return replace(dq, seconds=adds, joules=dq.joules and joules(dq.use, adds, device))


def _held_back(queue: cost_model.Queue, free: Sequence[float]) -> float:
    """Return when a launch ends if each of its thread blocks has a fixed first work tile.

    The parameters are those of `cost_model.ends`.
    """
    takes, walks, clump, _ = queue
    order = [
        item
        for first in range(0, walks, clump)
        for item in takes
        for _ in range(min(clump, walks - first))
    ]
    held = [begin + item for begin, item in zip(sorted(free), order, strict=False)]
    return max(cost_model.ends(cost_model.Queue(order[len(held) :], 1, 1), held))


def _form(
    problem: Problem,
    algorithm: str,
    deterministic: bool,
    tiling: Tiling | None,
    kernels: str | None,
    device: Device,
) -> str:
    """Return the algorithm that `Result.backward(deterministic)` runs on the device."""
    family, gpu = _family(_named(kernels, device), "backward"), Gpu.like(device)
    form, ordered = plans.fastest_backward(
        algorithm,
        deterministic,
        tiled=tiling is not None,
        stores_dq=lambda _: family.stores_dq(problem, gpu, ordered=deterministic),
        orders_dq=lambda _: family.orders_dq(problem),
        fuses=lambda _: family.fuses(problem, gpu),
        stores_first=lambda _: family.stores_first(problem, gpu),
    )
    if ordered:
        raise UnsupportedError(
            "for this problem, the kernels run a fused backward pass in a fixed order, whose "
            "time cannot be predicted; leave out deterministic= and use algorithm='flash2' to "
            "get the time of the three passes"
        )
    return form


def made_for(device: Device) -> str:
    """Return the kernel family that runs on a device by default."""
    return "hopper" if device.compute_capability == (9, 0) else "portable"


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


def _named(kernels: str | None, device: Device) -> str:
    """Return the kernel family that the caller named, or the device's default family."""
    return checks.one_of("kernels", made_for(device) if kernels is None else kernels, CALIBRATED)


def _family(kernels: str, direction: str) -> Family:
    if kernels != "python":
        return FAMILIES[kernels]
    from flashsim.backends.numba_gpu import launch_policy

    return launch_policy.HOPPER if direction == "forward" else launch_policy.TENSOR


def _stage(one: KernelPass, traffic: Traffic, constants: Mapping[str, Constants]) -> StageTime:
    device, name = traffic.device, one.stage.name
    if not one.kernel.shared_bytes:  # a row-wise kernel, which streams rows
        bytes_once = once_bytes(traffic, name)
        begun, share = calibration.STREAMED[one.kernel.overlaps]
        kept = zeros(traffic)[0] if name == "delta" and device.l2_bandwidth else 0.0
        streamed = (bytes_once - kept) / (device.hbm_bandwidth * share)
        seconds = begun + streamed + (2 * kept / device.l2_bandwidth if kept else 0.0)
        if not one.kernel.overlaps:
            seconds = max(calibration.STREAMED_LEAST, seconds)
        use = use_of(one, traffic, {})
        busy = {"HBM": streamed}
        return StageTime(name, seconds, busy, 1.0, 0.0, use, joules(use, seconds, device))
    works = works_of(one, traffic)
    seconds, last, mean, hbm = stage_seconds(works, _constants(one, traffic, constants))
    visits = float(works[-1].visits.mean()) / device.sm_count
    busy = {unit: sum(w.visit[unit] * len(w.one.items) for w in works) for unit in UNITS}
    units = {unit: each * visits for unit, each in busy.items()} | {"HBM": hbm}
    started = sum(len(w.one.items) * w.one.kernel.cluster for w in works)
    waves = started / (works[-1].blocks * device.sm_count)
    use = use_of(one, traffic, units)
    tail = 1 - mean / last if last else 0.0
    # The energy of FP8 was not measured.
    energy = None if traffic.problem.fp8 else joules(use, seconds, device)
    return StageTime(name, seconds, units, waves, tail, use, energy)


def works_of(one: KernelPass, traffic: Traffic) -> tuple[Work, ...]:
    """Return one `Work` object per kernel launch of a stage, in launch order."""
    return tuple(work_of(each, traffic) for each in (*one.before, one))


def stage_seconds(works: Sequence[Work], c: Constants) -> tuple[float, float, float, float]:
    """Return four predicted times of a stage (kernel), in seconds.

    The four times are the kernel's time with its launch, the end of the last tile, the mean busy
    time of an SM, and HBM's time. `works` is the result of `works_of`. The constants `c` belong to
    the last launch, because it has most of the work tiles.
    """
    one, traffic, work = works[-1].one, works[-1].traffic, works[-1]
    device = traffic.device
    shared, waiting, grid, places = _blocks(work, c)
    if one.before:
        runs = []
        for each in works:  # of work tiles of equal duration
            its, wait, _, at_once = _blocks(each, c)
            cluster = each.one.kernel.cluster
            seconds = float(its[0] + wait[0])
            runs.append((seconds, len(each.one.items), cluster, at_once // cluster))
        last, mean = in_launches(runs, device.sm_count)
    else:
        last, mean = makespan(shared.tolist(), waiting.tolist(), *grid, places, work.blocks)
    if grid[0] * len(work.visits) > places * work.blocks:  # some block starts after another ends
        last, mean = last + c.changeover, mean + c.changeover  # on every SM, so there is no tail
    name = one.stage.name
    once, again = once_bytes(traffic, name), bytes_again(one, traffic)
    forward = bool(one.kernel.boxes) and name == "forward"
    # The constants of the forward in Python were fitted without the first tiles' own time.
    in_cpp = is_hopper_in_cpp(one)
    forward_in_cpp = forward and in_cpp
    _, streamed = calibration.STREAMED[True]
    share = streamed if in_cpp else calibration.HBM_SHARE
    full = calibration.FORWARD_L2_FULL if forward_in_cpp else calibration.L2_FULL
    kept, fetched = (x if name == "fused" else 0.0 for x in zeros(traffic))
    beyond = _beyond_l2(once / device.l2_bytes, full) / (device.hbm_bandwidth * share)
    hbm = (once - kept) * beyond + again / (device.hbm_bandwidth * share)
    if again or one.kernel.boxes:  # blocks wait for HBM at times, not always
        power = calibration.FORWARD if forward else calibration.AGAIN
        waves = -(-grid[0] * len(work.visits) // (places * work.blocks))
        exposed = calibration.EXPOSED if name == "fused" and not one.stage.once else 0.0
        alone = (1.0 if forward else exposed) * in_cpp * hbm / waves * _exposed(work)
        # No block asks for dQ's zeros in advance, so it waits the longer, the busier HBM is.
        busy = min(1.0, hbm / last) if last else 1.0
        alone = min(hbm, alone + fetched * beyond * busy)
        seconds = alone + (last**power + (hbm - alone) ** power) ** (1 / power)
    else:
        seconds = max(last, hbm)
    late = max(0.0, seconds - calibration.POWER_AFTER)  # the clock falls after this time
    return seconds + c.throttle * late + c.launch, last, mean, hbm


def _beyond_l2(size: float, full: float) -> float:
    """Return the share of a kernel's bytes that HBM moves; `size` is the bytes divided by L2's.

    L2 still has the rest from the previous kernel or call. From the size `full` on, it has nothing.
    """
    keeps = calibration.L2_KEEPS
    return min(1.0, max(0.0, (size - keeps) / (full - keeps)))


def _exposed(work: Work) -> float:
    """Return the fraction of a wave's HBM bytes whose transfer overlaps with no matrix product.

    The thread blocks of a wave load their outer tiles, and the tiles of their first inner-loop
    iterations, at about the same time; they store their results together. The tiles of all later
    iterations arrive during matrix products.
    """
    stage, traffic = work.one.stage, work.traffic
    visited = {move.tensor for move in stage.visit if move.op == "load"}
    nbytes = sum(whole_bytes(traffic.problem, tensor) for tensor in visited)
    streamed = nbytes / once_bytes(traffic, stage.name)
    return 1 - streamed + streamed / max(1.0, float(work.visits.mean()))


def _blocks(work: Work, c: Constants) -> tuple[np.ndarray, np.ndarray, tuple[int, int], int]:
    """Return four values of a launch: both results of `durations`, the grid, and the usable SMs.

    The grid is a pair: how often the launch loops over all tiles, in total and per head group.
    """
    one, p, blocks = work.one, work.traffic.problem, work.one.kernel.cluster
    if blocks > 1:  # blocks that share a work tile have equal parts of it, of whole visits
        visits, own = -(-work.visits // blocks), work.own / blocks
        work = replace(work, visits=visits, longest=visits, masked=work.masked / blocks, own=own)
        if work.stores is not None:
            work = replace(work, stores=-(-work.stores // blocks))
    shared, waiting = durations(work, c)
    if blocks > 1:
        width = 64 if max(p.head_dim, p.head_dim_v) <= 64 else 128
        # `ADDING_UP` is the mean over cluster sizes; each doubling adds as much time.
        waiting = waiting + 1e-6 * cost_model.ADDING_UP[width] * math.log2(blocks) / 2
    equal = cost_model.has_equal_tiles(one.stage, one.tables)
    share = (cost_model.TOGETHER if equal else cost_model.CLUSTERS)[blocks]
    places = int(work.traffic.device.sm_count * share)
    started = one.walks * len(work.visits) * blocks
    at_once = blocks * dict(work.traffic.device.clusters).get(blocks, 0)
    if places < started <= at_once:  # all clusters run at once, as in `cost_model.shared_out`
        places = at_once
    return shared, waiting, (one.walks * blocks, one.clump * blocks), places


def _constants(one: KernelPass, traffic: Traffic, constants: Mapping[str, Constants]) -> Constants:
    """Return a launch's time constants: those under the first of its names that `constants` has."""
    names = constants_names(one, traffic.problem)
    for name in names:
        if name in constants:
            return constants[name]
    raise OptionError(
        f"constants= must have an entry for {names[0]!r}, got entries for {', '.join(constants)}"
    )


def constants_names(one: KernelPass, problem: Problem) -> list[str]:
    """Return a launch's names in `constants`: one for its head width, then one for any width."""
    named = constants_name(one, problem)
    without, _, width = named.rpartition(", ")
    if named == "dq, 128 rows":
        return [named, "dq, 128", "dq"]
    return [named, without] if without == "forward" or width == "128" else [named]


def constants_name(one: KernelPass, problem: Problem) -> str:
    """Return the name of a launch's time constants in its kernel family."""
    name = one.stage.name
    if not one.kernel.boxes:
        return name
    width = max(problem.head_dim, problem.head_dim_v)
    if problem.fp8:
        return f"{name}, fp8"
    if name == "forward":
        classes = {64: "", 96: ", 96", 128: ", 128", 192: ", wide", 256: ", widest"}
        return name + next(words for widest, words in classes.items() if width <= widest)
    if width > 128:
        if name == "fused" and width > 192:
            return "fused, widest"  # shared memory has no space for the dQ to be stored
        return f"{name}, roles" if one.kernel.name.endswith("_roles") else f"{name}, wide"
    if name == "dq" and width > 64 and one.tables.schedule.tiling.block_q > 64:
        return "dq, 128 rows"
    how = ", deferred" if dict(one.kernel.constants).get("FS_DEFERRED") else ""
    how = ", once" if one.stage.once else how
    return f"{name}{how}{', 128' if width > 64 else ''}"


def durations(work: Work, c: Constants) -> tuple[np.ndarray, np.ndarray]:
    """Return two arrays: for how many seconds each outer tile uses an SM, and how long it waits."""
    unit = work.visit
    shares = {"tensor cores": c.tensor, "scores": c.scores, "shared memory": c.shared}
    shares |= {"pieces": c.pieces, "reductions": c.reduced, "statistics": c.loads}
    latency = (c.visit + c.waits * unit["tensor cores"]) * PAIR / work.groups
    busy = sum(share * unit[name] for name, share in shares.items())
    busy += c.scores * SCALED * unit["O"]
    # L2 also delivers tiles while a block waits.
    a_visit = max(busy, unit["L2"] - latency / work.blocks)
    shared = work.visits * a_visit + work.masked * (c.masked * unit["scores"]) + c.own * work.own
    waiting = work.longest * latency + c.item
    if work.one.tables.shares is not None:
        waiting = waiting + calibration.SHARES
    if work.stores is not None:
        flag, stored = calibration.FIRST
        waiting = waiting + work.longest * flag + work.stores * stored
    return shared, waiting
