"""Constants of the time model, fitted by `benchmarks/predict.py --fit` to one H200's kernels.

What they were fitted to is `benchmarks/time_shapes.py`'s `CALIBRATION`; what they were judged on is
never seen by the fit (docs/guides/truth.md). What a chip's units can do is measured without any of
these kernels: docs/data/units-h200.csv.
"""

from __future__ import annotations

from typing import NamedTuple

from flashsim.errors import own_errors


@own_errors
class Constants(NamedTuple):
    """What one stage of one kernel family makes of an SM's units, and what it waits for.

    The first seven are shares of a unit's own time (`units.Work`) for which a visit keeps other
    blocks of its SM waiting: near 1 where a unit is what bounds a kernel, near 0 where its work
    hides behind another's. Where a kernel's warps wait for each other, they exceed 1.

    Attributes
    ----------
    tensor : float
        Of the tensor cores' time at the data sheet's peak.
    scores : float
        Instructions for each score, on the CUDA cores.
    masked : float
        More of them for each score of a tile with a mask.
    shared : float
        Of shared memory's time.
    pieces : float
        Instructions for each 16 bytes that are placed one by one.
    reduced : float
        Of the time in which L2 delivers what is added to it.
    own : float
        Of L2's time for what an outer tile loads and stores besides its visits.
    waits : float
        Of the tensor cores' time, in which a block waits and the others of its SM need not.
    visit, item, launch : float
        Seconds: latency of a visit, of an outer tile, and of the kernel.
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
    throttle: float = 0.0


class DecodeConstants(NamedTuple):
    """What the decode kernel makes of an SM and of HBM; seconds, but for the bytes a second.

    `launch` of any call; `item` of a block, besides its keys, and `row` more for each element of
    its results; an SM streams at most `rate` bytes a second, and all of them `hbm_share` of HBM's
    nominal bandwidth; `merge` where keys are split, `exchange` where the splits are a cluster. With
    pages, `table` for the first numbers, and a byte takes 1 + `scatter` / sqrt(bytes of a page's
    rows) times as long.
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


#: Fitted by `benchmarks/predict.py --decode --fit` to docs/data/decode-h200.csv: batches of 1 and
#: 32 of its table, and two of its sweeps over splits.
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

#: By kernel family and stage; "wide" are the Hopper kernels with keys outside, and dQ, for a
#: head_dim beyond 128, which are other kernels.
CALIBRATED: dict[str, dict[str, Constants]] = {
    "hopper": {
        "forward": Constants(
            tensor=0.728,
            scores=3.728,
            masked=5.277,
            own=2.034,
            visit=0.53e-6,
            item=0.00e-6,
            launch=3.81e-6,
            throttle=0.160,
        ),
        "dkdv": Constants(
            tensor=1.155,
            scores=2.814,
            masked=5.067,
            own=1.703,
            item=0.62e-6,
            launch=3.10e-6,
            throttle=0.100,
        ),
        "dq": Constants(
            tensor=1.232, scores=2.528, own=0.280, item=2.42e-6, launch=3.87e-6, throttle=0.115
        ),
        "fused": Constants(
            tensor=0.991,
            scores=10.490,
            reduced=0.306,
            own=3.192,
            item=0.58e-6,
            launch=1.02e-6,
            throttle=0.028,
        ),
        "dkdv, wide": Constants(
            tensor=0.934, masked=8.742, visit=0.74e-6, item=3.69e-6, launch=2.00e-6, throttle=0.100
        ),
        "dq, wide": Constants(
            tensor=0.433, own=3.424, visit=0.27e-6, launch=2.00e-6, throttle=0.033
        ),
        "fused, wide": Constants(
            tensor=0.903, reduced=2.017, visit=1.05e-6, item=5.49e-6, launch=2.00e-6
        ),
    },
    "portable": {
        "forward": Constants(
            tensor=1.457,
            scores=0.013,
            masked=1.445,
            shared=0.290,
            pieces=20.726,
            own=2.153,
            waits=0.001,
            visit=0.90e-6,
            item=1.64e-6,
            launch=3.07e-6,
            throttle=0.146,
        ),
        "dkdv": Constants(
            tensor=1.815,
            shared=0.428,
            pieces=29.682,
            own=2.282,
            waits=0.316,
            visit=0.42e-6,
            launch=1.78e-6,
            throttle=0.029,
        ),
        "dq": Constants(
            tensor=1.171,
            shared=0.743,
            pieces=61.872,
            own=3.671,
            waits=0.428,
            visit=0.27e-6,
            launch=2.90e-6,
            throttle=0.042,
        ),
        "fused": Constants(
            tensor=1.304,
            shared=0.466,
            pieces=42.819,
            reduced=1.367,
            own=2.989,
            waits=0.223,
            visit=0.91e-6,
            launch=1.60e-6,
            throttle=0.001,
        ),
    },
    "python": {
        "forward": Constants(
            tensor=0.818,
            scores=4.437,
            masked=4.155,
            own=1.294,
            visit=0.34e-6,
            item=0.55e-6,
            launch=4.37e-6,
            throttle=0.043,
        ),
        "dkdv": Constants(
            tensor=1.275,
            shared=0.232,
            pieces=1.546,
            own=1.437,
            waits=0.302,
            visit=1.33e-6,
            item=2.54e-6,
            launch=1.51e-6,
            throttle=0.109,
        ),
        "dq": Constants(
            tensor=1.028,
            shared=0.868,
            pieces=4.674,
            own=4.771,
            waits=0.511,
            launch=2.63e-6,
            throttle=0.122,
        ),
        "fused": Constants(
            tensor=1.404,
            masked=3.547,
            shared=0.161,
            pieces=19.029,
            reduced=0.913,
            own=4.295,
            waits=0.096,
            visit=1.74e-6,
            launch=0.60e-6,
            throttle=0.076,
        ),
    },
}

#: Seconds for which the chip keeps its highest clock under these kernels' load.
POWER_AFTER = 3e-3
#: Kernels that only stream: seconds for the launch, and the share of the nominal HBM bandwidth.
STREAMED, STREAM_SHARE = 3.5e-6, 0.83
#: Of a copy: its share of the nominal HBM bandwidth, and the seconds of any launch.
HBM_SHARE, LAUNCH = 0.85, 3e-6
#: How the time of tiles and that of bytes that cross HBM again make one: as the root of the sum of
#: such powers. 1 would be one after the other, infinity the longer alone; chosen with six passes of
#: grouped heads in view (docs/guides/truth.md).
AGAIN = 3
#: Share of the tensor cores' peak that a large matrix product of a library reaches: 783 of 989
#: TFLOP/s, bfloat16, 8192 x 8192 x 8192, on the same H200.
MATRIX_SHARE = 0.79
