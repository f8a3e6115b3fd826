"""Constants of the time model, fitted by `benchmarks/predict.py --fit`.

They were fitted to the shapes of `CALIBRATION` in `benchmarks/time_shapes.py` on one H200, Hopper's
also to 216 random shapes on one H100, and judged on shapes that the fit never sees
(docs/reference/predictions.md). The rates of a chip's units are measured
without any of these kernels: docs/data/units-h200.csv.
"""

from __future__ import annotations

import csv
from importlib.resources import files
from typing import NamedTuple

from flashsim.errors import own_errors


@own_errors
class Constants(NamedTuple):
    """How much of an SM's units one stage of a kernel family uses, and its latencies.

    The first seven are shares of a unit's own time (`units.Work`) for which a visit (one query tile
    times one key tile) keeps the other blocks of its SM waiting. A share is near 1 if the unit
    bounds the kernel, and near 0 if its work hides behind another unit's. It exceeds 1 if the
    kernel's warps wait for each other.

    Attributes
    ----------
    tensor : float
        Share of the tensor cores' time at the data sheet's peak.
    scores : float
        Instructions per score, on the CUDA cores.
    masked : float
        Further instructions per score of a tile with a mask.
    shared : float
        Share of shared memory's time.
    pieces : float
        Instructions per 16 bytes that are placed one by one.
    reduced : float
        Share of the time in which L2 delivers the bytes that are added to it.
    own : float
        Share of L2's time for the bytes that an outer tile loads and stores outside its visits.
    waits : float
        Share of the tensor cores' time in which a block waits while the others of its SM run.
    visit, item, launch : float
        Latencies in seconds: of a visit, of an outer tile, and of the kernel. `visit` and `waits`
        hold for two warpgroups that use the tensor cores alternately (ping-pong scheduling).
    changeover : float
        Seconds lost once if there are more outer tiles than the SMs can hold at a time.
    throttle : float
        How much slower the chip is, as a share, when a kernel has run for `POWER_AFTER`.
    """

    tensor: float = 0.0
    scores: float = 0.0
    masked: float = 0.0
    shared: float = 0.0
    pieces: float = 0.0
    reduced: float = 0.0
    own: float = 0.0
    waits: float = 0.0
    visit: float = 0.0
    item: float = 0.0
    launch: float = 2e-6
    changeover: float = 0.0
    throttle: float = 0.0


class DecodeConstants(NamedTuple):
    """Constants of the decode kernel, in seconds except for `rate`, `hbm_share` and `scatter`.

    `launch` is per call, `item` per block without its keys, and `row` per element of its results.
    An SM streams at most `rate` bytes per second; all SMs together stream at most `hbm_share` of
    HBM's nominal bandwidth. `merge` applies if keys are split, `exchange` if the splits form a
    cluster. With pages, `table` is the time for the first page numbers, and a byte takes
    1 + `scatter` / sqrt(bytes of a page's rows) times as long.
    """

    launch: float
    item: float
    row: float
    rate: float
    hbm_share: float
    merge: float
    exchange: float
    scatter: float
    table: float


#: Fitted by `benchmarks/predict.py --decode --fit` to an earlier run of docs/data/decode-h200.csv:
#: batches of 1 and 32 of its table, and two of its sweeps over splits.
DECODING = DecodeConstants(
    launch=9.05e-08,
    item=3.65e-06,
    row=6.86e-10,
    rate=6.59e10,
    hbm_share=0.907,
    merge=2.85e-06,
    exchange=5.56e-07,
    scatter=0.352,
    table=3.84e-07,
)


def _read() -> dict[str, dict[str, Constants]]:
    text = files("flashsim").joinpath("data", "time_model.csv").read_text(encoding="utf-8")
    found: dict[str, dict[str, Constants]] = {}
    for row in csv.DictReader(text.splitlines()):
        kernels, stage = row.pop("kernels"), row.pop("stage")
        constants = Constants(**{name: float(text) for name, text in row.items() if text})
        found.setdefault(kernels, {})[stage] = constants
    return found


#: By kernel family and stage, from flashsim/data/time_model.csv. Hopper's kernels of other widths
#: are other kernels: a name ends in the widest head_dim of its class, 96 or 128, and without one it
#: is for 64; "wide" is up to 192, "widest" beyond. "roles" is the fused one up to 192 columns whose
#: warpgroups have different roles. "deferred" makes dQ of a visit in the next one, "once" has one
#: visit a row tile. "fp8" are the 16-bit forward's of all widths, as an earlier fit had them:
#: nothing is fitted to FP8.
CALIBRATED = _read()

#: Seconds for which the chip keeps its highest clock under these kernels' load.
POWER_AFTER = 3e-3
#: Kernels that only stream: seconds for the launch, and the share of the nominal HBM bandwidth, by
#: whether a launch begins while the one before it ends (`Kernel.overlaps`), fitted likewise; and
#: what the shortest takes of those that do not.
STREAMED = {False: (2.22e-6, 0.844), True: (1.00e-6, 0.915)}
STREAMED_LEAST = 4e-6
#: Of a copy: its share of the nominal HBM bandwidth, and the seconds of any launch.
HBM_SHARE, LAUNCH = 0.85, 3e-6
#: Of L2, what is surely still there when it is read again (docs/notebooks/l2.md, the probe).
L2_KEEPS = 2 / 3
#: How the time of tiles and that of HBM's bytes make one: as the root of the sum of such powers. 1
#: would be one after the other, infinity the longer alone. `AGAIN` is for kernels whose bytes cross
#: HBM again, chosen with six passes of grouped heads in view, and for Hopper's backward kernels;
#: `FORWARD` is for Hopper's forward, whose next loads and last stores run beside its products.
AGAIN, FORWARD = 3, 6
#: Share of the tensor cores' peak that a large matrix product of a library reaches: 783 of 989
#: TFLOP/s, bfloat16, 8192 x 8192 x 8192, on the same H200.
MATRIX_SHARE = 0.79
