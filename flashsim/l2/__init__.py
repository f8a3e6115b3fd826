"""A model of the L2 cache between HBM and the SMs, which predicts DRAM bytes.

For each thread block of a kernel, the package lists the requests to L2 tile by tile. The requests
are interleaved as the SMs issue them: by launch order, blocks in flight and their uneven progress.
Then the package replays the requests through a simulated cache. The reference
docs/reference/predictions.md says what this model leaves out, and compares its predictions with
hardware counters.
"""

from flashsim.l2.curve import Curve
from flashsim.l2.launch import L2Model
from flashsim.l2.model import Dram, curves, dram

__all__ = ["Curve", "Dram", "L2Model", "curves", "dram"]
