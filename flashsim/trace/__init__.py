"""Traces: the recorded memory transfers and computations of a run, and methods to query them."""

from flashsim.trace.trace import Trace

__all__ = ["Trace"]
