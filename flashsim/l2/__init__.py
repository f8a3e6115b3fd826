"""A model of the L2 cache between HBM and the SMs, which predicts DRAM bytes.

The package lists the L2 requests of each thread block tile by tile, interleaves the requests in the
SMs' order, and replays all requests through a simulated cache. The page
docs/reference/predictions.md lists what the model leaves out, and compares predictions with
hardware counters.
"""

from flashsim.l2.curve import Curve
from flashsim.l2.launch import L2Model
from flashsim.l2.model import Dram, curves, dram

__all__ = ["Curve", "Dram", "L2Model", "curves", "dram"]
