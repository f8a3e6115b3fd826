"""flash-attention's interfaces, beside an oracle in float64 that is written here."""

import inspect
import math
from itertools import pairwise

import numpy as np
import pytest
from refusals import refusals, refused

torch = pytest.importorskip("torch")

from flashsim.errors import DTypeError, OptionError, ShapeError, UnsupportedError  # noqa: E402
from flashsim.functions.tracing import trace_score  # noqa: E402
from flashsim.torch import (  # noqa: E402
    attention,
    decode,
    decoding,
    flash_attn,
    flash_attn_cache,
    flash_attn_core,
    flash_attn_cute,
    flash_attn_interface,
)

pytestmark = pytest.mark.promise("bridges equal their library")

WINDOWS = [(-1, -1), (5, 0), (3, 4)]
SLOPES = torch.tensor([0.9, 0.5, 0.3, 0.1])


def tensors(*shapes, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return [torch.randn(shape).to(dtype) for shape in shapes]


def kept(n_q, n_k, causal=False, window=(-1, -1), chunk=0, signed=False):
    """Which keys each query sees: (n_q, n_k). If not `signed`, -1 means no limit."""
    rows = torch.arange(n_q)[:, None] + n_k - n_q
    columns = torch.arange(n_k)[None]
    left, right = window
    see = torch.ones(n_q, n_k, dtype=torch.bool)
    if causal:
        see &= columns <= rows
    if left is not None and (left >= 0 or signed):
        see &= columns >= rows - left
    if right is not None and (right >= 0 or signed):
        see &= columns <= rows + right
    if chunk:
        see &= columns.div(chunk, rounding_mode="floor") == rows.div(chunk, rounding_mode="floor")
    return see


def oracle(q, k, v, qv=None, slopes=None, *, scale=None, softcap=0.0, sinks=None, **mask):
    """out (n, heads, d) and LSE (heads, n) of one sequence, by token, in float64."""
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[0] // x.shape[0], 0) for x in (k, v))
    width = q.shape[-1] + (0 if qv is None else v.shape[-1])
    scores = q @ k.mT
    if qv is not None:
        scores = scores + qv.double().transpose(0, 1) @ v.mT
    scores = scores * (width**-0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    n_q, n_k = scores.shape[-2:]
    if slopes is not None:
        rows = torch.arange(n_q)[:, None] + n_k - n_q
        scores = scores - slopes.double()[:, None, None] * (rows - torch.arange(n_k)).abs()
    scores = scores.masked_fill(~kept(n_q, n_k, **mask), -math.inf)
    lse = scores.logsumexp(-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.double()[:, None])
    p = torch.exp(scores - lse[..., None]).nan_to_num(0.0)
    return (p @ v).transpose(0, 1), lse


def oracles(*given, **told):
    """out (batch, n, heads, d) and LSE (batch, heads, n) of a batch, by the oracle."""
    each = [oracle(*one, **told) for one in zip(*given, strict=True)]
    return tuple(torch.stack(x) for x in zip(*each, strict=True))


def close(got, wanted, tolerance=2e-5):
    """Compare tensors, or sequences of tensors, of any types."""
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance, check_dtype=False)


def close_gradients(out, given, wanted, exact):
    """Compare the gradients of `given` with those of `exact`, for the same gradient of `out`."""
    dout = torch.randn_like(out)
    found = torch.autograd.grad(out, given, dout)
    close(found, torch.autograd.grad(wanted, exact, dout.double()), 1e-4)


SIGNED = [(None, None), (3, None), (5, 0), (None, -2), (-1, 4), (-3, None)]
#: The interfaces' names of the oracle's options.
THEIRS = {
    **{"window": "window_size", "scale": "softmax_scale", "slopes": "alibi_slopes"},
    **{"chunk": "attention_chunk", "sinks": "learnable_sink"},
}


def dense_calls():
    """Yield an interface, n_q, n_k and the oracle's options; with sinks, these are to be made."""
    for causal in (False, True):
        for window in WINDOWS:
            mask = {"causal": causal, "window": window}
            yield flash_attn, 7, 11, {**mask, "softcap": 5.0, "scale": 0.3}
            yield flash_attn, 5, 8, {**mask, "softcap": 3.0, "slopes": SLOPES}
            for n_q in (3, 13, 17):
                yield flash_attn_interface, n_q, 13, {**mask, "chunk": 4}
    for window in SIGNED:
        told = {"window": window, "signed": True, "softcap": 4.0, "scale": 0.3, "sinks": None}
        yield flash_attn_cute, 7, 11, told


@pytest.mark.parametrize(("interface", "n_q", "n_k", "meant"), [*dense_calls()])
def test_values_lse_and_gradients(interface, n_q, n_k, meant):
    q, k, v = tensors((2, n_q, 4, 16), (2, n_k, 2, 16), (2, n_k, 2, 24))
    leaves = {"q": q, "k": k, "v": v, **({"sinks": torch.randn(4)} if "sinks" in meant else {})}
    given = {name: x.requires_grad_() for name, x in leaves.items()}
    exact = {name: x.detach().double().requires_grad_() for name, x in leaves.items()}
    told = {THEIRS.get(n, n): x for n, x in (meant | given).items() if n != "signed"}
    more = {} if interface is flash_attn_cute else {"return_attn_probs": True}
    out, lse, *rest = interface.flash_attn_func(**told, **more)
    assert rest == ([None] if interface is flash_attn else [])
    assert (out.shape, lse.shape) == ((2, n_q, 4, 24), (2, 4, n_q))
    inputs = [exact.pop(name) for name in "qkv"]
    wanted = oracles(*inputs, **meant | exact)
    close((out, lse), wanted)
    close_gradients(out, [*given.values()], wanted[0], [*inputs, *exact.values()])


@pytest.mark.parametrize(
    ("window", "causal", "meaning"),
    [
        ((1, -3), False, (None, None)),  # no key is left: both limits are ignored
        ((-2, None), True, (None, None)),
        ((3, -2), True, (3, None)),  # a causal mask replaces the right limit
    ],
)
def test_limits_that_the_package_ignores(window, causal, meaning):
    q, k, v = tensors((1, 7, 2, 16), (1, 11, 2, 16), (1, 11, 2, 16))
    out, _ = flash_attn_cute.flash_attn_func(q, k, v, causal=causal, window_size=window)
    close(out[0], oracle(q[0], k[0], v[0], causal=causal, window=meaning, signed=True)[0])


def test_packed_arguments_are_the_same_call():
    (qkv,) = tensors((2, 9, 3, 4, 16))
    whole = flash_attn.flash_attn_func(*qkv.unbind(2), causal=True)
    for other in (
        flash_attn.flash_attn_qkvpacked_func(qkv, causal=True),
        flash_attn.flash_attn_kvpacked_func(qkv[:, :, 0], qkv[:, :, 1:], causal=True),
        flash_attn_interface.flash_attn_qkvpacked_func(qkv, causal=True),
        flash_attn_interface.flash_attn_qkvpacked_func(
            qkv.flatten(2, 3), causal=True, num_heads_q=4
        ),
    ):
        torch.testing.assert_close(other, whole, rtol=0, atol=0)
    flat, cuts = qkv.flatten(0, 1), torch.tensor([0, 9, 18], dtype=torch.int32)
    q, kv = flat[:, 0], flat[:, 1:]
    for other in (
        flash_attn.flash_attn_varlen_qkvpacked_func(flat, cuts, 9, causal=True),
        flash_attn.flash_attn_varlen_kvpacked_func(q, kv, cuts, cuts, 9, 9, causal=True),
        flash_attn_interface.flash_attn_varlen_func(*flat.unbind(1), cuts, cuts, 9, 9, causal=True),
    ):
        torch.testing.assert_close(other.unflatten(0, (2, 9)), whole, rtol=1e-6, atol=1e-6)


def test_alibi_with_slopes_of_each_sequence():
    q, k, v = tensors((2, 5, 4, 16), (2, 8, 2, 16), (2, 8, 2, 16))
    slopes = torch.rand(2, 4)
    told = {"alibi_slopes": slopes, "softcap": 3.0, "return_attn_probs": True}
    out, lse, _ = flash_attn.flash_attn_func(q, k, v, **told)
    close((out, lse), oracles(q, k, v, [None, None], slopes, softcap=3.0))


@pytest.mark.parametrize(
    ("n_k", "dtype", "tolerance"),
    [(11, torch.float16, 2e-3), (9000, torch.float16, 2e-3), (60_000, torch.float32, 2e-5)],
)
def test_alibi_of_queries_far_from_the_first_key(n_k, dtype, tolerance):
    """The term of a key near the query is small: it must not be a difference of large numbers."""
    q, k, v = tensors((1, 3, 4, 16), (1, n_k, 2, 16), (1, n_k, 2, 16), dtype=dtype)
    told = {"causal": True, "alibi_slopes": SLOPES, "return_attn_probs": True}
    out, lse, _ = flash_attn.flash_attn_func(q, k, v, **told)
    wanted, of_rows = oracles(q, k, v, [None], [SLOPES], causal=True)
    close(out, wanted, tolerance)
    close(lse, of_rows)


@pytest.mark.parametrize("of_k", [[0, 4, 4, 9], [0, 7, 10, 21]], ids=["one diagonal", "three"])
@pytest.mark.parametrize("own", [False, True], ids=["shared slopes", "own slopes"])
def test_alibi_of_packed_sequences(own, of_k):
    of_q = [0, 4, 4, 9]
    q, k, v = tensors((9, 4, 16), (of_k[-1], 2, 16), (of_k[-1], 2, 16))
    slopes = torch.rand(3, 4) if own else torch.rand(4)
    cuts = [torch.tensor(x, dtype=torch.int32) for x in (of_q, of_k)]
    out, lse, _ = flash_attn.flash_attn_varlen_func(
        q, k, v, *cuts, 5, 11, causal=True, alibi_slopes=slopes, return_attn_probs=True
    )
    for n, ((a, b), (c, d)) in enumerate(zip(pairwise(of_q), pairwise(of_k), strict=True)):
        each = slopes[n] if own else slopes
        wanted = oracle(q[a:b], k[c:d], v[c:d], causal=True, slopes=each)
        close((out[a:b], lse[:, a:b]), wanted)


def test_alibi_over_a_cache():
    q, k, v = tensors((2, 2, 4, 16), (2, 12, 2, 16), (2, 12, 2, 16))
    slopes, lengths = torch.rand(4), torch.tensor([9, 5], dtype=torch.int32)
    out = flash_attn.flash_attn_with_kvcache(
        q, k, v, cache_seqlens=lengths, causal=True, alibi_slopes=slopes
    )
    for b, n in enumerate((9, 5)):
        close(out[b], oracle(q[b], k[b, :n], v[b, :n], causal=True, slopes=slopes)[0])


# -- flash_attn.cute -------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [(None, None), (2, 0), (None, -1)], ids=str)
@pytest.mark.parametrize("kind", ["packed", "padded", "pages"])
def test_lengths_packed_padded_and_in_pages(kind, window):
    used_q, used_k = [4, 0, 5], [7, 3, 11]
    q, k, v = tensors((3, 6, 4, 16), (3, 12, 2, 16), (3, 12, 2, 16))
    causal = window != (None, -1)  # which would replace this limit
    told = {"window_size": window, "causal": causal, "return_lse": True}
    lengths = {f"seqused_{x}": torch.tensor(n) for x, n in (("q", used_q), ("k", used_k))}
    if kind == "packed":
        given = [
            torch.cat([x[b, :n] for b, n in enumerate(of)])
            for x, of in ((q, used_q), (k, used_k), (v, used_k))
        ]
        cuts = [torch.tensor([0, *of]).cumsum(0).int() for of in (used_q, used_k)]
        lengths = {"cu_seqlens_q": cuts[0], "cu_seqlens_k": cuts[1]}
    elif kind == "padded":
        given = [q, k, v]
    else:
        table = torch.tensor([[5, 1, 8], [2, 0, 3], [4, 7, 6]], dtype=torch.int32)
        pools = [torch.empty(9, 4, 2, 16) for _ in "kv"]
        for pool, x in zip(pools, (k, v), strict=True):
            pool[table.flatten().long()] = x.reshape(9, 4, 2, 16)
        given, lengths = [q, *pools], {**lengths, "page_table": table}
    out, lse = flash_attn_cute.flash_attn_varlen_func(*given, **lengths, **told)
    start = 0
    for b, (n, m) in enumerate(zip(used_q, used_k, strict=True)):
        told = {"causal": causal, "window": window, "signed": True}
        wanted = oracle(q[b, :n], k[b, :m], v[b, :m], **told)
        if kind == "packed":
            close((out[start : start + n], lse[:, start : start + n]), wanted)
        else:
            close((out[b, :n], lse[b, :, :n]), wanted)
            assert not out[b, n:].any()
        start += n


def test_one_compiled_alibi_serves_every_length():
    slopes = torch.rand(4)
    graphs = [trace_score(flash_attn_core._alibi(slopes, torch.tensor([n]))).graph for n in (3, 70)]
    assert graphs[0].digest == graphs[1].digest


def test_qv_adds_to_the_scores():
    """With qv, `flash_attn.cute` returns an LSE whose heads are the last axis."""
    q, k, v, qv = tensors((2, 5, 4, 16), (2, 8, 1, 16), (2, 8, 1, 32), (2, 5, 4, 32))
    wanted = oracles(q, k, v, qv, causal=True)
    out, lse = flash_attn_cute.flash_attn_func(q, k, v, qv, causal=True)
    close((out, lse.mT), wanted)
    close(flash_attn_interface.flash_attn_func(q, k, v, causal=True, qv=qv), wanted[0])


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
def test_sequences_of_different_lengths(window, paged):
    of_q, of_k = [0, 4, 4, 9], [0, 7, 10, 21]
    q, k, v = tensors((9, 4, 16), (21, 2, 16), (21, 2, 16))
    cuts = [torch.tensor(x, dtype=torch.int32) for x in (of_q, of_k)]
    given, table = [k, v], None
    if paged:
        table = torch.tensor([[5, 1, 9], [2, 0, 0], [3, 7, 4]], dtype=torch.int32)
        given = [torch.full((10, 4, 2, 16), math.nan) for _ in "kv"]
        for b, (start, stop) in enumerate(pairwise(of_k)):
            for n, row in enumerate(range(start, stop)):
                for pool, x in zip(given, (k, v), strict=True):
                    pool[table[b, n // 4], n % 4] = x[row]
    out, lse, _ = flash_attn.flash_attn_varlen_func(
        q, *given, *cuts, 5, 11, 0.0, None, True, window, return_attn_probs=True, block_table=table
    )
    assert lse.shape == (4, 9)
    for (a, b), (c, d) in zip(pairwise(of_q), pairwise(of_k), strict=True):
        wanted = oracle(q[a:b], k[c:d], v[c:d], causal=True, window=window)
        close((out[a:b], lse[:, a:b]), wanted)


def test_rows_that_do_not_count_give_zeros():
    q, k, v = tensors((10, 2, 16), (12, 2, 16), (12, 2, 16))
    cuts = torch.tensor([0, 5, 10], dtype=torch.int32), torch.tensor([0, 6, 12], dtype=torch.int32)
    out, lse = flash_attn_interface.flash_attn_varlen_func(
        q, k, v, *cuts, 5, 6, torch.tensor([3, 5]), torch.tensor([6, 2]), return_attn_probs=True
    )
    close(out[:3], oracle(q[:3], k[:6], v[:6])[0])
    close(out[5:], oracle(q[5:], k[6:8], v[6:8])[0])
    assert not out[3:5].any()
    assert torch.isneginf(lse[:, 3:5]).all()


def test_fp8_inputs_and_their_descales():
    wide = tensors((2, 5, 4, 16), (2, 8, 2, 16), (2, 8, 2, 16))
    q, k, v = (x.to(torch.float8_e4m3fn) for x in wide)
    scales = [torch.rand(2, 2) + 0.5 for _ in "qkv"]
    out = flash_attn_interface.flash_attn_func(q, k, v, None, True, None, *scales)
    assert out.dtype == torch.bfloat16
    exact = [
        x.float() * s.repeat_interleave(x.shape[2] // 2, 1)[:, None, :, None]
        for x, s in zip((q, k, v), scales, strict=True)
    ]
    close(out, oracles(*exact, causal=True)[0], 0.03)


# -- a cache ---------------------------------------------------------------------------------------


def turned(x, cos, sin, positions, interleaved):
    """`x`, (n, heads, d), rotated as complex numbers."""
    half = cos.shape[1]
    head, rest = x[..., : 2 * half].double(), x[..., 2 * half :].double()
    pairs = head.unflatten(-1, (half, 2)) if interleaved else torch.stack(head.chunk(2, -1), -1)
    angle = torch.complex(cos[positions].double(), sin[positions].double())[:, None]
    done = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * angle)
    head = done.flatten(-2) if interleaved else torch.cat((done[..., 0], done[..., 1]), -1)
    return torch.cat((head, rest), -1)


def test_float64_rows_are_rotated_in_float64():
    x, cos, sin = tensors((3, 2, 8), (3, 4), (3, 4), dtype=torch.float64)
    got = flash_attn_cache.rotated(x, torch.arange(3), cos=cos, sin=sin, interleaved=True)
    close(got, turned(x, cos, sin, torch.arange(3), True), 1e-12)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["plain", "entries and padding", "pages", "padded pages"])
@pytest.mark.parametrize("rotary", [None, True, False], ids=["no rotation", "pairs", "halves"])
def test_a_cache_grows_and_is_read(kind, rotary, causal):
    """New keys are rotated and written; queries see the live keys; all else keeps its numbers."""
    before, starts, rows = [6, 0, 9], [0, 0, 0], [0, 1, 2]
    q, new_k, new_v = tensors((3, 2, 4, 16), (3, 2, 2, 16), (3, 2, 2, 24))
    caches = tensors((5, 12, 2, 16), (5, 12, 2, 24), seed=1)
    how, told = {}, {"causal": causal}
    if "padd" in kind:
        starts, rows = [2, 0, 7], [1, 0, 2] if "pages" in kind else [4, 0, 3]
        how["cache_batch_idx"] = torch.tensor(rows, dtype=torch.int32)
        how["cache_leftpad"] = torch.tensor(starts, dtype=torch.int32)
    table = torch.tensor([[3, 8, 1], [0, 2, 4], [9, 7, 6]], dtype=torch.int32)
    whole = [x.clone() for x in caches]
    if "pages" in kind:
        pools = [torch.full((10, 4, *x.shape[2:]), 7.0) for x in caches]
        for pool, x in zip(pools, caches, strict=True):
            for b in range(3):
                pool[table[b].long()] = x[b].unflatten(0, (3, 4))
        given, how["block_table"] = pools, table
    else:
        given = [x.clone() for x in caches]
    if rotary is not None:
        cos, sin = (torch.rand(20, 4) for _ in "cs")
        how |= {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": rotary}
    lengths = torch.tensor(before, dtype=torch.int32)
    out, lse = flash_attn.flash_attn_with_kvcache(
        q, *given, new_k, new_v, cache_seqlens=lengths, return_softmax_lse=True, **told, **how
    )
    assert lengths.tolist() == before
    for b, (start, n, row) in enumerate(zip(starts, before, rows, strict=True)):
        keys, queries = new_k[b].double(), q[b].double()
        if rotary is not None:
            at = torch.arange(n, n + 2)
            keys = turned(keys, cos, sin, at, rotary)
            queries = turned(queries, cos, sin, at if causal else at[:1].expand(2), rotary)
        whole[0][row, n : n + 2], whole[1][row, n : n + 2] = keys, new_v[b]
        live = [x[row, start : n + 2] for x in whole]
        close((out[b], lse[b]), oracle(queries, *live, **told))
    for x, cache in zip(given, whole, strict=True):
        if "pages" in kind:
            x = x[table.long()].flatten(1, 2)
            cache = cache[:3]
        torch.testing.assert_close(x, cache, rtol=1e-6, atol=1e-6)


def test_chunks_of_sequences_that_are_all_empty():
    q, k = torch.zeros(0, 4, 8), torch.zeros(0, 2, 8)
    offsets = torch.zeros(3, dtype=torch.int32)
    how = {"attention_chunk": 4, "return_attn_probs": True}
    out, lse = flash_attn_interface.flash_attn_varlen_func(q, k, k, offsets, offsets, 0, 0, **how)
    assert (out.shape, lse.shape) == ((0, 4, 8), (4, 0))
    for n_q, n_k in ((0, 3), (3, 0)):
        q, k = torch.zeros(2, n_q, 4, 8), torch.zeros(2, n_k, 2, 8)
        out, lse = flash_attn_interface.flash_attn_func(q, k, k, **how)
        assert (out.shape, lse.shape) == ((2, n_q, 4, 8), (2, 4, n_q))


@pytest.mark.parametrize("chunk", [0, 5])
def test_packed_queries_over_a_cache(chunk):
    """FlashAttention-3's way: queries and new keys packed, positions to rotate by of their own."""
    q, new_k, new_v = tensors((6, 4, 16), (3, 2, 16), (3, 2, 16))
    caches = tensors((2, 12, 2, 16), (2, 12, 2, 16), seed=1)
    of_q, of_new = torch.tensor([0, 2, 6]), torch.tensor([0, 0, 3])
    cos, sin = (torch.rand(40, 8) for _ in "cs")
    whole = [x.clone() for x in caches]
    out = flash_attn_interface.flash_attn_with_kvcache(
        q, *caches, new_k, new_v, None, cos, sin, torch.tensor([9, 4]), cu_seqlens_q=of_q,
        cu_seqlens_k_new=of_new, rotary_seqlens=torch.tensor([20, 30]), causal=True,
        attention_chunk=chunk,
    )  # fmt: skip
    whole[0][1, 4:7] = turned(new_k, cos, sin, torch.arange(30, 33), True)
    whole[1][1, 4:7] = new_v
    for b, (a, z, n, at) in enumerate([(0, 2, 9, 20), (2, 6, 7, 30)]):
        queries = turned(q[a:z], cos, sin, torch.arange(at, at + z - a), True)
        live = [x[b, :n] for x in whole]
        close(out[a:z], oracle(queries, *live, causal=True, chunk=chunk)[0])


def test_a_cache_with_qv_and_with_one_length_for_all():
    q, qv = tensors((2, 1, 4, 16), (2, 1, 4, 32))
    caches = tensors((2, 9, 1, 16), (2, 9, 1, 32), seed=1)
    out = flash_attn_interface.flash_attn_with_kvcache(q, *caches, qv=qv, cache_seqlens=7)
    close(out, oracles(q, *(x[:, :7] for x in caches), qv)[0])
    plain = flash_attn_interface.flash_attn_with_kvcache(q, *caches)
    close(plain[1], oracle(q[1], *(x[1] for x in caches))[0])


def test_parts_are_combined():
    q, k, v = tensors((5, 2, 16), (12, 2, 16), (12, 2, 16))
    parts = [oracle(q, k[a:b], v[a:b]) for a, b in ((0, 4), (4, 12), (12, 12))]
    outs = torch.stack([x.float() for x, _ in parts])
    outs[2] = math.nan  # of no key
    sums = torch.stack([x.float().transpose(0, 1) for _, x in parts])
    out, lse = flash_attn.flash_attn_combine(outs, sums)
    close((out, lse.mT), oracle(q, k, v))
    place = torch.empty(5, 2, 16, dtype=torch.bfloat16)
    assert flash_attn.flash_attn_combine(outs, sums, out=place)[0] is place
    torch.testing.assert_close(place, out.bfloat16(), rtol=0, atol=0)
    assert flash_attn.flash_attn_combine(outs, sums, out_dtype=torch.half)[0].dtype == torch.half


Q, K, V = tensors((1, 5, 2, 16), (1, 8, 2, 16), (1, 8, 2, 16))
ONE, CUTS = (Q[0], K[0], V[0]), (torch.tensor([0, 5]), torch.tensor([0, 8]))
#: Interfaces by the names that the table has for them.
OF = {"fa2": flash_attn, "fa3": flash_attn_interface, "cute": flash_attn_cute, "decode": decode}
CACHE, TABLE = tensors((2, 4, 1, 16), (2, 2, 9, 16), (2, 2, 9, 16)), torch.zeros(2, 1).int()
REFUSED = refusals(r"""
fa2.flash_attn_func(Q, K, V, 0.1) -> UnsupportedError: no dropout
fa2.flash_attn_func(Q[0], K, V) -> ShapeError: q must be a tensor
fa2.flash_attn_func(Q, K, V, alibi_slopes=torch.rand(3)) -> ShapeError: alibi_slopes must have
fa2.flash_attn_varlen_func(*ONE, *CUTS, 5, 8, alibi_slopes=torch.rand(2, 2))
    -> ShapeError: (2,), or one ... (1, 2)
cute.flash_attn_func(Q, K, V, score_mod=max)
    -> UnsupportedError: score_mod=; write the function for flashsim.torch.flex_attention
cute.flash_attn_varlen_func(Q, K, V, page_table=TABLE[:1], cu_seqlens_k=CUTS[1])
    -> OptionError: pass the lengths as seqused_k=
cute.flash_attn_varlen_func(Q, K[0], V[0]) -> ShapeError: k must be (batch, n
fa2.flash_attn_varlen_func(*ONE, CUTS[0], torch.tensor([0, 4, 8]), 5, 8)
    -> ShapeError: same number of sequences
fa2.flash_attn_varlen_func(*ONE, CUTS[0], torch.tensor([1, 8]), 5, 8)
    -> ShapeError: must begin at 0
fa3.flash_attn_varlen_func(*ONE, *CUTS, 5, 8, torch.tensor([6]))
    -> ShapeError: at most the length of
fa2.flash_attn_qkvpacked_func(Q) -> ShapeError: qkv must be
fa3.flash_attn_qkvpacked_func(Q, num_heads_q=1) -> ShapeError: heads_k
fa2.flash_attn_with_kvcache(Q, K, V, K, V) -> OptionError: need cache_seqlens
fa2.flash_attn_with_kvcache(Q, K, V, K[:, :1], V[:, :1], cache_seqlens=torch.tensor(2))
    -> ShapeError: must be 1 integers
fa2.flash_attn_with_kvcache(Q, K, V, K)
    -> OptionError: only one of them was passed; pass both
fa2.flash_attn_with_kvcache(Q, K, V, rotary_cos=torch.rand(9, 4)) -> OptionError: needs rotary_sin
fa2.flash_attn_with_kvcache(Q, K.mT.contiguous().mT, V) -> ShapeError: contiguous last
fa3.flash_attn_with_kvcache(Q, K, V, cu_seqlens_k_new=CUTS[1]) -> OptionError: needs cu_seqlens_q
fa3.flash_attn_func(Q, K, V, q_descale=torch.rand(1, 2)) -> DTypeError: are for FP8 inputs
fa2.flash_attn_combine(torch.rand(3, 5, 2, 16), torch.rand(2, 5, 2))
    -> ShapeError: lse_partial the same without d
fa2.flash_attn_combine(torch.rand(3, 5, 2, 16), torch.rand(3, 5, 2).double())
    -> DTypeError: must be float32
fa2.flash_attn_combine(torch.rand(3, 5, 2, 16), torch.rand(3, 5, 2), out=torch.empty(3, 5, 2, 16))
    -> ShapeError: out must have the shape (5, 2, 16)
fa2.flash_attn_varlen_func(Q[0], K, V, *CUTS, 5, 8) -> ShapeError: k must be a tensor (tokens,
fa3.flash_attn_varlen_func(*ONE, *CUTS, 5, 8, torch.tensor([-1]))
    -> ShapeError: at most the length of
fa3.flash_attn_func(Q, K, V, qv=K) -> ShapeError: qv must have q's rows
fa3.flash_attn_func(Q, K, V[:, :4], qv=Q) -> ShapeError: k and v must have the same heads and rows
fa2.flash_attn_func(Q, K, V, window_size=(1, 2, 3))
    -> ShapeError: window_size must be a pair (left, right), got (1, 2, 3)
cute.flash_attn_func(Q, K, V, window_size=()) -> ShapeError: must be a pair (left, right), got ()
fa3.flash_attn_varlen_func(*ONE, CUTS[0], 9 * CUTS[1], 5, 8, seqused_k=CUTS[1][:1])
    -> ShapeError: the number of tokens of k, 8, got 72
fa3.flash_attn_varlen_func(*ONE, *CUTS, 5, 8, torch.tensor([2.5]))
    -> ShapeError: seqused_q must be a 1-D tensor of integers, got torch.float32
cute.flash_attn_varlen_func(Q[0], K, V, None, CUTS[0], page_table=TABLE[:1], seqused_k=CUTS[1] / 1)
    -> ShapeError: seqused_k must be a 1-D tensor of integers, got torch.float32
cute.flash_attn_varlen_func(Q[0], K[0], V[0], None, CUTS[0], page_table=TABLE[:1])
    -> ShapeError: k must be a tensor (pages, page_size
fa2.flash_attn_varlen_func(Q[0], K, V, *CUTS, 5, 8, block_table=TABLE[0])
    -> ShapeError: the table of pages must be a tensor (batch, max_pages), got (1,)
fa3.flash_attn_with_kvcache(Q, K, V, cu_seqlens_q=CUTS[0]) -> ShapeError: q must be a tensor (tokens
fa3.flash_attn_with_kvcache(Q[0], K, V, cu_seqlens_q=CUTS[1])
    -> ShapeError: cu_seqlens_q must end at q's 5 tokens, got 8
fa3.flash_attn_with_kvcache(Q[0], K, V, *ONE[1:], cu_seqlens_q=CUTS[0], cu_seqlens_k_new=TABLE[0])
    -> ShapeError: cu_seqlens_k_new must have 2 offsets
fa2.flash_attn_varlen_func(*ONE[:1], K[:, :0], V[:, :0], *CUTS, 5, 8, block_table=TABLE[:1])
    -> ShapeError: a page must hold at least one key
decode(CACHE[0][0, 0, 0, 0], *CACHE[1:], cache_seqlens=1) -> ShapeError: (batch, heads, n_q
decode(CACHE[0].to_sparse(), *CACHE[1:]) -> UnsupportedError: q must be a dense tensor
decode(*CACHE, causal=1) -> DTypeError: causal must be True or False, got 1
decode(*CACHE, return_lse=TABLE) -> DTypeError: return_lse must be True or False, got tensor(
decode(*CACHE, splits=-3) -> ShapeError: splits must be at least 0, got -3
decode(*CACHE, window=TABLE[0]) -> DTypeError: window= must be a pair (left, right)
decode(*CACHE, cache_seqlens=2**40) -> ShapeError: cache_seqlens must fit in 32 bits
decode(*CACHE, cache_seqlens=[1]) -> ShapeError: 2 integers, one per sequence
decode(*CACHE, cache_seqlens=torch.ones(2)) -> ShapeError: 2 integers, one per sequence
decode(*CACHE, block_table=TABLE.long()) -> ShapeError: block_table must be int32
decode(*CACHE, block_table=TABLE, cache_starts=torch.zeros(2).int())
    -> UnsupportedError: out cache_starts
decode(*CACHE[:2], CACHE[2][:, :, :4]) -> ShapeError: same entries
decode(CACHE[0], CACHE[1][:1], CACHE[2][:1]) -> ShapeError: an entry for each of the
decode(CACHE[0].double(), *CACHE[1:]) -> DTypeError: the same dtype
decode(CACHE[0], CACHE[1].to("meta"), CACHE[2].to("meta")) -> DTypeError: float32 on meta
decode(CACHE[0][..., :8], *CACHE[1:]) -> ShapeError: the same head_dim
decode(*CACHE, block_table=[[0], [1]]) -> DTypeError: block_table must be Tensor | None, got [[0
fa2.flash_attn_func(Q, K, V, alibi_slopes=[0.5, 0.25]) -> DTypeError: alibi_slopes must be Tensor
fa2.flash_attn_kvpacked_func(Q, [K, V]) -> DTypeError: kv must be Tensor, got [tensor(
fa2.flash_attn_qkvpacked_func([Q, K, V]) -> DTypeError: qkv must be Tensor, got [tensor(
fa2.flash_attn_varlen_func(*ONE, 5, CUTS[1], 5, 8) -> DTypeError: cu_seqlens_q must be Tensor, got 5
fa2.flash_attn_with_kvcache(None, K, V) -> ShapeError: q must be a tensor
fa2.flash_attn_with_kvcache(Q, K.numpy(), V) -> ShapeError: k_cache must be a tensor
fa2.flash_attn_with_kvcache(Q, K, V, K.numpy(), V, cache_seqlens=0) -> ShapeError: k must be a
fa2.flash_attn_with_kvcache(Q, K, V, block_table=[[0]]) -> DTypeError: block_table must be Tensor
fa2.flash_attn_combine([Q], [K]) -> DTypeError: out_partial must be Tensor, got [tensor(
fa3.flash_attn_func(Q, K, V, qv=[1]) -> ShapeError: qv must be a tensor
fa3.flash_attn_qkvpacked_func([Q, K, V], num_heads_q=1) -> DTypeError: qkv must be Tensor, got [
fa3.flash_attn_with_kvcache(Q, K, V, page_table=[[0]]) -> DTypeError: page_table must be Tensor
cute.flash_attn_func(Q, K, [V]) -> ShapeError: v must be a tensor
cute.flash_attn_varlen_func([Q], K, V) -> DTypeError: q must be Tensor, got [tensor(
fa3.flash_attn_func(Q, K, V, is_causal=True) -> UnknownArgumentError: here it is called causal
fa2.flash_attn_qkvpacked_func(Q, casual=True)
    -> UnknownArgumentError: flash_attn_qkvpacked_func() has no argument 'casual'
fa2.flash_attn_varlen_qkvpacked_func(Q, CUTS[0], 5, block_table=None)
    -> UnknownArgumentError: flash_attn_varlen_qkvpacked_func() has no argument 'block_table'
fa2.flash_attn_varlen_kvpacked_func(Q, K, *CUTS, 5, 8, *[0] * 8, None)
    -> UnknownArgumentError: flash_attn_varlen_kvpacked_func(): too many positional arguments
fa2.flash_attn_kvpacked_func(Q, K) -> ShapeError: kv must be (batch, n, 2, heads, head_dim), got (
fa2.flash_attn_varlen_kvpacked_func(Q[0], K, *CUTS, 5, 8)
    -> ShapeError: kv must be (tokens, 2, heads, head_dim), got (
""")


@pytest.mark.parametrize(("call", "said"), REFUSED)
def test_what_is_refused_says_so(call, said):
    refused(call, said, {**globals(), **OF})


def test_metadata_is_none():
    assert flash_attn_interface.get_scheduler_metadata(1, 2, causal=True) is None


def test_what_does_not_fit_is_refused_before_a_cache_changes():
    q, k, v = tensors((2, 2, 4, 16), (2, 9, 2, 16), (2, 9, 2, 8))
    new_k, new_v = tensors((2, 2, 2, 16), (2, 2, 2, 8))
    pages = torch.arange(2, dtype=torch.int32)[:, None]  # each sequence has one page
    cos = torch.rand(4, 8)
    fits = {"k": new_k, "v": new_v, "cache_seqlens": torch.tensor([3, 7])}
    cases = [
        (r"k= must have .* \(2, 2, 2, 16\)", {"k": new_k[:, :, :1]}),  # these would broadcast
        (r"k= must have .* \(2, 2, 2, 16\)", {"k": new_k[:1]}),
        (r"v= must have .* \(2, 2, 2, 8\)", {"v": new_v[:, :1]}),
        (r"v= must have .* \(2, 2, 2, 8\)", {"v": torch.ones(())}),
        (r"k must be a tensor \(batch, n", {"k": new_k[0]}),
        (r"q must be a tensor \(batch, n", {"q": q[0]}),
        (r"v_cache must be a tensor \(batch, n", {"v_cache": v[0]}),
        ("k_cache and v_cache must have the same shape", {"v_cache": v[:, :8]}),
        ("rows 0 to 8, got 3 to 9", {"cache_seqlens": torch.tensor([3, 8])}),
        ("rows 0 to 8, got -1 to 4", {"cache_seqlens": torch.tensor([3, -1])}),
        ("rows 0 to 8, got 3 to 9", {"cache_seqlens": torch.tensor([3, 8]), "block_table": pages}),
        ("the caches' pages 0 to 1, got -1 to 0", {"block_table": -pages}),
        ("the caches' pages 0 to 1, got 0 to 2", {"block_table": 2 * pages}),
        (r"of shape \(2, max_pages\)", {"block_table": pages[:1]}),
        (r"of shape \(2, max_pages\)", {"block_table": pages[:, 0]}),
        ("the caches' entries 0 to 1, got 0 to 2", {"cache_batch_idx": 2 * pages[:, 0]}),
        ("the caches' entries 0 to 1, got -1 to 0", {"cache_batch_idx": -pages[:, 0]}),
        ("rows of block_table, 0 to 1, got 0 to 2", {
            "block_table": pages, "cache_batch_idx": 2 * pages[:, 0]}),
        ("cache_batch_idx must be 2 integers", {"cache_batch_idx": pages}),
        ("rows of rotary_cos, 0 to 3, got 2 to 4", {
            "cache_seqlens": torch.tensor([2, 3]), "rotary_cos": cos, "rotary_sin": cos}),
        ("rotary_sin must have the same shape", {"rotary_cos": cos[0], "rotary_sin": cos[0]}),
    ]  # fmt: skip
    caches = k.clone(), v.clone()
    for words, changed in cases:
        told = {"q": q, "k_cache": caches[0], "v_cache": caches[1], **fits, **changed}
        with pytest.raises(ShapeError, match=words):
            flash_attn.flash_attn_with_kvcache(**told)
    torch.testing.assert_close(caches, (k, v), rtol=0, atol=0)
    with pytest.raises(OptionError, match="rotary_sin= needs rotary_cos="):
        flash_attn.flash_attn_with_kvcache(q, *caches, **fits, rotary_sin=cos)
    with pytest.raises(ShapeError, match=r"rotary_seqlens must have the shape \(2,\)"):
        flash_attn_interface.flash_attn_with_kvcache(
            *(q, *caches), **fits, rotary_cos=cos, rotary_sin=cos, rotary_seqlens=pages
        )
    with pytest.raises(ShapeError, match="cache_seqlens must be 2 integers"):
        flash_attn_interface.flash_attn_with_kvcache(
            *(q.flatten(0, 1), *caches),
            **{"cache_seqlens": torch.tensor([1.0, 2]), "cu_seqlens_q": torch.tensor([0, 2, 4])},
        )
    for name in ("k", "v"):
        words = f"{name}= must have the dtype of {name}_cache, float32, got float16; convert it"
        with pytest.raises(DTypeError, match=words):
            flash_attn.flash_attn_with_kvcache(q, *caches, **fits | {name: fits[name].half()})
    torch.testing.assert_close(caches, (k, v), rtol=0, atol=0)
    flash_attn.flash_attn_with_kvcache(q, *caches, **fits)
    assert torch.equal(caches[0][1, 7:], new_k[1])


def test_a_block_table_reads_no_page_that_is_missing():
    """A negative page would otherwise count from the last one."""
    q, k, v = tensors((2, 4, 1, 16), (3, 2, 8, 16), (3, 2, 8, 16))
    table = torch.tensor([[0, -1], [1, 2]], dtype=torch.int32)
    first = decode(q, k, v, block_table=table, cache_seqlens=[8, 8])  # page -1 is unused
    same = decode(q, k, v, block_table=table, cache_seqlens=np.int64(8))
    torch.testing.assert_close(same, first, rtol=0, atol=0)
    for page in (-1, 3):
        table[0, 1] = page
        with pytest.raises(ShapeError, match=f"pages 0 to 2, got {min(page, 0)} to "):
            decode(q, k, v, block_table=table, cache_seqlens=[9, 16])
    with pytest.raises(ShapeError, match="entries 0 to 2, got -1 to 0"):
        decode(q, k, v, cache_batch_idx=torch.tensor([0, -1]))


def test_lengths_and_starts_outside_a_cache_count_as_its_ends():
    q, k, v = tensors((3, 1, 4, 16), (3, 9, 2, 16), (3, 9, 2, 16))
    lengths, starts = torch.tensor([-2, 20, 5]), torch.tensor([0, -3, 2])
    told = {"cache_seqlens": lengths, "cache_leftpad": starts, "return_softmax_lse": True}
    slopes = torch.zeros(4)  # read on the host
    for more in ({}, {"alibi_slopes": slopes}):
        out, lse = flash_attn.flash_attn_with_kvcache(q, k, v, **told, **more)
        assert not out[0].any()
        assert torch.isneginf(lse[0]).all()
        close((out[1], lse[1]), oracle(q[1], k[1], v[1]))
        close((out[2], lse[2]), oracle(q[2], k[2, 2:5], v[2, 2:5]))


def test_public_names_are_documented():
    for module in (flash_attn, flash_attn_interface, flash_attn_cute):
        for name in module.__all__:
            assert inspect.getdoc(getattr(module, name)), name


# -- decode ----------------------------------------------------------------------------------------


def test_decode_checks_and_has_no_gradient():
    q, k, v = tensors((2, 4, 1, 16), (2, 2, 9, 16), (2, 2, 9, 16))
    out, lse = decode(q, k, v, cache_seqlens=[9, 4], window=(3, 0), softcap=2.0, return_lse=True)
    for b, n in enumerate((9, 4)):
        by_token = [x[b].transpose(0, 1) for x in (q, k[:, :, :n], v[:, :, :n])]
        wanted = oracle(*by_token, window=(3, 0), softcap=2.0)
        close((out[b].transpose(0, 1), lse[b]), wanted)
    got = decode(q.requires_grad_(), k, v)
    with pytest.raises(UnsupportedError, match="no gradient"):
        got.sum().backward()


@pytest.mark.parametrize("compiled", [False, True])
def test_decode_casts_under_autocast_as_attention_does(compiled):
    q, k, v = tensors((2, 4, 1, 16), (2, 2, 9, 16), (2, 2, 9, 16))
    run = torch.compile(decode, fullgraph=True, backend="aot_eager") if compiled else decode
    wanted = decode(*(x.bfloat16() for x in (q, k, v)))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(run(q, k.bfloat16(), v), wanted)
        assert attention(q, k, v).dtype == wanted.dtype
    assert wanted.dtype == torch.bfloat16


def test_decode_compiles():
    q, k, v = tensors((2, 4, 1, 16), (2, 2, 9, 16), (2, 2, 9, 16))
    lengths = torch.tensor([9, 4], dtype=torch.int32)
    compiled = torch.compile(decode, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(
        compiled(q, k, v, cache_seqlens=lengths), decode(q, k, v, cache_seqlens=lengths)
    )


@pytest.mark.parametrize("told", [{}, {"causal": True, "left": 4}, {"right": 2, "softcap": 3.0}])
@pytest.mark.parametrize("paged", [False, True])
def test_what_no_kernel_decodes_is_written_out(paged, told):
    """What torch's operators compute on a GPU is what the CPU's engine computes, beside NaN too."""
    q, k, v = tensors((3, 4, 2, 16), (9, 2, 8, 16), (9, 2, 8, 24))
    lengths, table, starts, entries = torch.tensor([7, 0, 5]), None, None, None
    if paged:
        table = torch.tensor([[1, 2], [3, 8], [0, 4]], dtype=torch.int32)
        lengths = torch.tensor([16, 9, 3])
    else:
        v[:, :, 7:] = math.nan
        starts, entries = torch.tensor([2, 0, 1]), torch.tensor([8, 1, 0])
    asked = {"causal": False, "left": -1, "right": -1, "softcap": 0.0} | told
    given = q, k, v, lengths, table, starts, entries, *asked.values(), None, 0
    close(decoding._written_out(*given), decoding._packed(*given), 1e-5)


@pytest.mark.parametrize("keys", [(0, 9), (2, 7), (0, 1), (3, 3), (-2, 30), (8, 1)], ids=str)
@pytest.mark.parametrize("told", [{}, {"causal": True, "left": 4}])
def test_equal_lengths_are_decoded_without_a_copy(keys, told, monkeypatch):
    """As views of the caches, which may have more entries than there are sequences."""
    q, k, v = tensors((2, 4, 2, 16), (3, 2, 9, 16), (3, 2, 9, 24))
    begin, stop = (max(0, min(x, 9)) for x in keys)
    for x in (k, v):
        x[:, :, stop:] = x[:, :, :begin] = math.nan
    starts, lengths = (torch.tensor([x, x]) for x in keys)
    asked = {"causal": False, "left": -1, "right": -1, "softcap": 0.0} | told
    given = q, k, v, lengths, None, starts, None, *asked.values(), None, 0
    monkeypatch.setattr(decoding, "live", None)
    out, lse = decoding._packed(*given)
    close(decoding._written_out(*given), (out, lse), 1e-5)
    assert out.is_contiguous()
