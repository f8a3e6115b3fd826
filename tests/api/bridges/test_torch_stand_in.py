"""flashsim in the place of torch's flash attention, on the CPU: asked for, used, given back."""

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from torch.nn import attention as registry  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention  # noqa: E402

import flashsim.torch  # noqa: E402
from flashsim.api import execution  # noqa: E402
from flashsim.errors import UnsupportedError  # noqa: E402
from flashsim.torch import sdpa_override  # noqa: E402

pytestmark = pytest.mark.promise("bridges equal their library")

FOR_CPU, FOR_CPU_BACKWARD = sdpa_override._replacements(sdpa_override._CPU).values()
ON_CUDA = sdpa_override._replacements(sdpa_override._CUDA)
FLASH, FLASH_BACKWARD, SDPA, SDPA_BACKWARD = ON_CUDA.values()


@pytest.fixture
def calls(monkeypatch):
    """flashsim activated; the list grows with each call of its forward or backward pass."""
    seen = []
    for name in ("run", "backward"):
        real = getattr(execution, name)

        def counted(*args, _name=name, _real=real, **options):
            seen.append(_name)
            return _real(*args, **{**options, "backend": "simulator"})

        monkeypatch.setattr(execution, name, counted)
    flashsim.torch.install()
    registry.activate_flash_attention_impl("flashsim")
    yield seen
    registry.restore_flash_attention_impl(_raise_warn=False)


def attend(q, k, v, **options):
    """Output and gradients of torch's attention, by its flash attention."""
    q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = scaled_dot_product_attention(q, k, v, **options)
    out.square().sum().backward()
    return out.detach(), q.grad, k.grad, v.grad


def tensors(n_q=20, n_kv=24, dtype=torch.float64):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, n, 16, dtype=dtype) for n in (n_q, n_kv, n_kv))
    return q.transpose(1, 2).contiguous().transpose(1, 2), k, v


