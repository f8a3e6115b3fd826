"""No batch, no query or no key on a GPU: zeros of the caller's kind, and no kernel is launched."""

import numpy as np
import pytest

import flashsim
from flashsim.errors import UnsupportedError

cupy = pytest.importorskip("cupy")

from cupy_checks import MARKS  # noqa: E402

pytestmark = [*MARKS, pytest.mark.promise("empty inputs")]

SHAPES = {
    "no batch": ((0, 4, 5, 64), (0, 2, 7, 64), (0, 2, 7, 64)),
    "no queries": ((2, 4, 0, 64), (2, 2, 7, 64), (2, 2, 7, 64)),
    "no keys": ((2, 4, 5, 64), (2, 2, 0, 64), (2, 2, 0, 64)),
}


def torchs(shape):
    torch = pytest.importorskip("torch")
    return torch.ones(shape, dtype=torch.bfloat16, device="cuda")


KINDS = {
    "numpy": lambda shape: np.ones(shape, np.float16),
    "cupy": lambda shape: cupy.ones(shape, cupy.float16),
    "torch": torchs,
}


@pytest.fixture
def no_launches(monkeypatch):
    """Whoever compiles or loads a kernel fails."""
    from flashsim.backends.cupy_gpu import decode, engine

    def fails(*_, **__):
        raise AssertionError("a kernel is about to be launched")

    monkeypatch.setattr(engine, "_plan", fails)
    monkeypatch.setattr(decode, "forward", fails)


def check(x, like, shape, value):
    assert type(x) is type(like)
    assert tuple(x.shape) == tuple(shape)
    assert bool((x == value).all())


@pytest.mark.parametrize("backend", ["cupy", "numba_cuda"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SHAPES)
def test_zeros_of_the_callers_kind(name, kind, backend, no_launches):
    if backend == "numba_cuda":
        pytest.importorskip("numba_cuda")
    q, k, v = map(KINDS[kind], SHAPES[name])
    how = {"backend": backend, "causal": True}
    r = flashsim.run(q, k, v, **how)
    check(r.out, q, q.shape, 0)
    assert r.out.dtype == q.dtype
    check(r.lse, q, q.shape[:3], -np.inf)
    dout = KINDS[kind](q.shape)
    again = flashsim.backward(q, k, v, r.out, r.lse, dout, **how)
    for g in (r.backward(dout), r.backward(dout, deterministic=False), again):
        for x, like in ((g.dq, q), (g.dk, k), (g.dv, v)):
            check(x, like, like.shape, 0)
            assert x.dtype == q.dtype


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SHAPES)
def test_decoding(name, kind, no_launches):
    q, k, v = map(KINDS[kind], SHAPES[name])
    r = flashsim.run(q, k, v, algorithm="flash-decode", backend="cupy", pack_gqa=True)
    check(r.out, q, q.shape, 0)
    check(r.lse, q, q.shape[:3], -np.inf)


def test_a_cache_of_which_no_key_is_live():
    q, k = (KINDS["cupy"](shape) for shape in ((2, 4, 1, 64), (2, 2, 70, 64)))
    how = {"algorithm": "flash-decode", "backend": "cupy", "cache_seqlens": [0, 0]}
    for _ in range(2):
        r = flashsim.run(q, k, k, **how)
        check(r.out, q, q.shape, 0)
        check(r.lse, q, q.shape[:3], -np.inf)


def test_what_a_gpu_takes_not_is_refused_all_the_same(no_launches):
    q, k, v = (np.ones(shape) for shape in SHAPES["no keys"])
    with pytest.raises(UnsupportedError, match="not float64"):
        flashsim.run(q, k, v, backend="cupy")
    with pytest.raises(UnsupportedError, match="bias"):
        flashsim.run(
            *map(KINDS["numpy"], SHAPES["no keys"]),
            bias=np.zeros((5, 0), np.float16),
            backend="cupy",
        )


@pytest.mark.parametrize("name", SHAPES)
def test_gradients_through_torch(name):
    torch = pytest.importorskip("torch")
    from flashsim.torch import attention

    inputs = [torchs(shape).requires_grad_() for shape in SHAPES[name]]
    out, lse = attention(*inputs, return_lse=True)
    check(out.detach(), torch.Tensor(), inputs[0].shape, 0)
    assert torch.isneginf(lse).all()
    for g, x in zip(torch.autograd.grad(out.sum(), inputs), inputs, strict=True):
        check(g, torch.Tensor(), x.shape, 0)
