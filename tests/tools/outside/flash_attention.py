"""flash-attention's size grids and error rule, from their published text.

The rule: the error beside attention in float32 is at most twice (for some gradients three or five
times) the error of attention in the same half precision, written in torch's operators.
https://github.com/Dao-AILab/flash-attention/blob/main/tests/test_flash_attn.py
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

import flashsim
from flashsim.torch import attention
from outside.cases import Point, Test, one_of_each, product

TITLE = "flash-attention (FlashAttention-2's tests)"

#: Maximum number of scores of one head on a CPU; larger sizes are left out.
MOST = 2**17

DTYPES = ("float16", "bfloat16")
WIDTHS = (32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256)
SIZES = (
    *((113, 203), (128, 217), (113, 211), (108, 256), (256, 512), (512, 256), (1024, 1024)),
    *((1023, 1024), (1024, 1023), (2048, 2048)),
)
CAUSAL = (
    *((1, 239), (3, 799), (127, 512), (127, 513), (113, 203), (128, 217), (113, 211)),
    *((108, 256), (256, 512), (1023, 1024)),
)
SPLIT = (
    *((3, 1024), (1, 339), (64, 800), (3, 799), (64, 2048), (16, 20000), (16, 100000)),
    *((128, 128), (256, 256)),
)
CACHED = (
    *((1, 128), (1, 339), (3, 1024), (64, 800), (64, 256), (3, 799), (64, 2048), (16, 20000)),
    *((1, 2**17), (16, 2**17), (128, 128)),
)
BOTH = (False, True)


def squares(*lengths: int) -> list[tuple[int, int]]:
    """Return sizes with as many queries as keys."""
    return [(n, n) for n in lengths]


def swapped(sizes: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return sizes in both orders."""
    return [*sizes, *((k, q) for q, k in sizes)]


