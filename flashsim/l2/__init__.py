"""A model of the L2 cache between HBM and the SMs, which predicts DRAM bytes.

For each thread block of a kernel, the package lists the requests to L2 tile by tile. The package
interleaves the blocks' requests in the order in which the SMs issue them. This order depends on the
launch order, the blocks in flight and their uneven progress. Then the package replays the requests
through a simulated cache. The reference docs/reference/predictions.md says what this model leaves
out, and compares its predictions with hardware counters.
"""

from flashsim.l2.curve import Curve
from flashsim.l2.launch import L2Model
from flashsim.l2.model import Dram, curves, dram

__all__ = ["Curve", "Dram", "L2Model", "curves", "dram"]
