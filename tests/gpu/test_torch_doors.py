"""The doors on CUDA: few queries take the decode kernels, in CUDA graphs and under torch.compile;
`flashsim.torch.decode`; flash-attention's interface; Hugging Face's caches.
"""

from __future__ import annotations

import functools
import gc
import math

import pytest

torch = pytest.importorskip("torch")

from cupy_checks import CAPTURE, MARKS  # noqa: E402

import flashsim.torch  # noqa: E402
from flashsim.torch import attention, decode, direct, flash_attn, flash_attn_cute  # noqa: E402
from flashsim.torch.layers import Layers  # noqa: E402

_OF_COMPILERS = ("TensorFloat32 tensor cores", "`torch.jit", "The CUDA Graph is empty")
pytestmark = [
    *MARKS,
    *(pytest.mark.filterwarnings(f"ignore:{x}") for x in _OF_COMPILERS),
    pytest.mark.promise("bridges equal their library"),
]

HALF = torch.bfloat16


def tensors(*shapes, dtype=HALF):
    torch.manual_seed(0)
    return [torch.randn(s, device="cuda", dtype=dtype) for s in shapes]


def plain(q, k, v, live, *, causal=False, window=(-1, -1), softcap=0.0):
    """Attention over keys `live` (a slice per sequence), and its LSE, in the type of the inputs."""
    outs, sums = [], []
    for b, keys in enumerate(live):
        group = q.shape[1] // k.shape[1]
        kb, vb = (x[b, :, keys].repeat_interleave(group, dim=0) for x in (k, v))
        s = q[b] @ kb.mT * q.shape[-1] ** -0.5
        s = softcap * torch.tanh(s / softcap) if softcap else s
        n_q, n = s.shape[-2:]
        at = torch.arange(n, device=q.device) - (
            torch.arange(n_q, device=q.device)[:, None] + n - n_q
        )
        kept = torch.ones_like(at, dtype=torch.bool)
        if causal:
            kept &= at <= 0
        for side, sign in zip(window, (-1, 1), strict=True):
            if side >= 0:
                kept &= sign * at <= side
        s = s.masked_fill(~kept, -math.inf)
        outs.append(torch.softmax(s, -1) @ vb if n else torch.zeros_like(q[b, ..., :1] * vb.sum()))
        sums.append(s.logsumexp(-1))
    return torch.stack(outs), torch.stack(sums)


def judged(out, lse, q, k, v, live=None, **told):
    """Error <= 2 x plain attention's in the same type + a rounding of the largest value."""
    live = [slice(None)] * len(q) if live is None else live
    rough, _ = plain(q, k, v, live, **told)
    exact, exact_lse = plain(q.double(), k.double(), v.double(), live, **told)
    error, allowed = ((x.double() - exact).abs().max() for x in (out, rough))
    assert error <= 2 * allowed + torch.finfo(q.dtype).eps * exact.abs().max()
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n_q", [1, 4, 16])
@pytest.mark.parametrize("told", [{}, {"causal": True}, {"window": (300, 5)}, {"softcap": 5.0}])
def test_few_queries_of_a_long_cache(told, n_q, dtype):
    q, k, v = tensors((2, 16, n_q, 128), (2, 4, 3000, 128), (2, 4, 3000, 128), dtype=dtype)
    out, lse = attention(q, k, v, return_lse=True, **told)
    judged(out, lse, q, k, v, **told)


@pytest.mark.promise("deterministic")
def test_the_same_bits_with_and_without_a_gradient_and_each_time():
    q, k, v = tensors((2, 16, 2, 64), (2, 4, 5000, 64), (2, 4, 5000, 64))
    out = attention(q, k, v, causal=True)
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    again = attention(*inputs, causal=True)
    assert torch.equal(out, again)
    assert torch.equal(out, attention(q, k, v, causal=True))
    dout = torch.randn_like(out)
    got = torch.autograd.grad(again, inputs, dout)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    true = torch.autograd.grad(
        plain(*exact, [slice(None)] * 2, causal=True)[0], exact, dout.double()
    )
    for x, y in zip(got, true, strict=True):
        assert (x.double() - y).abs().max() <= 0.02 * y.abs().max()


def test_a_growing_cache_shares_a_plan():
    q, k, v = tensors((1, 8, 1, 64), (1, 2, 2048, 64), (1, 2, 2048, 64))
    attention(q, k[:, :, :2000], v[:, :, :2000])
    before = len(direct._READY)
    for n in (2001, 2010, 2047, 2048):
        out, lse = attention(q, k[:, :, :n], v[:, :, :n], return_lse=True)
        judged(out, lse, q, k[:, :, :n], v[:, :, :n])
    assert len(direct._READY) <= before + 1  # with the LSE and without ask the same


