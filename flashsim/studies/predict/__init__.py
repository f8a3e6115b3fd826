"""Predict the time of `flashsim.backends`' GPU kernels from units, overlap, waves and tails.

The model also covers standard attention's time; `when` finds the lengths at which FlashAttention
wins. docs/reference/predictions.md tells how it was calibrated, and its error elsewhere.
"""

from flashsim.problem.links import LINKS, Link
from flashsim.studies.predict.calibration import CALIBRATED, Constants
from flashsim.studies.predict.ideal import least
from flashsim.studies.predict.lengths import versions, when
from flashsim.studies.predict.model import predict
from flashsim.studies.predict.prediction import Prediction, StageTime
from flashsim.studies.predict.ranks import SpreadTime, spread

__all__ = [
    "CALIBRATED",
    "LINKS",
    "Constants",
    "Link",
    "Prediction",
    "SpreadTime",
    "StageTime",
    "least",
    "predict",
    "spread",
    "versions",
    "when",
]
