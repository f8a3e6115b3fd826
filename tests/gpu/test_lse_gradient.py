"""The LSE's gradient on a GPU: every family of kernels against float64, and the bytes of it."""

from dataclasses import replace

import numpy as np
import pytest
from cupy_checks import (  # noqa: F401
    FEATURES,
    HOPPER,
    ON_HOPPER,
    ONCE,
    PORTABLE,
    PYTHON_HOPPER,
    check,
    check_bits,
    check_counts,
    check_timelines,
    cupy,
    families,
    gradients,
    make,
    on_any_gpu,
    on_gpu,
    poisoned,
    run,
)

import flashsim
from flashsim import BlockMask, Problem
from flashsim.errors import DTypeError
from flashsim.problem import oracle

pytestmark = pytest.mark.promise("three counts equal", "twice plain attention's error")

#: Keys in two parts.
CUT = slice(0, 90), slice(90, None)
NAMES = ("gqa", "varlen", "no keys", "softcap", "blocks")
#: Row tiles have one visit: Hopper's kernels store dQ at once.
SHORT = [
    Problem(100, 100, 64, batch=2, heads=4, kv_heads=2, dtype="bfloat16", causal=True, dlse=True),
    Problem(300, 120, 128, heads=2, dtype="float16", dlse=True),
    Problem(150, 128, 32, 20, heads=2, dtype="bfloat16", window=(60, 10), dlse=True),
]


@pytest.mark.parametrize("family", families())
@pytest.mark.parametrize("head_dim", [64, 111, 128])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_and_counted_bytes(name, head_dim, family):
    p = Problem(head_dim=head_dim, dtype="bfloat16", dlse=True, **FEATURES[name])
    if name == "blocks" and family in (HOPPER, PYTHON_HOPPER):  # whose tiles have up to 128 rows
        p = replace(p, n_q=384, n_kv=512, block_mask=BlockMask(p.block_mask.grid, 128, 128))
    check(p, family)
    check_counts(p, family)


@pytest.mark.parametrize("family", families("portable", "hopper"))
@pytest.mark.parametrize("head_dim", [192, 256])
def test_wide_rows(head_dim, family):
    p = Problem(head_dim=head_dim, dtype="float16", dlse=True, **FEATURES["gqa"])
    check(p, family)
    check_counts(p, family)


@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("name", NAMES)
@on_any_gpu
def test_float32(name, tf32):
    p = Problem(head_dim=37, head_dim_v=61, dtype="float32", dlse=True, **FEATURES[name])
    check(p, PORTABLE, tf32=tf32)
    check_counts(p, PORTABLE, allow_tf32=tf32)


@pytest.mark.parametrize("family", families("hopper"))
@pytest.mark.parametrize("problem", SHORT)
def test_one_visit(problem, family):
    assert ONCE in family.forms_of(problem)
    check(problem, family)
    check_counts(problem, family)


@pytest.mark.parametrize("family", families("hopper"))
def test_one_visit_is_chosen_with_a_gradient_of_the_lse_as_without(family):
    p = Problem(128, 128, 64, batch=8, heads=16, dtype="bfloat16")
    x = make(replace(p, dlse=True))
    result = run(p, x, family, trace=True)
    traces = [result.backward(x["dout"], dlse=dlse, deterministic=True).trace
              for dlse in (None, x["dlse"])]  # fmt: skip
    assert [trace.algorithm for trace in traces] == [ONCE, ONCE]
    assert traces[1].bytes("load", "dL") == 8 * 16 * 128 * 4
    assert traces[0].bytes("load", "dL") == 0


@pytest.mark.parametrize("family", families("portable", "hopper", "python", "python-hopper"))
@pytest.mark.promise("deterministic")
def test_bits_are_the_same_in_every_run(family):
    p = Problem(300, 400, 64, heads=3, dtype="float16", causal=True, dlse=True)
    check_bits(p, family, runs=20)


@pytest.mark.parametrize("family", families("hopper"))
@pytest.mark.promise("deterministic")
def test_bits_of_one_visit_are_the_same_in_every_run(family):
    check_bits(SHORT[1], family, runs=50, forms=(ONCE,))


@pytest.mark.parametrize("family", families("portable", "hopper"))
def test_timelines(family):
    check_timelines(Problem(head_dim=64, dtype="bfloat16", dlse=True, **FEATURES["gqa"]), family)


