"""A model of the L2 cache between HBM and the SMs, which predicts DRAM bytes.

The package lists the requests of every thread block tile by tile. It interleaves them in the order
in which the SMs issue them (launch order, blocks in flight, uneven progress), and replays them
through a cache. docs/reference/predictions.md says what this model leaves out, and compares its
predictions with hardware counters.
"""

from flashsim.l2.curve import Curve
from flashsim.l2.launch import L2Model
from flashsim.l2.model import Dram, curves, dram

__all__ = ["Curve", "Dram", "L2Model", "curves", "dram"]
