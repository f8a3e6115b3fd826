"""The L2 cache between HBM and the SMs: from requested bytes to DRAM bytes.

The package lists the requests of every thread block tile by tile, interleaves them as the SMs would
issue them (launch order, blocks in flight, uneven progress), and replays them through a cache. This
is a model: docs/reference/predictions.md says what it leaves out, and how far it is from hardware
counters.
"""

from flashsim.l2.curve import Curve
from flashsim.l2.launch import L2Model
from flashsim.l2.model import Dram, curves, dram

__all__ = ["Curve", "Dram", "L2Model", "curves", "dram"]
