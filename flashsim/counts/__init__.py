"""Closed forms of bytes and FLOPs, and bounds on bytes, computed without a run."""

from flashsim.counts.traffic import Traffic

__all__ = ["Traffic"]
