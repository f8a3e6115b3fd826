"""Run attention tile by tile, compare it with the textbook formula, and print the bytes moved."""

import numpy as np

import flashsim
from flashsim import Tiling

# One head: 1,024 queries and keys of 64 numbers each.
q, k, v = np.random.default_rng(0).standard_normal((3, 1024, 64), dtype=np.float32)

result = flashsim.run(q, k, v, tiling=Tiling(block_q=128, block_k=64), trace=True)

scores = q.astype(np.float64) @ k.T / np.sqrt(64)
weights = np.exp(scores - scores.max(axis=1, keepdims=True))
textbook = weights @ v / weights.sum(axis=1, keepdims=True)
print(f"largest difference from softmax(q k^T / 8) v: {np.abs(result.out - textbook).max():.1e}")

# Q and O move between memory and chip once. K and V are loaded once per row tile: 8 = 1024 / 128.
print(result.trace)
assert result.trace.bytes("load", "K") == 8 * k.nbytes
