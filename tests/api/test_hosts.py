"""Arrays of other libraries on the CPU engines, and `flashsim.backward`, which keeps no job."""

import sys
from dataclasses import replace

import numpy as np
import pytest
from helpers import tensors
from refusals import refuses

import flashsim
from flashsim import DTypeError, ShapeError
from flashsim.problem.problem import numpy_dtype

pytestmark = pytest.mark.promise("layout changes nothing")

QUESTIONS = {
    "plain": {},
    "causal, window": {"causal": True, "window": (9, -1)},
    "softcap": {"softcap": 5.0},
    "packed": {"cu_seqlens_q": (0, 12, 20), "cu_seqlens_k": (0, 17, 24), "causal": True},
}


class Exported:
    """An array of a library that we know nothing of: DLPack is all it offers."""

    def __init__(self, array):
        self._array = array

    def __dlpack__(self, **options):
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


class Elsewhere(Exported):
    """On a device that is no CPU."""

    def __dlpack_device__(self):
        return 2, 0


class Broken(Exported):
    def __dlpack__(self, **options):
        raise BufferError("strides are odd")


Traced = type("Traced", (), {"__module__": "jax._src.core", "aval": None, "shape": (1, 1, 8, 4)})


def bits(x):
    """The numbers of an array, NumPy's, JAX's or torch's, as NumPy can compare them."""
    if str(x.dtype) == "torch.bfloat16":
        x = x.view(sys.modules["torch"].int16)
    if str(x.dtype).startswith("torch.float8"):
        x = x.view(sys.modules["torch"].uint8)
    x = np.asarray(x)
    return x.view(f"u{x.itemsize}") if x.itemsize <= 2 else x


# -- backward from what was kept ------------------------------------------------------------------


@pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS)
@pytest.mark.parametrize(
    ("backend", "algorithm"),
    [
        ("simulator", "flash2"),
        ("simulator", "flash2-fused"),
        ("numba", "flash2"),
        ("simulator", "flash1"),
    ],
)
def test_backward_needs_only_what_was_kept(backend, algorithm, question):
    x = tensors(20, 24, 8, heads=4, kv_heads=2, dtype="float32", bias=(1, 4))
    given = {"bias": x.bias, "backend": backend, "algorithm": algorithm, **question}
    result = flashsim.run(x.q, x.k, x.v, trace=True, **given)
    expected = result.backward(x.dout)
    got = flashsim.backward(*(x.q, x.k, x.v, result.out, result.lse, x.dout), trace=True, **given)
    for name in ("dq", "dk", "dv", "dbias"):
        if algorithm == "flash1":  # P by m and l there, by their sum here: equal but for roundings
            np.testing.assert_allclose(getattr(got, name), getattr(expected, name), atol=2e-6)
        else:
            np.testing.assert_array_equal(getattr(got, name), getattr(expected, name))
    assert got.trace.bytes() == expected.trace.bytes()


def test_rows_that_see_no_key_have_no_gradient():
    x = tensors(12, 8, 8)
    for algorithm in ("flash1", "flash2"):
        r = flashsim.run(x.q, x.k, x.v, causal=True, algorithm=algorithm)
        g = flashsim.backward(x.q, x.k, x.v, r.out, r.lse, x.dout, causal=True, algorithm=algorithm)
        assert np.isneginf(r.lse[..., :4]).all()
        np.testing.assert_array_equal(g.dq[..., :4, :], 0)
        assert np.isfinite(g.dk).all()


X = tensors(12, 8, 8)
R = flashsim.run(X.q, X.k, X.v)
#: Of a library that flashsim does not know, and without DLPack.
FIELDS = {"shape": X.dout.shape, "dtype": "torch.float32", "reshape": lambda self, *_: self}
Opaque = type("Opaque", (), FIELDS)
GIVEN = {"q": X.q, "k": X.k, "v": X.v, "out": R.out, "lse": R.lse, "dout": X.dout}


def backward(**change):
    return flashsim.backward(**{**GIVEN, **change})


