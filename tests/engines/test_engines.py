"""Every engine and algorithm, forward and backward, judged by the error of plain attention."""

import numpy as np
import pytest
from helpers import ENGINES, JUDGED, KINDS, Judge, run_both, tensors, with_lse_gradient

import flashsim
from flashsim import BlockMask, Tiling, UnsupportedError

pytestmark = pytest.mark.promise("twice plain attention's error")

SIZES = [
    *((n, n) for n in (1, 2, 3, 17, 63, 64, 65, 127, 128)),
    *((113, 203), (203, 113), (1, 512), (512, 1)),
]


def check(x, target, algorithm, **options):
    result, gradients, got = run_both(x, target, algorithm, **options)
    for name, array in got.items():
        assert not np.isnan(array.astype(np.float64)).any(), name
    Judge.of(x, result.problem).check(got)
    return result, gradients


@pytest.mark.parametrize("dtype", JUDGED)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("target", "algorithm"), ENGINES)
def test_kinds_and_types(target, algorithm, kind, dtype):
    x = tensors(113, 203, 16, kind=kind, dtype=dtype)
    result, gradients = check(x, target, algorithm, tiling=Tiling(32, 48))
    assert {a.dtype for a in (result.out, gradients.dq, gradients.dk, gradients.dv)} == {x.q.dtype}
    assert result.lse.dtype == ("float64" if dtype == "float64" else "float32")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n_q", "n_kv"), SIZES)
@pytest.mark.parametrize(("target", "algorithm"), ENGINES)
def test_sizes(target, algorithm, n_q, n_kv, kind):
    tiling = Tiling(64, 64) if n_q == n_kv else Tiling(32, 48)
    check(tensors(n_q, n_kv, 8, kind=kind, heads=1), target, algorithm, tiling=tiling)


@pytest.mark.parametrize(("n_q", "n_kv"), SIZES)
@pytest.mark.parametrize(("target", "algorithm"), ENGINES)
def test_sizes_causal_in_bfloat16(target, algorithm, n_q, n_kv):
    x = tensors(n_q, n_kv, 8, dtype="bfloat16", heads=1)
    check(x, target, algorithm, tiling=Tiling(64, 64), causal=True)


def third(q, k):
    return (q + k) % 3 == 0


GRID = np.random.default_rng(5).random((4, 7)) < 0.5  # cells of 30 x 30 over 113 x 203
ALIGNED = np.random.default_rng(6).random((4, 5)) < 0.5  # one value a tile of 32 x 48

