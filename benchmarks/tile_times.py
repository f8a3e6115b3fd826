"""Measure the time of a work tile and of a visit for each forward tile on this GPU.

Usage: python benchmarks/tile_times.py. For each tile that the Hopper kernels choose between
(backends/launch_policy/cost_model.py), it launches loops of equal length, for several lengths and
numbers of heads. The time of a launch is a constant plus the number of waves times the time of a
work tile, which is a constant plus a constant per visit. These three constants are fitted by least
squares of relative errors. They are printed in µs, with the largest error of the fit, beside the
constants in the table. Times are medians of 15 repetitions after a spinning kernel.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from gpu_lab import Lab, medians, open_lab

import flashsim
from flashsim.backends.launch_policy.cost_model import HOPPER_FORWARD
from flashsim.schedule.tiling import Tiling

LENGTHS, ROUNDS = (128, 256, 384, 512, 768, 1024, 2048), (0.5, 1, 2, 5)
REPETITIONS, CALLS = 15, 5


def fit(lab: Lab, head_dim: int, tiling: Tiling, processors: int) -> tuple[np.ndarray, float]:
    """Return (launch, work tile, visit) in µs, and the largest relative error."""
    rows, took = [], []
    for n in LENGTHS:
        tiles = -(-n // tiling.block_q)
        for rounds in ROUNDS:
            heads = max(1, int(rounds * processors / tiles))
            q, k, v = (lab.array((1, heads, n, head_dim), "float16") for _ in range(3))
            run = partial(flashsim.run, q, k, v, tiling=tiling, backend="cupy", kernel="hopper")
            took += medians(lab, {"": run}, REPETITIONS, CALLS).values()
            full = -(-heads * tiles // processors)
            rows.append((1, full, full * -(-n // tiling.block_k)))
    features, times = np.array(rows, float), np.array(took)
    made, *_ = np.linalg.lstsq(features / times[:, None], np.ones(len(times)), rcond=None)
    return made, float(np.abs(features @ made / times - 1).max())


def main() -> None:
    """Print the table."""
    import cupy

    lab, _ = open_lab()
    processors = cupy.cuda.runtime.getDeviceProperties(0)["multiProcessorCount"]
    print(f"{lab.name}: µs\n{'d':>4}  {'tile':10}{'launch':>8}{'item':>8}{'visit':>8}", end="")
    print("  largest error; item, visit in the table")
    for head_dim, known in HOPPER_FORWARD.items():
        for tiling, times in known.items():
            (launch, item, visit), error = fit(lab, head_dim, tiling, processors)
            print(f"{head_dim:4}  {tiling!s:10}{launch:8.2f}{item:8.2f}{visit:8.2f}", end="")
            print(f"{error:8.1%}; {times.item} {times.visit}", flush=True)


if __name__ == "__main__":
    main()
