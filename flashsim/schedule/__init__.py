"""Schedules: score tiles, the order of visits, and the on-chip buffers of an algorithm's stages."""

from flashsim.schedule.schedule import Schedule, Visit
from flashsim.schedule.tiling import Tiling

__all__ = ["Schedule", "Tiling", "Visit"]
