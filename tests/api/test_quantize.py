"""FP8 inputs: scales, the Hadamard rotation, and what attention makes of them."""

import ml_dtypes
import numpy as np
import pytest
from helpers import tensors
from refusals import refuses

import flashsim
from flashsim import OptionError, ShapeError, Tiling
from flashsim.problem.checks import FP8
from flashsim.problem.oracle import attention, gradients
from flashsim.problem.problem import Problem, numpy_dtype
from flashsim.problem.rotation import hadamard, random_signs, rotated, unrotated

pytestmark = pytest.mark.promise("twice plain attention's error")

GRANULARITIES = ("tensor", "head", "block")
LARGEST = {"float8_e4m3fn": 448, "float8_e5m2": 57344}


def with_outliers(*shape, seed=0):
    rng = np.random.default_rng(seed)
    large = 10 * rng.standard_normal(shape) * (rng.random(shape) < 0.001)
    return (rng.standard_normal(shape) + large).astype(np.float32)


def inputs(n_q=96, n_kv=160, d=32):
    shapes = (2, 4, n_q, d), (2, 2, n_kv, d), (2, 2, n_kv, d)
    return [with_outliers(*shape, seed=n) for n, shape in enumerate(shapes)]


def sylvester(d):
    """Hadamard's matrix by its definition: H_2n = [[H_n, H_n], [H_n, -H_n]]."""
    h = np.ones((1, 1))
    while len(h) < d:
        h = np.kron([[1, 1], [1, -1]], h)
    return h


# -- rotation -------------------------------------------------------------------------------------


@pytest.mark.parametrize("d", [1, 2, 64, 256])
def test_the_fast_transform_is_a_product_with_hadamards_matrix(d):
    x = np.random.default_rng(d).standard_normal((3, 5, d))
    np.testing.assert_allclose(hadamard(x), x @ sylvester(d) / np.sqrt(d), atol=1e-14 * d)


def test_rotating_both_leaves_products_and_turns_back():
    q, k = (with_outliers(40, 64, seed=n) for n in (0, 1))
    signs = random_signs(64, 3)
    assert set(signs.tolist()) == {-1.0, 1.0}
    size = np.linalg.norm(q, axis=-1)[:, None] * np.linalg.norm(k, axis=-1)
    apart = np.abs(rotated(q, signs) @ rotated(k, signs).T - q.astype(np.float64) @ k.T)
    # 64 products and twice log2 64 additions, a rounding each
    assert (apart <= 80 * 2.0**-24 * size).all()
    np.testing.assert_allclose(unrotated(rotated(q, signs), signs), q, atol=1e-5)
    assert np.abs(rotated(q, signs)).max() < np.abs(q).max() / 2  # outliers are spread


# -- quantisation ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_the_largest_element_of_what_shares_a_scale_is_the_types_largest(granularity, dtype):
    q, k, v = inputs()
    q[1, 2] = 0  # a head of zeros has scale 1
    x = flashsim.quantize(q, k, v, granularity=granularity, block=(64, 48), dtype=dtype)
    assert x.q.dtype == x.k.dtype == x.v.dtype == numpy_dtype(dtype)
    shapes = {"tensor": ((), ()), "head": ((2, 4), (2, 2)), "block": ((2, 4, 2), (2, 2, 4))}
    assert (x.q_scale.shape, x.k_scale.shape) == shapes[granularity]
    largest, bits = LARGEST[dtype], {"float8_e4m3fn": 3, "float8_e5m2": 2}[dtype]
    halves = slice(64), slice(64, 96)
    groups = {
        "tensor": [(slice(None),)],
        "head": [(b, h) for b in range(2) for h in range(4)],
        "block": [(b, h, rows) for b in range(2) for h in range(4) for rows in halves],
    }[granularity]
    for at in groups:
        most = np.abs(x.q[at].astype(np.float32)).max()
        assert most == (largest if np.any(q[at]) else 0)
    # An element is off by half a unit in its last place, and a subnormal one by half the smallest.
    back = x.dequantized()
    for given, found, scale in zip((q, k, v), back, x.scales, strict=True):
        tiny = float(ml_dtypes.finfo(numpy_dtype(dtype)).smallest_subnormal) * float(scale.max())
        assert (
            np.abs(given - found) <= np.abs(given) * 2.0 ** (-bits - 1) * 1.001 + tiny / 2
        ).all()
    if granularity != "tensor":
        assert x.q_scale[1, 2].max() == 1


