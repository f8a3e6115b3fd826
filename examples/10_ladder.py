"""From softmax to FlashAttention in eleven rungs, each executed, counted and predicted."""

from flashsim import SramOverflow, Tiling
from flashsim.studies import ladder

# Every rung uses the same 512 x 1024 scores. Loads and stores per score fall to zero.
climb = ladder.climb(n_q=512, n_kv=1024, head_dim=64, tiling=Tiling(32, 64))
print(climb)

# Each closed form is an equality, not an estimate.
assert all(step.moved == step.predicted for step in climb.steps.values())

# Without subtracting the maximum, large scores overflow: the error is NaN.
print(ladder.climb(n_q=64, n_kv=64, magnify=200.0, rungs=["naive", "stable", "online"]))

# Whole rows on chip move as few bytes as FlashAttention, until a row is too long.
try:
    ladder.climb(n_q=64, n_kv=100_000, rungs=["whole-row-attention"])
except SramOverflow as error:
    print(f"\nSramOverflow: {error}")
