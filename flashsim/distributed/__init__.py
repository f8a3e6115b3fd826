"""Attention over several GPUs: ring, zigzag, striped, Ulysses and USP, simulated and counted.

The link between ranks is one more level of the memory hierarchy. For each step, the model states
which bytes each rank sends to which rank, and the FLOPs and HBM bytes of each rank. `run` executes
all ranks in one process, with real arrays. `count` returns the same integers without a run.
"""

from flashsim.distributed.account import Account
from flashsim.distributed.counting import count
from flashsim.distributed.group import SCHEMES, Block, Group
from flashsim.distributed.simulation import Spread, SpreadGradients, run, simulate

__all__ = [
    "SCHEMES", "Account", "Block", "Group", "Spread", "SpreadGradients", "count", "run",
    "simulate",
]  # fmt: skip
