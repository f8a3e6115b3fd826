"""Constants of the time model, fitted by `benchmarks/predict.py` to one H200's kernels.

Fitted to N = 4096, 4 batch entries, without and with causal mask, head_dim 64 and 128, bfloat16:
four times a stage; everything else in docs/verify-h200.csv was kept to test them (docs/truth.md).
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
        "forward": Constants(0.697, 0.516, 2.98e-6),
        "dkdv": Constants(1.303, 0.200, 2.78e-6),
        "dq": Constants(1.028, 0.334, 1.86e-6),
        "fused": Constants(1.331, 0.481, 3.41e-6),
    },
    "portable": {
        "forward": Constants(2.206, 0.213, 1.00e-6),
        "dkdv": Constants(0.838, 1.081, 4.34e-6),
        "dq": Constants(1.709, 0.000, 2.92e-6),
        "fused": Constants(0.716, 1.772, 7.36e-6),
    },
}

#: Share of the nominal HBM bandwidth that streaming kernels reach, and the seconds that any launch
#: takes: from the delta pass, which only streams.
HBM_SHARE, LAUNCH = 0.85, 3e-6