test_arrays_that_cannot_be_taken_say_why = refuses(r"""
backward(lse=np.zeros((1, 2, 12))) -> DTypeError: lse must have ... float32, got float64
backward(lse=np.zeros((2, 12), "f")) -> ShapeError: lse must ... (1, 2, 12), got (2, 12)
backward(out=np.zeros((1, 2, 12, 4), "f")) -> ShapeError: out ... (1, 2, 12, 8), got
backward(dout=np.zeros((1, 2, 8, 8), "f")) -> ShapeError: dout must have the same shape as out
backward(algorithm="standard") -> UnsupportedError: saved; use run
backward(is_causal=True) -> UnknownArgumentError: it is called causal
run(Exported(X.q), X.k, X.v)
    -> DTypeError: but k is a numpy.ndarray and another argument comes from test_hosts; convert
run(X.q, Exported(X.k), X.v)
    -> DTypeError: one library, but k is a test_hosts.Exported and another argument comes from nump
run(*map(Broken, (X.q, X.k, X.v)))
    -> DTypeError: q of type test_hosts.Broken cannot be read through DLPack (strides are odd)
run(Traced(), Traced(), Traced())
    -> DTypeError: q is a JAX tracer ... call flashsim.jax.attention
run(*map(Elsewhere, (X.q, X.k, X.v))) -> DTypeError: q
R.backward(Opaque()) -> DTypeError: 'simulator' takes arrays in the CPU's memory, but dout is a
""")


# -- DLPack ---------------------------------------------------------------------------------------


def test_arrays_that_speak_dlpack_only_come_out_as_numpys():
    x = tensors(12, 8, 8)
    expected = flashsim.run(x.q, x.k, x.v)
    result = flashsim.run(*(Exported(a) for a in (x.q, x.k, x.v)))
    grads = result.backward(Exported(x.dout))
    assert type(result.out) is np.ndarray
    assert np.shares_memory(result._job.q, x.q)
    np.testing.assert_array_equal(result.out, expected.out)
    np.testing.assert_array_equal(grads.dk, expected.backward(x.dout).dk)


# -- torch ----------------------------------------------------------------------------------------


