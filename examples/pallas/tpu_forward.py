"""FlashAttention-2's forward pass in Pallas for a TPU, whose grid is the loop over key tiles.

    python examples/pallas/tpu_forward.py

prints the bytes that the pipeline copies to and from VMEM, for two index maps of the keys. The
second map repeats the last block, so nothing is copied. It needs JAX, but no TPU.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


def forward_kernel(q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, acc_ref, *, causal, scale):
    """Add one key tile to the running O, m and l of one query tile."""
    i, j = pl.program_id(1), pl.program_id(2)
    block_q, block_k = q_ref.shape[0], k_ref.shape[0]

    @pl.when(j == 0)
    def _():
        m_ref[...] = jnp.full(m_ref.shape, -jnp.inf)
        l_ref[...] = jnp.zeros(l_ref.shape)
        acc_ref[...] = jnp.zeros(acc_ref.shape)

    @pl.when(jnp.logical_or(not causal, j * block_k <= i * block_q + block_q - 1))
    def _():
        s = jnp.dot(q_ref[...], k_ref[...].T, preferred_element_type=jnp.float32) * scale
        if causal:
            rows = i * block_q + lax.broadcasted_iota(jnp.int32, s.shape, 0)
            keys = j * block_k + lax.broadcasted_iota(jnp.int32, s.shape, 1)
            s = jnp.where(rows >= keys, s, -jnp.inf)
        m_new = jnp.maximum(m_ref[...], s.max(axis=1))
        p = jnp.exp(s - m_new[:, None])
        alpha = jnp.exp(m_ref[...] - m_new)
        v = v_ref[...]
        pv = jnp.dot(p.astype(v.dtype), v, preferred_element_type=jnp.float32)
        acc_ref[...] = acc_ref[...] * alpha[:, None] + pv
        l_ref[...] = l_ref[...] * alpha + p.sum(axis=1)
        m_ref[...] = m_new

    @pl.when(j == pl.num_programs(2) - 1)
    def _():
        o_ref[...] = (acc_ref[...] / l_ref[...][:, None]).astype(o_ref.dtype)


def forward(q, k, v, causal=False, block_q=64, block_k=32, keep_last=True):
    """Return O of (heads, n, d) arrays; n must be a multiple of the block sizes.

    With `keep_last`, the index map returns the last used block in the steps that the causal mask
    skips, so the pipeline copies nothing in these steps.
    """
    heads, n, d = q.shape

    def key_block(h, i, j):
        if causal and keep_last:
            j = jnp.minimum(j, (i * block_q + block_q - 1) // block_k)
        return h, j, 0

    rows = pl.BlockSpec((None, block_q, d), lambda h, i, j: (h, i, 0))
    keys = pl.BlockSpec((None, block_k, d), key_block)
    return pl.pallas_call(
        functools.partial(forward_kernel, causal=causal, scale=d**-0.5),
        grid=(heads, n // block_q, n // block_k),
        in_specs=[rows, keys, keys],
        out_specs=rows,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_shapes=[
            pltpu.VMEM((block_q,), jnp.float32),
            pltpu.VMEM((block_q,), jnp.float32),
            pltpu.VMEM((block_q, d), jnp.float32),
        ],
        name="forward",
    )(q, k, v)


if __name__ == "__main__":
    import flashsim.jax

    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 256, 64)).astype(np.float32)
    for keep_last in (False, True):
        traced = flashsim.jax.trace_kernel(forward, q, k, v, True, 64, 32, keep_last)
        print(traced.by_line())
