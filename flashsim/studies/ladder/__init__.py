"""The ladder from softmax to FlashAttention: algorithms ("rungs") that are executed and counted.

The rungs are softmax (naive, stable, online, and with whole rows on chip), softmax fused with the
product P V, attention without its softmax, attention with whole rows of scores on chip, and
standard attention and FlashAttention. Each rung runs on the simulated memory, its bytes are
predicted in closed form, and its result is compared with float64.

>>> from flashsim import ladder
>>> print(ladder.climb(n_q=256, n_kv=512, head_dim=32))  # doctest: +SKIP
"""

from flashsim.studies.ladder.rungs import RUNGS, Climb, Rung, Step, climb

__all__ = ["RUNGS", "Climb", "Rung", "Step", "climb"]
