"""Traces: the recorded events of a run, and methods that answer questions about them."""

from flashsim.trace.trace import Trace

__all__ = ["Trace"]