@pytest.mark.parametrize("family", families("portable", "hopper", "python"))
def test_where_it_lies_does_not_matter(family):
    """Strided, on the GPU or from NumPy; by `run`'s result, or from what was kept."""
    p = Problem(head_dim=64, dtype="float16", dlse=True, **FEATURES["gqa"])
    host = make(p)
    x = on_gpu(host)
    result = run(p, x, family)
    expected = gradients(result, x["dout"], True, dlse=x["dlse"])
    wide = cupy.stack([x["dlse"], x["dlse"]], axis=2)[:, :, 0]  # heads lie twice as far apart
    assert not wide.flags.c_contiguous
    how = {"backend": family.backend, "kernel": family.kernel, "causal": True}
    given = x["q"], x["k"], x["v"], result.out, result.lse, x["dout"]
    here = run(p, host, family)
    found = [
        gradients(result, x["dout"], True, dlse=wide),
        flashsim.backward(*given, dlse=x["dlse"], deterministic=True, **how),
        here.backward(host["dout"], dlse=host["dlse"], deterministic=True),
    ]
    for got in found:
        for name in ("dq", "dk", "dv"):
            mine, theirs = (cupy.asnumpy(getattr(y, name)) for y in (got, expected))
            np.testing.assert_array_equal(mine, theirs)
    with pytest.raises(DTypeError, match="dlse must be on the same device as q, k and v"):
        result.backward(x["dout"], dlse=host["dlse"])


@on_any_gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_torch_merges_parts_of_the_keys(compiled):
    """Two parts merged by their LSE have the whole's gradients, as float64 has them."""
    torch = pytest.importorskip("torch")
    from flashsim.torch import attention

    torch.manual_seed(0)
    shapes = (2, 4, 200, 64), (2, 2, 230, 64), (2, 2, 230, 64)
    like = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
    inputs = [torch.randn(shape, **like) for shape in shapes]

    def loss(q, k, v):
        parts = [attention(q, k[:, :, at], v[:, :, at], return_lse=True) for at in CUT]
        (out, lse), (other, other_lse) = parts
        both = torch.logaddexp(lse, other_lse)
        weights = (lse - both).exp()[..., None], (other_lse - both).exp()[..., None]
        return (out * weights[0] + other * weights[1]).sin().sum() + both.square().sum()

    def plain(q, k, v):
        k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
        s = q @ k.mT / 8
        out = torch.softmax(s, dim=-1) @ v
        return out.sin().sum() + s.logsumexp(-1).square().sum()

    run_it = torch.compile(loss, fullgraph=True, backend="aot_eager") if compiled else loss
    got = torch.autograd.grad(run_it(*inputs), inputs)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    exact = torch.autograd.grad(plain(*wide), wide)
    rough = torch.autograd.grad(plain(*inputs), inputs)
    eps = torch.finfo(torch.bfloat16).eps
    for mine, theirs, true in zip(got, rough, exact, strict=True):
        error, allowed = ((x.double() - true).abs().max() for x in (mine, theirs))
        assert error <= 2 * allowed + 2 * eps * true.abs().max()


@on_any_gpu
def test_jax_has_it_too():
    jax = pytest.importorskip("jax")
    jnp = pytest.importorskip("jax.numpy")
    if jax.default_backend() != "gpu":
        pytest.skip("this JAX has no GPU")
    import flashsim.jax

    p = Problem(head_dim=64, dtype="float16", dlse=True, **FEATURES["gqa"])
    x = make(p)

    def both(q, k, v):
        return flashsim.jax.attention(q, k, v, causal=True, return_lse=True)

    _, pull_back = jax.vjp(jax.jit(both), *(jnp.asarray(x[name]) for name in "qkv"))
    got = pull_back((jnp.asarray(x["dout"]), jnp.asarray(x["dlse"])))
    exact = oracle.gradients(x["q"], x["k"], x["v"], x["dout"], p, dlse=x["dlse"])
    rough = oracle.gradients(x["q"], x["k"], x["v"], x["dout"], p, dlse=x["dlse"], dtype="float16")
    for mine, name in zip(got, ("dq", "dk", "dv"), strict=True):
        size = np.abs(exact[name]).max()
        error, allowed = (
            np.abs(np.asarray(y, np.float64) - exact[name]).max() for y in (mine, rough[name])
        )
        assert error <= 2 * allowed + 2**-10 * size
