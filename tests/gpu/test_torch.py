"""`flashsim.torch` on CUDA: the operator, torch.compile, CUDA graphs, SDPA."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from bridge_cases import plain  # noqa: E402
from cupy_checks import CAPTURE, MARKS  # noqa: E402

import flashsim.torch  # noqa: E402
from flashsim.errors import DTypeError, UnsupportedError  # noqa: E402
from flashsim.torch import FlashAttention, attention, ops  # noqa: E402

pytestmark = [*MARKS, pytest.mark.promise("bridges equal their library")]

HALF = torch.bfloat16
CUTS = {"cu_seqlens_q": [0, 70, 200], "cu_seqlens_k": [0, 90, 230], "causal": True}


def tensors(*, batch=2, heads=4, kv_heads=2, n_q=200, n_kv=230, d=64, dtype=HALF, grad=True):
    torch.manual_seed(0)
    shapes = [(batch, heads, n_q, d), (batch, kv_heads, n_kv, d), (batch, kv_heads, n_kv, d)]
    return [torch.randn(s, device="cuda", dtype=dtype, requires_grad=grad) for s in shapes]


def value_and_gradients(function, inputs, dout):
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = function(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, dout.to(out.dtype))]


def judge(function, inputs, reference=plain):
    """Error <= 2 x plain attention's in the same type + roundings of the largest value.

    One of the type, and a few of the accumulator, float32: P is recomputed from a rounded LSE.
    """
    dout = torch.randn(inputs[0].shape, device="cuda", dtype=inputs[0].dtype)
    got = value_and_gradients(function, inputs, dout)
    rough = value_and_gradients(reference, inputs, dout)
    exact = value_and_gradients(reference, [x.double() for x in inputs], dout.double())
    eps = torch.finfo(inputs[0].dtype).eps + 8 * torch.finfo(torch.float32).eps
    for mine, theirs, true in zip(got, rough, exact, strict=True):
        error, allowed = ((x.double() - true).abs().max() for x in (mine, theirs))
        assert error <= 2 * allowed + eps * true.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "question",
    [{}, {"causal": True}, {"window": (50, 20)}, {"softcap": 5.0, "causal": True}],
    ids=["plain", "causal", "window", "softcap"],
)
@pytest.mark.parametrize("fused", [False, True], ids=["three passes", "fused"])
def test_value_and_gradients(fused, question, dtype):
    told = {**question, "deterministic": not fused}
    judge(lambda *x: attention(*x, **told), tensors(dtype=dtype), lambda *x: plain(*x, **question))


@pytest.mark.parametrize("d", [64, 60, 128])
def test_rows_that_the_kernels_cannot_read_are_padded(d):
    judge(lambda *x: attention(*x, causal=True), tensors(d=d), lambda *x: plain(*x, causal=True))


def test_the_python_kernels():
    pytest.importorskip("numba_cuda")
    judge(
        lambda *x: attention(*x, causal=True, backend="numba_cuda"),
        tensors(),
        lambda *x: plain(*x, causal=True),
    )


@pytest.mark.parametrize("d", [64, 60])  # rows of 60 numbers are padded
@pytest.mark.parametrize("backend", ["cupy", "numba_cuda"])
def test_run_on_the_same_memory_again(backend, d):
    """The third call repeats a launch, which reads the memory as it is now."""
    pytest.importorskip("cupy" if backend == "cupy" else "numba_cuda")

    def ran(q, k, v):
        result = flashsim.run(q, k, v, causal=True, backend=backend)
        got = result.backward(dout)
        return [x.clone() for x in (result.out, result.lse, got.dq, got.dk, got.dv)]

    q, k, v = tensors(d=d, grad=False)
    dout = torch.randn_like(q)
    wanted = ran(q, k, v)
    for _ in range(4):
        assert all(map(torch.equal, ran(q, k, v), wanted))
    q.mul_(2)
    other = ran(q, k, v)
    assert not torch.equal(other[0], wanted[0])
    assert all(map(torch.equal, other, ran(q.clone(), k.clone(), v.clone())))
    q.div_(2)
    assert all(map(torch.equal, ran(q, k, v), wanted))
    several = [flashsim.run(q, k, v, causal=True, backend=backend) for _ in range(3)]
    assert len({x.out.data_ptr() for x in several}) == 3
    assert all(torch.equal(x.backward(dout).dq, wanted[2]) for x in several)


def test_packed_sequences_with_offsets_here_and_there():
    def by_parts(q, k, v):
        parts = ((0, 70, 0, 90), (70, 200, 90, 230))
        rows = [
            plain(q[:, :, a:b], k[:, :, c:e], v[:, :, c:e], causal=True) for a, b, c, e in parts
        ]
        return torch.cat(rows, dim=2)

    inputs = tensors(batch=1)
    judge(lambda *x: attention(*x, **CUTS), inputs, by_parts)
    there = {
        name: torch.tensor(x, device="cuda", dtype=torch.int32) if isinstance(x, list) else x
        for name, x in CUTS.items()
    }
    torch.testing.assert_close(
        attention(*inputs, **there), attention(*inputs, **CUTS), rtol=0, atol=0
    )


def test_memory_layouts_of_models_and_broadcast_gradients():
    whole = tensors(grad=False)
    views = [x.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in whole]
    out = attention(*views, causal=True)
    torch.testing.assert_close(out, attention(*whole, causal=True), rtol=0, atol=0)
    got = torch.autograd.grad(out.sum(), views)
    again = [x.detach().clone().requires_grad_() for x in whole]
    expected = torch.autograd.grad(attention(*again, causal=True), again, torch.ones_like(out))
    for x, y in zip(got, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


# -- a bias, sinks, functions ----------------------------------------------------------------------


def added(*shape, dtype=HALF):
    return torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("lead", [(1, 1), (2, 4), (1, 4)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_a_bias(causal, lead, dtype):
    judge(
        lambda q, k, v, bias: attention(q, k, v, bias=bias, causal=causal),
        [*tensors(dtype=dtype), added(*lead, 200, 230, dtype=dtype)],
        lambda *x: plain(*x, causal=causal),
    )


@pytest.mark.parametrize("n_q", [200, 1])
@pytest.mark.parametrize("kind", [torch.float32, HALF])
@pytest.mark.parametrize("causal", [False, True])
def test_sinks(causal, kind, n_q):
    inputs = [*tensors(n_q=n_q), added(4, dtype=kind)]
    judge(
        lambda q, k, v, sinks: attention(q, k, v, sinks=sinks, causal=causal),
        inputs,
        lambda q, k, v, sinks: plain(q, k, v, None, sinks, causal=causal),
    )


def test_sinks_of_packed_sequences_and_beside_a_bias():
    q, k, v = tensors(batch=1)
    sinks, bias = added(4), added(1, 4, 200, 230)
    judge(
        lambda q, k, v, bias, sinks: attention(q, k, v, bias=bias, sinks=sinks),
        [q, k, v, bias, sinks],
        plain,
    )

    def by_parts(q, k, v, sinks):
        parts = ((0, 70, 0, 90), (70, 200, 90, 230))
        told = {"sinks": sinks, "causal": True}
        rows = [plain(q[:, :, a:b], k[:, :, c:e], v[:, :, c:e], **told) for a, b, c, e in parts]
        return torch.cat(rows, dim=2)

    packed = lambda q, k, v, sinks: attention(q, k, v, sinks=sinks, **CUTS)  # noqa: E731
    judge(packed, [q, k, v, sinks], by_parts)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_bias_and_sinks_compile_without_a_break():
    def loss(q, k, v, bias, sinks):
        out = attention(q * 2, k, v, bias=bias, sinks=sinks, causal=True)
        return out.float().square().sum()

    inputs = [*tensors(), added(1, 4, 200, 230), added(4)]
    torch._dynamo.reset()
    got, expected = (
        torch.autograd.grad(f(*inputs), inputs) for f in (torch.compile(loss, fullgraph=True), loss)
    )
    for x, y in zip(got, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)


def flexed(q, k, v, bias, slopes):
    """ALiBi and a bias where a query sees a prefix, its own sequence's keys, by torch's words."""
    lengths = torch.tensor([230, 170], device="cuda")

    def score(s, b, h, q_idx, kv_idx):
        return s + slopes[h] * (kv_idx - q_idx) + bias[b, h, q_idx, kv_idx]

    def mask(b, h, q_idx, kv_idx):
        return ((kv_idx <= q_idx) | (kv_idx < 40)) & (kv_idx < lengths[b])

    return score, mask


def flex(q, k, v, bias, slopes):
    from torch.nn.attention.flex_attention import create_block_mask

    score, mask = flexed(q, k, v, bias, slopes)
    if not torch.compiler.is_compiling():
        mask = create_block_mask(mask, 2, None, 200, 230, device="cuda")
    return flashsim.torch.flex_attention(q, k, v, score, mask, enable_gqa=True)


def written_out(q, k, v, bias, slopes):
    score, mask = flexed(q, k, v, bias, slopes)
    k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
    at = [torch.arange(n, device="cuda") for n in (2, 4, 200, 230)]
    b, h, i, j = at[0][:, None, None, None], at[1][:, None, None], at[2][:, None], at[3]
    s = score(q @ k.mT * q.shape[-1] ** -0.5, b, h, i, j).to(q.dtype)
    return torch.softmax(s.masked_fill(~mask(b, h, i, j), -torch.inf), dim=-1) @ v


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("compiled", [False, True])
def test_flex_attention(compiled):
    """With gradients of what the function captures; also in code that inductor compiled whole."""
    slopes = torch.linspace(0.01, 0.1, 4, device="cuda").requires_grad_()
    inputs = [*tensors(), added(2, 4, 200, 230), slopes]
    torch._dynamo.reset()
    judge(torch.compile(flex, fullgraph=True) if compiled else flex, inputs, written_out)


def test_opcheck():
    question = ops.Options(True, -1, -1, 0.0, None, "flash2", None, "cupy")
    more = [added(4, dtype=torch.float32)]
    operator = torch.ops.flashsim.attention.default
    for names in ((), ("sinks",)):
        given = (*tensors(dtype=torch.float32), more[: len(names)])
        asked = ops.OpCall.of(question, names)
        assert set(torch.library.opcheck(operator, (*given, *asked)).values()) == {"SUCCESS"}


def test_beside_inputs_and_output_one_number_a_row_is_kept():
    q, k, v = tensors()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        out = attention(q, k, v, causal=True)
    known = {x.data_ptr() for x in (q, k, v, out)}
    assert [x.shape for x in kept if x.data_ptr() not in known] == [q.shape[:-1]]


# torch 2.11 warns about itself: inductor imports what torch.jit deprecates. Its CUDA graph trees
# begin with an empty graph, to own a memory pool, and record the warning of it in order to drop
# it: where warnings are errors, it is raised all the same.
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiles_without_a_break(mode):
    """In torch's mode "reduce-overhead" with CUDA graphs: an empty one would leave old results."""
    counters = torch._dynamo.utils.counters

    def loss(q, k, v):
        return attention(q * 2, k, v, causal=True).float().square().sum()

    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(loss, fullgraph=True, mode=mode)
    one, other = tensors(), tensors()
    for _ in range(4):  # torch warms up, records, and plays twice
        for x, y in zip(one, other, strict=True):
            with torch.no_grad():
                y.copy_(x.normal_())
            x.grad = y.grad = None
        compiled(*one).backward()
        loss(*other).backward()
        for x, y in zip(one, other, strict=True):
            torch.testing.assert_close(x.grad, y.grad, rtol=2e-2, atol=2e-2)
    recorded = counters["inductor"]["cudagraph_recorded_non_static_inputs"]
    assert bool(recorded) == (mode == "reduce-overhead"), counters["inductor"]


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_traced_under_autocast():
    wide = [x.float() for x in tensors(grad=False)]
    torch._dynamo.reset()
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        traced = torch.compile(attention, fullgraph=True, backend="aot_eager")(*wide, causal=True)
        eager = attention(*wide, causal=True)
    assert traced.dtype == torch.bfloat16
    torch.testing.assert_close(traced, eager, rtol=0, atol=0)