def tests(device: str, whole: bool) -> list[Test]:
    """Return the tests, with a point per size and per head_dim; `whole`: all points."""
    gpu = device == "cuda"
    usual = {"dtype": DTYPES, "local": BOTH, "causal": BOTH, "deterministic": BOTH, "alibi": BOTH}
    usual |= {"dropout": (0.0, 0.17)}
    grouped = usual | {"heads": ("mha", "mqa", "gqa"), "softcap": (0.0, 50.0)}
    causal = {"dtype": DTYPES, "local": BOTH, "causal": (True,), "d": WIDTHS}
    small = {"dtype": ("float16",), "causal": BOTH, "d": (16, 32, 64)}

    def unfit(point: Point) -> str:
        if point.get("dropout"):
            return "flashsim has no dropout"
        if point.get("alibi") and point.get("varlen"):
            return "the ALiBi bias would be one matrix over all packed sequences"
        if point.get("pages"):
            return "flashsim has no backward pass over pages"
        return ""

    def uncached(point: Point) -> str:
        if point["new_kv"] or point["rotary"]:
            return "flashsim neither writes into a cache nor applies rotary embeddings"
        if point["leftpad"]:
            return "flashsim does not support a left-padded cache"
        return "ALiBi is a bias, and decoding takes no bias" if point["alibi"] else ""

    def choose(points: Sequence[Point]) -> list[Point]:
        if whole:
            return [*points]
        if not gpu:
            points = [p for p in points if math.prod(p["n"]) <= MOST]
        return [*one_of_each("n")(points), *one_of_each("d")(points)]

    def test(name: str, run: Any, unfit: Any = unfit, **values: Any) -> Test:
        given = [p | {"device": device} for p in product(**values)]
        # As in the original: no softcap with dropout, no rotation without new keys.
        given = [p for p in given if not (p.get("softcap") and p.get("dropout"))]
        given = [p for p in given if p.get("new_kv") or not p.get("rotary")]
        given = [p for p in given if not (p.get("leftpad") and p.get("pages"))]
        return Test(name, run, given, unfit, choose)

    packed = squares(97, 128, 200, 384, 768, 1024, 1025, 2048)
    varied = squares(97, 128, 200, 257, 384, 512, 768, 1025, 2048)
    narrow = tuple(d for d in WIDTHS if d != 80)
    return [
        test("qkvpacked", judged, **usual, packed=["qkv"], n=packed, d=WIDTHS, batch=[4]),
        test("varlen_qkvpacked", judged, **usual, packed=["qkv"], varlen=[True], n=varied,
             d=tuple(d for d in WIDTHS if d not in (40, 111)), batch=[5]),
        test("output", judged, **grouped, packed=("kv", ""), n=SIZES, d=narrow, batch=[4],
             slack=[3]),
        test("varlen_output", judged, **grouped, packed=("kv", ""), varlen=[True],
             n=((1, 147), *SIZES), d=tuple(d for d in WIDTHS if d != 40), batch=[4], slack=[3]),
        test("causal", judged, **causal, n=swapped(CAUSAL), batch=[8], atol=[1e-5]),
        test("varlen_causal", judged, **causal, n=swapped(CAUSAL), varlen=[True],
             pages=(None, 256, 512), batch=[8], atol=[1e-5]),
        test("splitkv", judged, **usual | {"dropout": (0.0,)}, n=swapped(SPLIT), d=WIDTHS,
             batch=[1], atol=[1e-5, ], atol_gradients=[2e-4]),
        test("kvcache", cached, uncached, n=CACHED, d=(32, 59, 64, 80, 128, 256), splits=(1, 0),
             heads=("mha", "mqa", "gqa"), new_kv=BOTH, alibi=BOTH, local=BOTH, causal=BOTH,
             new_as_long=BOTH, interleaved=BOTH, rotary=(0.0, 0.5, 1.0), pages=(None, 256),
             leftpad=BOTH),
        test("bwd_overflow", judged, **small, n=squares(1, 2, 5, 17, 128), batch=[2], spread=[5],
             slack=[5], atol_gradients=[1e-3]),
        test("bwd_transpose", judged, dtype=DTYPES, causal=BOTH, d=(64, 128),
             n=squares(97, 128, 200, 256), batch=[5], strided=[True]),
        test("bwd_varlen_overflow", finite, n=[(256, 3)], **small),
        test("race_condition, deterministic", repeated, **usual | {"alibi": [False],
             "deterministic": [True], "dropout": [0.0]}, n=swapped(CAUSAL), d=WIDTHS),
    ]  # fmt: skip


# -- one point ------------------------------------------------------------------------------------

HEADS = {"mha": 6, "mqa": 1, "gqa": 2}


def plain(q, k, v, *, causal, window, softcap, bias, wide):
    """Return attention on (batch, heads, n, d) in torch's operators, in float32 or q's type."""
    dtype, group = q.dtype, q.shape[1] // k.shape[1]
    if wide:
        q, k, v = (x.float() for x in (q, k, v))
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = q @ (k * q.shape[-1] ** -0.5).mT
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    scores = scores if bias is None else scores + bias
    n_q, n_kv = scores.shape[-2:]
    rows, columns = (torch.arange(n, device=q.device) for n in (n_q, n_kv))
    offset = columns - (rows[:, None] + n_kv - n_q)
    left, right = (n_q + n_kv if side < 0 else side for side in window)
    kept = (offset >= -left) & (offset <= (0 if causal else right))
    shares = scores.masked_fill(~kept, -torch.inf).softmax(-1)
    return (shares.masked_fill(~kept.any(-1, keepdim=True), 0) @ v).to(dtype)


