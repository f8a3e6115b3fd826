"""FlashAttention-2's forward pass in Numba-CUDA: one thread block per query tile.

    NUMBA_ENABLE_CUDASIM=1 python examples/numba_cuda/forward.py

prints the bytes that each line of the kernel loads and stores. It needs no GPU.
"""

import math

import numpy as np
from numba import cuda, float32

BLOCK_Q, BLOCK_K, D = 16, 8, 16


@cuda.jit
def forward(Q, K, V, O, L, scale, causal):
    """Compute one query tile of one head; each thread keeps one row of O in registers."""
    k_tile = cuda.shared.array((BLOCK_K, D), float32)
    v_tile = cuda.shared.array((BLOCK_K, D), float32)
    head, thread = cuda.blockIdx.y, cuda.threadIdx.x
    first = cuda.blockIdx.x * BLOCK_Q
    i, n = first + thread, K.shape[1]
    q = cuda.local.array(D, float32)
    acc = cuda.local.array(D, float32)
    for d in range(D):
        q[d] = Q[head, i, d] if i < n else 0.0
        acc[d] = 0.0
    m, l = -math.inf, 0.0
    end = min(first + BLOCK_Q, n) if causal else n
    for start in range(0, end, BLOCK_K):
        # All threads load the tile together: neighbouring threads load neighbouring elements.
        for at in range(thread, BLOCK_K * D, BLOCK_Q):
            row, d = start + at // D, at % D
            k_tile[at // D, d] = K[head, row, d] if row < n else 0.0
            v_tile[at // D, d] = V[head, row, d] if row < n else 0.0
        cuda.syncthreads()
        for j in range(min(BLOCK_K, n - start)):
            if not causal or start + j <= i:
                s = 0.0
                for d in range(D):
                    s += q[d] * k_tile[j, d]
                s *= scale
                m_new = max(m, s)
                alpha, p = math.exp(m - m_new), math.exp(s - m_new)
                l = l * alpha + p
                for d in range(D):
                    acc[d] = acc[d] * alpha + p * v_tile[j, d]
                m = m_new
        cuda.syncthreads()
    if i < n:
        for d in range(D):
            O[head, i, d] = acc[d] / l
        L[head, i] = m + math.log(l)


if __name__ == "__main__":
    import flashsim.cuda

    n, heads = 32, 2
    q, k, v = np.random.default_rng(0).standard_normal((3, heads, n, D)).astype(np.float32)
    o, lse = np.zeros_like(q), np.zeros((heads, n), np.float32)
    grid = (-(-n // BLOCK_Q), heads)
    traced = flashsim.cuda.trace(forward[grid, BLOCK_Q], q, k, v, o, lse, D**-0.5, True)
    print(traced)
    print(traced.by_line())
