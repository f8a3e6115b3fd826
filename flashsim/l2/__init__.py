"""A model of the L2 cache between HBM and the SMs, which predicts DRAM bytes.

For each thread block of a kernel, the package lists the requests tile by tile. The package
interleaves these requests in the order in which the SMs issue them (launch order, blocks in flight,
uneven progress), and replays them through a simulated cache. The page docs/reference/predictions.md
says what this model leaves out, and compares its predictions with hardware counters.
"""

from flashsim.l2.curve import Curve
from flashsim.l2.launch import L2Model
from flashsim.l2.model import Dram, curves, dram

__all__ = ["Curve", "Dram", "L2Model", "curves", "dram"]