def judged(
    *,
    n: tuple[int, int],
    d: int,
    dtype: str,
    causal: bool,
    device: str,
    batch: int,
    local: bool = False,
    heads: str = "mha",
    packed: str = "",
    softcap: float = 0.0,
    alibi: bool = False,
    deterministic: bool = False,
    varlen: bool = False,
    strided: bool = False,
    spread: float = 1.0,
    slack: float = 2.0,
    atol: float = 0.0,
    atol_gradients: float | None = None,
    dropout: float = 0.0,
    pages: None = None,
) -> None:
    """Check output and gradients by the rule."""
    torch.manual_seed(0)
    like: dict[str, Any] = {"device": device, "dtype": getattr(torch, dtype)}
    n_q, n_kv = n
    many, few = (4, min(HEADS[heads], 4)) if softcap else (6, HEADS[heads])
    window = tuple(torch.randint(0, n_kv, (2,)).tolist()) if local else (-1, -1)
    q, *kv = by_token(batch, n, (many, few), d, packed, like)
    q, kv = q * (softcap or spread), [x * min(spread, 3) for x in kv]
    told = {"causal": causal, "window": window, "softcap": softcap}
    bias = slopes(batch, many, n, like) if alibi else None
    ours = {**told, "bias": bias, "deterministic": deterministic}
    if varlen:
        cuts = [lengths(rows, batch) for rows in n]
        q, k, v = (
            torch.cat([one[:size] for one, size in zip(x, sizes, strict=True)])[None]
            for x, sizes in zip((q, *kv), (cuts[0], cuts[1], cuts[1]), strict=True)
        )
        offsets = [[0, *torch.tensor(sizes).cumsum(0).tolist()] for sizes in cuts]
        ours |= {"cu_seqlens_q": offsets[0], "cu_seqlens_k": offsets[1]}
        parts = [[*pairwise(one)] for one in offsets]
    else:
        (k, v), parts = kv, [[(0, n_q)], [(0, n_kv)]]

    def written_out(q, k, v, wide):
        found = [
            plain(q[:, :, a:b], k[:, :, c:e], v[:, :, c:e], bias=bias, wide=wide, **told)
            for (a, b), (c, e) in zip(*parts, strict=True)
        ]
        return torch.cat(found, dim=2)

    dout = torch.randn(
        q.shape if not strided else (q.shape[1], 2 * q.shape[0], *q.shape[2:]), **like
    )
    dout = dout[:, ::2].transpose(0, 1) if strided else dout
    got, rough, exact = (
        outcome(function, (q, k, v), dout)
        for function in (
            lambda *x: attention(*x, **ours),
            lambda *x: written_out(*x, wide=False),
            lambda *x: written_out(*x, wide=True),
        )
    )
    atol_gradients = atol if atol_gradients is None else atol_gradients
    # only for splitkv, whose original tolerance is eight times as large
    if alibi and atol_gradients:
        slack = 8
    limits = [(2.0, atol), *[(slack, atol_gradients)] * 3]
    for name, x, y, true, (factor, more) in zip(
        ("out", "dq", "dk", "dv"), got, rough, exact, limits, strict=True
    ):
        error, allowed = ((z.float() - true.float()).abs().max().item() for z in (x, y))
        assert error <= factor * allowed + more, f"{name}: {error:.3g} > {factor:g} x {allowed:.3g}"


def outcome(function: Any, inputs: Sequence[torch.Tensor], dout: torch.Tensor) -> list[Any]:
    """Return output and gradients; tensors are (batch, n, heads, d), as in the original."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = function(*(x.transpose(1, 2) for x in inputs)).transpose(1, 2)
    return [out.detach(), *torch.autograd.grad(out, inputs, dout)]


def by_token(
    batch: int, n: tuple[int, int], heads: tuple[int, int], d: int, packed: str, like: Any
) -> list[torch.Tensor]:
    """Return q, k and v, (batch, n, heads, d): separate, or views of one tensor."""
    (n_q, n_kv), (many, few) = n, heads
    if packed == "qkv":
        return [*torch.randn(batch, n_q, 3, many, d, **like).unbind(2)]
    q = torch.randn(batch, n_q, many, d, **like)
    if packed == "kv":
        return [q, *torch.randn(batch, n_kv, 2, few, d, **like).unbind(2)]
    return [q, *(torch.randn(batch, n_kv, few, d, **like) for _ in range(2))]


def lengths(most: int, batch: int) -> list[int]:
    """Return a length per batch entry: up to twenty tokens less than `most`."""
    return torch.randint(max(1, most - 20), most + 1, (batch,)).tolist()


def slopes(batch: int, heads: int, n: tuple[int, int], like: Any) -> torch.Tensor:
    """Return ALiBi's bias, rounded to the type of q, for all implementations that are compared."""
    rows, columns = (torch.arange(size, device=like["device"]) for size in n)
    slope = 0.3 * torch.rand(batch, heads, 1, 1, device=like["device"])
    return (-slope * (rows[:, None] + n[1] - n[0] - columns).abs()).to(like["dtype"])


