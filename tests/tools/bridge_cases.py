"""Small problems for attention in torch and in JAX: sizes of tensors, and options."""

import functools

CUTS = {"cu_seqlens_q": (0, 4, 7), "cu_seqlens_k": (0, 5, 9), "causal": True}
CASES = {
    "plain": ({}, {}),
    "causal": ({}, {"causal": True}),
    "grouped": ({"heads": 4, "kv_heads": 2}, {"causal": True}),
    "softcap": ({}, {"softcap": 2.0}),
    "window": ({}, {"window": (3, 2), "scale": 0.7}),
    "packed": ({"batch": 1}, CUTS),
    "bias": ({"bias": (1, 2)}, {"causal": True}),
    "bias a batch entry": ({"bias": (2, 1)}, {}),
}


def plain(q, k, v, bias=None, sinks=None, *, causal=False, window=None, softcap=0.0, scale=None):
    """Attention in torch's own operators; one batch entry, or several of equal lengths.

    A row without keys is zeros. Sinks, (heads,), are one more score per row, of no value.
    """
    import torch

    group = q.shape[-3] // k.shape[-3]
    k, v = (x.repeat_interleave(group, dim=-3) for x in (k, v))
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    s = softcap * torch.tanh(s / softcap) if softcap else s
    s = s if bias is None else s + bias
    n_q, n_kv = s.shape[-2:]
    rows, columns = (torch.arange(n, device=q.device) for n in (n_q, n_kv))
    offset = columns - (rows[:, None] + n_kv - n_q)
    left, right = (n_kv + n_q if side < 0 else side for side in window or (-1, -1))
    kept = (offset >= -left) & (offset <= (0 if causal else right))
    s = s.masked_fill(~kept, float("-inf"))
    if sinks is not None:
        more = sinks.to(s.dtype)[:, None, None].expand(*s.shape[:-1], 1)
        s = torch.cat([s, more], dim=-1)
    return torch.softmax(s, dim=-1).nan_to_num()[..., :n_kv] @ v


def plain_in_jax(q, k, v, bias=None, *, causal=False, window=None, softcap=0.0, scale=None):
    """Attention in JAX's own operators; one batch entry, or several of equal lengths."""
    import jax
    import jax.numpy as jnp

    group = q.shape[-3] // k.shape[-3]
    k, v = (jnp.repeat(x, group, axis=-3) for x in (k, v))
    product = functools.partial(jnp.matmul, precision="highest")  # a GPU would round to TF32
    s = product(q, k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    s = softcap * jnp.tanh(s / softcap) if softcap else s
    s = s if bias is None else s + bias
    n_q, n_kv = s.shape[-2:]
    offset = jnp.arange(n_kv) - (jnp.arange(n_q)[:, None] + n_kv - n_q)
    left, right = (n_kv + n_q if side < 0 else side for side in window or (-1, -1))
    kept = (offset >= -left) & (offset <= (0 if causal else right))
    return product(jax.nn.softmax(jnp.where(kept, s, -jnp.inf), axis=-1), v)