MASKS = {
    "none": lambda n_q, n_kv: {},
    "boolean": lambda n_q, n_kv: {"attn_mask": torch.rand(n_q, n_kv) > 0.5},
    "boolean, a key mask": lambda n_q, n_kv: {"attn_mask": torch.rand(2, 1, 1, n_kv) > 0.3},
    "additive": lambda n_q, n_kv: {"attn_mask": torch.randn(2, 1, n_q, n_kv, dtype=torch.float64)},
    "causal": lambda n_q, n_kv: {"is_causal": True, "scale": 0.3},
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize(("n_q", "n_kv"), [(20, 20), (10, 24), (24, 10)])
def test_sdpa_gives_the_same_in_the_same_memory_layout(calls, n_q, n_kv, mask):
    """torch's causal mask starts at the top left, and its gradients lie by token."""
    inputs, options = tensors(n_q, n_kv), mask(n_q, n_kv)
    got = attend(*inputs, **options)
    assert calls == ["run", "backward"]
    registry.restore_flash_attention_impl()
    expected = attend(*inputs, **options)
    assert calls == ["run", "backward"]  # torch's own again
    for x, y in zip(got, expected, strict=True):
        torch.testing.assert_close(x, y)
        assert x.stride() == y.stride()


def test_gradcheck_also_without_a_gradient_of_the_output(calls):
    """It tries undefined gradients, too: torch's for an output that no one uses."""
    inputs = [x[:1, :1, :5].requires_grad_() for x in tensors()]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert torch.autograd.gradcheck(scaled_dot_product_attention, inputs)
    assert calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_sdpa_in_narrow_types(calls, dtype):
    inputs = tensors(dtype=dtype)
    got = attend(*inputs)
    assert calls
    registry.restore_flash_attention_impl()
    for x, y in zip(got, attend(*inputs), strict=True):
        assert x.dtype == dtype
        torch.testing.assert_close(x, y, rtol=0.03, atol=4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("ours", ["run", "backward"])
def test_torchs_own_kernel_may_run_the_other_pass(calls, ours):
    """Also for rows that see no key."""
    inputs = [x.requires_grad_() for x in tensors()]
    mask = torch.rand(20, 24) > 0.5
    mask[3:5] = False
    if ours == "backward":
        registry.restore_flash_attention_impl()
    out = scaled_dot_product_attention(*inputs, attn_mask=mask)
    if ours == "backward":
        registry.activate_flash_attention_impl("flashsim")
    else:
        registry.restore_flash_attention_impl()
    found = torch.autograd.grad(out.square().sum(), inputs)
    assert calls == [ours]
    registry.restore_flash_attention_impl(_raise_warn=False)
    torch.testing.assert_close(found, attend(*inputs, attn_mask=mask)[1:])


def test_it_is_listed_but_not_active_until_asked():
    code = (
        "import flashsim.torch\n"
        "from torch.nn import attention as a\n"
        "assert 'flashsim' not in a.list_flash_attention_impls()\n"
        "assert flashsim.torch.install()[0] == 'torch'\n"
        "assert 'flashsim' in a.list_flash_attention_impls()\n"
        "assert a.current_flash_attention_impl() is None\n"
        "a.activate_flash_attention_impl('flashsim')\n"
        "assert a.current_flash_attention_impl() == 'flashsim'\n"
        "a.restore_flash_attention_impl()\n"
        "assert a.current_flash_attention_impl() is None\n"
    )
    subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", code], check=True)


def test_compiled_code_uses_it(calls):
    inputs = tensors()
    compiled = torch.compile(lambda *x: attend(*x)[0], backend="aot_eager")
    got = compiled(*inputs)
    assert "run" in calls
    registry.restore_flash_attention_impl()
    torch.testing.assert_close(got, attend(*inputs)[0])


def test_dropout_is_refused():
    q, k, v = tensors()
    with pytest.raises(UnsupportedError, match=r"no dropout, got dropout_p=0.1; pass dropout_p=0"):
        FOR_CPU(q, k, v, 0.1)


# -- what torch registers for CUDA, on CPU tensors: the same code, another engine ------------------


def test_the_cuda_functions_by_their_schemas():
    """(batch, n, heads, d) or packed (tokens, heads, d): out, LSE and gradients as torch's."""
    q, k, v = (x.transpose(1, 2).contiguous() for x in tensors(20, 20))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sdpa_override, "default_backend", lambda x: "simulator")
        out, lse, *state, debug = FLASH(*(q, k, v, None, None, 20, 20, 0.0, True, False), scale=0.3)
        cuts = torch.tensor([0, 20, 40], dtype=torch.int32)
        rows = [x.reshape(40, 3, 16) for x in (q, k, v)]
        packed = FLASH(*rows, cuts, cuts, 20, 20, 0.0, True, False, scale=0.3)
        whole = [x.transpose(1, 2) for x in (q, k, v)]
        sdpa = SDPA(*whole, is_causal=True, scale=0.3)
        dout = torch.randn_like(out)
        ends = (20, 20, 0.0, True, *state)
        grads = FLASH_BACKWARD(dout, q, k, v, out, lse, None, None, *ends, scale=0.3)
        packed_grads = FLASH_BACKWARD(
            dout.reshape(40, 3, 16), *rows, *packed[:2], cuts, cuts, *ends, scale=0.3
        )
        sdpa_grads = SDPA_BACKWARD(
            *(dout.transpose(1, 2), *whole, *sdpa[:2], None, None, *ends), scale=0.3
        )
    inputs = [x.detach().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    expected = scaled_dot_product_attention(*inputs, is_causal=True, scale=0.3)
    expected.backward(dout.transpose(1, 2))
    torch.testing.assert_close(out.transpose(1, 2), expected)
    torch.testing.assert_close(packed[0].reshape(out.shape), out)
    torch.testing.assert_close(sdpa[0], expected)
    assert sdpa[0].stride() == whole[0].stride()
    assert (lse.shape, packed[1].shape, debug.numel()) == ((2, 3, 20), (3, 40), 0)
    for g, one, other, x in zip(grads, packed_grads, sdpa_grads, inputs, strict=True):
        torch.testing.assert_close(g.transpose(1, 2), x.grad)
        torch.testing.assert_close(one.reshape(g.shape), g)
        torch.testing.assert_close(other, x.grad)
        assert other.stride() == whole[0].stride()


@pytest.mark.parametrize("kernel", ["efficient", "cudnn"])
@pytest.mark.parametrize("mask", ["bias", "of all heads", "padding", "causal"])
def test_masks_on_cuda_through_the_kernels_that_take_them(calls, kernel, mask):
    """What torch calls there for a mask, on CPU tensors: O, LSE and gradients in their layouts."""
    replacements = sdpa_override._replacements(sdpa_override._MASKED_ON_CUDA)
    forward, backward = (
        replacements[f"_scaled_dot_product_{kernel}_attention{end}"] for end in ("", "_backward")
    )
    q, k, v = tensors(20, 25)
    batch, heads = q.shape[:2]
    kept = torch.arange(25) < torch.tensor([25, 11])[:, None, None, None]
    bias = {
        "bias": torch.randn(batch, heads, 20, 25, dtype=q.dtype),
        "of all heads": torch.randn(20, 25, dtype=q.dtype).expand(batch, heads, -1, -1),
        "padding": torch.zeros(kept.shape, dtype=q.dtype).masked_fill(~kept, -torch.inf),
        "causal": torch.zeros(1, 1, 20, 25, dtype=q.dtype),
    }[mask].expand(batch, heads, 20, 25)
    bias = bias.detach().requires_grad_(mask != "padding")
    causal = mask == "causal"
    given = [x.detach() for x in (q, k, v)]
    out, lse, *rest = forward(*given, bias.detach(), True, 0.0, causal, scale=0.3)
    wide = [x.detach().requires_grad_() for x in given]
    s = wide[0] @ wide[1].mT * 0.3 + bias
    s = s.masked_fill(torch.ones(20, 25).triu(1).bool(), -torch.inf) if causal else s
    exact = s.softmax(-1) @ wide[2]
    torch.testing.assert_close(out, exact)
    dout = torch.randn_like(out)
    theirs = torch.autograd.grad(exact, [*wide, *([bias] * bias.requires_grad)], dout)
    if kernel == "efficient":
        assert lse.shape == (batch, heads, 32)
        assert forward(*given, bias.detach(), False)[1].shape == (batch, heads, 0)
        which = [True, True, True, bias.requires_grad]
        told = (bias.detach(), out, lse, *rest, 0.0, which, causal)
        *mine, of_mask = backward(dout, *given, *told, scale=0.3)
        mine += [of_mask] * bias.requires_grad
    else:
        assert lse.shape == (batch, heads, 20, 1)
        cuts, seeds = rest[:4], rest[4:6]
        told = (out, lse, *seeds, bias.detach(), *cuts, 0.0, causal)
        mine, theirs = backward(dout, *given, *told, scale=0.3), theirs[:3]
    torch.testing.assert_close(mine, theirs)
    assert calls == ["run", "run", "backward"] if kernel == "efficient" else ["run", "backward"]


def test_a_call_without_a_mask_goes_to_torchs_own_kernel(monkeypatch):
    class Own:
        @staticmethod
        def call_boxed(keyset, *args, **options):
            return "own", keyset, args, options

    monkeypatch.setattr(torch.library, "get_kernel", lambda name, device: Own)
    for name, function in sdpa_override._masked_on_cuda().items():
        schema = getattr(torch.ops.aten, name).default._schema.arguments
        args = tuple(None if x.name == "attn_bias" else 0 for x in schema)
        assert function("keys", *args, scale=3) == ("own", "keys", args, {"scale": 3})
    function = sdpa_override._if_masked(lambda *args, **options: "ours", 2, Own)
    assert function("keys", 1, 2, 0, scale=3) == "ours"


def test_what_flash_attention_cannot_do_here_is_said():
    q, k, v = (x.transpose(1, 2) for x in tensors(20, 20))
    rest = (None, None, 20, 20, 0.0, True, False)
    with pytest.raises(UnsupportedError, match=r"does not support alibi_slopes; .*restore_flash"):
        FLASH(q, k, v, *rest, alibi_slopes=torch.ones(3))


@pytest.mark.parametrize("sizes", [(0, 5, 7), (2, 0, 7), (2, 5, 0)])
@pytest.mark.parametrize("masked", [False, True])
def test_of_nothing_zeros_as_torchs_own(calls, sizes, masked):
    """By torch's choice of a kernel, and by the functions that stand in for its own."""
    batch, n_q, n_kv = sizes
    shapes = (batch, 2, n_q, 8), (batch, 2, n_kv, 8), (batch, 2, n_kv, 8)
    q, k, v = (torch.ones(shape, requires_grad=True) for shape in shapes)
    mask = torch.ones(n_q, n_kv, dtype=torch.bool) if masked else None
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert out.shape == q.shape
    assert not out.any()
    given = [x.detach() for x in (q, k, v)]
    mine, lse = FOR_CPU(*given, attn_mask=mask)
    torch.testing.assert_close(mine, out.detach(), rtol=0, atol=0)
    assert not lse.any()  # as torch has it for a row that sees no key
    gradients = FOR_CPU_BACKWARD(
        *(torch.ones_like(mine), *given, mine, lse, 0.0, False), attn_mask=mask
    )
    for got, like in zip(gradients, given, strict=True):
        torch.testing.assert_close(got, torch.zeros_like(like), rtol=0, atol=0)
    assert calls[-2:] == ["run", "backward"]
