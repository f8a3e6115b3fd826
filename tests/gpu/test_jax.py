"""`flashsim.jax` on CUDA: XLA's memory and stream, under jit, grad and vmap."""

from __future__ import annotations

from functools import partial

import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from bridge_cases import plain_in_jax  # noqa: E402
from cupy_checks import MARKS  # noqa: E402

import flashsim.jax  # noqa: E402


def has_gpu():
    try:
        return bool(jax.devices("gpu"))
    except RuntimeError:
        return False


pytestmark = [
    *MARKS,
    pytest.mark.skipif(not has_gpu(), reason="this JAX sees no GPU"),
    pytest.mark.promise("bridges equal their library"),
]


def tensors(*, heads=4, n_q=200, n_kv=230, d=64, dtype=jnp.bfloat16):
    random = np.random.default_rng(0)
    shapes = [(2, heads, n_q, d), (2, 2, n_kv, d), (2, 2, n_kv, d)]
    return [jnp.asarray(random.standard_normal(s), dtype) for s in shapes]


plain = partial(plain_in_jax, causal=True)


def ours(*x):
    return flashsim.jax.attention(*x, causal=True)


def value_and_gradients(function, inputs, dout):
    out, pull_back = jax.vjp(function, *inputs)
    return [out, *pull_back(dout.astype(out.dtype))]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("d", [64, 60])
def test_value_and_gradients(d, jit, dtype):
    """Error <= 2 x plain attention's in the same type + roundings, by a float64 on the CPU."""
    inputs = tensors(d=d, dtype=dtype)
    dout = jnp.asarray(np.random.default_rng(1).standard_normal(inputs[0].shape), dtype)
    run = jax.jit(lambda x, y: value_and_gradients(ours, x, y)) if jit else None
    got = run(inputs, dout) if jit else value_and_gradients(ours, inputs, dout)
    rough = value_and_gradients(plain, inputs, dout)
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        wide = [jnp.asarray(np.asarray(x, "float64")) for x in (*inputs, dout)]
        exact = [np.asarray(x) for x in value_and_gradients(plain, wide[:3], wide[3])]
    eps = float(jnp.finfo(dtype).eps) + 8 * float(jnp.finfo(jnp.float32).eps)
    for mine, theirs, true in zip(got, rough, exact, strict=True):
        error, allowed = (np.abs(np.asarray(x, "float64") - true).max() for x in (mine, theirs))
        assert error <= 2 * allowed + eps * np.abs(true).max()


def test_between_other_work_of_a_compiled_function():
    """It waits for what makes its inputs, and what reads its results waits for it."""
    q, k, v = tensors(n_q=2000, n_kv=2000)
    ones = jnp.ones(1 << 26)

    def digest(x):
        # Of bits, in integers: XLA adds floats in another order where it fuses.
        return jax.lax.bitcast_convert_type(x, jnp.int16).astype(jnp.int32).sum(axis=2)

    @jax.jit
    def busy(q, k, v):
        # 1, and late; no product, for which XLA compiles kernels by the dozen to choose one.
        late = jax.lax.fori_loop(0, 20, lambda _, x: jnp.minimum(2 * x, 1), ones).max()
        for _ in range(4):
            q = ours(q * late.astype(q.dtype), k, v)
        return digest(q)

    x = q
    for _ in range(4):
        x = jax.block_until_ready(ours(x, k, v))
    for _ in range(10):
        np.testing.assert_array_equal(busy(q, k, v), digest(x))


def test_maps_fold_into_the_batch():
    q, k, v = tensors()
    many = jnp.stack([q, -q, 2 * q])
    got = jax.jit(jax.vmap(ours, (0, None, None)))(many, k, v)
    for x, single in zip(got, many, strict=True):
        np.testing.assert_array_equal(x, ours(single, k, v))


def test_called_as_jax_nn_is_and_offsets_that_are_traced():
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in tensors(n_kv=200))
    told = {"is_causal": True, "local_window_size": (50, 0)}
    got = flashsim.jax.dot_product_attention(q, k, v, **told)
    expected = jax.nn.dot_product_attention(q, k, v, **told)
    np.testing.assert_allclose(*(x.astype("float32") for x in (got, expected)), atol=2e-2)
    q, k, v = (x[:1] for x in tensors())
    cuts = [jnp.asarray(x) for x in ((0, 70, 200), (0, 90, 230))]
    packed = jax.jit(
        lambda *x: flashsim.jax.attention(*x[:3], cu_seqlens_q=x[3], cu_seqlens_k=x[4], causal=True)
    )(q, k, v, *cuts)
    np.testing.assert_array_equal(packed[:, :, :70], ours(q[:, :, :70], k[:, :, :90], v[:, :, :90]))


def test_what_is_refused():
    q, k, v = tensors()
    with pytest.raises(jax.errors.JaxRuntimeError, match="takes arrays in the CPU's memory"):
        jax.block_until_ready(flashsim.jax.attention(q, k, v, backend="numba"))