@pytest.mark.parametrize(("heads", "d"), [((8, 2), 64), ((8, 1), 128), ((4, 4), 60)])
def test_the_layers_of_a_step(heads, d):
    """Each has new numbers at new addresses; also in another stream, and in a CUDA graph."""
    (h, g), asked = heads, (True, None, 0.0, None, "flash2", None, None)
    for n in (1000, 1001, 5000):
        shapes = (1, h, 1, d), (1, g, n, d), (1, g, n, d)
        of = functools.partial(
            lambda *s: [torch.randn(x, device="cuda").to(HALF) for x in s], *shapes
        )
        attention(*of(), causal=True)
        layers, side = Layers(), torch.cuda.Stream()
        for step in range(6):
            given = of()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side if step in (2, 4) else torch.cuda.current_stream()):
                out = layers(*given, asked)
            torch.cuda.synchronize()
            assert out.is_contiguous()
            assert torch.equal(out.transpose(1, 2), attention(*given, causal=True))
        graph, given = torch.cuda.CUDAGraph(), of()
        with torch.cuda.graph(graph, **CAPTURE):
            outs = [layers(*given, asked) for _ in range(2)]
        for _ in range(2):
            for x in given:
                x.normal_()
            graph.replay()
            for out in outs:
                assert torch.equal(out.transpose(1, 2), attention(*given, causal=True))


@pytest.mark.parametrize("n_kv", [131072, 600])
def test_a_graph_may_be_the_first_call(n_kv):
    """No allocation and no wait in capture, also if the plan is made there."""
    q, k, v = tensors((1, 24, 1, 64), (1, 3, n_kv, 64), (1, 3, n_kv, 64))
    torch.zeros(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **CAPTURE):
        out, lse = attention(q, k, v, return_lse=True)
    for _ in range(2):
        q.normal_()
        graph.replay()
        torch.cuda.synchronize()
        judged(out, lse, q, k, v)


@pytest.mark.parametrize("n", [333, 77])
def test_a_graph_of_a_forward_pass_may_be_the_first_call(n):
    """Its kernel may be compiled there, too: head_dim 40 is in no other test."""
    q, k, v = tensors((1, 3, n, 40), (1, 3, n, 40), (1, 3, n, 40))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **CAPTURE):
        out, lse = attention(q, k, v, return_lse=True)
    graph.replay()
    torch.cuda.synchronize()
    judged(out, lse, q, k, v)


@pytest.mark.parametrize("n_q", [1, 200])
def test_a_kept_call_does_not_keep_its_tensors(n_q):
    """Else their memory is lost, and torch refuses a CUDA graph whose pool they lie in."""
    call = lambda: attention(  # noqa: E731
        *tensors((1, 4, n_q, 48), (1, 2, 210, 48), (1, 2, 210, 48)), causal=True
    )
    gc.collect()
    before = torch.cuda.memory_allocated()
    call()
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("shape", [(1, 4, 128, 64), (4, 16, 1024, 64)])
@pytest.mark.parametrize("deterministic", [None, True, False])
def test_calls_again_at_the_same_addresses(shape, deterministic):
    """Such calls are filled in once: they read new numbers, in each stream and in a graph."""
    inputs = tensors(shape, shape, shape)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    dout = torch.randn_like(inputs[0])
    told = {"causal": True, "deterministic": deterministic}

    def step(*given):
        given = [x.detach().requires_grad_() for x in given]
        out, lse = attention(*given, return_lse=True, **told)
        return out, lse, *torch.autograd.grad((out, lse), given, (dout, torch.ones_like(lse)))

    for _ in range(2):
        # Other addresses, so filled in anew at each call.
        wanted = step(*(x.clone() for x in inputs))
        exact = 0.02 if deterministic is False else 0
        for given in (inputs, turned):
            for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    for _ in range(4):
                        found = step(*given)
                torch.cuda.current_stream().wait_stream(stream)
                for x, y in zip(found, wanted, strict=True):
                    torch.testing.assert_close(x, y, rtol=exact, atol=exact)
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph, **CAPTURE):
            outs = [attention(*inputs, **told) for _ in range(3)]
        graph.replay()
        for x in outs:
            assert torch.equal(x, wanted[0])
        for x, y in zip(inputs, turned, strict=True):
            y.copy_(x.normal_())


