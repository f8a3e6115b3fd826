"""Arrays that speak DLPack only, and the teaching kernels' stream: without a GPU and on one."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import flashsim
from flashsim import Problem
from flashsim.api import dispatch
from flashsim.api.arrays import only_dlpack
from flashsim.errors import BackendUnavailable, DTypeError

cupy = pytest.importorskip("cupy")

from cupy_checks import gpus, make, on_any_gpu  # noqa: E402  (it imports CuPy)

from flashsim.backends.cupy_gpu import arrays  # noqa: E402
from flashsim.backends.cupy_gpu import engine as cupy_engine  # noqa: E402

pytestmark = pytest.mark.promise("layout changes nothing")


class Exported:
    """An array of a library that we know nothing of: DLPack is all it offers."""

    def __init__(self, array, device=None):
        self._array, self._device = array, device

    def __dlpack__(self, **options):
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._device or self._array.__dlpack_device__()


class Elsewhere(Exported):
    """On NVIDIA GPU 0, as it says, with a type of elements that the consumer has not."""

    def __init__(self):
        super().__init__(None, (2, 0))


# -- without a GPU --------------------------------------------------------------------------------


def test_dlpack_is_for_arrays_that_offer_nothing_else():
    class Both(Exported):
        __cuda_array_interface__ = {}  # noqa: RUF012

    x = np.ones((8, 16), np.float16)
    assert only_dlpack(Exported(x))
    assert not only_dlpack(Both(x))
    assert not only_dlpack(x)  # though NumPy's arrays speak DLPack
    assert not only_dlpack([1])


@pytest.mark.parametrize("backend", ["cupy", "numba_cuda"])
@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
def test_each_array_is_taken_through_dlpack(name, backend, monkeypatch):
    """`adopt` gets those that need it, by name, before anything else looks at them."""
    if backend == "numba_cuda":
        pytest.importorskip("numba_cuda")

    class Adopted(Exception):
        pass

    def adopt(name, array):
        raise Adopted(name)

    monkeypatch.setattr(cupy_engine, "adopt", adopt)
    x = np.ones((8, 16), np.float16)
    given = dict.fromkeys(("q", "k", "v"), x)
    if name == "dout":
        result = flashsim.run(**given)
        asked = replace(result._asked, engine=dispatch.engine(backend), backend=backend)
        with pytest.raises(Adopted, match="dout"):
            replace(result, _asked=asked).backward(Exported(x))
    else:
        with pytest.raises(Adopted, match=name):
            flashsim.run(**{**given, name: Exported(x)}, backend=backend)


def test_where_an_array_is_that_a_kernel_reports_into(monkeypatch):
    """Those are CuPy's, whatever library's arrays a call has."""

    class OfCupy:
        data = SimpleNamespace(ptr=16)

    monkeypatch.setattr(arrays.cupy, "ndarray", OfCupy)
    space = object.__new__(arrays.TorchSpace)
    assert space.pointer(OfCupy()) == 16
    assert space.pointer(SimpleNamespace(data_ptr=lambda: 32)) == 32


def test_a_cpu_backend_takes_no_gpus_dlpack():
    x = np.ones((8, 16), np.float16)
    with pytest.raises(DTypeError, match="q must be an array"):
        flashsim.run(Elsewhere(), Elsewhere(), Elsewhere())
    with pytest.raises(
        DTypeError, match=r"from one library, but k is a numpy.ndarray and another argument"
    ):
        flashsim.run(Elsewhere(), x, x)


def test_dlpack_from_the_cpu_is_refused_with_what_to_give_instead():
    x = np.ones((8, 16), np.float16)
    with pytest.raises(
        DTypeError, match=r"k, .*Exported, is not on an NVIDIA GPU .*\(1, 0\).*numpy.fr"
    ):
        arrays.adopt("k", Exported(x))


@pytest.mark.parametrize("failure", [NotImplementedError("no bfloat16"), BufferError("too new")])
def test_what_cupy_cannot_take_is_said(failure, monkeypatch):
    def refuse(array):
        raise failure

    monkeypatch.setattr(cupy, "from_dlpack", refuse)
    text = rf"q, .*Elsewhere, cannot be read through DLPack by CuPy {cupy.__version__}: {failure}"
    with pytest.raises(DTypeError, match=text):
        arrays.adopt("q", Elsewhere())


@pytest.mark.skipif(bool(gpus()), reason="there is a GPU")
@pytest.mark.parametrize("x", [Elsewhere(), np.zeros((8, 16), np.float32)], ids=["dlpack", "numpy"])
def test_without_a_gpu_it_is_said_that_there_is_none(x):
    with pytest.raises(BackendUnavailable, match=r"finds no usable GPU.*nvidia-smi"):
        flashsim.run(x, x, x, backend="cupy")


# -- on a GPU -------------------------------------------------------------------------------------


@on_any_gpu
@pytest.mark.parametrize(
    ("backend", "dtype"), [("cupy", "float16"), ("cupy", "float32"), ("numba_cuda", "float32")]
)
def test_dlpack_arrays_give_what_cupy_arrays_give_without_a_copy(backend, dtype):
    if backend == "numba_cuda":
        pytest.importorskip("numba_cuda")
    p = Problem(100, 120, 64, batch=2, heads=2, dtype=dtype, causal=True)
    x = {name: cupy.asarray(a) for name, a in make(p).items()}
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.get_current_stream().synchronize()
    with stream:
        wanted = flashsim.run(x["q"], x["k"], x["v"], backend=backend, causal=True)
        got = flashsim.run(*(Exported(x[n]) for n in "qkv"), backend=backend, causal=True)
        grads = got.backward(Exported(x["dout"]))
        expected = wanted.backward(x["dout"])
    stream.synchronize()
    assert isinstance(got.out, cupy.ndarray)
    assert got._job.q.data.ptr == x["q"].data.ptr
    np.testing.assert_array_equal(got.out.get(), wanted.out.get())
    np.testing.assert_array_equal(grads.dk.get(), expected.dk.get())
    assert cupy.from_dlpack(Exported(got.out)).data.ptr == got.out.data.ptr  # and back, uncopied


@on_any_gpu
def test_bfloat16_cupy_arrays_are_taken_where_cupy_has_them():
    p = Problem(64, 64, 64, heads=2, dtype="bfloat16", causal=True)
    host = make(p)
    try:
        x = {name: cupy.asarray(a) for name, a in host.items()}
    except (TypeError, ValueError) as error:
        pytest.skip(f"CuPy {cupy.__version__} has no bfloat16: {error}")
    result = flashsim.run(x["q"], x["k"], x["v"], backend="cupy", causal=True)
    wanted = flashsim.run(host["q"], host["k"], host["v"], backend="cupy", causal=True)
    assert isinstance(result.out, cupy.ndarray)
    bits = [a.view(np.uint16) for a in (result.out.get(), wanted.out)]
    np.testing.assert_array_equal(*bits)


@on_any_gpu
def test_teaching_kernels_wait_for_the_stream_of_their_arrays():
    """They read what was queued there before, and before what is queued after overwrites it."""
    pytest.importorskip("numba_cuda")
    p = Problem(64, 64, 32, heads=2, dtype="float32")
    host = make(p)
    stream = cupy.cuda.Stream(non_blocking=True)
    wanted = flashsim.run(host["q"], host["k"], host["v"], backend="numba_cuda")
    x = {name: cupy.full(a.shape, np.nan, a.dtype) for name, a in host.items()}
    ready = {name: cupy.asarray(a) for name, a in host.items()}
    spin = cupy.RawKernel(
        'extern "C" __global__ void spin(long long n) { long long t = clock64(); '
        "while (clock64() - t < n) {} }",
        "spin",
    )
    cupy.cuda.Device().synchronize()
    with stream:
        spin((1,), (1,), (np.int64(200_000_000),))
        for name, array in x.items():
            array[...] = ready[name]
        result = flashsim.run(x["q"], x["k"], x["v"], backend="numba_cuda")
        # Queued behind the kernels: overwrites nothing before they have read it.
        for array in x.values():
            array[...] = np.nan
    stream.synchronize()
    np.testing.assert_array_equal(result.out.get(), wanted.out)


@on_any_gpu
def test_teaching_kernels_take_torch_tensors_on_torchs_stream():
    torch = pytest.importorskip("torch")
    pytest.importorskip("numba_cuda")
    p = Problem(64, 64, 32, heads=2, dtype="float32")
    host = make(p)
    wanted = flashsim.run(host["q"], host["k"], host["v"], backend="numba_cuda")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        x = {name: torch.as_tensor(a, device="cuda") for name, a in host.items()}
        torch.cuda._sleep(100_000_000)
        given = [x[name] * 1 for name in "qkv"]
        result = flashsim.run(*given, backend="numba_cuda")
        for array in given:
            array.fill_(float("nan"))
        doubled = result.out * 2
    stream.synchronize()
    np.testing.assert_array_equal(doubled.cpu().numpy(), 2 * wanted.out)
