"""Arrays in and out of the portable kernels on a GPU, and what they refuse."""

import numpy as np
import pytest
from cupy_checks import MARKS, cupy, make, poisoned  # noqa: F401

import flashsim
from flashsim import Problem, Tiling
from flashsim.errors import DTypeError, UnsupportedError
from flashsim.problem import oracle
from flashsim.problem.masks import BlockMask

pytestmark = [*MARKS, pytest.mark.promise("layout changes nothing")]


def test_torch_tensors_come_back_as_torch_without_a_copy_and_on_their_stream():
    torch = pytest.importorskip("torch")
    p = Problem(100, 120, 64, batch=2, heads=2, dtype="bfloat16", causal=True)
    x = make(p)
    host = flashsim.run(x["q"], x["k"], x["v"], backend="cupy", kernel="portable", causal=True)
    on_gpu = {
        name: torch.as_tensor(a.astype(np.float32), device="cuda").to(torch.bfloat16)
        for name, a in x.items()
    }
    # (batch, n, heads, d) in memory, as most models hold it
    strided = {n: a.transpose(1, 2).contiguous().transpose(1, 2) for n, a in on_gpu.items()}
    assert not strided["q"].is_contiguous()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        before = torch.cuda.memory_allocated()
        result = flashsim.run(
            strided["q"], strided["k"], strided["v"], backend="cupy", kernel="portable", causal=True
        )
        made = torch.cuda.memory_allocated() - before
        grads = result.backward(strided["dout"])
    stream.synchronize()
    assert isinstance(result.out, torch.Tensor)
    assert result.out.dtype == torch.bfloat16
    assert made < result.out.nbytes + result.lse.nbytes + 2048  # no copies of q, k or v
    np.testing.assert_array_equal(result.out.float().cpu().numpy(), host.out.astype(np.float32))
    again = host.backward(x["dout"])
    np.testing.assert_array_equal(grads.dk.float().cpu().numpy(), again.dk.astype(np.float32))


@pytest.mark.parametrize("library", ["numpy", "cupy", "torch"])
@pytest.mark.parametrize("dv", [64, 20], ids=["whole rows", "padded rows"])
def test_backward_from_what_was_kept(library, dv):
    p = Problem(100, 120, 64, dv, batch=2, heads=2, dtype="float16", causal=True)
    x = make(p)
    if library == "cupy":
        x = {name: cupy.asarray(a) for name, a in x.items()}
    elif library == "torch":
        torch = pytest.importorskip("torch")
        x = {name: torch.as_tensor(a, device="cuda") for name, a in x.items()}
    inputs = [x[name] for name in "qkv"]
    result = flashsim.run(*inputs, backend="cupy", causal=True)
    got = flashsim.backward(
        *(*inputs, result.out, result.lse, x["dout"]), backend="cupy", causal=True
    )
    expected = result.backward(x["dout"])
    for name in ("dq", "dk", "dv"):
        one, other = getattr(got, name), getattr(expected, name)
        assert type(one) is type(other)
        assert (one == other).all()


def test_torch_tensors_come_back_from_the_kernels_in_python_with_the_same_values():
    pytest.importorskip("numba_cuda")
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
    pytest.importorskip("numba_cuda")
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


def test_cupy_arrays_come_back_as_cupy():
    p = Problem(64, 64, 32, heads=1, dtype="float16")
    x = {name: cupy.asarray(a) for name, a in make(p).items()}
    result = flashsim.run(
        x["q"][0, 0], x["k"][0, 0], x["v"][0, 0], backend="cupy", kernel="portable"
    )
    assert isinstance(result.out, cupy.ndarray)
    assert result.out.shape == (64, 32)
    assert result.lse.shape == (64,)
    assert result.backward(x["dout"][0, 0]).dv.dtype == np.float16


def test_cupy_arrays_on_the_same_memory_again():
    """The third call repeats a launch, which reads the memory as it is now."""
    x = {name: cupy.asarray(a) for name, a in make(Problem(100, 120, 64, dtype="float16")).items()}
    q, k, v = (x[name] for name in "qkv")

    def ran():
        result = flashsim.run(q, k, v, backend="cupy")
        got = result.backward(x["dout"])
        return [a.get() for a in (result.out, result.lse, got.dq, got.dk, got.dv)]

    first = ran()
    for _ in range(4):
        assert all(map(np.array_equal, ran(), first))
    q *= 2
    other = ran()
    assert not np.array_equal(other[0], first[0])
    fresh = flashsim.run(q.copy(), k.copy(), v.copy(), backend="cupy")
    np.testing.assert_array_equal(other[0], fresh.out.get())
    with cupy.cuda.Stream(non_blocking=True) as stream:
        elsewhere = ran()
        stream.synchronize()
    assert all(map(np.array_equal, elsewhere, other))


def test_unaligned_rows_are_copied_not_misread():
    p = Problem(50, 60, 32, heads=1, dtype="float16")
    x = make(p)
    wide = {n: cupy.zeros((*a.shape[:-1], 33), a.dtype) for n, a in x.items()}
    for name, array in wide.items():
        array[..., 1:] = cupy.asarray(x[name])
    result = flashsim.run(*(wide[n][..., 1:] for n in "qkv"), backend="cupy", kernel="portable")
    expected = flashsim.run(x["q"], x["k"], x["v"], backend="cupy", kernel="portable")
    np.testing.assert_array_equal(result.out.get(), expected.out)


def test_copies_for_alignment_are_named():
    x = make(Problem(50, 60, 37, 40, dtype="float16"))
    result = flashsim.run(x["q"], x["k"], x["v"], backend="cupy", kernel="portable")
    assert result.copied == {"q": 50 * 40 * 2, "k": 60 * 40 * 2}
    x = make(Problem(50, 60, 40, dtype="float16"))
    assert flashsim.run(x["q"], x["k"], x["v"], backend="cupy", kernel="portable").copied == {}


def test_arrays_in_two_places_are_refused():
    x = make(Problem(8, 8, 16, dtype="float32"))
    with pytest.raises(DTypeError, match=r"all arrays must be on one device .*, got q cupy"):
        flashsim.run(cupy.asarray(x["q"]), x["k"], x["v"], backend="cupy", kernel="portable")


def test_a_gradient_from_elsewhere_is_refused():
    x = make(Problem(8, 8, 16, dtype="float32"))
    result = flashsim.run(x["q"], x["k"], x["v"], backend="cupy", kernel="portable")
    with pytest.raises(DTypeError, match=r"dout must be on the same device as .* got cupy"):
        result.backward(cupy.asarray(x["dout"]))


def test_what_gpus_cannot_do_is_refused():
    x = make(Problem(64, 64, 16, dtype="float32"))
    given = (x["q"], x["k"], x["v"])
    with pytest.raises(UnsupportedError, match="cannot call a Python mask function"):
        flashsim.run(*given, backend="cupy", kernel="portable", mask=lambda q, k: q >= k)
    with pytest.raises(UnsupportedError, match="not float64"):
        flashsim.run(*(a.astype(np.float64) for a in given), backend="cupy", kernel="portable")
    with pytest.raises(UnsupportedError, match="not 'standard'"):
        flashsim.run(*given, backend="cupy", kernel="portable", algorithm="standard")
    mask = BlockMask(np.ones((2, 2), bool), 48, 48)
    with pytest.raises(UnsupportedError, match="tile sides must divide"):
        flashsim.run(
            *given, backend="cupy", kernel="portable", block_mask=mask, tiling=Tiling(32, 32)
        )
