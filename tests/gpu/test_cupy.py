"""Values of the kernels for any GPU, in C++ and in Python: beside float64, and bits each time."""

import numpy as np
import pytest
from compiled import star
from cupy_checks import (  # noqa: F401
    FEATURES,
    MARKS,
    PORTABLE,
    check,
    check_bits,
    families,
    make,
    poisoned,
    run,
)

import flashsim
from flashsim import Problem, Tiling
from flashsim.problem import oracle

pytestmark = [*MARKS, pytest.mark.promise("twice plain attention's error")]


def ways(*dtypes, in_python):
    """A decorator for tests of (family, dtype): several types in C++, and one in Python."""
    ((name,), marks, _) = families("python")[0]
    every = [pytest.param(PORTABLE, dtype, id=dtype) for dtype in dtypes]
    every.append(pytest.param(name, in_python, id=f"{in_python}-python", marks=marks))
    return pytest.mark.parametrize(("family", "dtype"), every)


@pytest.mark.parametrize("sides", [(64, 128), (128, 40), (192, 128), (37, 5)])
@ways("bfloat16", "float32", in_python="bfloat16")
def test_value_dims_and_padding(sides, family, dtype):
    check(Problem(97, 129, *sides, heads=2, dtype=dtype, causal=True), family)


@ways("float16", "float32", in_python="float16")
@pytest.mark.parametrize("name", FEATURES)
def test_features(name, family, dtype):
    check(Problem(head_dim=64, dtype=dtype, **FEATURES[name]), family)


@pytest.mark.parametrize(("name", "head_dim"), star([*FEATURES], [64, 37, 80, 128, 192, 256]))
def test_tf32(name, head_dim):
    check(Problem(head_dim=head_dim, dtype="float32", **FEATURES[name]), tf32=True)


@pytest.mark.parametrize(
    "tiling", [(16, 16), (32, 64), (48, 16), (64, 32), (96, 48), (128, 64), (128, 96), (16, 128)]
)
def test_tf32_tilings(tiling):
    p = Problem(150, 201, 64, 40, heads=2, dtype="float32", causal=True)
    backward = Tiling(*(min(side, 64) for side in tiling))
    check(p, tiling=Tiling(*tiling), backward_tiling=backward, tf32=True)


def test_tf32_is_used_when_allowed_and_not_otherwise():
    p = Problem(300, 400, 64, heads=2, dtype="float32")
    x = make(p)
    given = (x["q"], x["k"], x["v"])
    exact, _ = oracle.attention(*given, p)
    errors = {}
    for allowed in (False, True):
        out = flashsim.run(*given, backend="cupy", kernel="portable", allow_tf32=allowed).out
        errors[allowed] = np.abs(out - exact).max()
    assert errors[True] > 50 * errors[False]
    assert flashsim.run(*given, backend="cupy", kernel="portable").kernel == "portable"
    half = [a.astype(np.float16) for a in given]
    assert (
        "tf32" not in flashsim.run(*half, backend="cupy", kernel="portable", allow_tf32=True).kernel
    )


@pytest.mark.parametrize("kind", ["rising", "falling", "outliers"])
@ways("bfloat16", "float32", in_python="bfloat16")
def test_kinds_of_scores(kind, family, dtype):
    check(Problem(300, 700, 64, heads=2, dtype=dtype), family, kind=kind)


@pytest.mark.parametrize(
    "tiling", [(16, 16), (32, 64), (48, 16), (64, 32), (96, 48), (128, 128), (128, 64), (16, 128)]
)
@ways("bfloat16", "float32", in_python="bfloat16")
def test_the_tiling_given_is_the_one_that_runs(tiling, family, dtype):
    p = Problem(150, 201, 64, heads=2, dtype=dtype, causal=True)
    # float32's backward tiles are twice as large: the largest is more than a block can have.
    backward = Tiling(*(min(side, 64) for side in tiling))
    check(p, family, Tiling(*tiling), backward)
    result = run(p, make(p), family, tiling=Tiling(*tiling), trace=True)
    assert result.trace.tiling == Tiling(*tiling)


@pytest.mark.parametrize("head_dim", [64, 128])
@ways("bfloat16", "float32", in_python="bfloat16")
@pytest.mark.promise("deterministic")
def test_two_hundred_runs_give_the_same_bits(family, dtype, head_dim):
    p = Problem(300, 400, head_dim, heads=3, dtype=dtype, causal=True)
    check_bits(p, family, forms=(True,))
