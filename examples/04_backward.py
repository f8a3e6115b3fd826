"""Run the backward pass in its two forms, and check a gradient with a small step."""

import numpy as np

import flashsim

rng = np.random.default_rng(0)
q, k, v, dout = rng.standard_normal((4, 2, 256, 64), dtype=np.float32)
result = flashsim.run(q, k, v, causal=True, trace=True)

three_passes = result.backward(dout)  # delta; dK and dV; dQ: no atomics, always the same bits
fused = result.backward(dout, deterministic=False)  # one pass, which sums dQ in HBM
print(three_passes.trace)
print(fused.trace)
print(f"dq differs by {np.abs(three_passes.dq - fused.dq).max():.1e}")

# A gradient is right if it predicts how much a small step of q changes the loss.
step = 1e-2 * rng.standard_normal(q.shape).astype(np.float32)
loss = lambda x: float((flashsim.run(x, k, v, causal=True).out * dout).sum())  # noqa: E731
predicted = float((three_passes.dq * step).sum())
print(f"the loss changed by {(loss(q + step) - loss(q - step)) / 2:.4f}, predicted {predicted:.4f}")
