"""Schedules: score tiles, their order, and the on-chip buffers of each stage of an algorithm."""

from flashsim.schedule.schedule import Schedule, Visit
from flashsim.schedule.tiling import Tiling

__all__ = ["Schedule", "Tiling", "Visit"]