def as_torch(a):
    torch = pytest.importorskip("torch")
    if a.dtype == numpy_dtype("bfloat16"):
        return torch.from_numpy(a.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(a)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("backend", ["simulator", "numba"])
def test_torch_in_torch_out_without_a_copy(backend, dtype):
    torch = pytest.importorskip("torch")
    x = tensors(20, 24, 8, heads=4, kv_heads=2, dtype=dtype, bias=(1, 1))
    expected = flashsim.run(x.q, x.k, x.v, bias=x.bias, backend=backend)
    given = [as_torch(a) for a in (x.q, x.k, x.v)]
    result = flashsim.run(*given, bias=as_torch(x.bias), backend=backend)
    assert np.shares_memory(result._job.q, x.q)
    assert np.shares_memory(result._job.bias, x.bias)
    grads, wanted = result.backward(as_torch(x.dout)), expected.backward(x.dout)
    pairs = [(result.out, expected.out), (result.lse, expected.lse)]
    pairs += [(getattr(grads, name), getattr(wanted, name)) for name in ("dq", "dv", "dbias")]
    for got, want in pairs:
        assert type(got) is torch.Tensor
        assert str(got.dtype) == f"torch.{want.dtype}"
        np.testing.assert_array_equal(bits(got), bits(want))


def test_a_subclass_of_torchs_tensors_comes_back_as_a_tensor():
    torch = pytest.importorskip("torch")
    x = tensors(20, 20, 8)
    q, k, v = (as_torch(a) for a in (x.q, x.k, x.v))
    mine = q.as_subclass(type("Mine", (torch.Tensor,), {}))
    got = flashsim.run(mine, k, v)  # beside plain ones
    assert type(got.out) is type(got.backward(mine).dq) is torch.Tensor
    np.testing.assert_array_equal(got.out.numpy(), flashsim.run(x.q, x.k, x.v).out)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", ["strided", "jagged"])
def test_a_nested_tensor_is_called_one(layout):
    torch = pytest.importorskip("torch")
    parts = [torch.zeros(3, 8), torch.zeros(5, 8)]
    nested = torch.nested.nested_tensor(parts, layout=getattr(torch, layout))
    with pytest.raises(DTypeError, match=r"q is a nested tensor; pass q\.values\(\), which holds"):
        flashsim.run(nested, nested, nested)


def test_offsets_may_be_a_tensor_that_changes():
    torch = pytest.importorskip("torch")
    x = tensors(20, 20, 8)
    given = [as_torch(a) for a in (x.q, x.k, x.v)]
    offsets = torch.tensor([0, 12, 20], dtype=torch.int32)
    for cut in (12, 5):
        offsets[1] = cut
        got = flashsim.run(*given, cu_seqlens_q=offsets, cu_seqlens_k=offsets)
        cuts = (0, cut, 20)
        expected = flashsim.run(x.q, x.k, x.v, cu_seqlens_q=cuts, cu_seqlens_k=cuts)
        np.testing.assert_array_equal(got.out.numpy(), expected.out)


def spoilt(change):
    return flashsim.run(*[change(as_torch(tensors(12, 12, 8).q))] * 3)


test_tensors_that_cannot_be_taken_say_why = refuses(r"""
spoilt(lambda t: t.to_sparse())
    -> DTypeError: q is a sparse tensor (torch.sparse_coo); pass q.to_dense
spoilt(lambda t: t.to("meta")) -> DTypeError: q is on the meta device, which holds no numbers
spoilt(lambda t: t.requires_grad_())
    -> DTypeError: q requires a gradient ... use flashsim.torch.attention, or pass q.detach
spoilt(lambda t: t.int()) -> DTypeError: dtype 'int32' is not supported
spoilt(lambda t: t.to(dtype=sys.modules["torch"].complex64).conj())
    -> DTypeError: 'complex64' is not supp
""")


def test_tensors_of_other_strides_and_signs_are_taken_or_refused_by_name():
    torch = pytest.importorskip("torch")
    x = tensors(12, 12, 8)
    q, k, v = (as_torch(a) for a in (x.q, x.k, x.v))
    expected = flashsim.run(x.q, x.k, x.v)
    by_token = q.transpose(1, 2).contiguous().transpose(1, 2)  # (batch, n, heads, d) in memory
    np.testing.assert_array_equal(flashsim.run(by_token, k, v).out.numpy(), expected.out)
    negated = torch.view_as_complex(torch.stack([k, -q], -1)).conj().imag
    assert negated.is_neg()
    np.testing.assert_array_equal(
        flashsim.run(negated.contiguous(), k, v).out.numpy(), expected.out
    )
    with torch.no_grad():
        flashsim.run(q.clone().requires_grad_(), k, v)
    with pytest.raises(ShapeError, match=r"q of shape .* looks transposed.*q.contiguous\(\)"):
        flashsim.run(*[torch.zeros(1, 2, 8, 12).mT] * 3)


# -- every function that takes arrays -------------------------------------------------------------


def as_jax(a):
    jax = pytest.importorskip("jax")
    return jax.numpy.asarray(a)


LIBRARIES = {"torch": as_torch, "jaxlib": as_jax}


def merges(q, k, v, dout, scores):
    r = flashsim.run(q, k, v)
    return flashsim.merge(r.out, r.lse, r.out, r.lse)


def distributes(q, k, v, dout, scores):
    spread = flashsim.distributed.run(q, k, v, ranks=2)
    grads = spread.backward(dout)
    return spread.out, spread.lse, grads.dq, grads.dk, grads.dv


def quantizes(q, k, v, dout, scores):
    x = flashsim.quantize(q, k, v, granularity="block", block=(8, 8), rotate="hadamard")
    r = flashsim.run(x.q, x.k, x.v, **x.options)
    grads = r.backward(r.out)
    return (
        *(x.q, x.k, x.v, *x.scales, *x.dequantized()),
        *(r.out, r.lse, x.unrotated(grads.dq), grads.dv),
    )


def compares(q, k, v, dout, scores):
    compared = flashsim.compare(q, k, v, dout=dout)
    compared.table()  # sets results side by side
    pages = [x.reshape(2, 4, 8, 8).swapaxes(0, 1) for x in (k, v)]
    table = np.arange(4, dtype=np.int32)[None]
    paged = flashsim.compare(
        *(q[:1], *pages), algorithms=["flash2", "flash-decode"], block_table=table
    )
    return compared.results["flash1"].out, paged.results["flash2"].out


def multiplies(q, k, v, dout, scores):
    return [
        flashsim.softmax_matmul.run(scores, v[0], backend=b).out for b in ("simulator", "numba")
    ]


FUNCTIONS = (merges, distributes, quantizes, compares, multiplies)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_what_goes_in_comes_out_of_every_function(library, dtype, function):
    there = LIBRARIES[library]
    x = tensors(32, 32, 8, heads=2, dtype=dtype)
    scores = np.random.default_rng(0).standard_normal((2, 5, 32)).astype(np.float32)
    v = x.v.astype(np.float32) if function is multiplies else x.v
    given = x.q, x.k, v, x.dout, scores
    expected = function(*given)
    got = function(*map(there, given))
    assert len(got) == len(expected)
    for n, (mine, plain) in enumerate(zip(got, expected, strict=True)):
        assert type(mine).__module__.partition(".")[0] == library
        assert str(mine.dtype).removeprefix("torch.") == plain.dtype.name
        np.testing.assert_array_equal(bits(mine), bits(plain), err_msg=f"result {n}")


@pytest.mark.parametrize("library", LIBRARIES)
def test_what_judges_reads_any_library(library):
    there = LIBRARIES[library]
    x = tensors(12, 8, 8, dtype="bfloat16", bias=(1, 1))
    given = x.q, x.k, x.v, x.dout
    p = flashsim.Problem(12, 8, 8, heads=2, dtype="bfloat16", bias=(1, 1))
    for judge, arrays in (
        (flashsim.oracle.attention, given[:3]),
        (flashsim.oracle.gradients, given),
        (flashsim.oracle.finite_difference, given),
    ):
        got = judge(*map(there, arrays), p, bias=there(x.bias))
        expected = judge(*arrays, p, bias=x.bias)
        np.testing.assert_equal(got, expected)
    grid = np.array([[True, False]])
    assert flashsim.BlockMask(there(grid), 16, 4) == flashsim.BlockMask(grid, 16, 4)


def test_a_tensor_that_requires_a_gradient_is_read_where_none_is_recorded():
    torch = pytest.importorskip("torch")
    x = tensors(12, 8, 8)
    given = [as_torch(a).requires_grad_() for a in (x.q, x.k, x.v)]
    out, _ = flashsim.oracle.attention(*given, flashsim.Problem(12, 8, 8, heads=2))
    assert type(out) is np.ndarray
    with pytest.raises(DTypeError, match="out_a requires a gradient, which this function does not"):
        flashsim.merge(given[0], torch.zeros(1, 2, 12), given[0], torch.zeros(1, 2, 12))


class OnGpu:
    """An array of a library called cupy: its numbers are to be had by `download` only."""

    __module__ = "cupy"

    def __init__(self, array):
        self._array = array
        self.shape, self.dtype, self.reshape = array.shape, array.dtype, array.reshape

    def __dlpack_device__(self):
        return 2, 0

    def __lt__(self, other):
        return self._array < other


@pytest.fixture
def fake_gpu(monkeypatch):
    """What CuPy's part of the package does, done by NumPy."""
    pytest.importorskip("cupy")
    from types import SimpleNamespace

    from flashsim.algorithms.merge import merged
    from flashsim.api import dispatch
    from flashsim.backends.cupy_gpu import arrays, merge

    def merges(**given):
        return tuple(map(OnGpu, merged(*(x._array for x in given.values()))))

    real, fake = dispatch.engine, SimpleNamespace(adopt=lambda _, x: x)
    monkeypatch.setattr(dispatch, "engine", lambda name: fake if name == "cupy" else real(name))
    monkeypatch.setattr(merge, "held", lambda given: given)
    monkeypatch.setattr(merge, "merged", merges)
    monkeypatch.setattr(arrays, "download", lambda x: x._array)
    monkeypatch.setattr(arrays, "upload", OnGpu)


def test_arrays_on_a_gpu_are_merged_there(fake_gpu):
    x = tensors(12, 8, 8)
    r = flashsim.run(x.q, x.k, x.v)
    out, lse = flashsim.merge(*map(OnGpu, (r.out, r.lse, r.out, r.lse)))
    expected = flashsim.merge(r.out, r.lse, r.out, r.lse)
    for got, want in zip((out, lse), expected, strict=True):
        assert type(got) is OnGpu
        np.testing.assert_array_equal(got._array, want)
    wrong = r.lse.copy()
    wrong[0, 0, 0] = np.nan
    with pytest.raises(flashsim.OptionError, match=r"lse_a contains 1 NaN or \+inf values"):
        flashsim.merge(*map(OnGpu, (r.out, wrong, r.out, r.lse)))


def test_arrays_on_a_gpu_are_dequantised_beside_them(fake_gpu):
    x = tensors(12, 8, 8)
    here = flashsim.quantize(x.q, x.k, x.v, rotate="hadamard")
    names = ("q", "k", "v", "q_scale", "k_scale", "v_scale")
    there = replace(here, **{name: OnGpu(getattr(here, name)) for name in names})
    for got, want in zip(there.dequantized(), here.dequantized(), strict=True):
        assert type(got) is OnGpu
        np.testing.assert_array_equal(got._array, want)
    turned = there.unrotated(OnGpu(x.q))
    np.testing.assert_array_equal(turned._array, here.unrotated(x.q))


def test_what_lies_on_another_device_is_refused():
    class OnOther(OnGpu):
        __module__ = "other"

    x = tensors(12, 8, 8)
    here = flashsim.quantize(x.q, x.k, x.v)
    there = replace(here, q=OnOther(here.q), q_scale=OnOther(here.q_scale))
    with pytest.raises(DTypeError, match="takes arrays in the CPU's memory, but q is a other"):
        there.dequantized()


# -- JAX ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_jax_in_jax_out_without_a_copy(dtype):
    jax = pytest.importorskip("jax")
    x = tensors(20, 24, 8, heads=4, kv_heads=2, dtype=dtype)
    expected = flashsim.run(x.q, x.k, x.v)
    q, k, v, dout = (jax.numpy.asarray(a) for a in (x.q, x.k, x.v, x.dout))
    result = flashsim.run(q, k, v)
    assert result._job.q.__array_interface__["data"][0] == q.unsafe_buffer_pointer()
    grads, wanted = result.backward(dout), expected.backward(x.dout)
    for got, want in (
        (result.out, expected.out),
        (result.lse, expected.lse),
        (grads.dk, wanted.dk),
    ):
        assert isinstance(got, jax.Array)
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(bits(got), bits(want))


def test_a_traced_array_is_refused():
    jax = pytest.importorskip("jax")
    ones = jax.numpy.ones((2, 8, 8))
    attend = lambda q: flashsim.run(q, q, q).out  # noqa: E731
    text = r"q is a JAX tracer \(\w*Tracer\), which holds no numbers; .* call flashsim\.jax"
    beside = lambda q: flashsim.run(q, ones, ones).out  # noqa: E731
    for under in (jax.jit, jax.vmap, jax.grad):
        for asks in (attend, beside):
            with pytest.raises(DTypeError, match=text):
                under(asks)(ones)
    with pytest.raises(DTypeError, match="k is a JAX tracer"):
        jax.jit(lambda k: flashsim.run(ones, k, ones).out)(ones)
