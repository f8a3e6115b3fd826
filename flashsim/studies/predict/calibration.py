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
        Seconds: latency of a visit, of an outer tile, and of the kernel. That of a visit, and
        `waits`, are for two warpgroups that take turns.
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

#: By kernel family and stage; "wide" are the Hopper kernels with keys outside, and dQ, for a
#: head_dim beyond 128, which are other kernels. "fused, wide" has two times to be fitted to.
CALIBRATED: dict[str, dict[str, Constants]] = {
    "hopper": {
        "forward": Constants(
            scores=8.054,
            masked=3.413,
            own=1.711,
            waits=0.569,
            visit=0.24e-6,
            launch=3.86e-6,
            throttle=0.053,
        ),
        "dkdv": Constants(
            tensor=0.541,
            scores=4.579,
            masked=5.397,
            own=1.644,
            visit=0.61e-6,
            item=0.34e-6,
            launch=2.00e-6,
            changeover=1.04e-6,
            throttle=0.073,
        ),
        "dq": Constants(
            tensor=0.474,
            scores=2.059,
            masked=1.123,
            visit=0.64e-6,
            item=2.11e-6,
            launch=2.43e-6,
            changeover=2.71e-6,
            throttle=0.078,
        ),
        "fused": Constants(
            scores=10.749,
            masked=4.308,
            reduced=1.950,
            own=2.283,
            visit=0.66e-6,
            item=0.36e-6,
            launch=1.43e-6,
            changeover=6.11e-6,
            throttle=0.016,
        ),
        "dkdv, wide": Constants(
            tensor=0.985, visit=0.68e-6, item=3.55e-6, launch=2.00e-6, throttle=0.100
        ),
        "dq, wide": Constants(
            tensor=1.306, visit=0.06e-6, item=3.95e-6, launch=2.00e-6, throttle=0.100
        ),
        "fused, wide": Constants(tensor=2.066, item=3.91e-6, launch=2.00e-6),
    },
    "portable": {
        "forward": Constants(
            tensor=1.485,
            scores=0.012,
            masked=1.897,
            shared=0.289,
            pieces=21.150,
            own=1.696,
            waits=0.001,
            visit=0.88e-6,
            item=1.51e-6,
            launch=4.00e-6,
            changeover=6.26e-6,
            throttle=0.102,
        ),
        "dkdv": Constants(
            tensor=1.812,
            masked=0.006,
            shared=0.479,
            pieces=27.583,
            own=1.824,
            waits=0.272,
            visit=0.42e-6,
            item=0.01e-6,
            launch=2.26e-6,
            changeover=4.63e-6,
            throttle=0.019,
        ),
        "dq": Constants(
            tensor=1.565,
            masked=0.109,
            shared=0.660,
            pieces=69.753,
            own=2.329,
            waits=0.107,
            visit=0.26e-6,
            item=0.48e-6,
            launch=3.30e-6,
            changeover=5.11e-6,
            throttle=0.054,
        ),
        "fused": Constants(
            tensor=1.246,
            masked=0.001,
            shared=0.554,
            pieces=40.906,
            reduced=1.372,
            own=2.326,
            waits=0.158,
            visit=0.89e-6,
            item=0.04e-6,
            launch=2.35e-6,
            changeover=7.63e-6,
        ),
    },
    "python": {
        "forward": Constants(
            tensor=0.733,
            scores=5.011,
            masked=0.319,
            own=0.576,
            visit=0.32e-6,
            item=0.92e-6,
            launch=4.73e-6,
            changeover=0.74e-6,
            throttle=0.120,
        ),
        "dkdv": Constants(
            tensor=1.555,
            masked=0.006,
            pieces=3.000,
            own=2.087,
            waits=0.717,
            visit=1.06e-6,
            item=0.29e-6,
            launch=2.05e-6,
            changeover=5.39e-6,
            throttle=0.057,
        ),
        "dq": Constants(
            tensor=0.991,
            masked=0.001,
            shared=0.869,
            pieces=1.082,
            own=4.243,
            waits=0.523,
            visit=0.00e-6,
            launch=2.72e-6,
            changeover=4.69e-6,
            throttle=0.091,
        ),
        "fused": Constants(
            tensor=1.521,
            masked=4.031,
            shared=0.145,
            pieces=0.105,
            reduced=0.995,
            own=3.119,
            waits=0.080,
            visit=1.66e-6,
            item=0.00e-6,
            launch=1.78e-6,
            changeover=7.25e-6,
            throttle=0.047,
        ),
    },
}

#: Seconds for which the chip keeps its highest clock under these kernels' load.
POWER_AFTER = 3e-3
#: Kernels that only stream: seconds for the launch, and the share of the nominal HBM bandwidth, by
#: whether a launch begins while the one before it ends (`Kernel.overlaps`), fitted likewise; and
#: what the shortest takes.
STREAMED = {False: (3.66e-6, 0.831), True: (2.67e-6, 0.876)}
STREAMED_LEAST = 4e-6
#: Of a copy: its share of the nominal HBM bandwidth, and the seconds of any launch.
HBM_SHARE, LAUNCH = 0.85, 3e-6
#: Of L2, what is surely still there when it is read again (docs/notebooks/l2.md, the probe).
L2_KEEPS = 2 / 3
#: How the time of tiles and that of bytes that cross HBM again make one: as the root of the sum of
#: such powers. 1 would be one after the other, infinity the longer alone; chosen with six passes of
#: grouped heads in view (docs/guides/truth.md).
AGAIN = 3
#: Share of the tensor cores' peak that a large matrix product of a library reaches: 783 of 989
#: TFLOP/s, bfloat16, 8192 x 8192 x 8192, on the same H200.
MATRIX_SHARE = 0.79