@pytest.mark.parametrize("dtype", LARGEST)
@pytest.mark.parametrize("rotate", [None, "hadamard"])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_attention_is_that_of_the_numbers_that_are_meant(granularity, rotate, dtype):
    """One key tile: P is rounded to e4m3, of either type, with 8 more in the exponent; O once."""
    q, k, v = inputs()
    given = {"granularity": granularity, "rotate": rotate, "block": (32, 80), "dtype": dtype}
    x = flashsim.quantize(q, k, v, **given)
    result = flashsim.run(x.q, x.k, x.v, **x.options, tiling=Tiling(32, 160), causal=True)
    assert result.out.dtype == numpy_dtype("bfloat16")
    assert result.lse.dtype == np.float32
    q, k, v = (np.repeat(a, 4 // a.shape[1], 1).astype(np.float64) for a in x.dequantized())
    s = q @ k.mT / np.sqrt(32)
    s[..., np.arange(160) > np.arange(96)[:, None] + 64] = -np.inf
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    e4m3 = (256 * p).astype(np.float32).astype(numpy_dtype("float8_e4m3fn"))
    out = e4m3.astype(np.float64) / 256 @ v / p.sum(axis=-1, keepdims=True)
    lse = s.max(axis=-1) + np.log(p.sum(axis=-1))
    np.testing.assert_allclose(result.lse, lse, rtol=2e-6)
    error = np.abs(result.out.astype(np.float64) - out)
    # A rounding of O; and where float32 and float64 disagree which way P is rounded, one e4m3 step
    # of a weight: rare, so of the mean no more than a tenth of it.
    assert error.mean() <= 2**-9 * np.abs(out).mean() * 1.1
    assert error.max() <= 2**-9 * np.abs(out).max() + 2**-4 * np.abs(v).max()


@pytest.mark.parametrize("algorithm", ["standard", "flash1", "flash2", "flash2-fused"])
def test_errors_and_gradients_are_those_of_the_type(algorithm):
    """P's rounding is the largest: half of 2**-3 of each weight, which add up at random."""
    q, k, v = inputs()
    x = flashsim.quantize(q, k, v, rotate="hadamard")
    result = flashsim.run(x.q, x.k, x.v, **x.options, algorithm=algorithm, tiling=Tiling(32, 48))
    dout = with_outliers(*result.out.shape, seed=9).astype(result.out.dtype)
    grads = result.backward(dout, tiling=Tiling(32, 48))
    meant = x.dequantized()
    problem = Problem(96, 160, 32, batch=2, heads=4, kv_heads=2)
    exact, _ = attention(*meant, problem)
    assert np.abs(result.out.astype(np.float64) - exact).mean() < 2**-5 * np.abs(exact).mean()
    truth = gradients(*meant, dout, problem)
    for name, found in (("dq", grads.dq), ("dk", grads.dk), ("dv", grads.dv)):
        found = found.astype(np.float32)
        if name != "dv":
            found = x.unrotated(found)
        error = np.abs(found - truth[name]).mean()
        assert error < 2**-5 * np.abs(truth[name]).mean(), name


def test_rotation_lowers_the_error_that_outliers_make():
    """arXiv:2407.08608, section 3.3; its table 3 has 2.6 times, at a shape that it does not say."""
    q, k, v = (with_outliers(1, 2, 512, 128, seed=n) for n in range(3))
    exact, _ = attention(q, k, v, Problem(512, head_dim=128, heads=2))
    errors = []
    for rotate in (None, "hadamard"):
        x = flashsim.quantize(q, k, v, granularity="tensor", rotate=rotate)
        out = flashsim.run(x.q, x.k, x.v, **x.options, tiling=Tiling(128, 128)).out
        errors.append(np.sqrt(((out.astype(np.float64) - exact) ** 2).mean()))
    assert errors[1] < 0.8 * errors[0]


def test_inputs_without_scales_stand_for_themselves():
    x = tensors(40, 40, 16, dtype="float8_e4m3fn")
    one = np.float32(1).reshape(())
    plain = flashsim.run(x.q, x.k, x.v, scales="unscaled")
    scaled = flashsim.run(x.q, x.k, x.v, scales=(one, one, one))
    np.testing.assert_array_equal(plain.out, scaled.out)
    decoded = flashsim.run(x.q, x.k, x.v, algorithm="flash-decode", splits=2, scales="unscaled")
    np.testing.assert_allclose(decoded.lse, plain.lse, rtol=1e-6)


def test_numbers_are_scales_of_whole_tensors():
    x = flashsim.quantize(*inputs(), granularity="tensor")
    expected = flashsim.run(x.q, x.k, x.v, scales=x.scales)
    numbers = tuple(float(one) for one in x.scales)
    for scales in (numbers, [*map(np.float64, numbers)], (*numbers[:2], x.v_scale)):
        result = flashsim.run(x.q, x.k, x.v, scales=scales)
        np.testing.assert_array_equal(result.out, expected.out)
        assert result.problem.scales == "tensor"
    flat = [a[0, 0] for a in (x.q, x.k, x.v)]
    got = flashsim.run(*flat, scales=numbers, causal=True)
    want = flashsim.run(x.q[:, :1], x.k[:, :1], x.v[:, :1], scales=numbers, causal=True)
    np.testing.assert_array_equal(got.out, want.out[0, 0])
    two = flashsim.run(x.q, x.k, x.v, scales=(2, 1, 1)).lse
    np.testing.assert_array_equal(two, flashsim.run(x.q, x.k, x.v, scales=(2.0, 1.0, 1.0)).lse)


@pytest.mark.parametrize("algorithm", ["flash2", "standard", "flash-decode"])
def test_fp8_says_what_its_elements_stand_for(algorithm):
    """Without their scales, arrays of `quantize` would be taken for other numbers, silently."""
    x = flashsim.quantize(*inputs())
    text = r"q, k and v are float8_e4m3fn, .*run\(x.q, .*x.options\), or scales='unscaled'"
    with pytest.raises(OptionError, match=text):
        flashsim.run(x.q, x.k, x.v, algorithm=algorithm)
    with pytest.raises(OptionError, match="FP8 inputs need scales"):
        flashsim.run(x.q, x.k, x.v, algorithm=algorithm, scales=None)
    with pytest.raises(OptionError, match="FP8 inputs need scales"):
        flashsim.compare(x.q, x.k, x.v, algorithms=[algorithm])
    r = flashsim.run(x.q, x.k, x.v, scales="unscaled")
    with pytest.raises(OptionError, match="FP8 inputs need scales"):
        flashsim.backward(x.q, x.k, x.v, r.out, r.lse, np.zeros_like(r.out))
    g = flashsim.backward(x.q, x.k, x.v, r.out, r.lse, r.out, scales="unscaled")
    np.testing.assert_array_equal(g.dv, r.backward(r.out).dv)


def test_fewer_axes_have_fewer_in_their_scales():
    q, k, v = (a[0, 0] for a in inputs())
    x = flashsim.quantize(q, k, v, granularity="block", block=(32, 40))
    assert x.q_scale.shape == (3,)
    assert x.k_scale.shape == (4,)
    tiling = Tiling(32, 40)
    result = flashsim.run(x.q, x.k, x.v, scales=x.scales, tiling=tiling)  # a tile is a block
    whole = flashsim.run(*(a[None] for a in (x.q, x.k, x.v)), **_lead(x.options), tiling=tiling)
    np.testing.assert_array_equal(result.out, whole.out[0])


def _lead(options):
    return {**options, "scales": [one[None] for one in options["scales"]]}


# -- what is refused ------------------------------------------------------------------------------


def test_what_is_too_small_for_a_scale_is_zero_and_no_nan():
    tiny = np.zeros((1, 2, 64, 32), np.float32)
    tiny[:, 0, :, 0] = 1e-44  # / 448 is less than the least float32 above 0
    for granularity in GRANULARITIES:
        x = flashsim.quantize(tiny, tiny, tiny, granularity=granularity)
        assert (x.k_scale == 1).all()
        assert not x.k.astype(np.float32).any()


PLAIN = inputs()
X = flashsim.quantize(*PLAIN)
BLOCKS = flashsim.quantize(*PLAIN, granularity="block", block=(32, 48))
FP8_PROBLEM = {"n_q": 256, "dtype": "float8_e4m3fn"}
PACKED = {"cu_seqlens_q": (0, 100, 256), "cu_seqlens_k": (0, 100, 256)}


def run(**options):
    return flashsim.run(X.q, X.k, X.v, **options)


def run_blocks(**options):
    return flashsim.run(BLOCKS.q, BLOCKS.k, BLOCKS.v, scales=BLOCKS.scales, **options)


test_what_cannot_be_quantised_or_scaled = refuses(r"""
quantize(*inputs(d=24), rotate="hadamard")
    -> ShapeError: power of two, got 24; pad q and k with zeros to head_dim 32
quantize(*PLAIN[:2], np.full((2, 2, 160, 32), np.inf, np.float32))
    -> OptionError: v contains NaN or infinity
quantize(*PLAIN, granularity="row") -> OptionError: unknown granularity 'row'
quantize(*PLAIN, dtype="float16") -> OptionError: unknown FP8 dtype 'float16'
quantize(*PLAIN, block=64)
    -> ShapeError: block= must be a pair (query rows, key rows), got 64
quantize(X.q, X.k, X.v) -> DTypeError: are float8_e4m3fn already
flashsim.run(*PLAIN, scales=X.scales) -> OptionError: scales= works only with FP8 inputs
flashsim.run(*PLAIN, scales="unscaled")
    -> OptionError: 'unscaled' is for FP8 inputs only, but q, k and v are float32
run(scales=X.q_scale) -> DTypeError: scales= must be 'unscaled' or three arrays
run(scales="none") -> DTypeError: for q, k and v, got 'none'
run(scales=(X.q_scale, X.k_scale, X.v_scale[0])) -> ShapeError: must all have shape ()
run(scales=(X.k_scale, X.k_scale, X.v_scale))
    -> ShapeError: scale of q must have shape (2, 4), got (2, 2)
run(scales=(X.q_scale, X.k_scale.astype(float), X.v_scale))
    -> DTypeError: scale of k must be a float32 array, got float64
run(scales=(X.q_scale, X.k_scale, -X.v_scale))
    -> OptionError: scale of v must be positive and finite
run(scales=(1.0, 0.0, 1.0)) -> OptionError: positive and finite
run(scales=(1.0, 1e300, 1.0)) -> OptionError: positive and finite
run(scales=(1.0, True, 1.0)) -> DTypeError: got bool
run(scales=X.scales, scale_block=(64, 64)) -> OptionError: these scales are one per head
run(scale_block=(64, 64)) -> OptionError: so it needs scales
run_blocks() -> OptionError: need the size of a block; pass scale_block=
run_blocks(scale_block=(32, 48), tiling=Tiling(32, 64))
    -> TilingError: tiles would split the scale blocks of (32, 48) query and key rows
run(backend="numba") -> UnsupportedError: backend 'numba' does not support float8_e4m3fn
run(scales=X.scales, algorithm="flash-decode")
    -> UnsupportedError: does not support scales of FP8 inputs
Problem(**FP8_PROBLEM, scales=3) -> OptionError: scale
Problem(**FP8_PROBLEM, scales="row") -> OptionError: scale
Problem(**FP8_PROBLEM, scales=(8, 0)) -> ShapeError: scale
Problem(**FP8_PROBLEM, scales=(8, 8), **PACKED) -> UnsupportedError: use scales='head'
count(Problem(**FP8_PROBLEM, scales="head"), level="dram") -> UnsupportedError:
flashsim.predict.predict(Problem(**FP8_PROBLEM, head_dim=32)) -> UnsupportedError:
flashsim.ladder.climb(64, 64, 16, dtype="float8_e4m3fn") -> UnsupportedError:
flashsim.distributed.Group(Problem(**FP8_PROBLEM), 4) -> UnsupportedError:
simulate(print, X.q, X.k, X.v) -> UnsupportedError:
""")


def test_a_tiling_is_chosen_that_keeps_the_blocks_of_scales():
    chosen = run_blocks(scale_block=(32, 48)).tiling
    assert chosen.keeps_scales(Problem(96, 160, dtype="float8_e4m3fn", scales=(32, 48)))


def test_bytes_of_fp8_without_scales_are_counted():
    problem = Problem(256, head_dim=32, dtype="float8_e4m3fn")
    assert flashsim.count(problem, level="dram").bytes("read", "Q") == 256 * 32


def test_on_a_gpu_axes_are_those_given(monkeypatch):
    """The kernel's part is done by NumPy's here."""
    pytest.importorskip("cupy")
    from flashsim.api import dispatch
    from flashsim.backends.cupy_gpu import quantize as gpu

    def made(q, k, v, granularity, block, signs, dtype):
        x = flashsim.quantize(q, k, v, granularity=granularity, block=block, dtype=dtype)
        assert signs is not None
        return gpu.Fp8Arrays(x.q, x.k, x.v, *x.scales, v_transposed=x.v.swapaxes(2, 3))

    monkeypatch.setattr(dispatch, "engine", lambda name: None)
    monkeypatch.setattr(gpu, "quantize", made)
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, n, 16)).astype(np.float16) for n in (130, 100, 100))
    for granularity, shape in (("block", (2, 3)), ("head", (2,)), ("tensor", ())):
        x = flashsim.quantize(q, k, v, granularity=granularity, rotate="hadamard", backend="cupy")
        assert x.q.shape == (2, 130, 16)
        assert x.q_scale.shape == shape
        assert x.options["v_transposed"] is x.v_transposed
        assert ("scale_block" in x.options) == (granularity == "block")
    with pytest.raises(ShapeError, match="same head_dim, got 16 and 8"):
        flashsim.quantize(q, k, v[..., :8].copy(), backend="cupy")
