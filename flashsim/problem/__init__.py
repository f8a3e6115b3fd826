"""Attention problems, masks, GPU models, and float64 attention with which results are checked."""

from flashsim.problem.hardware import Device
from flashsim.problem.masks import BlockMask
from flashsim.problem.problem import Problem

__all__ = ["BlockMask", "Device", "Problem"]
