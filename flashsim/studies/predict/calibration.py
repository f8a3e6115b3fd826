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
    changeover : float
        Seconds, once, where there are more outer tiles than places for their blocks.
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
            tensor=1.156,
            scores=2.860,
            masked=5.568,
            own=1.671,
            item=0.43e-6,
            launch=3.06e-6,
            changeover=1.86e-6,
            throttle=0.097,
        ),
        "dq": Constants(
            tensor=1.260,
            scores=2.211,
            item=2.18e-6,
            launch=4.04e-6,
            changeover=3.51e-6,
            throttle=0.102,
        ),
        "fused": Constants(
            tensor=1.015,
            scores=10.446,
            reduced=0.249,
            own=3.073,
            launch=1.27e-6,
            changeover=6.05e-6,
            throttle=0.026,
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
            tensor=1.472,
            scores=0.013,
            masked=1.740,
            shared=0.295,
            pieces=21.533,
            own=1.710,
            waits=0.001,
            visit=0.88e-6,
            item=1.84e-6,
            launch=3.20e-6,
            changeover=5.28e-6,
            throttle=0.131,
        ),
        "dkdv": Constants(
            tensor=1.813,
            masked=0.006,
            shared=0.459,
            pieces=28.066,
            own=1.748,
            waits=0.309,
            visit=0.42e-6,
            item=0.07e-6,
            launch=2.01e-6,
            changeover=5.12e-6,
            throttle=0.021,
        ),
        "dq": Constants(
            tensor=1.554,
            masked=0.094,
            shared=0.587,
            pieces=73.554,
            own=2.319,
            waits=0.090,
            visit=0.37e-6,
            item=0.44e-6,
            launch=3.12e-6,
            changeover=5.56e-6,
            throttle=0.074,
        ),
        "fused": Constants(
            tensor=1.308,
            masked=0.000,
            shared=0.509,
            pieces=40.821,
            reduced=1.391,
            own=2.263,
            waits=0.191,
            visit=0.88e-6,
            launch=2.14e-6,
            changeover=7.57e-6,
            throttle=0.000,
        ),
    },
    "python": {
        "forward": Constants(
            tensor=0.818,
            scores=4.436,
            masked=4.155,
            own=1.294,
            visit=0.34e-6,
            item=0.55e-6,
            launch=4.37e-6,
            throttle=0.043,
        ),
        "dkdv": Constants(
            tensor=1.557,
            masked=0.016,
            shared=0.000,
            pieces=2.148,
            own=2.143,
            waits=0.722,
            visit=1.06e-6,
            item=0.24e-6,
            launch=1.95e-6,
            changeover=4.39e-6,
            throttle=0.091,
        ),
        "dq": Constants(
            tensor=1.030,
            masked=0.000,
            shared=0.834,
            pieces=2.417,
            own=4.002,
            waits=0.588,
            visit=0.00e-6,
            launch=2.94e-6,
            changeover=4.97e-6,
            throttle=0.128,
        ),
        "fused": Constants(
            tensor=1.501,
            masked=3.840,
            shared=0.165,
            pieces=19.029,
            reduced=0.982,
            own=3.024,
            waits=0.097,
            visit=1.66e-6,
            item=0.00e-6,
            launch=1.88e-6,
            changeover=8.71e-6,
            throttle=0.049,
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
