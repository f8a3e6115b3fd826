"""Closed forms: bytes, FLOPs and bounds, counted without running anything."""

from flashsim.counts.traffic import Traffic

__all__ = ["Traffic"]