# torch warms up on a side stream, as its own guide to CUDA graphs says to, and then warns of it.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")
@pytest.mark.parametrize("question", [{"causal": True}, CUTS], ids=["causal", "packed"])
@pytest.mark.parametrize("fused", [False, True], ids=["three passes", "fused"])
def test_cuda_graphs(fused, question):
    """Captured once, forward and backward, and played again on other numbers."""
    inputs = tensors(batch=1)
    dout = torch.randn_like(inputs[0])
    told = {**question, **({"deterministic": False} if fused else {})}

    def step():
        out = attention(*inputs, **told)
        return out, *torch.autograd.grad(out, inputs, dout)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **CAPTURE):
        held = step()
    with torch.no_grad():
        for x in (*inputs, dout):
            x.normal_()
    graph.replay()
    exact = 2e-2 if fused else 0
    for x, y in zip(held, step(), strict=True):
        torch.testing.assert_close(x, y, rtol=exact, atol=exact)


def test_torch_func():
    q, k, v = tensors(grad=False)
    loss = lambda *x: attention(*x, causal=True).float().square().sum()  # noqa: E731
    many = torch.stack([q, q * 2, -q])
    got = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1)), in_dims=(0, None, None))(
        many, k, v
    )
    singles = [torch.func.grad(loss, argnums=(0, 1))(x, k, v) for x in many]
    for x, parts in zip(got, zip(*singles, strict=True), strict=True):
        torch.testing.assert_close(x, torch.stack(parts), rtol=1e-2, atol=1e-2)


