"""How long the GPU kernels of `flashsim.backends` take: a model of units, overlap, waves and tails.

Standard attention's time, too, and when FlashAttention wins: `when`. What the model was calibrated
on, and how far off it is elsewhere: docs/reference/predictions.md.
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
