"""backend="numba_cuda" on a GPU, as tests/gpu/test_cupy.py asks of the CUDA C++ kernels.

Its inputs, error budget and list of features are used here; outputs begin as NaN, too.
"""

import numpy as np
import pytest
from compiled import star
from cupy_checks import (  # noqa: F401
    FEATURES,
    MARKS,
    PYTHON,
    check,
    check_bits,
    check_counts,
    check_timelines,
    cupy,
    make,
    poisoned,
)

import flashsim
from flashsim import Problem, Tiling
from flashsim.errors import BackendUnavailable
from flashsim.problem import oracle

try:
    import flashsim.backends.numba_gpu.engine
except BackendUnavailable as error:
    pytest.skip(str(error), allow_module_level=True)

pytestmark = [*MARKS, pytest.mark.promise("twice plain attention's error")]


@pytest.mark.parametrize("sides", [(64, 128), (128, 40), (37, 5)])
def test_value_dims_and_padding(sides):
    check(Problem(97, 129, *sides, heads=2, dtype="bfloat16", causal=True), PYTHON)


@pytest.mark.parametrize("name", FEATURES)
def test_features(name):
    check(Problem(head_dim=64, dtype="float16", **FEATURES[name]), PYTHON)


@pytest.mark.parametrize("kind", ["rising", "falling", "outliers"])
def test_kinds_of_scores(kind):
    check(Problem(300, 700, 64, heads=2, dtype="bfloat16"), PYTHON, kind=kind)


@pytest.mark.parametrize("sides", [(16, 16), (48, 16), (96, 48), (128, 128), (16, 128)])
def test_the_tiling_given_is_the_one_that_runs(sides):
    p, tiling = Problem(150, 201, 64, heads=2, dtype="bfloat16", causal=True), Tiling(*sides)
    check(p, PYTHON, tiling, Tiling(*(min(side, 64) for side in sides)))
    x = make(p)
    given = (x["q"], x["k"], x["v"])
    result = flashsim.run(*given, backend="numba_cuda", tiling=tiling, causal=True, trace=True)
    assert result.trace.tiling == tiling


#: Padded rows; padded tiles; rows as wide as a tile.
SIDES = [(59, 111), (40, 24), (64, 64)]


@pytest.mark.parametrize(
    ("sides", "name", "key_order"),
    star(
        *(SIDES, [*FEATURES], ["ascending", "descending"]),
        also=[(SIDES[0], "blocks", "descending")],  # whose visits are listed
    ),
)
def test_counted_bytes_are_the_simulators(sides, name, key_order):
    head_dim, head_dim_v = sides
    p = Problem(head_dim=head_dim, head_dim_v=head_dim_v, dtype="bfloat16", **FEATURES[name])
    check_counts(p, PYTHON, key_order, (Tiling(32, 64), Tiling(64, 32)))


@pytest.mark.parametrize(("dtype", "head_dim"), [("float16", 64), ("bfloat16", 128)])
@pytest.mark.promise("deterministic")
def test_two_hundred_runs_give_the_same_bits(dtype, head_dim):
    p = Problem(300, 400, head_dim, heads=3, dtype=dtype, causal=True)
    check_bits(p, PYTHON, forms=(True,))


def test_timeline_covers_every_visit_of_every_head():
    check_timelines(Problem(1000, 1000, 64, heads=8, dtype="bfloat16", causal=True), PYTHON)


def test_torch_tensors_come_back_as_torch_with_the_same_values():
    torch = pytest.importorskip("torch")
    p = Problem(100, 120, 64, batch=2, heads=2, dtype="float16", causal=True)
    x = make(p)
    host = flashsim.run(x["q"], x["k"], x["v"], backend="numba_cuda", causal=True)
    x = {name: torch.as_tensor(a, device="cuda") for name, a in x.items()}
    result = flashsim.run(x["q"], x["k"], x["v"], backend="numba_cuda", causal=True)
    assert isinstance(result.out, torch.Tensor)
    assert result.out.dtype == torch.float16
    np.testing.assert_array_equal(result.out.cpu().numpy(), host.out)


@pytest.mark.parametrize("library", ["numpy", "cupy", "torch"])
def test_teaching_kernels_give_back_what_they_were_given(library):
    p = Problem(70, 90, 32, heads=2, dtype="float32", causal=True)
    host = make(p)
    if library == "torch":
        torch = pytest.importorskip("torch")
        x = {name: torch.as_tensor(a, device="cuda") for name, a in host.items()}
    else:
        x = host if library == "numpy" else {name: cupy.asarray(a) for name, a in host.items()}
    result = flashsim.run(x["q"], x["k"], x["v"], backend="numba_cuda", causal=True)
    grads = result.backward(x["dout"])
    assert result.kernel == "teaching"
    exact = oracle.gradients(host["q"], host["k"], host["v"], host["dout"], p)
    for name in ("dq", "dk", "dv"):
        got = getattr(grads, name)
        assert type(got) is type(x["q"])
        got = got.cpu().numpy() if library == "torch" else cupy.asnumpy(got)
        np.testing.assert_allclose(got, exact[name], rtol=0, atol=1e-4)
