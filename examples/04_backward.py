"""The backward pass recomputes the scores instead of reading them back, in one of two forms."""

import numpy as np

import flashsim

rng = np.random.default_rng(0)
q, k, v, dout = rng.standard_normal((4, 2, 256, 64), dtype=np.float32)
result = flashsim.run(q, k, v, causal=True, trace=True)

three_passes = result.backward(dout)  # delta; dK and dV; dQ: no atomics, the same bits every time
fused = result.backward(dout, deterministic=False)  # one pass; dQ is summed in HBM
print(three_passes.trace)
print(fused.trace)
print(f"dq differs by {np.abs(three_passes.dq - fused.dq).max():.1e}")

# A gradient is right if a small step changes the loss by as much as the gradient predicts.
step = 1e-2 * rng.standard_normal(q.shape).astype(np.float32)
loss = lambda x: float((flashsim.run(x, k, v, causal=True).out * dout).sum())  # noqa: E731
predicted = float((three_passes.dq * step).sum())
print(f"loss moved by {(loss(q + step) - loss(q - step)) / 2:.4f}, predicted {predicted:.4f}")
