"""Attention over several GPUs: ring, zigzag, striped, Ulysses and USP, simulated and counted.

The link between ranks (one GPU each) is modelled as one more level of the memory hierarchy. For
each step, the model states the bytes that each rank sends to each other rank, and the FLOPs and HBM
bytes of each rank. `run` executes all ranks in one process on real arrays. `count` returns the same
integers in closed form.
"""

from flashsim.distributed.account import Account
from flashsim.distributed.counting import count
from flashsim.distributed.group import SCHEMES, Block, Group
from flashsim.distributed.simulation import Spread, SpreadGradients, run

__all__ = ["SCHEMES", "Account", "Block", "Group", "Spread", "SpreadGradients", "count", "run"]
