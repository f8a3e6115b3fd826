"""Calls that go straight to an engine: checked once, never taken for others, the same numbers."""

import gc
import weakref

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from bridge_cases import plain  # noqa: E402

import flashsim  # noqa: E402
from flashsim.api import dispatch  # noqa: E402
from flashsim.errors import DTypeError, ShapeError  # noqa: E402
from flashsim.torch import attention, direct, flex_attention  # noqa: E402

pytestmark = pytest.mark.promise("bridges equal their library")


def tensors(n_q=5, n_kv=9, dtype=torch.float64):
    torch.manual_seed(0)
    return [torch.randn(2, h, n, 8, dtype=dtype) for h, n in ((4, n_q), (2, n_kv), (2, n_kv))]


@pytest.fixture
def kept(monkeypatch):
    """The calls that are kept; none as a test begins."""
    monkeypatch.setattr(direct, "_READY", {})
    monkeypatch.setattr(direct, "_EXACT", {})
    return lambda: len(direct._READY)


def test_the_same_bits_as_without_a_kept_call(kept):
    q, k, v = tensors()
    alone = flashsim.run(q, k, v, causal=True, backend="numba")
    for _ in range(2):
        got = attention(q, k, v, causal=True, return_lse=True)
        assert all(torch.equal(x, y) for x, y in zip(got, (alone.out, alone.lse), strict=True))
    assert kept() == 1
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out, lse = attention(*inputs, causal=True, return_lse=True)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    got = torch.autograd.grad((out, lse), inputs, (dout, dlse), retain_graph=True)
    wanted = alone.backward(dout, dlse=dlse)
    for x, y in zip(got, (wanted.dq, wanted.dk, wanted.dv), strict=True):
        assert torch.equal(x, y)
    alone = torch.autograd.grad(lse, inputs[0], dlse)[0]  # of the LSE only
    assert alone.shape == q.shape


def test_a_kept_call_is_not_taken_for_another(kept):
    q, k, v = tensors()
    causal = attention(q, k, v, causal=True)
    assert not torch.equal(causal, attention(q, k, v))
    assert not torch.equal(causal, attention(q, k, v, causal=True, softcap=1.0))
    with pytest.raises(DTypeError, match="causal must be True or False"):
        attention(q, k, v, causal=1)
    assert attention(q.float(), k.float(), v.float(), causal=True).dtype == torch.float32
    with pytest.raises(ShapeError):
        attention(q, k[:, :, :4], v, causal=True)
    with pytest.raises(DTypeError):
        attention(q, k.float(), v, causal=True)
    assert kept() == 4


#: The options that change the result.
SCORES = {"causal", "window", "softcap", "scale"}


def variations():
    """Yield calls that differ in one thing: shapes, strides, types, options."""
    torch.manual_seed(1)
    sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "n_q": 5, "n_kv": 9, "d": 8, "dv": 8}

    def made(dtype=torch.float64, **other):
        b, h, g, n, m, d, dv = (sizes | other).values()
        shapes = (b, h, n, d), (b, g, m, d), (b, g, m, dv)
        return [torch.randn(s, dtype=torch.float64).to(dtype) for s in shapes]

    base = made()
    yield base, {}
    for name, other in zip(sizes, (1, 2, 4, 4, 8, 16, 16), strict=True):
        yield made(**{name: other}), {}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        yield made(dtype), {}
    yield [x.transpose(1, 2).contiguous().transpose(1, 2) for x in base], {}
    yield [x.mT.contiguous().mT for x in base], {}
    yield [base[0], *(x[:, :1].expand_as(x) for x in base[1:])], {}
    options = {
        "causal": [True],
        "window": [(1, 0), (0, 1), (2, 2)],
        "softcap": [1.0, 2.0],
        "scale": [1.0, 0.5],
        "algorithm": ["flash2-fused"],
        "deterministic": [True, False],
        "backend": ["numba", "simulator"],
    }
    for name, values in options.items():
        for value in values:
            yield base, {name: value}


def compared():
    """Make each call between other calls, and compare it with attention written out."""
    calls = list(variations())
    for given, told in [*calls, *reversed(calls)]:
        found = attention(*given, **told)
        q, k, v = (x.double() for x in given)
        wanted = plain(q, k, v, **{name: told[name] for name in told.keys() & SCORES})
        assert found.dtype == given[0].dtype
        assert found.shape == wanted.shape
        tolerance = 20 * torch.finfo(found.dtype).eps
        torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance)


def test_no_call_is_taken_for_one_that_differs(kept):
    compared()


class Strict:
    """Stands in for `Ready`: it refuses tensors that differ from those that it was made for."""

    def __init__(self, q, k, v, question):
        self.made_for = [(x.shape, x.dtype) for x in (q, k, v)]
        self.told = question.keywords()

    def output(self, q, k, v):
        assert [(x.shape, x.dtype) for x in (q, k, v)] == self.made_for
        told = {name: self.told[name] for name in SCORES}
        return plain(q.double(), k.double(), v.double(), **told).to(q.dtype)


