"""FlashAttention-2's forward pass in Pallas for a GPU, with one program per query tile.

    python examples/pallas/gpu_forward.py

prints the bytes that each line of the kernel loads and stores. It needs JAX, but no GPU.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu


def forward_kernel(q_ref, k_ref, v_ref, o_ref, lse_ref, *, n, block_q, block_k, causal, scale):
    """Compute one query tile of one head in a loop over its key tiles."""
    rows = pl.program_id(1) * block_q + jnp.arange(block_q)
    q = plgpu.load(q_ref, mask=rows[:, None] < n, other=0.0)

    def visit(j, carry):
        m, l, acc = carry
        keys = j * block_k + jnp.arange(block_k)
        tile = pl.ds(j * block_k, block_k)
        k = plgpu.load(k_ref.at[tile, :], mask=keys[:, None] < n, other=0.0)
        v = plgpu.load(v_ref.at[tile, :], mask=keys[:, None] < n, other=0.0)
        s = jnp.dot(q, k.T, preferred_element_type=jnp.float32) * scale
        keep = keys[None, :] < n
        if causal:
            keep = keep & (rows[:, None] >= keys[None, :])
        s = jnp.where(keep, s, -jnp.inf)
        m_new = jnp.maximum(m, s.max(axis=1))
        p = jnp.exp(s - m_new[:, None])
        alpha = jnp.exp(m - m_new)
        pv = jnp.dot(p.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return m_new, l * alpha + p.sum(axis=1), acc * alpha[:, None] + pv

    end = pl.cdiv(jnp.minimum((pl.program_id(1) + 1) * block_q, n), block_k)
    m = jnp.full(block_q, -jnp.inf)
    l = jnp.zeros(block_q)
    acc = jnp.zeros(q.shape)
    m, l, acc = lax.fori_loop(0, end if causal else pl.cdiv(n, block_k), visit, (m, l, acc))
    o = (acc / l[:, None]).astype(o_ref.dtype)
    plgpu.store(o_ref, o, mask=rows[:, None] < n)
    plgpu.store(lse_ref, m + jnp.log(l), mask=rows < n)


def forward(q, k, v, causal=False, block_q=64, block_k=32):
    """Return O and the LSE of (heads, n, d) arrays; K and V may have fewer heads than Q."""
    heads, n, d = q.shape
    group = heads // k.shape[0]
    kernel = functools.partial(
        forward_kernel, n=n, block_q=block_q, block_k=block_k, causal=causal, scale=d**-0.5
    )
    rows = pl.BlockSpec((None, block_q, d), lambda h, i: (h, i, 0))
    keys = pl.BlockSpec((None, n, d), lambda h, i: (h // group, 0, 0))
    return pl.pallas_call(
        kernel,
        grid=(heads, pl.cdiv(n, block_q)),
        in_specs=[rows, keys, keys],
        out_specs=[rows, pl.BlockSpec((None, block_q), lambda h, i: (h, i))],
        out_shape=[
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((heads, n), jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
        name="forward",
    )(q, k, v)


if __name__ == "__main__":
    import flashsim.jax

    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 256, 64)).astype(np.float32)
    traced = flashsim.jax.trace_kernel(forward, q, k, v, True)
    print(traced)
    print(traced.by_line())
