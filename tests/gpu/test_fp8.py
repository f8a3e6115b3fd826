"""The FP8 forward on a Hopper GPU: against float64 on what the numbers stand for, its counts
against the simulator's; the quantiser against `flashsim.quantize` on the CPU.

The yardstick is plain attention that rounds P as the kernel does, and its output to bfloat16.
"""

from dataclasses import replace

import numpy as np
import pytest
from cupy_checks import (  # noqa: F401
    ON_HOPPER,
    ROOMY,
    check_timeline,
    cupy,
    options,
    poison_shared_memory,
    poisoned,
)

import flashsim
from flashsim import Problem
from flashsim.backends.cupy_gpu import quantize
from flashsim.backends.launch_policy.hopper_fp8 import TILINGS
from flashsim.errors import ShapeError
from flashsim.problem import oracle
from flashsim.problem.masks import BlockMask
from flashsim.problem.problem import numpy_dtype
from flashsim.problem.rotation import rotated

pytestmark = [
    *ON_HOPPER,
    pytest.mark.promise("three counts equal", "twice plain attention's error"),
]

BLOCK = (64, 128)
SHAPES = {
    "one tile": dict(n_q=128, n_kv=128),
    "1 x 1": dict(n_q=1, n_kv=1),
    "ragged": dict(n_q=333, n_kv=517, batch=2, heads=2),
    "causal": dict(n_q=700, n_kv=700, heads=4, kv_heads=2, causal=True),
    "more queries": dict(n_q=700, n_kv=300, heads=4, kv_heads=1, causal=True),
    "more keys": dict(n_q=300, n_kv=1111, heads=2, causal=True),
    "window": dict(n_q=900, n_kv=1000, heads=3, window=(100, 50)),
    "blocks": dict(
        n_q=640,
        n_kv=768,
        heads=2,
        block_mask=BlockMask(np.random.default_rng(0).random((5, 6)) < 0.4, 128, 128),
    ),
    "many items": dict(n_q=200, n_kv=200, batch=8, heads=40, causal=True),
}


def make(problem, granularity="block", rotate=None, dtype="float8_e4m3fn", spread=True):
    """Inputs whose size differs from block to block, and what `flashsim.quantize` makes of them."""
    p, rng = problem, np.random.default_rng(0)
    shapes = {
        "q": (p.batch, p.heads, p.n_q, p.head_dim),
        "k": (p.batch, p.kv_heads, p.n_kv, p.head_dim),
        "v": (p.batch, p.kv_heads, p.n_kv, p.head_dim),
    }
    x = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    if spread:
        for name, size in (("q", 1.5), ("k", 2.0), ("v", 8.0)):
            x[name] *= (
                size
                ** rng.uniform(-1, 1, x[name].shape[2] // 128 + 1).repeat(128)[
                    : x[name].shape[2], None
                ]
            )
    x = {name: a.astype(numpy_dtype("bfloat16")) for name, a in x.items()}
    return x, flashsim.quantize(
        *(x["q"], x["k"], x["v"]), granularity=granularity, rotate=rotate, block=BLOCK, dtype=dtype
    )


def meant(x8):
    """What q, k and v stand for, float64, in the basis that they were quantised in."""
    given = zip((x8.q, x8.k, x8.v), spread(x8), strict=True)
    return [a.astype(np.float64) * scale for a, scale in given]


def spread(x8):
    """The scale of each row of q, k and v, float64."""
    found = []
    for a, scale, rows in zip((x8.q, x8.k, x8.v), x8.scales, (0, 1, 1), strict=True):
        scale = scale.astype(np.float64)
        if scale.ndim == 3:
            scale = scale.repeat(BLOCK[rows], axis=2)[:, :, : a.shape[2]]
        found.append(scale.reshape(scale.shape + (1,) * (4 - scale.ndim)))
    return found


def plain(q, k, v, p):
    """Attention with P rounded as FlashAttention-3 does; out as bfloat16."""
    group = p.heads // p.kv_heads
    S = p.scale * q @ k.repeat(group, axis=1).swapaxes(2, 3)
    S = np.where(oracle.keep_matrix(p), S, -np.inf)
    m = S.max(axis=-1, keepdims=True)
    P = np.exp(S - np.where(np.isneginf(m), 0, m))
    rounded = (256 * P).astype(numpy_dtype("float8_e4m3fn")).astype(np.float64) / 256
    total = P.sum(axis=-1, keepdims=True)
    out = rounded @ v.repeat(group, axis=1) / np.where(total == 0, 1, total)
    return out.astype(numpy_dtype("bfloat16")).astype(np.float64)


