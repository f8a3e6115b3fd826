"""Constants of the time model, fitted by ``python benchmarks/predict.py`` to one H200's kernels.

Fitted to N = 4096, 4 batch entries, without and with causal mask, head_dim 64 and 128, bfloat16:
four times a stage; everything else in docs/verify-h200.csv was kept to test them (docs/truth.md).
"""

from __future__ import annotations

from typing import NamedTuple


class Constants(NamedTuple):
    """What one stage of one kernel family makes of an SM's units.

    A visit takes ``busiest * (time of the busiest unit) + others * (sum over the other units)``: a
    kernel that overlapped perfectly would have (1, 0), one that overlapped nothing (1, 1). An outer
    tile takes `item` seconds more: loading it, filling the pipeline, storing the result. Clocks
    below the nominal one, latencies and everything else that is not modelled is in these numbers.
    """

    busiest: float
    others: float
    item: float


#: By kernel family and stage.
CALIBRATED = {
    "hopper": {
        "forward": Constants(0.8, 0.5, 2e-6),
        "dkdv": Constants(1.0, 0.5, 2e-6),
        "dq": Constants(1.0, 0.5, 2e-6),
        "fused": Constants(1.0, 0.5, 2e-6),
    },
    "portable": {
        "forward": Constants(1.0, 0.5, 2e-6),
        "dkdv": Constants(1.0, 0.5, 2e-6),
        "dq": Constants(1.0, 0.5, 2e-6),
        "fused": Constants(1.0, 0.5, 2e-6),
    },
}

#: Share of the nominal HBM bandwidth that streaming kernels reach, and the seconds that any launch
#: takes: from the passes that only stream (delta, convert).
HBM_SHARE, LAUNCH = 0.8, 2e-6
