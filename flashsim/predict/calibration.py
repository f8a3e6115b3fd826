"""Constants of the time model, fitted by `benchmarks/predict.py` to one H200's kernels.

Fitted to N = 4096, 4 batch entries, without and with causal mask, head_dim 64 and 128, bfloat16:
four times a stage, from docs/verify-h200.csv. Everything else in that table was kept to test the
constants (docs/truth.md).
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


#: By kernel family and stage.
CALIBRATED = {
    "hopper": {
        "forward": Constants(0.700, 0.516, 2.86e-6),
        "dkdv": Constants(1.303, 0.200, 2.73e-6),
        "dq": Constants(1.028, 0.334, 1.83e-6),
        "fused": Constants(0.853, 0.800, 3.75e-6),
    },
    "portable": {
        "forward": Constants(2.134, 0.247, 0.88e-6),
        "dkdv": Constants(0.838, 1.081, 4.33e-6),
        "dq": Constants(1.709, 0.000, 2.92e-6),
        "fused": Constants(0.716, 1.772, 7.36e-6),
    },
}

#: Share of the nominal HBM bandwidth that streaming kernels reach, and the seconds that any launch
#: takes: from the delta pass, which only streams.
HBM_SHARE, LAUNCH = 0.85, 3e-6