@pytest.mark.parametrize("n_q", [1, 5, 200])
def test_calls_again_run_from_xlas_memory_to_xlas_memory(n_q):
    """Few queries take the decode kernels; the first call and later ones give the same bits."""
    q, k, v = tensors(n_q=n_q, heads=8)
    q, k, v = q, k[:, :2], v[:, :2]
    out, lse = flashsim.jax.attention(q, k, v, causal=True, return_lse=True)
    again = flashsim.jax.attention(q, k, v, causal=True, return_lse=True)
    compiled = jax.jit(lambda *x: flashsim.jax.attention(*x, causal=True, return_lse=True))
    for other in (again, compiled(q, k, v), compiled(q, k, v)):
        np.testing.assert_array_equal(np.asarray(out, np.float32), np.asarray(other[0], np.float32))
        np.testing.assert_array_equal(lse, other[1])
    rough, exact = plain(q, k, v), plain(*(x.astype(jnp.float32) for x in (q, k, v)))
    error, allowed = (float(abs(x.astype(jnp.float32) - exact).max()) for x in (out, rough))
    assert error <= 2 * allowed + 2**-8 * float(abs(exact).max())


def written_out(q, k, v, bias, sinks=None):
    # XLA multiplies float32 on a GPU in TF32 otherwise: an error of 3e-4 here.
    einsum = partial(jnp.einsum, precision="highest")
    s = einsum("bhqd,bhkd->bhqk", q, jnp.repeat(k, q.shape[1] // k.shape[1], 1)) * 64**-0.5
    s = (s + bias).astype(q.dtype)
    if sinks is not None:
        more = jnp.broadcast_to(sinks.astype(s.dtype)[:, None, None], (*s.shape[:3], 1))
        s = jnp.concatenate([s, more], axis=-1)
    p = jax.nn.softmax(s, axis=-1)[..., : bias.shape[-1]]
    return einsum("bhqk,bhkd->bhqd", p, jnp.repeat(v, q.shape[1] // v.shape[1], 1))


def check(function, reference, inputs):
    """Values and gradients are those of plain attention in float32, but for a few roundings."""
    dout = jnp.asarray(np.random.default_rng(3).standard_normal(inputs[0].shape), "float32")
    mine = lambda *x: value_and_gradients(function, x, dout)  # noqa: E731
    exact = value_and_gradients(reference, [x.astype("float32") for x in inputs], dout)
    near = max(4 * float(jnp.finfo(inputs[0].dtype).eps), 1e-4)
    for how in (mine, jax.jit(mine)):
        for x, true in zip(how(*inputs), exact, strict=True):
            error = np.abs(np.asarray(x, "float32") - np.asarray(true)).max()
            assert error <= near * (1 + np.abs(true).max())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("lead", [(1, 1), (2, 4)], ids=str)
def test_a_bias_and_sinks(lead, dtype):
    q, k, v = (x.astype(dtype) for x in tensors())
    random = np.random.default_rng(4)
    bias = jnp.asarray(random.standard_normal((*lead, q.shape[2], k.shape[2])), dtype)
    sinks = jnp.asarray(random.standard_normal(q.shape[1]), dtype)

    def ours(q, k, v, bias, sinks):
        return flashsim.jax.attention(q, k, v, bias=bias, sinks=sinks)

    check(ours, written_out, (q, k, v, bias, sinks))


def test_a_mask_as_jax_nn_has_it():
    q, k, v = tensors()
    mask = jnp.asarray(np.random.default_rng(5).random((2, 1, q.shape[2], k.shape[2])) < 0.7)
    told = {"mask": mask, "key_value_seq_lengths": jnp.asarray([k.shape[2], 100])}
    x = [jnp.swapaxes(x, 1, 2) for x in (q, k, v)]
    got = flashsim.jax.dot_product_attention(*x, **told)
    expected = jax.nn.dot_product_attention(*x, **told)
    np.testing.assert_allclose(*(x.astype("float32") for x in (got, expected)), atol=2e-2)


def test_functions_that_capture_traced_arrays():
    q, k, v = tensors()
    n_q, n_kv = q.shape[2], k.shape[2]
    slopes = jnp.linspace(0.01, 0.05, q.shape[1])
    marks = jnp.asarray(np.sort(np.random.default_rng(6).integers(0, 4, max(n_q, n_kv))))
    i, j = jnp.arange(n_q)[:, None], jnp.arange(n_kv)

    def ours(q, k, v, slopes):
        score = lambda s, b, h, q, k: s - slopes[h] * abs(q - k)  # noqa: E731
        mask = lambda b, h, q, k: (marks[q] == marks[k]) | (k < 20)  # noqa: E731
        return flashsim.jax.attention(q, k, v, score_mod=score, mask_mod=mask)

    def plain(q, k, v, slopes):
        bias = -slopes[:, None, None] * abs(i - j)
        return written_out(q, k, v, jnp.where((marks[i] == marks[j]) | (j < 20), bias, -jnp.inf))

    check(ours, plain, (q, k, v, slopes))
