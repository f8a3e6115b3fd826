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
            scores=8.528,
            masked=4.324,
            own=1.657,
            waits=0.580,
            visit=0.17e-6,
            launch=3.85e-6,
            throttle=0.053,
        ),
        "dkdv": Constants(
            tensor=0.524,
            scores=4.632,
            masked=5.820,
            own=1.785,
            visit=0.62e-6,
            item=0.21e-6,
            launch=1.96e-6,
            changeover=1.02e-6,
            throttle=0.056,
        ),
        "dq": Constants(
            tensor=0.469,
            scores=2.256,
            masked=0.936,
            visit=0.63e-6,
            item=2.13e-6,
            launch=2.45e-6,
            changeover=2.81e-6,
            throttle=0.054,
        ),
        "fused": Constants(
            scores=11.398,
            masked=14.320,
            reduced=2.037,
            own=2.438,
            visit=0.59e-6,
            launch=6.00e-6,
            changeover=0.58e-6,
            throttle=0.013,
        ),
        "dkdv, wide": Constants(
            tensor=0.976,
            visit=0.68e-6,
            item=3.64e-6,
            launch=2.00e-6,
            throttle=0.100,
        ),
        "dq, wide": Constants(
            tensor=1.248,
            visit=0.09e-6,
            item=4.10e-6,
            launch=2.00e-6,
            throttle=0.100,
        ),
        "fused, wide": Constants(tensor=1.475, item=3.85e-6, launch=2.00e-6),
    },
    "portable": {
        "forward": Constants(
            tensor=1.483,
            scores=0.012,
            masked=1.916,
            shared=0.289,
            pieces=21.351,
            own=1.697,
            waits=0.001,
            visit=0.88e-6,
            item=1.51e-6,
            launch=4.00e-6,
            changeover=6.22e-6,
            throttle=0.103,
        ),
        "dkdv": Constants(
            tensor=1.824,
            masked=0.006,
            shared=0.463,
            pieces=27.420,
            own=1.855,
            waits=0.270,
            visit=0.42e-6,
            item=0.01e-6,
            launch=2.04e-6,
            changeover=5.22e-6,
            throttle=0.011,
        ),
        "dq": Constants(
            tensor=1.562,
            masked=0.109,
            shared=0.660,
            pieces=69.552,
            own=2.323,
            waits=0.107,
            visit=0.26e-6,
            item=0.48e-6,
            launch=3.30e-6,
            changeover=5.11e-6,
            throttle=0.054,
        ),
        "fused": Constants(
            tensor=1.239,
            masked=0.000,
            shared=0.525,
            pieces=36.253,
            reduced=1.496,
            own=2.428,
            waits=0.141,
            visit=0.91e-6,
            item=0.06e-6,
            launch=2.13e-6,
            changeover=7.75e-6,
            throttle=0.000,
        ),
    },
    "python": {
        "forward": Constants(
            tensor=0.656,
            scores=5.777,
            masked=1.471,
            own=0.286,
            visit=0.32e-6,
            item=0.99e-6,
            launch=4.82e-6,
            changeover=0.75e-6,
            throttle=0.157,
        ),
        "dkdv": Constants(
            tensor=1.199,
            masked=0.000,
            shared=0.389,
            pieces=3.000,
            own=2.053,
            waits=0.000,
            visit=1.46e-6,
            item=0.34e-6,
            launch=2.02e-6,
            changeover=5.57e-6,
            throttle=0.069,
        ),
        "dq": Constants(
            tensor=1.968,
            masked=0.001,
            shared=0.354,
            pieces=5.390,
            own=4.154,
            waits=0.515,
            launch=2.58e-6,
            changeover=4.68e-6,
            throttle=0.124,
        ),
        "fused": Constants(
            tensor=1.751,
            masked=0.477,
            shared=0.149,
            pieces=0.105,
            reduced=0.417,
            own=3.141,
            waits=0.035,
            visit=1.66e-6,
            item=0.08e-6,
            launch=1.67e-6,
            changeover=7.88e-6,
            throttle=0.043,
        ),
    },
}

#: Seconds for which the chip keeps its highest clock under these kernels' load.
POWER_AFTER = 3e-3
#: Kernels that only stream: seconds for the launch, and the share of the nominal HBM bandwidth, by
#: whether a launch begins while the one before it ends (`Kernel.overlaps`), fitted likewise; and
#: what the shortest takes.
STREAMED = {False: (3.49e-6, 0.843), True: (2.70e-6, 0.879)}
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
