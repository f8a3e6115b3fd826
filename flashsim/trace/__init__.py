"""What was recorded, and the questions one asks of it."""

from flashsim.trace.trace import Trace

__all__ = ["Trace"]
