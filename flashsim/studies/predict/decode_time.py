"""Predicts the time of the GPU kernel of `algorithm="flash-decode"`.

In the model, a thread block waits for its first keys, processes its keys, and merges its warps'
results. The time for the keys is the larger of two times: streaming them to an SM, and multiplying
them in the portable forward kernel. HBM's bandwidth limits all blocks together. If keys are split,
the last block of each sequence, or a cluster on chip, merges the results.
"""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np

from flashsim.api import counting
from flashsim.backends.launch.kernel import Gpu, padded_dims
from flashsim.backends.launch_policy import decode_plan
from flashsim.counts.traffic import Traffic
from flashsim.errors import OptionError, UnsupportedError
from flashsim.problem.hardware import Device
from flashsim.problem.problem import Problem
from flashsim.schedule.split_kv import RESERVED
from flashsim.schedule.tiling import Tiling
from flashsim.studies.predict.blocks import makespan
from flashsim.studies.predict.calibration import CALIBRATED, DECODING, DecodeConstants
from flashsim.studies.predict.prediction import StageTime

ALGORITHM = decode_plan.ALGORITHM


def launch(problem: Problem, splits: int | str, device: Device) -> decode_plan.Decode:
    """Return how the decode kernel is launched for a problem.

    Shared prefixes, latent attention, and different numbers of queries per sequence raise a
    `FlashSimError`.
    """
    if splits == "fa3":
        raise OptionError(
            "the GPU's decode kernel does not support splits='fa3', so its time cannot be "
            "predicted; use splits='auto' or an integer"
        )
    p, lengths = problem, (problem.n_kv,) * problem.batch
    for name in ("shared_prefix", "latent"):
        if getattr(p, name):
            raise UnsupportedError(
                f"the time of decoding with {name} cannot be predicted; leave out {name}="
            )
    if p.cu_seqlens_q is not None:
        queries = {s.q_stop - s.q_start for s in p.sequences}
        if len(queries) > 1:
            raise UnsupportedError(
                "the GPU's decode kernel needs the same number of queries for every "
                f"sequence, got {queries}"
            )
        assert p.cu_seqlens_k is not None
        lengths = tuple(b - a for a, b in pairwise(p.cu_seqlens_k))
        p = replace(p, cu_seqlens_q=None, cu_seqlens_k=None)
        p = replace(p, n_q=queries.pop(), n_kv=max(lengths), batch=len(lengths))
    p = replace(p, page_size=None)
    gpu = Gpu.like(device)
    given = None if splits == "auto" else int(splits)
    return decode_plan.plan(p, lengths, gpu, given, problem.page_size or 0)


def traffic(problem: Problem, made: decode_plan.Decode, device: Device) -> Traffic:
    """Return the bytes and FLOPs of a decode kernel's launch, from closed-form formulas."""
    tiling = Tiling(min(made.rows, dict(made.kernel.constants)["FS_BLOCK_Q"]), made.block_k)
    roomy = replace(device, sram_bytes=device.sram_per_sm + device.registers_per_sm)
    splits = max(made.splits)
    return counting.count(problem, algorithm=ALGORITHM, tiling=tiling, device=roomy, splits=splits)


def stages(
    made: decode_plan.Decode, page: int | None, device: Device, c: DecodeConstants = DECODING
) -> tuple[StageTime, ...]:
    """Return the predicted times: the decode kernel's loop over keys, and the merge of splits."""
    p = made.problem
    per_sm = 1
    if made.kernel.threads < 256:  # `plan` assigns half of an SM's shared memory to each block
        per_sm = max(1, min(2, device.sram_per_sm // (made.kernel.shared_bytes + RESERVED)))
    slots = per_sm * device.sm_count
    # The rows of a page of one key head are contiguous. With shorter runs, more DRAM pages open.
    row = p.head_dim * p.itemsize
    scattered = 1 + c.scatter / math.sqrt(page * row) if page else 1.0
    key = (p.head_dim + p.head_dim_v) * p.itemsize * scattered
    tiles = made.items[:, 2] - made.items[:, 1]
    keys = np.minimum(tiles * made.block_k, made.items[:, 6])
    item = c.item + c.row * made.rows / made.row_tiles * p.head_dim_v
    copies = keys * key / c.rate
    flops = 2 * dict(made.kernel.constants)["FS_BLOCK_Q"] * sum(padded_dims(p))  # of a key
    peak = device.peak(p.dtype) / CALIBRATED["portable"]["forward"].tensor
    products = keys * (flops * device.sm_count / peak)
    walks = p.kv_heads * made.row_tiles
    durations = (item + per_sm * np.maximum(copies, products)).tolist()
    # Each block has a slot of its own, because `copies` already includes the blocks per SM.
    last, mean = makespan(durations, [0.0] * len(durations), walks, walks, slots, 1)
    read = float(keys.sum()) * key * p.kv_heads * made.row_tiles
    hbm = read / (device.hbm_bandwidth * c.hbm_share)
    seconds = c.launch + max(last, hbm + item) + (c.table if page else 0)
    every = walks / device.sm_count
    units = {
        "tensor cores": float(products.sum()) * every,
        "L2": float(copies.sum()) * every,
        "HBM": hbm,
    }
    walk = StageTime(
        *("split", seconds, units, len(keys) * p.kv_heads * made.row_tiles / slots),
        1 - min(1.0, max(mean, hbm) / seconds),
    )
    if max(made.splits) == 1:
        return (walk,)
    merge = c.merge if made.cluster == 1 else c.exchange
    return walk, StageTime("combine", merge, {"latency": merge}, 1.0, 0.0)
