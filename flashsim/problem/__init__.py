"""Attention problems, masks and GPU models, and the float64 attention that checks results."""

from flashsim.problem.hardware import Device
from flashsim.problem.masks import BlockMask
from flashsim.problem.problem import Problem

__all__ = ["BlockMask", "Device", "Problem"]