def run(p, x8, **more):
    return flashsim.run(x8.q, x8.k, x8.v, backend="cupy", **options(p), **x8.options, **more)


def check(p, out, lse, inputs):
    """The rule: twice plain FP8 attention's error; LSE as good as FP8 products are added up.

    Hopper cuts every addition of an FP8 product's accumulator off at about 14 bits: d / 32 of them,
    each of a sum that is no larger than that of |q k|.
    """
    q, k, v = inputs
    exact, exact_lse = oracle.attention(q, k, v, replace(p, dtype="float64"))
    rough = plain(q, k, v, p)
    error, allowed = (np.abs(x.astype(np.float64) - exact) for x in (out, rough))
    assert np.isfinite(out.astype(np.float64)).all()
    assert np.sqrt((error**2).mean()) <= 2 * np.sqrt((allowed**2).mean())
    assert error.max() <= 2 * allowed.max() + 2**-8 * np.abs(exact).max()
    size = p.scale * (np.abs(q) @ np.abs(k.repeat(p.group, axis=1)).swapaxes(2, 3)).max()
    seen = np.isfinite(exact_lse)
    np.testing.assert_array_equal(lse[~seen], exact_lse[~seen])
    off = p.head_dim / 32 * 2**-13 * size + 2e-5
    assert np.abs(lse[seen] - exact_lse[seen]).max(initial=0) <= off


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name, head_dim):
    p = Problem(head_dim=head_dim, dtype="bfloat16", **SHAPES[name])
    _, x8 = make(p)
    result = run(p, x8)
    assert result.out.dtype == numpy_dtype("bfloat16")
    assert result.lse.dtype == np.float32
    assert result.kernel == "hopper, fp8"
    check(p, result.out, result.lse, meant(x8))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("granularity", ["tensor", "head", "block"])
def test_scales_and_types(granularity, dtype, head_dim):
    p = Problem(300, 600, head_dim, heads=4, kv_heads=2, dtype="bfloat16", causal=True)
    _, x8 = make(p, granularity, dtype=dtype)
    result = run(p, x8)
    check(p, result.out, result.lse, meant(x8))


TILES = [(d, tile) for d, tiles in TILINGS.items() for tile in tiles]


@pytest.mark.parametrize("tile", TILES, ids=lambda t: f"{t[0]}-{t[1]}".replace(" ", ""))
@pytest.mark.parametrize("name", ["causal", "window", "many items"])
def test_every_tile(name, tile):
    head_dim, tiling = tile
    p = Problem(head_dim=head_dim, dtype="bfloat16", **SHAPES[name])
    _, x8 = make(p)
    result = run(p, x8, tiling=tiling)
    assert result.tiling == tiling
    check(p, result.out, result.lse, meant(x8))


def test_without_scales():
    p = Problem(300, 600, 128, heads=2, dtype="bfloat16", causal=True)
    _, x8 = make(p, "tensor", spread=False)
    q, k, v = (x.astype(np.float64) for x in (x8.q, x8.k, x8.v))
    given = replace(p, scale=2.0**-14)
    result = flashsim.run(
        x8.q, x8.k, x8.v, backend="cupy", causal=True, scale=2.0**-14, scales="unscaled"
    )
    check(given, result.out, result.lse, (q, k, v))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("granularity", ["none", "head", "block"])
