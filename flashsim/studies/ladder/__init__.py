"""The ladder from softmax to FlashAttention: algorithms ("rungs") that are run and counted.

The first rungs are a softmax alone; the next rungs fuse softmax with the product P V; the last
rungs are standard attention and FlashAttention. Closed forms predict each rung's bytes, and each
rung's result is compared with float64.

>>> from flashsim import ladder
>>> print(ladder.climb(n_q=256, n_kv=512, head_dim=32))  # doctest: +SKIP
"""

from flashsim.studies.ladder.rungs import RUNGS, Climb, Rung, Step, climb

__all__ = ["RUNGS", "Climb", "Rung", "Step", "climb"]
