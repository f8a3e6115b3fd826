"""Predicts the time of each kernel of a pass from its work and the constants of its family."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from flashsim.backends.launch.passes import KernelPass
from flashsim.backends.launch_policy import cost_model
from flashsim.counts.traffic import Traffic
from flashsim.errors import OptionError
from flashsim.problem.problem import Problem
from flashsim.schedule.tensors import whole_bytes
from flashsim.studies.energy import joules
from flashsim.studies.predict import calibration
from flashsim.studies.predict.blocks import in_launches, makespan
from flashsim.studies.predict.calibration import Constants
from flashsim.studies.predict.prediction import StageTime
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


def stage_times(
    passes: tuple[KernelPass, ...],
    traffic: Traffic,
    constants: Mapping[str, Constants],
    works: Sequence[Sequence[Work]] = (),
) -> tuple[StageTime, ...]:
    """Return the predicted time of each kernel of a pass.

    `works` holds the result of `works_of` for each kernel, if it is known.
    """
    works = works or [works_of(one, traffic) for one in passes]
    found = tuple(
        _stage(one, its, traffic, constants) for one, its in zip(passes, works, strict=True)
    )
    if passes[-1].kernel.boxes and found[-1].name == "dq":
        found = (*found[:-1], _beside(found[-1], works[-2:], constants))
    return found


def _stage(
    one: KernelPass, works: Sequence[Work], traffic: Traffic, constants: Mapping[str, Constants]
) -> StageTime:
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
    """Return one `Work` object per kernel launch of a stage, in launch order.

    A kernel that streams rows has none.
    """
    if not one.kernel.shared_bytes:
        return ()
    return tuple(work_of(each, traffic) for each in (*one.before, one))


def stage_seconds(works: Sequence[Work], c: Constants) -> tuple[float, float, float, float]:
    """Return four predicted times of a stage (kernel), in seconds.

    The four times are the kernel's time with its launch, the end of the last tile, the mean busy
    time of an SM, and HBM's time. `works` is the result of `works_of`. The constants `c` belong to
    the last launch, because it has most of the work tiles.
    """
    one, traffic, work = works[-1].one, works[-1].traffic, works[-1]
    device, p = traffic.device, traffic.problem
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
    in_cpp = is_hopper_in_cpp(one)
    exposed = 0.0  # constants of kernels in Python were fitted without the first tiles' own time
    if in_cpp and forward:
        exposed = 1.0
    elif in_cpp and name == "fused":
        exposed = calibration.EXPOSED
    _, streamed = calibration.STREAMED[True]
    share = streamed if in_cpp else calibration.HBM_SHARE
    full = calibration.FORWARD_L2_FULL if forward and in_cpp else calibration.L2_FULL
    kept, fetched = zeros(traffic) if name == "fused" else (0.0, 0.0)
    beyond = _beyond_l2(once / device.l2_bytes, full) / (device.hbm_bandwidth * share)
    hbm = (once - kept) * beyond + again / (device.hbm_bandwidth * share)
    if again or one.kernel.boxes:  # blocks wait for HBM at times, not always
        power = calibration.FORWARD if forward else calibration.AGAIN
        if in_cpp and name == "fused" and max(p.head_dim, p.head_dim_v) > 128:
            power = calibration.WIDE
        waves = -(-grid[0] * len(work.visits) // (places * work.blocks))
        alone = exposed * hbm / waves * _exposed(work)
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
    one, blocks = work.one, work.one.kernel.cluster
    if blocks > 1:  # blocks that share a work tile have equal parts of it, of whole visits
        visits, own = -(-work.visits // blocks), work.own / blocks
        work = replace(work, visits=visits, longest=visits, masked=work.masked / blocks, own=own)
        if work.stores is not None:
            work = replace(work, stores=-(-work.stores // blocks))
    shared, waiting = durations(work, c)
    if blocks > 1:
        waiting = waiting + c.cluster + c.doubling * math.log2(blocks)
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
    shared = work.visits * a_visit + work.masked * (c.masked * unit["masks"]) + c.own * work.own
    waiting = work.longest * latency + c.item
    if work.one.tables.shares is not None:
        waiting = waiting + calibration.SHARES
    if work.stores is not None:
        flag, stored = calibration.FIRST
        waiting = waiting + work.longest * flag + work.stores * stored
    return shared, waiting


def _beside(
    dq: StageTime, works: Sequence[Sequence[Work]], constants: Mapping[str, Constants]
) -> StageTime:
    """Return the time that Hopper's dQ kernel adds to the pass, after the kernel for dK and dV.

    The dQ kernel is launched while the kernel for dK and dV runs, and does not wait for that
    kernel's results. Blocks of the dQ kernel start at once on SMs without a block of the first
    kernel. On the others they start after that block, and `launch` later: only then do they load
    their first tiles. A block's number determines its first work tile: while a block waits for an
    SM, no other block can take that tile.
    """
    runs = []
    for *_, work in works:
        c = _constants(work.one, work.traffic, constants)
        shared, waiting, grid, places = _blocks(work, c)
        runs.append((cost_model.Queue((shared + waiting).tolist(), *grid), places))
    (before, places), (queue, _) = runs
    device = work.traffic.device
    # Some SMs cannot run a cluster; they are free from the beginning.
    done = cost_model.ends(before, [0.0] * places) + [0.0] * (device.sm_count - places)
    alone = max(cost_model.ends(queue, [0.0] * len(done)))
    begin = [end + c.launch if end else 0.0 for end in done]
    gained = alone + max(done) - _held_back(queue, begin)
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