@pytest.mark.parametrize("name", ["ragged", "causal", "window"])
def test_counts_are_the_simulators(name, granularity, head_dim):
    p = Problem(head_dim=head_dim, dtype="bfloat16", **SHAPES[name])
    _, x8 = make(p, "head" if granularity == "none" else granularity)
    asked = {"scales": "unscaled"} if granularity == "none" else x8.options
    given = {"trace": True, **options(p), **asked}
    counted = flashsim.run(x8.q, x8.k, x8.v, backend="cupy", **given).trace
    simulated = flashsim.run(x8.q, x8.k, x8.v, tiling=counted.tiling, device=ROOMY, **given).trace
    assert counted.diff(simulated) == {}
    assert counted.same_events(simulated)
    assert counted.transfers == counted.predicted().transfers


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_timeline(head_dim):
    p = Problem(head_dim=head_dim, dtype="bfloat16", **SHAPES["causal"])
    _, x8 = make(p)
    trace = run(p, x8, trace="timeline").trace
    check_timeline(trace, trace.tiling.block_q // 64)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.promise("deterministic")
def test_bits_are_the_same_each_time(head_dim):
    p = Problem(1000, 1000, head_dim, heads=16, dtype="bfloat16", causal=True)
    _, x8 = make(p)
    first = run(p, x8)
    for number in range(50):
        if number % 10 == 0:
            poison_shared_memory()
        again = run(p, x8)
        assert again.out.tobytes() == first.out.tobytes(), number
        assert again.lse.tobytes() == first.lse.tobytes(), number


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_sums_over_many_keys_lose_nothing(head_dim):
    """With V above 0 and scores alike, what the tensor cores cut off adds up: all of it is lost on
    the same side. 16,384 keys are 512 additions; cut off at 14 bits in one accumulator, these would
    lose 512 / 2 * 2**-13, 3 %. A visit's 4 lose 2**-12 at the most.
    """
    n = 16384
    rng = np.random.default_rng(0)
    e4m3 = numpy_dtype("float8_e4m3fn")
    q = np.zeros((1, 1, 128, head_dim), e4m3)
    k = rng.standard_normal((1, 1, n, head_dim)).astype(e4m3)
    v = rng.uniform(1, 2, (1, 1, n, head_dim)).astype(e4m3)
    result = flashsim.run(q, k, v, backend="cupy", scales="unscaled")
    exact = v.astype(np.float64).mean(axis=2, keepdims=True)
    error = result.out.astype(np.float64) / exact - 1
    assert np.abs(error).max() <= 2**-8 + 2**-11  # bfloat16's rounding, and what a visit loses


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


def quantised(torch, x, granularity, block, signs, dtype="float8_e4m3fn", kind="bfloat16"):
    given = [
        torch.as_tensor(x[n].astype(np.float32)).to("cuda", getattr(torch, kind)) for n in "qkv"
    ]
    return quantize.quantize(*given, granularity, block, signs, dtype)


def host(torch, tensor):
    if tensor.dtype == torch.float32:
        return tensor.cpu().numpy()
    name = str(tensor.dtype).removeprefix("torch.")
    return tensor.view(torch.uint8).cpu().numpy().view(numpy_dtype(name))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("rotate", [None, "hadamard"])
@pytest.mark.parametrize("granularity", ["tensor", "head", "block"])
def test_the_quantiser_is_the_cpus(torch, granularity, rotate, head_dim):
    """But for elements that lie half way between two numbers, to where float32 sums are as good."""
    p = Problem(300, 777, head_dim, batch=2, heads=4, kv_heads=2, dtype="bfloat16")
    x, x8 = make(p, granularity, rotate)
    made = quantised(torch, x, granularity, BLOCK, x8.signs)
    for got, true in zip((made.q_scale, made.k_scale, made.v_scale), x8.scales, strict=True):
        assert tuple(got.shape) == true.shape
        np.testing.assert_allclose(host(torch, got), true, rtol=1e-5)
    for name, scale in zip("qkv", spread(x8), strict=True):
        wide = x[name].astype(np.float64)
        if rotate and name != "v":
            wide = rotated(wide, x8.signs)
        check_rounding(wide / scale, host(torch, getattr(made, name)), getattr(x8, name))


def check_rounding(exact, got, true):
    """Where two roundings of `exact` differ, it lies half way between them."""
    same = got.view(np.uint8) == true.view(np.uint8)
    assert same.mean() > 0.9
    got, true = got.astype(np.float64), true.astype(np.float64)
    assert (np.abs(got - true) <= np.maximum(np.abs(true) / 8, 2**-9)).all()  # neighbours
    assert (np.abs(exact - (got + true) / 2) <= 448 * 2**-20)[~same].all()


def test_the_quantisers_v_is_the_transposed_one(torch):
    p = Problem(300, 777, 128, batch=2, heads=4, kv_heads=2, dtype="bfloat16", causal=True)
    x, _ = make(p)
    made = quantised(torch, x, "block", BLOCK, None)
    given = {"scales": (made.q_scale, made.k_scale, made.v_scale), "scale_block": BLOCK}
    asked = {"backend": "cupy", "causal": True, **given}
    one = flashsim.run(made.q, made.k, made.v, v_transposed=made.v_transposed, **asked)
    two = flashsim.run(made.q, made.k, made.v, **asked)
    assert torch.equal(one.out, two.out)
    assert torch.equal(one.lse, two.lse)
    assert one.copied == {}
    assert two.copied == {"v": 2 * 2 * 128 * 784}
    with pytest.raises(ShapeError, match="v_transposed must have shape"):
        flashsim.run(made.q, made.k, made.v, v_transposed=made.v, **asked)


def test_fa3s_outliers_are_within_the_published_error(torch):
    """Table 3 of arXiv:2407.08608: N(0, 1) + N(0, 100) Bernoulli(0.001), error 9.1e-3."""
    rng = np.random.default_rng(0)
    shape = 2, 4, 4096, 128
    x = {
        name: rng.standard_normal(shape)
        + 10 * rng.standard_normal(shape) * (rng.random(shape) < 0.001)
        for name in "qkv"
    }
    signs = rng.choice([-1.0, 1.0], 128).astype(np.float32)
    made = quantised(torch, x, "block", BLOCK, signs)
    scales = made.q_scale, made.k_scale, made.v_scale
    result = flashsim.run(
        *(made.q, made.k, made.v), backend="cupy", scales=scales, scale_block=BLOCK
    )
    q, k, v = (torch.as_tensor(x[name]).cuda() for name in "qkv")
    exact = torch.softmax(q @ k.mT / 128**0.5, dim=-1) @ v
    rmse = (result.out.double() - exact).square().mean().sqrt().item()
    assert rmse <= 9.1e-3


def test_cupys_arrays():
    p = Problem(200, 300, 64, heads=2, dtype="bfloat16")
    _, x8 = make(p)
    e4m3 = numpy_dtype("float8_e4m3fn")
    q, k, v = (cupy.asarray(x.view(np.uint8)).view(e4m3) for x in (x8.q, x8.k, x8.v))
    scales = tuple(cupy.asarray(x) for x in x8.scales)
    result = flashsim.run(q, k, v, backend="cupy", scales=scales, scale_block=BLOCK)
    assert isinstance(result.out, cupy.ndarray)
    three = flashsim.run(q, k, v, backend="cupy", scales=(0.5, 0.25, 2))  # numbers, anywhere
    ones = tuple(cupy.asarray(x, "float32") for x in (0.5, 0.25, 2))
    as_arrays = flashsim.run(q, k, v, backend="cupy", scales=ones)
    cupy.testing.assert_array_equal(three.lse, as_arrays.lse)
    same = run(p, x8)
    assert result.out.view(cupy.uint16).get().tobytes() == same.out.tobytes()


@pytest.mark.parametrize("granularity", ["tensor", "head", "block"])
def test_cupys_arrays_are_quantised(torch, granularity):
    p = Problem(200, 300, 64, heads=4, kv_heads=2, dtype="bfloat16")
    x, _ = make(p)
    given = {"granularity": granularity, "block": BLOCK, "rotate": "hadamard", "backend": "cupy"}
    made = flashsim.quantize(*(cupy.asarray(x[n].astype(np.float16)) for n in "qkv"), **given)
    same = quantised(torch, x, granularity, BLOCK, made.signs.astype(np.float32), kind="float16")
    for name in ("q", "k", "v", "v_transposed"):
        got = getattr(made, name)
        assert got.dtype == numpy_dtype("float8_e4m3fn")
        assert got.view(cupy.uint8).get().tobytes() == host(torch, getattr(same, name)).tobytes()
    result = flashsim.run(made.q, made.k, made.v, backend="cupy", **made.options)
    assert isinstance(result.out, cupy.ndarray)
    assert cupy.isfinite(result.lse).all()


def test_rows_apart(torch):
    """Heads between the rows, as most models have them."""
    p = Problem(200, 300, 128, heads=2, dtype="bfloat16")
    _, x8 = make(p)
    raw = [torch.as_tensor(x.view(np.uint8)).cuda() for x in (x8.q, x8.k, x8.v)]
    rows = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in raw]
    q, k, v = (x.view(torch.float8_e4m3fn) for x in rows)
    assert not q.is_contiguous()
    scales = tuple(torch.as_tensor(x).cuda() for x in x8.scales)
    result = flashsim.run(q, k, v, backend="cupy", scales=scales, scale_block=BLOCK)
    out = result.out.view(torch.int16).cpu().numpy()
    assert out.tobytes() == run(p, x8).out.tobytes()