#: name: (what the tensors are like, options of `run`)
OPTION_CASES = {
    "gqa": ({"heads": 4, "kv_heads": 2, "batch": 2}, {}),
    "mqa-causal": ({"heads": 3, "kv_heads": 1}, {"causal": True}),
    "wide-values": ({"dv": 24}, {}),
    "narrow-values": ({"dv": 5}, {"causal": True}),
    "causal": ({}, {"causal": True}),
    "window": ({}, {"window": (20, 5)}),
    "window-left": ({}, {"window": (30, -1)}),
    "window-right": ({}, {"window": (-1, 7)}),
    "window-causal": ({}, {"window": (25, 9), "causal": True}),
    "window-gqa": ({"heads": 4, "kv_heads": 2}, {"window": (20, 5)}),
    "softcap": ({}, {"softcap": 1.5}),
    "scale": ({}, {"scale": -0.4}),
    "varlen": ({}, {"cu_seqlens_q": (0, 0, 40, 60, 113), "cu_seqlens_k": (0, 20, 100, 100, 203)}),
    "varlen-bias": (
        {"bias": (1, 1), "heads": 2, "kv_heads": 1},
        {"cu_seqlens_q": (0, 40, 40, 113), "cu_seqlens_k": (0, 0, 20, 203), "softcap": 1.5},
    ),
    "varlen-causal": (
        {"heads": 2, "kv_heads": 1},
        {"cu_seqlens_q": (0, 50, 113), "cu_seqlens_k": (0, 20, 203), "causal": True},
    ),
    "bias": ({"bias": (1, 2)}, {}),
    "bias-shared": ({"bias": (1, 1), "heads": 4, "kv_heads": 2, "batch": 2}, {}),
    "bias-per-batch": ({"bias": (2, 1), "batch": 2}, {"causal": True}),
    "bias-softcap": ({"bias": (1, 2), "heads": 2, "kv_heads": 1}, {"softcap": 1.5}),
    "block-mask": ({}, {"block_mask": BlockMask(GRID, 30, 30)}),
    "block-mask-of-tiles": ({}, {"block_mask": ALIGNED, "causal": True}),
    "mask": ({}, {"mask": third}),
    "mask-causal-descending": ({}, {"mask": third, "causal": True, "key_order": "descending"}),
    "descending": ({"heads": 2, "kv_heads": 1}, {"key_order": "descending", "causal": True}),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", OPTION_CASES)
@pytest.mark.parametrize(("target", "algorithm"), ENGINES)
def test_options(target, algorithm, case, dtype):
    shape, options = OPTION_CASES[case]
    x = tensors(113, 203, 16, dtype=dtype, **shape)
    options = {"tiling": Tiling(32, 48), **options}
    if case in target.refuses:
        with pytest.raises(UnsupportedError):
            run_both(x, target, algorithm, **options)
    else:
        check(x, target, algorithm, **options)


@pytest.mark.parametrize("dtype", JUDGED)
@pytest.mark.parametrize("case", ["gqa", "varlen-bias", "bias-softcap", "mask-causal-descending"])
@pytest.mark.parametrize(("target", "algorithm"), ENGINES)
def test_a_gradient_of_the_lse(target, algorithm, case, dtype):
    shape, options = OPTION_CASES[case]
    x = tensors(113, 203, 16, dtype=dtype, **shape)
    with_lse_gradient(x)
    check(x, target, algorithm, tiling=Tiling(32, 48), **options)


@pytest.mark.parametrize(("target", "algorithm"), ENGINES)
def test_a_gradient_of_the_lse_alone(target, algorithm):
    """The loss sum(lse * dlse): out has no part in it, and dv is zero."""
    x = tensors(1, 203, 16, heads=4, kv_heads=2)
    x.dout[...] = 0
    with_lse_gradient(x)
    _, gradients = check(x, target, algorithm, tiling=Tiling(1, 48))
    assert not gradients.dv.any()


@pytest.mark.parametrize("d", [1, 3, 100, 256, 512])
@pytest.mark.parametrize(("target", "algorithm"), ENGINES)
def test_head_dim(target, algorithm, d):
    check(tensors(20, 17, d), target, algorithm, tiling=Tiling(8, 8))


@pytest.mark.parametrize(
    "tiling", [Tiling(1, 1), Tiling(1, 7), Tiling(7, 1), Tiling(128, 128), None], ids=str
)
@pytest.mark.parametrize(("target", "algorithm"), ENGINES)
def test_odd_tilings(target, algorithm, tiling):
    check(tensors(11, 13, 4), target, algorithm, tiling=tiling, causal=True)


@pytest.mark.parametrize("ndim", [2, 3, 4])
@pytest.mark.parametrize(("target", "algorithm"), ENGINES)
def test_leading_axes_may_be_left_out(target, algorithm, ndim):
    x = tensors(9, 10, 4, heads=1, bias=(1, 1))
    full = run_both(x, target, algorithm)[2]
    for name in ("q", "k", "v", "dout", "bias"):
        setattr(x, name, getattr(x, name).reshape(getattr(x, name).shape[4 - ndim :]))
    for name, array in run_both(x, target, algorithm)[2].items():
        assert array.ndim == (ndim - 1 if name == "lse" else ndim), name
        np.testing.assert_array_equal(array, full[name].reshape(array.shape))


@pytest.mark.parametrize(("target", "algorithm"), ENGINES)
def test_rows_without_keys(target, algorithm):
    """Bottom-right alignment leaves the first n_q - n_kv queries nothing to see."""
    x = tensors(50, 20, 8)
    result, gradients, _ = run_both(x, target, algorithm, causal=True, tiling=Tiling(16, 16))
    np.testing.assert_array_equal(result.out[:, :, :30], 0)
    np.testing.assert_array_equal(result.lse[:, :, :30], -np.inf)
    np.testing.assert_array_equal(gradients.dq[:, :, :30], 0)
    assert np.isfinite(result.lse[:, :, 30:]).all()
    assert np.abs(gradients.dq[:, :, 31:]).min() > 0


@pytest.mark.parametrize(("target", "algorithm"), ENGINES)
def test_keys_that_nobody_sees_have_no_gradient(target, algorithm):
    x = tensors(20, 60, 8)
    _, gradients, _ = run_both(x, target, algorithm, window=(3, 0), tiling=Tiling(16, 16))
    for grad in (gradients.dk, gradients.dv):
        np.testing.assert_array_equal(grad[:, :, : 60 - 20 - 3], 0)
        assert np.abs(grad[:, :, 60 - 20 - 3 :]).min() > 0


@pytest.mark.parametrize(
    ("backend", "algorithm"),
    [
        ("simulator", "flash2"),
        ("simulator", "flash1"),
        ("simulator", "standard"),
        ("numba", "flash2"),
    ],
)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_p_is_rounded_to_the_input_type(backend, algorithm, dtype):
    """CPU engines emulate a GPU: P in the input's type meets V, sums stay in float32.

    Scores are s, 0, 0 and only key 1 has values, so a row is w v / l with w = exp(-s): every
    rounding is known. (Standard attention divides before it rounds P for HBM.)
    """
    x = tensors(1, 3, 1, dv=64, dtype=dtype, heads=1)
    x.q[:], x.k[:] = 1, 0
    x.k[..., 0, 0] = 0.7
    x.v[..., [0, 2], :] = 0
    value, narrow = x.v[0, 0, 1].astype(np.float32), x.q.dtype
    weight = np.exp(-x.k.max().astype(np.float32) * np.float32([0, 1, 1]))
    if algorithm == "standard":
        rounded = (weight / weight.sum()).astype(narrow)[1].astype(np.float32) * value
    else:
        rounded = weight.astype(narrow)[1].astype(np.float32) * value / weight.sum()
    expected, wide = rounded.astype(narrow), (weight[1] * value / weight.sum()).astype(narrow)
    assert (expected != wide).any(), "these inputs cannot tell"
    out = flashsim.run(x.q, x.k, x.v, scale=1.0, algorithm=algorithm, backend=backend).out[0, 0, 0]
    np.testing.assert_array_equal(out, expected)


EVERY = ("q", "k", "v", "bias", "out", "lse")
#: What a backward pass reads where it lies: docs/reference/model.md.
READ = {
    "standard": ("q", "k", "v"),
    "flash1": ("q", "k", "v", "bias", "out"),
    "flash2": EVERY,
    "flash2-fused": EVERY,
    "flash2-fused-first": EVERY,
}


@pytest.mark.parametrize("changed", EVERY)
@pytest.mark.parametrize(("target", "algorithm"), [x for x in ENGINES if not x.marks])
def test_a_backward_pass_reads_what_the_model_says_where_it_lies(target, algorithm, changed):
    def gradients(value):
        rng = np.random.default_rng(0)
        arrays = {name: rng.standard_normal((20, 8), np.float32) for name in ("q", "k", "v")}
        arrays["bias"] = rng.standard_normal((20, 20), np.float32)
        dout = rng.standard_normal((20, 8), np.float32)
        result = flashsim.run(**arrays, algorithm=algorithm, backend=target.backend)
        arrays |= {"out": result.out, "lse": result.lse}
        if value is not None:
            arrays[changed][...] = value
        made = result.backward(dout)
        return made.dq, made.dk, made.dv, made.dbias

    same = [np.array_equal(a, b) for a, b in zip(gradients(None), gradients(0.5), strict=True)]
    assert all(same) == (changed not in READ[algorithm])
    if changed in ("v", "out"):
        assert same[2]  # dv = P^T dO