def finite(*, n: tuple[int, int], d: int, dtype: str, causal: bool, device: str) -> None:
    """Check that one key for many packed queries gives no NaN in the gradients."""
    torch.manual_seed(0)
    q, k, v = (
        (3 * torch.randn(1, 5, rows, d, device=device, dtype=getattr(torch, dtype)))
        for rows in (n[0], n[1], n[1])
    )
    inputs = [x.requires_grad_() for x in (q, k, v)]
    told = {"cu_seqlens_q": [0, 76, 110, 256], "cu_seqlens_k": [0, 1, 2, 3], "causal": causal}
    out = attention(*inputs, **told)
    for x in torch.autograd.grad(out, inputs, torch.randn_like(out)):
        assert x.isfinite().all()


def repeated(
    *, n: tuple[int, int], d: int, dtype: str, causal: bool, local: bool, device: str, **_: Any
) -> None:
    """Check for equal bits in every run."""
    torch.manual_seed(0)
    like = {"device": device, "dtype": getattr(torch, dtype), "requires_grad": True}
    window = tuple(torch.randint(0, n[1], (2,)).tolist()) if local else None
    inputs = [torch.randn(2, 9, rows, d, **like) for rows in (n[0], n[1], n[1])]

    def once():
        out = attention(*inputs, causal=causal, window=window, deterministic=True)
        return [out, *torch.autograd.grad(out, inputs, torch.ones_like(out))]

    first = once()
    for _ in range(50 if device == "cuda" else 2):
        assert all(torch.equal(x, y) for x, y in zip(first, once(), strict=True))


def cached(
    *,
    n: tuple[int, int],
    d: int,
    splits: int,
    heads: str,
    local: bool,
    causal: bool,
    pages: int | None,
    device: str,
    **_: Any,
) -> None:
    """Check decoding with live lengths, with and without pages; error at most 3 x + 1e-5."""
    torch.manual_seed(0)
    few = {"mha": 6, "mqa": 1, "gqa": 3}[heads]
    n_q, n_kv = n
    like: dict[str, Any] = {"device": device, "dtype": torch.float16}
    window = tuple(torch.randint(0, n_kv, (2,)).tolist()) if local else (-1, -1)
    q = torch.randn(2, 6, n_q, d, **like)
    size = pages or n_kv
    per = -(-n_kv // size)
    table = torch.randperm(2 * per).reshape(2, per).int()
    pool = [torch.randn(2 * per, few, size, d, **like) for _ in range(2)]
    k, v = (x[table.long()].transpose(1, 2).flatten(2, 3) for x in pool)
    live = torch.randint(0, n_kv + 1, (2,)).int()
    given = pool if pages else (k, v)
    out = flashsim.run(
        q,
        *given,
        algorithm="flash-decode",
        backend="cupy" if device == "cuda" else "simulator",
        causal=causal,
        window=window,
        splits=splits or "auto",
        cache_seqlens=live.to(device) if device == "cuda" else live.numpy(),
        block_table=None if not pages else table.to(device) if device == "cuda" else table.numpy(),
    ).out
    for entry, length in enumerate(live.tolist()):
        if length == 0:
            assert not out[entry].any()
            continue
        operands = q[entry, None], k[entry, None, :, :length], v[entry, None, :, :length]
        told = {"causal": causal, "window": window, "softcap": 0.0, "bias": None}
        exact, rough = (plain(*operands, wide=wide, **told) for wide in (True, False))
        error, allowed = (
            (x.float() - exact.float()).abs().max() for x in (out[entry, None], rough)
        )
        assert error <= 3 * allowed + 1e-5, f"out: {error:.3g} > 3 x {allowed:.3g}"
