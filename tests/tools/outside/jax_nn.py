"""JAX's tests of `jax.nn.dot_product_attention`, from their published text, on flashsim.jax.

https://github.com/jax-ml/jax/blob/main/tests/nn_test.py
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flashsim.jax import dot_product_attention
from outside.cases import Test, product

TITLE = "JAX, jax.nn.dot_product_attention"

MODES = (
    *(("bias",), ("causal",), ("padding",), ("custom",), ("causal", "padding")),
    *(("custom", "padding"), ("bias", "causal"), ("causal", "sliding_window")),
)


def tests(device: str, whole: bool) -> list[Test]:
    """Return JAX's three tests of attention, with flashsim instead of cuDNN."""
    return [
        Test(
            "testDotProductAttention",
            plain,
            product(dtype=("bfloat16", "float16"), groups=(1, 2, 4), vmap=(False, True)),
        ),
        Test("testDotProductAttentionMask", masked, product(mode=MODES)),
        Test(
            "testDotProductAttentionBiasGradient",
            bias_gradient,
            product(batch=(1, 16), vmap=(False, True)),
        ),
    ]


def normal(*shapes: tuple[int, ...], dtype: Any) -> list[jax.Array]:
    """Return arrays of random numbers."""
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [jax.random.normal(key, s, dtype) for key, s in zip(keys, shapes, strict=True)]


def close(got: Any, wanted: Any, tolerance: float) -> None:
    """Check that |got - wanted| <= tolerance (1 + |wanted|), as `assertAllClose` does."""
    assert got.dtype == wanted.dtype
    wide = (np.asarray(x, np.float32) for x in (got, wanted))
    np.testing.assert_allclose(*wide, rtol=tolerance, atol=tolerance)


def plain(dtype: str, groups: int, vmap: bool) -> None:
    """Check output and gradients with grouped heads, and with vmap over the batch."""
    q_shape, k_shape = (2, 128, 4, 32), (2, 128, 4 // groups, 32)
    q, k, v, dout = normal(q_shape, k_shape, k_shape, q_shape, dtype=dtype)
    function = jax.vmap(dot_product_attention) if vmap else dot_product_attention
    out, pull_back = jax.vjp(function, q, k, v)
    wanted, pull_back_wanted = jax.vjp(jax.nn.dot_product_attention, q, k, v)
    for x, y in zip((out, *pull_back(dout)), (wanted, *pull_back_wanted(dout)), strict=True):
        close(x, y, 0.01)


def masked(mode: tuple[str, ...]) -> None:
    """Check masks, bias, lengths and a window, and their combinations."""
    shape = (2, 128, 4, 32)
    q, k, v, dout, bias = normal(*[shape] * 4, (1, 4, 128, 128), dtype="bfloat16")
    told: dict[str, Any] = {"is_causal": "causal" in mode}
    if "padding" in mode:
        told["query_seq_lengths"] = jnp.array([64, 32], jnp.int32)
        told["key_value_seq_lengths"] = jnp.array([32, 64], jnp.int32)
    if "custom" in mode:
        told["mask"] = jnp.tril(jnp.ones((1, 1, 128, 128), bool))
    if "sliding_window" in mode:
        told["local_window_size"] = (3, 2)
    operands = [q, k, v, *([bias] if "bias" in mode else [])]
    out, pull_back = jax.vjp(lambda *x: dot_product_attention(*x, **told), *operands)
    wanted, pull_back_wanted = jax.vjp(
        lambda *x: jax.nn.dot_product_attention(*x, **told), *operands
    )
    close(out, wanted, 0.01)
    for x, y in zip(pull_back(dout), pull_back_wanted(dout), strict=True):
        close(x, y, 0.02)


def bias_gradient(batch: int, vmap: bool) -> None:
    """Check a bias per batch entry; JAX's cuDNN has its gradient only for one entry."""
    x, bias = normal((batch, 128, 4, 32), (batch, 4, 128, 128), dtype="bfloat16")
    mask = jnp.ones((1, 1, 128), bool)

    def attention(function: Any) -> Any:
        def one(x: Any, bias: Any, mask: Any) -> Any:
            return function(x, x, x, bias=bias, mask=mask)

        return jax.jit(jax.vmap(one, (0, 0, None)) if vmap else one)

    ours, theirs = attention(dot_product_attention), attention(jax.nn.dot_product_attention)
    close(ours(x, bias, mask), theirs(x, bias, mask), 0.01)
    (got, wanted) = (jax.vjp(f, x, bias, mask)[1](x)[1] for f in (ours, theirs))
    close(got, wanted, 0.1)
