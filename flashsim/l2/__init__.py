"""A model of the L2 cache between HBM and the SMs, which predicts DRAM bytes.

For each thread block of a kernel, the package lists the requests to L2 tile by tile, interleaves
the blocks' requests as the SMs issue them, and replays the requests through a simulated cache. The
reference docs/reference/predictions.md says what the model leaves out, and compares its predictions
with hardware counters.
"""

from flashsim.l2.curve import Curve
from flashsim.l2.launch import L2Model
from flashsim.l2.model import Dram, curves, dram

__all__ = ["Curve", "Dram", "L2Model", "curves", "dram"]
