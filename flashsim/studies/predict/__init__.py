"""Predicts the time of `flashsim.backends`' GPU kernels, and of standard attention.

In the model, the units of an SM work at the same time, and the last wave of thread blocks may leave
SMs idle. The function `when` finds the lengths at which FlashAttention is faster. The page
docs/reference/predictions.md describes the model's calibration and its errors.
"""

from flashsim.problem.links import LINKS, Link
from flashsim.studies.predict.calibration import CALIBRATED, Constants
from flashsim.studies.predict.ideal import least
from flashsim.studies.predict.lengths import versions, when
from flashsim.studies.predict.model import predict
from flashsim.studies.predict.prediction import Prediction, StageTime
from flashsim.studies.predict.ranks import SpreadTime, spread

__all__ = [
    "CALIBRATED", "LINKS", "Constants", "Link", "Prediction", "SpreadTime", "StageTime", "least",
    "predict", "spread", "versions", "when",
]  # fmt: skip
