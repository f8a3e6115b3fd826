"""Predictions against hardware counters: what Nsight Compute measured, kernel by kernel."""

from flashsim.verify.comparison import Verification, verify
from flashsim.verify.ncu import METRICS, Launch, command, parse

__all__ = ["METRICS", "Launch", "Verification", "command", "parse", "verify"]
