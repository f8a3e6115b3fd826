"""Traces: the recorded events of a run, and questions about them."""

from flashsim.trace.trace import Trace

__all__ = ["Trace"]