def test_the_courses_function():
    q, k, v = (x[:, 0].detach().requires_grad_() for x in tensors(n_q=128, n_kv=128))
    out = FlashAttention.apply(q, k, v, True)
    assert [x.shape for x in out.grad_fn.saved_tensors if x.shape == q.shape[:2]] == [q.shape[:2]]
    expected = plain(*(x[:, None].float() for x in (q, k, v)), causal=True)[:, 0]
    torch.testing.assert_close(out.float(), expected, rtol=1e-2, atol=1e-2)


def test_what_is_refused():
    q, k, v = tensors(grad=False)
    with pytest.raises(UnsupportedError, match="not float64"):
        attention(*(x.double() for x in (q, k, v)))
    packed = [x[:1] for x in (q, k, v)]
    with pytest.raises(UnsupportedError, match="packed sequences do not support bias="):
        attention(*packed, bias=torch.zeros(200, 230, device="cuda", dtype=HALF), **CUTS)
    with pytest.raises(DTypeError, match="on cpu"):
        attention(q, k.cpu(), v)


@pytest.mark.parametrize("backend", ["cupy", "torch"])
def test_measured_beside_the_prediction(backend):
    """`watch(measure=True)` finds the kernels of a call, and their time."""
    from torch.nn.functional import scaled_dot_product_attention

    inputs = tensors(batch=4, heads=16, kv_heads=16, n_q=4096, n_kv=4096, d=128)

    def run():
        if backend == "torch":
            return scaled_dot_product_attention(*inputs, is_causal=True)
        return attention(*inputs, causal=True)

    dout = torch.randn_like(inputs[0])
    torch.autograd.grad(run(), inputs, dout)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with flashsim.torch.watch(measure=True) as seen:
        begin.record()
        torch.autograd.grad(run(), inputs, dout)
        end.record()
    torch.cuda.synchronize()
    rows = [r for r in seen.rows(device="H200") if r["algorithm"] == "flash2" and r["api"]]
    assert [r["pass"] for r in rows] == ["forward", "backward"]
    for row in rows:
        assert row["measured on"] == "cuda, kernels"
        assert row["measured ms"] > 0
        assert row["ms"] > 0
    # Kernels alone: not more than passed between the events, waiting and launching included.
    assert sum(row["measured ms"] for row in rows) < 1.02 * begin.elapsed_time(end)
    assert len(seen.kernels().rows) >= 2


