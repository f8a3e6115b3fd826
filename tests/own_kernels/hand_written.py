"""A FlashAttention-2 forward whose accesses are noted by hand, as a frontend would note them."""

import numpy as np

from flashsim import Problem, oracle
from flashsim.own_kernels import LOAD, STORE, KernelTrace, Recorder


def attention(
    n=256, d=64, block_q=64, block_k=32, heads=2, causal=True, twice=False, skip=True, group=1
):
    """Return the trace; `twice` loads each K tile again, and ``skip=False`` keeps masked tiles."""
    p = Problem(n, head_dim=d, heads=heads, kv_heads=heads // group, causal=causal)
    rng = np.random.default_rng(0)
    q = rng.standard_normal((heads, n, d)).astype(np.float32)
    k, v = rng.standard_normal((2, heads // group, n, d)).astype(np.float32)
    out, lse = oracle.attention(q[None], k[None], v[None], p)
    values = [q, k, v, out[0].astype(np.float32), lse[0].astype(np.float32)]
    r = Recorder("hand")
    codes = [
        r.tensor(name, x.shape, [s // x.itemsize for s in x.strides], "float32", 4)
        for name, x in zip(("q_ptr", "k_ptr", "v_ptr", "o_ptr", "lse_ptr"), values, strict=True)
    ]
    q_, k_, v_, o_, l_ = codes
    tiles = -(-n // block_q)
    r.launch("forward", (tiles, heads), constants={"causal": causal})
    for head in range(heads):
        for i in range(tiles):
            r.program((i, head))
            rows = slice(i * block_q, min(n, (i + 1) * block_q))
            r.block(LOAD, q_, (head, rows), line=("mine.py", 10))
            for first in range(0, rows.stop if causal and skip else n, block_k):
                cols = slice(first, min(n, first + block_k))
                r.block(LOAD, k_, (head // group, cols), line=("mine.py", 20))
                if twice:
                    r.block(LOAD, k_, (head // group, cols), line=("mine.py", 21))
                r.work("matmul", 4 * block_q * block_k * d)
                r.block(LOAD, v_, (head // group, cols), line=("mine.py", 25))
            r.held({"acc": ((block_q, d), 4 * block_q * d), "m": ((block_q,), 4 * block_q)})
            r.block(STORE, o_, (head, rows), line=("mine.py", 30))
            r.block(STORE, l_, (head, rows), line=("mine.py", 31))
    return KernelTrace(r.done(), problem=None if group == 1 else p, values=values)
