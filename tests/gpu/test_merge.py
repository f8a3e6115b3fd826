"""Merging partial attention on a GPU is what the library's own merge says, rounded once."""

import pytest

import flashsim

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.promise("twice plain attention's error")]


@pytest.mark.parametrize("total", ["float32", "bfloat16"])
@pytest.mark.parametrize("width", [128, 64, 24, 7])
def test_the_kernel_merges_rows_in_place(width, total):
    from flashsim.backends.cupy_gpu.merge import merge_into

    torch.manual_seed(0)
    kinds = {"device": "cuda", "dtype": getattr(torch, total)}
    whole = torch.randn((2, 3, 70, width), **kinds)
    whole_lse = torch.randn((2, 3, 70), device="cuda")
    part = torch.randn((2, 3, 37, width), device="cuda", dtype=torch.bfloat16)
    part_lse = torch.randn((2, 3, 37), device="cuda")
    whole_lse[0, 0, 33] = part_lse[0, 0, 0] = part_lse[0, 0, 1] = -torch.inf
    whole[0, 0, 33] = part[0, 0, 0] = part[0, 0, 1] = 0
    before, before_lse = whole.clone(), whole_lse.clone()
    merge_into(whole[:, :, 33:], whole_lse[:, :, 33:], part, part_lse)
    given = (before[:, :, 33:], before_lse[:, :, 33:], part, part_lse)
    out, lse = flashsim.merge(*(x.float().cpu().numpy() for x in given))
    eps = torch.finfo(getattr(torch, total)).eps
    torch.testing.assert_close(
        whole[:, :, 33:].float().cpu(), torch.from_numpy(out), rtol=eps, atol=1e-6
    )
    torch.testing.assert_close(whole_lse[:, :, 33:].cpu(), torch.from_numpy(lse))
    torch.testing.assert_close(whole[:, :, :33], before[:, :, :33], rtol=0, atol=0)
    torch.testing.assert_close(whole_lse[:, :, :33], before_lse[:, :, :33], rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["torch", "cupy"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("lead", [(2, 3), (3,), ()])
def test_what_run_returns_is_merged_where_it_lies(lead, dtype, kind):
    cupy = pytest.importorskip("cupy")
    if (kind, dtype) == ("cupy", "bfloat16"):
        pytest.skip("CuPy computes nothing in bfloat16")
    torch.manual_seed(0)
    shape = {"device": "cuda", "dtype": getattr(torch, dtype)}
    q, k, v = (torch.randn((*lead, n, 64), **shape) for n in (70, 100, 100))
    given = [q, k, v] if kind == "torch" else [cupy.asarray(x) for x in (q, k, v)]
    q, k, v = given
    parts = [slice(0, 33), slice(33, 100)]
    a, b = (flashsim.run(q, k[..., p, :], v[..., p, :], backend="cupy") for p in parts)
    kept = a.out.copy() if kind == "cupy" else a.out.clone()
    out, lse = flashsim.merge(a.out, a.lse, b.out, b.lse)
    assert type(out) is type(lse) is type(q)
    assert out.dtype == q.dtype
    host = [x.float().cpu() if kind == "torch" else cupy.asnumpy(x) for x in (out, lse)]
    on_cpu = lambda x: x.cpu() if kind == "torch" else cupy.asnumpy(x)  # noqa: E731
    want, want_lse = flashsim.merge(*map(on_cpu, (a.out, a.lse, b.out, b.lse)))
    eps = torch.finfo(getattr(torch, dtype)).eps
    as_float = lambda x: torch.as_tensor(x).float()  # noqa: E731
    torch.testing.assert_close(as_float(host[0]), as_float(want), rtol=eps, atol=1e-6)
    torch.testing.assert_close(as_float(host[1]), as_float(want_lse))
    assert bool((a.out == kept).all())  # what is given stays as it is


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_lse_is_refused_there_too(value):
    out, lse = torch.zeros(2, 5, 8, device="cuda"), torch.zeros(2, 5, device="cuda")
    wrong = lse.clone()
    wrong[1, 2] = value
    with pytest.raises(flashsim.OptionError, match=r"lse_b contains 1 NaN or \+inf values"):
        flashsim.merge(out, lse, out, wrong)
    with pytest.raises(flashsim.DTypeError, match="all arrays must be on one device"):
        flashsim.merge(out, lse.cpu(), out, lse)
    with pytest.raises(flashsim.DTypeError, match="to merge on a GPU, out_a must be float32 or"):
        flashsim.merge(out.double(), lse, out.double(), lse)
    empty = flashsim.merge(out[:, :0], lse[:, :0], out[:, :0], lse[:, :0])
    assert empty[0].shape == (2, 0, 8)
    rows = torch.randn(70_000, 1, 8, device="cuda")  # more heads than a grid has along an axis
    zeros = torch.zeros(70_000, 1, device="cuda")
    merged, sums = flashsim.merge(rows, zeros, -rows, zeros)
    assert not merged.any()
    torch.testing.assert_close(sums, torch.full_like(sums, 2.0).log())


def test_what_was_quantised_on_a_gpu_is_dequantised_there():
    cupy = pytest.importorskip("cupy")
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 128, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    x = flashsim.quantize(q, k, v, rotate="hadamard", backend="cupy")
    for got, given in zip(x.dequantized(), (q, k, v), strict=True):
        assert got.device == given.device
        assert (got - given.float()).abs().max() < 0.1 * given.float().abs().max()
    y = flashsim.quantize(*(cupy.asarray(a.half()) for a in (q, k, v)), backend="cupy")
    for got, given in zip(y.dequantized(), (q, k, v), strict=True):
        assert isinstance(got, cupy.ndarray)
        assert float(abs(got - cupy.asarray(given.float())).max()) < 0.5
    with pytest.raises(flashsim.OptionError, match="FP8 inputs need scales"):
        flashsim.run(x.q, x.k, x.v, backend="cupy")
