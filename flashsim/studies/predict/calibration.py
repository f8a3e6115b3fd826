"""Constants of the time model, fitted by `benchmarks/predict.py --fit` to one H200's kernels.

They were fitted to the shapes of `CALIBRATION` in `benchmarks/time_shapes.py`, and judged on shapes
that the fit never sees (docs/reference/predictions.md). The rates of a chip's units are measured
without any of these kernels: docs/data/units-h200.csv.
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
#: head_dim beyond 128, which are other kernels. "roles" is the fused one up to 192 columns, whose
#: warpgroups have different roles: two times to be fitted to. "deferred" makes dQ of a visit in the
#: next one, "once" has one visit a row tile.
CALIBRATED: dict[str, dict[str, Constants]] = {
    "hopper": {
        "forward": Constants(
            scores=9.100,
            masked=4.691,
            own=1.740,
            waits=0.647,
            visit=0.02e-6,
            launch=3.19e-6,
            throttle=0.098,
        ),
        "dkdv": Constants(
            tensor=0.568,
            scores=3.798,
            masked=7.527,
            own=1.380,
            visit=0.65e-6,
            item=0.37e-6,
            launch=2.07e-6,
            changeover=1.66e-6,
            throttle=0.172,
        ),
        "dq": Constants(
            tensor=0.517,
            scores=1.889,
            masked=1.196,
            visit=0.64e-6,
            item=1.99e-6,
            launch=2.29e-6,
            changeover=3.19e-6,
            throttle=0.165,
        ),
        "fused": Constants(
            tensor=0.899,
            scores=6.003,
            masked=6.174,
            reduced=0.125,
            own=1.731,
            visit=0.65e-6,
            launch=2.42e-6,
            changeover=1.84e-6,
        ),
        "fused, deferred": Constants(
            tensor=0.000,
            scores=7.329,
            reduced=2.362,
            own=0.000,
            visit=0.64e-6,
            item=2.56e-6,
            launch=6.00e-6,
            changeover=10.29e-6,
            throttle=0.124,
        ),
        "fused, once": Constants(scores=23.094, visit=2.35e-6, item=1.85e-6, launch=2.70e-6),
        "dkdv, wide": Constants(
            tensor=0.896, visit=0.77e-6, item=3.52e-6, launch=2.00e-6, throttle=0.033
        ),
        "dq, wide": Constants(
            tensor=1.282, visit=0.08e-6, item=3.97e-6, launch=2.00e-6, throttle=0.100
        ),
        "fused, wide": Constants(
            tensor=0.675, visit=3.12e-6, item=5.42e-6, launch=2.00e-6, throttle=0.024
        ),
        "fused, roles": Constants(tensor=1.488, item=4.12e-6, launch=2.00e-6),
    },
    "portable": {
        "forward": Constants(
            tensor=1.483,
            scores=0.014,
            masked=2.009,
            shared=0.281,
            pieces=19.075,
            own=1.573,
            waits=0.001,
            visit=0.89e-6,
            item=1.43e-6,
            launch=3.67e-6,
            changeover=7.17e-6,
            throttle=0.130,
        ),
        "dkdv": Constants(
            tensor=1.835,
            masked=0.003,
            shared=0.446,
            pieces=29.232,
            own=1.960,
            waits=0.259,
            visit=0.43e-6,
            item=0.01e-6,
            launch=1.96e-6,
            changeover=4.78e-6,
            throttle=0.014,
        ),
        "dq": Constants(
            tensor=1.560,
            masked=0.107,
            shared=0.656,
            pieces=69.035,
            own=2.304,
            waits=0.105,
            visit=0.26e-6,
            item=0.48e-6,
            launch=3.30e-6,
            changeover=5.20e-6,
            throttle=0.054,
        ),
        "fused": Constants(
            tensor=1.271,
            masked=0.000,
            shared=0.524,
            pieces=40.848,
            reduced=1.391,
            own=2.562,
            waits=0.123,
            visit=0.92e-6,
            item=0.07e-6,
            launch=1.98e-6,
            changeover=7.89e-6,
            throttle=0.000,
        ),
    },
    "python": {
        "forward": Constants(
            tensor=0.757,
            scores=4.697,
            masked=1.303,
            own=0.148,
            visit=0.32e-6,
            item=1.12e-6,
            launch=4.49e-6,
            changeover=0.65e-6,
            throttle=0.151,
        ),
        "dkdv": Constants(
            tensor=1.219,
            masked=0.001,
            shared=0.363,
            pieces=13.629,
            own=1.284,
            waits=0.001,
            visit=1.46e-6,
            item=1.82e-6,
            launch=2.00e-6,
            changeover=5.64e-6,
            throttle=0.097,
        ),
        "dq": Constants(
            tensor=1.883,
            masked=0.001,
            shared=0.405,
            pieces=24.822,
            own=4.124,
            waits=0.494,
            visit=0.00e-6,
            launch=2.70e-6,
            changeover=4.75e-6,
            throttle=0.119,
        ),
        "fused": Constants(
            tensor=1.736,
            masked=3.382,
            shared=0.135,
            pieces=2.113,
            reduced=0.416,
            own=3.105,
            waits=0.031,
            visit=1.68e-6,
            item=0.08e-6,
            launch=1.88e-6,
            changeover=7.55e-6,
            throttle=0.037,
        ),
    },
}

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
#: How the time of tiles and that of bytes that cross HBM again make one: as the root of the sum of
#: such powers. 1 would be one after the other, infinity the longer alone; chosen with six passes of
#: grouped heads in view (docs/reference/predictions.md).
AGAIN = 3
#: Share of the tensor cores' peak that a large matrix product of a library reaches: 783 of 989
#: TFLOP/s, bfloat16, 8192 x 8192 x 8192, on the same H200.
MATRIX_SHARE = 0.79