# -- in the place of torch's own ------------------------------------------------------------------


@pytest.fixture
def stand_in():
    """flashsim as torch's flash attention; the list grows with each call of its two passes."""
    registry = pytest.importorskip("torch.nn.attention")
    if not hasattr(registry, "register_flash_attention_impl"):
        pytest.skip(f"torch {torch.__version__} has no register of flash attentions")
    from flashsim.api import execution

    seen, real = [], {name: getattr(execution, name) for name in ("run", "backward")}
    for name, function in real.items():
        setattr(
            execution, name, lambda *a, _f=function, _n=name, **o: seen.append(_n) or _f(*a, **o)
        )
    flashsim.torch.install()
    registry.activate_flash_attention_impl("flashsim")
    yield seen
    registry.restore_flash_attention_impl()
    for name, function in real.items():
        setattr(execution, name, function)


@pytest.mark.parametrize("causal", [False, True])
def test_sdpa(stand_in, causal):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    inputs = tensors(kv_heads=4, n_kv=200)

    def sdpa(*x):
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(*x, is_causal=causal)

    judge(sdpa, inputs, lambda *x: plain(*x, causal=causal))
    assert set(stand_in) == {"run", "backward"}
    by_token = [x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    assert sdpa(*by_token).stride() == by_token[0].stride()


@pytest.mark.parametrize("backend", ["EFFICIENT_ATTENTION", "CUDNN_ATTENTION"])
@pytest.mark.parametrize("mask", ["bias", "of all heads", "padding", "boolean"])
def test_sdpa_with_a_mask(stand_in, mask, backend):
    """torch's flash attention takes none: flashsim stands in for the kernels that do."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = tensors(kv_heads=4)
    shape = {"bias": (2, 4, 200, 230), "padding": (2, 1, 1, 230)}.get(mask, (200, 230))
    bias = added(*shape)
    if mask in ("padding", "boolean"):
        bias = torch.rand(shape, device="cuda") < 0.7
        bias[..., 0] = True
    inputs = [q, k, v]
    if bias.requires_grad and backend == "EFFICIENT_ATTENTION":  # cuDNN's has no such gradient
        inputs = [q, k, v, bias]

    fixed = bias.detach()

    def sdpa(q, k, v, bias=fixed):
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)

    def masked(q, k, v, bias=fixed):
        if bias.dtype == torch.bool:
            bias = torch.zeros(bias.shape, device="cuda", dtype=q.dtype).masked_fill(
                ~bias, -torch.inf
            )
        return plain(q, k, v, bias.to(q.dtype))

    judge(sdpa, inputs, masked)
    assert set(stand_in) == {"run", "backward"}
    del stand_in[:]
    sdpa(q, k, v, None)  # torch's own
    assert not stand_in


def test_varlen(stand_in):
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in tensors(batch=1, kv_heads=4, n_kv=200))
    cuts = torch.tensor([0, 70, 200], device="cuda", dtype=torch.int32)
    try:
        got = varlen.varlen_attn(q, k, v, cuts, cuts, 130, 130, window_size=(-1, 0))
    except TypeError:  # before torch 2.12
        got = varlen.varlen_attn(q, k, v, cuts, cuts, 130, 130, True)
    assert stand_in == ["run"]
    whole = [x.transpose(0, 1)[None] for x in (q, k, v)]
    expected = attention(*whole, cu_seqlens_q=cuts, cu_seqlens_k=cuts, causal=True)
    torch.testing.assert_close(got, expected[0].transpose(0, 1), rtol=0, atol=0)