@pytest.mark.parametrize("page", [0, 16, 3])
@pytest.mark.parametrize("splits", [None, 3])
@pytest.mark.parametrize("n_q", [1, 5])
def test_decode_reads_lengths_on_the_gpu(n_q, splits, page):
    q, k, v = tensors((3, 8, n_q, 64), (5, 2, 1200, 64), (5, 2, 1200, 80))
    told, starts, lengths = {"causal": True, "window": (700, 0)}, [0, 0, 0], [1200, 9, 801]
    given, how, rows = (k, v), {}, [0, 1, 2]
    if page:
        pages = 1200 // page
        table = torch.randperm(5 * pages, device="cuda").int()[: 3 * pages].view(3, pages)
        given = [
            torch.empty(5 * pages, 2, page, x.shape[3], device="cuda", dtype=HALF) for x in (k, v)
        ]
        for pool, x in zip(given, (k, v), strict=True):
            for b in range(3):
                pool[table[b].long()] = x[b].view(2, pages, page, -1).transpose(0, 1)
        how["block_table"] = table
    else:
        starts, rows = [100, 0, 700], [4, 0, 2]
        how["cache_starts"] = torch.tensor(starts, device="cuda")
        how["cache_batch_idx"] = torch.tensor(rows, device="cuda")
    on_gpu = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    call = lambda: decode(  # noqa: E731
        q, *given, cache_seqlens=on_gpu, splits=splits, return_lse=True, **told, **how
    )
    live = [slice(a, b) for a, b in zip(starts, lengths, strict=True)]
    judged(*call(), q, k[rows], v[rows], live, **told)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **CAPTURE):
        out, lse = call()
    lengths = [1000, 20, 720]
    on_gpu.copy_(torch.tensor(lengths))
    graph.replay()
    torch.cuda.synchronize()
    live = [slice(a, b) for a, b in zip(starts, lengths, strict=True)]
    judged(out, lse, q, k[rows], v[rows], live, **told)


def test_decode_in_float32():
    q, k, v = tensors((2, 8, 3, 64), (2, 2, 300, 64), (2, 2, 300, 64), dtype=torch.float32)
    lengths = torch.tensor([300, 77], device="cuda")
    out, lse = decode(q, k, v, cache_seqlens=lengths, causal=True, return_lse=True)
    judged(out, lse, q, k, v, [slice(300), slice(77)], causal=True)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled(mode):
    q, k, v = tensors((2, 8, 1, 64), (2, 2, 700, 64), (2, 2, 700, 64))
    compiled = torch.compile(attention, fullgraph=True, mode=mode)
    decoded = torch.compile(decode, fullgraph=True, mode=mode)
    lengths = torch.tensor([700, 300], dtype=torch.int32, device="cuda")
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(compiled(q, k, v).clone(), attention(q, k, v))
            got = decoded(q, k, v, cache_seqlens=lengths).clone()
            assert torch.equal(got, decode(q, k, v, cache_seqlens=lengths))


def test_compiled_training():
    inputs = [x.requires_grad_() for x in tensors(*[(2, 4, 300, 64)] * 3)]
    compiled = torch.compile(attention, fullgraph=True)
    dout = torch.randn_like(inputs[0])
    for x, y in zip(
        torch.autograd.grad(compiled(*inputs, causal=True), inputs, dout),
        torch.autograd.grad(attention(*inputs, causal=True), inputs, dout),
        strict=True,
    ):
        assert torch.equal(x, y)


@pytest.mark.parametrize("paged", [False, True])
def test_a_kv_cache_by_flash_attentions_interface(paged):
    """The GPU's result beside the CPU's, and equal caches afterwards."""
    q, k, v = tensors((3, 1, 8, 64), (3, 1, 2, 64), (3, 1, 2, 64))
    caches = tensors((6, 256, 2, 64), (6, 256, 2, 64))
    cos, sin = (torch.rand(300, 16, device="cuda") for _ in "cs")
    lengths = torch.tensor([200, 0, 131], dtype=torch.int32, device="cuda")
    how = {"block_table": torch.tensor([[3], [0], [5]], dtype=torch.int32, device="cuda")}
    found = []
    for device in ("cuda", "cpu"):
        given = [x.to(device, copy=True) for x in (q, *caches, k, v, cos, sin, lengths)]
        more = {n: x.to(device) for n, x in how.items()} if paged else {}
        out = flash_attn.flash_attn_with_kvcache(
            *given[:7], cache_seqlens=given[7], causal=True, **more
        )
        found.append([x.cpu() for x in (out, *given[1:3])])
    torch.testing.assert_close(found[0][0], found[1][0], rtol=0.02, atol=0.02)
    for x, y in zip(found[0][1:], found[1][1:], strict=True):
        torch.testing.assert_close(x, y, rtol=0.01, atol=0.01)


def test_packed_sequences_by_flash_attentions_interface():
    q, k, v = tensors((200, 4, 64), (230, 2, 64), (230, 2, 64))
    cuts = [torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([0, 70, 200], [0, 90, 230])]
    out = flash_attn.flash_attn_varlen_func(q, k, v, *cuts, 130, 140, causal=True)
    for (a, b), (c, d) in (((0, 70), (0, 90)), ((70, 200), (90, 230))):
        one = [x.transpose(0, 1)[None] for x in (q[a:b], k[c:d], v[c:d])]
        wanted, _ = plain(*(x.double() for x in one), [slice(None)], causal=True)
        error = (out[a:b].transpose(0, 1)[None].double() - wanted).abs().max()
        assert error <= 0.02


