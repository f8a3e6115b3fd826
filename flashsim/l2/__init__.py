"""The L2 cache between HBM and the SMs: from requested bytes to DRAM bytes.

The requests of every thread block are laid out tile by tile, woven together as the SMs would issue
them (launch order, blocks in flight, uneven progress), and replayed through a cache. A model: what
it leaves out, and how far from hardware counters it is, is said in docs/reference/predictions.md.
"""

from flashsim.l2.curve import Curve
from flashsim.l2.launch import L2Model
from flashsim.l2.model import Dram, curves, dram

__all__ = ["Curve", "Dram", "L2Model", "curves", "dram"]
