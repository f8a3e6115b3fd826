"""The ladder from softmax to FlashAttention: each rung is executed and counted.

The rungs are: softmax (naive, stable and online); softmax fused with the product that follows it;
attention without its softmax; attention with a whole row of scores on chip; attention. Each rung
runs on the simulated memory, is predicted in closed form and is compared with float64.

>>> from flashsim import ladder
>>> print(ladder.climb(n_q=256, n_kv=512, head_dim=32))  # doctest: +SKIP
"""

from flashsim.studies.ladder.rungs import RUNGS, Climb, Rung, Step, climb

__all__ = ["RUNGS", "Climb", "Rung", "Step", "climb"]
