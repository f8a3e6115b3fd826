"""Constants of the time model, fitted by `benchmarks/predict.py` to one H200's kernels.

Fitted to N = 4096, 4 batch entries, without and with causal mask, head_dim 64 and 128, bfloat16:
four times a stage, from docs/data/verify-h200.csv. Everything else in that table was kept to test
the constants (docs/guides/truth.md).
"""

from __future__ import annotations

from typing import NamedTuple


class Constants(NamedTuple):
    """What one stage of one kernel family makes of an SM's units.

    A visit takes ``busiest * (time of the busiest unit) + others * (sum over the other units)``: a
    kernel that overlapped perfectly would have (1, 0), one that overlapped nothing (1, 1). L2 and
    HBM are not in the sum: copies run beside the arithmetic, and bound it. An outer
    tile takes `item` seconds more: loading it, filling the pipeline, storing the result. Clocks
    below the nominal one, latencies and everything else that is not modelled is in these numbers.
    """

    busiest: float
    others: float
    item: float


class DecodeConstants(NamedTuple):
    """What the decode kernel makes of an SM and of HBM; seconds, but for the bytes a second.

    `launch` of any call; `item` of a block, besides its keys, and `row` more for each element of
    its results; an SM streams at most `rate` bytes a second, and all of them `hbm_share` of HBM's
    nominal bandwidth; `merge` where keys are split. With pages, `table` for the first numbers, and
    a byte takes 1 + `scatter` / sqrt(bytes of a page's rows) times as long.
    """

    launch: float
    item: float
    row: float
    rate: float
    hbm_share: float
    merge: float
    scatter: float
    table: float


#: Fitted by `benchmarks/predict.py --decode --fit` to docs/data/decode-h200.csv: batches of 1 and
#: 32 of its table, and two of its sweeps over splits.
DECODING = DecodeConstants(9.21e-07, 3.92e-06, 1.82e-09, 7.33e10, 0.909, 2.08e-06, 0.551, 4.74e-07)

#: By kernel family and stage.
CALIBRATED = {
    "hopper": {
        "forward": Constants(0.533, 0.620, 2.58e-6),
        "dkdv": Constants(1.117, 0.172, 2.85e-6),
        "dq": Constants(1.035, 0.312, 2.48e-6),
        "fused": Constants(0.969, 0.595, 4.30e-6),
    },
    "portable": {
        "forward": Constants(1.991, 0.342, 1.77e-6),
        "dkdv": Constants(0.603, 1.258, 2.45e-6),
        "dq": Constants(1.714, 0.000, 3.20e-6),
        "fused": Constants(0.000, 2.238, 9.55e-6),
    },
}

#: Share of the nominal HBM bandwidth that streaming kernels reach, and the seconds that any launch
#: takes: from the delta pass, which only streams.
HBM_SHARE, LAUNCH = 0.85, 3e-6

#: Share of the tensor cores' peak that a large matrix product of a library reaches: 783 of 989
#: TFLOP/s, bfloat16, 8192 x 8192 x 8192, on the same H200.
MATRIX_SHARE = 0.79