@pytest.mark.parametrize("of_k", [[0, 70, 200], [0, 90, 230]], ids=["one diagonal", "two"])
def test_alibi_by_flash_attentions_interface(of_k):
    """Values and gradients on the GPU, beside the CPU's in float32."""
    n_k = of_k[-1]
    inputs = tensors((200, 4, 64), (n_k, 2, 64), (n_k, 2, 64), (200, 4, 64))
    slopes = torch.rand(4, device="cuda")
    found = []
    for device, dtype in (("cuda", HALF), ("cpu", torch.float32)):
        *given, dout = (x.detach().to(device, dtype).requires_grad_() for x in inputs)
        cuts = [torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 70, 200], of_k)]
        how = {"causal": True, "window_size": (50, 0), "alibi_slopes": slopes.to(device)}
        out = flash_attn.flash_attn_varlen_func(*given, *cuts, 130, 140, **how)
        found.append([out, *torch.autograd.grad(out, given, dout)])
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x.float().cpu(), y, rtol=0.03, atol=0.03)


@pytest.mark.parametrize("window", [(None, None), (60, -3), (-2, None)], ids=str)
def test_sinks_and_windows_by_the_cute_interface(window):
    """Values and gradients on the GPU, beside the CPU's in float32."""
    inputs = tensors((2, 150, 4, 64), (2, 200, 2, 64), (2, 200, 2, 64), (4,), (2, 150, 4, 64))
    found = []
    for device, dtype in (("cuda", HALF), ("cpu", torch.float32)):
        *given, dout = (x.detach().to(device, dtype).requires_grad_() for x in inputs)
        *qkv, sinks = given
        how = {"window_size": window, "learnable_sink": sinks, "deterministic": True}
        out, lse = flash_attn_cute.flash_attn_func(*qkv, **how)
        found.append([out, lse, *torch.autograd.grad(out, given, dout)])
    for x, y in zip(*found, strict=True):
        error = (x.float().cpu() - y)[y.isfinite()].abs().max()
        assert error <= 0.02 * max(1.0, y[y.isfinite()].abs().max())
        assert torch.equal(x.isfinite().cpu(), y.isfinite())


@pytest.fixture(scope="module")
def model_of():
    transformers = pytest.importorskip("transformers")
    flashsim.torch.install()
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100}

    @functools.cache
    def make(name, **more):
        torch.manual_seed(0)
        config = getattr(transformers, f"{name}Config")(**sizes, **more)
        return getattr(transformers, f"{name}ForCausalLM")(config).to("cuda").eval()

    return make


@pytest.mark.parametrize(
    ("name", "more"),
    [("Llama", {}), ("Llama", {"cache_implementation": "static"}), ("Mistral", {})],
    ids=["dynamic", "static", "window"],
)
@pytest.mark.parametrize("padding", [0, 30])
def test_generated_tokens_are_eagers_in_float32(model_of, name, more, padding):
    """A static cache is compiled by transformers, with CUDA graphs."""
    model = model_of(name, **({"sliding_window": 40} if name == "Mistral" else {}))
    words = torch.randint(3, 100, (2, 60), device="cuda")
    mask = torch.ones_like(words)
    mask[1, :padding] = 0
    told = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    model.set_attn_implementation("eager")
    wanted = model.generate(words, **told)
    model.set_attn_implementation("flashsim")
    assert torch.equal(model.generate(words, **told, **more), wanted)


def test_assisted_tokens_are_eagers_in_float32(model_of):
    """Each step checks a few words that the prompt has, with several queries."""
    model = model_of("Llama")
    words = torch.randint(3, 100, (1, 20), device="cuda").repeat(1, 3)
    told = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    model.set_attn_implementation("eager")
    wanted = model.generate(words, **told)
    model.set_attn_implementation("flashsim")
    assert torch.equal(model.generate(words, **told, prompt_lookup_num_tokens=3), wanted)


def test_generation_in_half_precision_with_a_static_cache(model_of):
    llama, words = model_of("Llama"), torch.randint(3, 100, (2, 60), device="cuda")
    told = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "output_logits": True}
    told |= {"return_dict_in_generate": True, "cache_implementation": "static"}
    found = []
    try:
        llama.to(HALF)
        for name in ("sdpa", "flashsim"):
            llama.set_attn_implementation(name)
            found.append(llama.generate(words, **told).logits[0])
    finally:
        llama.float()
    torch.testing.assert_close(found[1], found[0], rtol=0.05, atol=0.05)
