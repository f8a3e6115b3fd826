"""How long the GPU kernels of `flashsim.backends` take: a model of units, overlap, waves and tails.

What it was calibrated on, and how far off it is elsewhere: docs/guides/truth.md.
"""

from flashsim.studies.predict.calibration import CALIBRATED, Constants
from flashsim.studies.predict.model import Prediction, StageTime, predict

__all__ = ["CALIBRATED", "Constants", "Prediction", "StageTime", "predict"]
