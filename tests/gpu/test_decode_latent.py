"""Latent attention decoded on a GPU: values against the float64 oracle, bytes that it counts."""

from dataclasses import replace

import cupy
import numpy as np
import pytest
from cupy_checks import MARKS, poisoned  # noqa: F401
from decode_cases import Case, moved, simulated
from test_decode import check_trace, counted_bytes, run

from flashsim import Problem
from flashsim.backends.cupy_gpu import engine
from flashsim.errors import UnsupportedError

pytestmark = [*MARKS, pytest.mark.promise("three counts equal", "twice plain attention's error")]


@pytest.fixture(autouse=True)
def on_hopper():
    if engine.gpu_of(0).compute_capability != (9, 0):
        pytest.skip("latent attention is decoded on Hopper")


def mla(batch, n, n_q=1, d=576, dv=512, heads=128, page=0, dtype="bfloat16", **more):
    """Live lengths from all of the room down to a few keys."""
    p = Problem(
        n_q, n, d, dv, batch=batch, heads=heads, kv_heads=1, dtype=dtype, latent=True, **more
    )
    lengths = tuple(max(n_q, n - b * (n // batch)) for b in range(batch))
    return Case(p, lengths, page)


def judged(case, x, out, lse):
    """Of all heads the first and last of each row tile: the truth of 128 would take minutes."""
    heads = sorted({n for n in (0, 17, 63, 64, case.problem.heads - 1) if n < case.problem.heads})
    some = Case(replace(case.problem, heads=len(heads)), case.lengths, case.page)
    some.check({**x, "q": x["q"][:, heads]}, out[:, heads], lse[:, heads])


def check(case, **more):
    x = case.make()
    result = run(case, x, **more)
    judged(case, x, result.out, result.lse)


@pytest.mark.parametrize("page", [0, 1, 3, 16, 64])
@pytest.mark.parametrize("n_q", [1, 2])
@pytest.mark.parametrize("splits", ["auto", 1, 5])
def test_values(n_q, page, splits):
    check(mla(3, 700, n_q, page=page, causal=n_q > 1, scale=192**-0.5), splits=splits)


@pytest.mark.parametrize(
    ("d", "dv", "heads", "dtype"),
    [(576, 512, 16, "float16"), (320, 256, 128, "bfloat16"), (200, 128, 5, "float16")],
)
def test_widths_and_heads(d, dv, heads, dtype):
    check(mla(2, 700, 1, d, dv, heads, dtype=dtype))


@pytest.mark.parametrize(
    "more", [{"window": (300, 0)}, {"softcap": 5.0}, {"scale": -0.1}, {"causal": True}], ids=str
)
def test_masks_and_scales(more):
    check(mla(2, 900, 2, page=16, **more))


@pytest.mark.parametrize(("batch", "n"), [(1, 9000), (70, 130), (3, 1), (2, 64)])
def test_shapes(batch, n):
    check(mla(batch, n, scale=192**-0.5))


def test_no_keys_at_all():
    p = Problem(1, 300, 576, 512, batch=3, heads=128, kv_heads=1, dtype="bfloat16", latent=True)
    check(Case(p, (0, 300, 1)))


@pytest.mark.promise("deterministic")
def test_equal_bits():
    case = mla(3, 9000, page=16)
    x = case.make()
    first = run(case, x)
    for _ in range(10):
        again = run(case, x)
        np.testing.assert_array_equal(again.out.view(np.uint16), first.out.view(np.uint16))
        np.testing.assert_array_equal(again.lse, first.lse)


def test_a_page_that_the_pool_has_not():
    case = mla(2, 1000, page=16, dtype="float16")
    x = case.make()
    x["table"][1, 3] = len(x["k"])
    result = run(case, {name: cupy.asarray(a) for name, a in x.items()})
    out = cupy.asnumpy(result.out)
    assert np.isnan(out[1]).all(), "not waited for, not read, and it shows"
    assert np.isfinite(out[0]).all()


@pytest.mark.parametrize("page", [0, 1, 3, 16])
@pytest.mark.parametrize("splits", [1, 5, "auto"])
@pytest.mark.parametrize("n_q", [1, 2])
def test_counted_bytes_are_the_simulators(n_q, splits, page):
    case = mla(3, 700, n_q, page=page, dtype="float16")
    case = Case(case.problem, (0, *case.lengths[1:]), page)
    counted, launched = counted_bytes(case, splits)
    assert counted == moved(launched, case) == simulated(launched, case)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("page", [0, 16])
def test_a_trace_is_the_simulators(page, splits):
    case = mla(2, 300, heads=70, page=page)
    check_trace(Case(case.problem, (300, 260), page), splits)


def test_it_has_no_timeline():
    with pytest.raises(
        UnsupportedError, match=r"trace='timeline' does not support .* latent attention"
    ):
        run(mla(1, 64), mla(1, 64).make(), trace="timeline")
