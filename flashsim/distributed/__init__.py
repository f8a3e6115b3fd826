"""Attention over several GPUs: ring, zigzag, striped, Ulysses and USP, simulated and counted.

The link between ranks is one more level of the memory hierarchy. For each step, the model says what
each rank sends and to whom, and what it computes and moves meanwhile. `run` executes with real
arrays, all ranks in one process; `count` gives the same integers without executing.
"""

from flashsim.distributed.account import Account
from flashsim.distributed.counting import count
from flashsim.distributed.group import SCHEMES, Block, Group
from flashsim.distributed.simulation import Spread, SpreadGradients, run, simulate

__all__ = [
    "SCHEMES", "Account", "Block", "Group", "Spread", "SpreadGradients", "count", "run",
    "simulate",
]  # fmt: skip