#: The parts of a key that a CPU can vary; without k's shape, v's shape still tells calls apart.
@pytest.mark.parametrize("part", [0, 2, "types", "options", "n_kv"])
def test_a_key_without_one_part_is_noticed(kept, monkeypatch, part):
    true = direct._key

    def lacking(q, k, v, asked):
        key = true(q, k, v, asked)
        if part == "types":
            return *key[:3], *key[6:]
        if part == "options":
            return key[:12]
        if part == "n_kv":
            return key[0], key[1][:2], key[2][:2], *key[3:]
        return *key[:part], None, *key[part + 1 :]

    monkeypatch.setattr(direct, "Ready", Strict)
    compared()
    direct._READY.clear()
    direct._EXACT.clear()
    monkeypatch.setattr(direct, "_key", lacking)
    with pytest.raises(AssertionError):
        compared()


def test_other_layouts_of_the_same_shapes_give_the_same(kept):
    q, k, v = tensors()
    wanted = attention(q, k, v)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert torch.equal(attention(*turned), wanted)
    assert torch.equal(attention(q, *(x.mT.contiguous().mT for x in (k, v))), wanted)
    one = [x[:, :1].expand_as(x) for x in (k, v)]
    assert torch.equal(attention(q, *one), attention(q, *(x.contiguous() for x in one)))
    assert kept() == 1
    negated = torch.complex(q, -q).conj().imag  # a pending negation
    assert negated.is_neg()
    assert torch.equal(attention(negated, k, v), wanted)


def test_a_kept_call_does_not_keep_its_tensors(kept, monkeypatch):
    """Neither itself nor in what it tells an engine that has calls of its own, as a GPU's has."""

    class Direct:
        def __init__(self, job, backward_job):
            self.backward_job = backward_job

        def forward(self, q, k, v):
            return q.clone(), q[..., 0].clone()

        backward = None

    monkeypatch.setattr(dispatch.engine("numba"), "direct", Direct, raising=False)
    arrays = [np.zeros((2, 2, n, 24)) for n in (5, 9, 9)]
    gone = [weakref.ref(x) for x in arrays]
    attention(*map(torch.from_numpy, arrays), causal=True)
    del arrays
    gc.collect()
    assert kept() == 1
    assert all(x() is None for x in gone)


@pytest.mark.parametrize("shape", [(5, 8), (4, 5, 8)])
def test_fewer_axes(kept, shape):
    q = torch.randn(shape)
    k = torch.randn((*((2,) * (len(shape) - 2)), 9, 8))
    wanted = attention(q[None, None] if q.ndim == 2 else q[None], *[
        k[None, None] if k.ndim == 2 else k[None]] * 2)  # fmt: skip
    for _ in range(2):
        out, lse = attention(q, k, k, return_lse=True)
        assert torch.equal(out, wanted.reshape(shape))
        assert lse.shape == shape[:-1]


@pytest.mark.parametrize("attend", [attention, flex_attention])
def test_batched_gradients(kept, attend):
    q, k, v = (x.requires_grad_() for x in tensors())
    out = attend(q, *(x.repeat_interleave(2, 1) for x in (k, v)))
    several = torch.randn(3, *out.shape, dtype=out.dtype)
    got = torch.autograd.grad(out, q, several, is_grads_batched=True, retain_graph=True)[0]
    for x, dout in zip(got, several, strict=True):
        torch.testing.assert_close(x, torch.autograd.grad(out, q, dout, retain_graph=True)[0])


def test_autocast_casts_before_the_look_up(kept):
    q, k, v = tensors(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert attention(q, k, v).dtype == torch.bfloat16
        assert attention(q, k, v).dtype == torch.bfloat16
    assert attention(q, k, v).dtype == torch.float32


@pytest.mark.parametrize("lse_too", [False, True])
def test_compiled_code_has_the_operator(kept, lse_too):
    """Values and gradients, through an operator without keywords and its backward pass."""
    seen = []

    def looking(module, example):
        seen.extend(str(node.target) for node in module.graph.nodes)
        return module

    q, k, v = (x.requires_grad_() for x in tensors())

    def function(q, k, v):
        out, lse = attention(q, k, v, causal=True, return_lse=True)
        return out.sum() + lse.square().sum() if lse_too else out.sum()

    compiled = torch.compile(function, fullgraph=True, backend=looking)
    got = torch.autograd.grad(compiled(q, k, v), (q, k, v))
    assert "flashsim.attention.default" in seen
    torch.testing.assert_close(compiled(*tensors()), function(*tensors()))
    assert "flashsim.attention_without_gradient.default" in seen
    torch.testing.assert_close(got, torch.autograd.grad(function(q, k, v), (q, k, v)))


def test_one_tensor_as_q_k_and_v_has_the_same_gradient_watched_or_not(kept, monkeypatch):
    """torch adds the three gradients in the order of the graph's edges."""
    x = torch.randn(2, 2, 24, 4, requires_grad=True)
    dout, found = torch.randn(2, 2, 24, 4), []
    for unwatched in (True, False):
        monkeypatch.setattr(direct, "unwatched", lambda unwatched=unwatched: unwatched)
        found += torch.autograd.grad(attention(x, x, x, causal=True), x, dout)
    assert torch.equal(*found)
