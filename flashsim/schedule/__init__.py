"""Which tiles there are, in which order, and what a stage of an algorithm holds."""

from flashsim.schedule.schedule import Schedule, Visit
from flashsim.schedule.tiling import Tiling

__all__ = ["Schedule", "Tiling", "Visit"]
