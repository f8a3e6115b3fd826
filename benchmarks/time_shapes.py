"""The shapes whose times are measured: those that the time model is fitted to, and held-out ones.

`CALIBRATION` has every form of the kernels (which depends on head_dim), long and short sequences,
with and without a causal mask, few and many blocks. `HELD_OUT` has other head dimensions, lengths
from 197 to 131,072, grouped heads, windows, ragged and packed sequences. No shape is in both
(tests/studies/test_agreement.py), and `benchmarks/predict.py --fit` reads only the first. Both end
with shapes for forms that only Hopper's fused backward has; for these only that backward is timed
(`FUSED_ALONE`): up to 128 keys, with one visit; and loops of less than 1,024 rows, where dQ is not
deferred. If lengths are equal, without a mask, clusters share the tail after the full waves.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from flashsim import Problem

TOKENS, WIDTH = 16_384, 2048
#: Lengths of packed sequences.
PACKED = {
    "even": (2048,) * 4,
    "mixed": (131, 4096, 700, 1500, 64, 3000, 1024, 2100),
    "many": (333, 517, 96, 250, 780, 411, 62, 901) * 4,
}


def problem(**sizes: Any) -> Problem:
    """Return a problem; by default 16 Ki tokens and heads = 2048 / d, as in the papers.

    `packed` selects the sequences of `PACKED`.
    """
    packed = sizes.pop("packed", None)
    if packed:
        ends = tuple(accumulate(PACKED[packed], initial=0))
        sizes |= {"n_q": ends[-1], "batch": 1, "cu_seqlens_q": ends, "cu_seqlens_k": ends}
    d = sizes["head_dim"]
    sizes.setdefault("batch", max(1, TOKENS // sizes["n_q"]))
    sizes.setdefault("heads", WIDTH // d)
    return Problem(dtype="bfloat16", **sizes)


def both(**sizes: Any) -> Iterator[Problem]:
    """Yield a shape without a mask, and causal."""
    for causal in (False, True):
        yield problem(**sizes, causal=causal)


def _calibration() -> Iterator[Problem]:
    for d in (32, 64, 80, 96, 128, 192, 256):
        yield from both(n_q=4096, head_dim=d, heads={96: 16, 192: 8}.get(d, WIDTH // d))
    for d in (64, 128, 256):
        yield from both(n_q=512, head_dim=d)
    yield problem(n_q=16_384, head_dim=64)
    yield problem(n_q=16_384, head_dim=128, causal=True)
    yield problem(n_q=32_768, head_dim=128, causal=True)
    # Few blocks, many short sequences, keys that all query heads share.
    yield problem(n_q=128, head_dim=128, batch=4)
    yield problem(n_q=128, head_dim=64, batch=64, heads=12)
    yield problem(n_q=256, head_dim=128, batch=8, heads=16, causal=True)
    yield problem(n_q=2048, head_dim=64, batch=1, heads=16)
    yield problem(n_q=2048, head_dim=64, batch=4, heads=16, kv_heads=1)


def _one_visit() -> Iterator[Problem]:
    """Yield calibration shapes with one visit per row tile: few and many heads and work tiles."""
    for d, heads in ((64, 12), (128, 16)):
        yield problem(n_q=128, head_dim=d, batch=1, heads=heads)
        yield problem(n_q=128, head_dim=d, batch=16, heads=heads, causal=True)
        yield problem(n_q=100, head_dim=d, batch=32, heads=heads)
        yield problem(n_q=64, head_dim=d, batch=64, heads=heads)
        yield problem(n_q=128, head_dim=d, batch=16, heads=32, kv_heads=8)
        yield problem(n_q=1024, n_kv=128, head_dim=d, batch=16, heads=heads)
    yield problem(n_q=128, head_dim=128, batch=64, heads=16)
    yield problem(n_q=128, head_dim=64, batch=256, heads=12, causal=True)


def _short_walks() -> Iterator[Problem]:
    """Yield calibration shapes with short loops."""
    yield from both(n_q=512, head_dim=96, batch=16, heads=16)
    yield problem(n_q=256, head_dim=64, batch=32, heads=12)
    yield problem(n_q=768, head_dim=128, batch=8, heads=16, causal=True)


def _one_visit_held_out() -> Iterator[Problem]:
    for d, heads in ((64, 12), (128, 16)):
        yield from both(n_q=128, head_dim=d, batch=8, heads=heads)
        yield problem(n_q=64, head_dim=d, batch=8, heads=heads)
        yield problem(n_q=100, head_dim=d, batch=64, heads=heads, causal=True)
        yield problem(n_q=128, head_dim=d, batch=64, heads=heads, causal=True)
        yield problem(n_q=577, n_kv=77, head_dim=d, batch=8, heads=heads)
    yield problem(n_q=120, head_dim=80, batch=32, heads=16)
    yield problem(n_q=96, head_dim=96, batch=4, heads=16, causal=True)
    yield problem(n_q=128, head_dim=128, batch=8, heads=32, kv_heads=8, causal=True)


def _short_walks_held_out() -> Iterator[Problem]:
    yield problem(n_q=384, head_dim=64, batch=32, heads=12, causal=True)
    yield problem(n_q=300, head_dim=128, batch=16, heads=16)
    yield problem(n_q=640, head_dim=80, batch=8, heads=16)


def _held_out() -> Iterator[Problem]:
    for d in (112, 160, 224):
        yield from both(n_q=4096, head_dim=d, heads=WIDTH // d)
    for d in (64, 128):
        for n in (1024, 2048, 8192, 16_384, 32_768):
            yield from both(n_q=n, head_dim=d)
    yield from both(n_q=1024, head_dim=256)
    yield from both(n_q=16_384, head_dim=256)
    yield problem(n_q=131_072, head_dim=128, heads=2, causal=True)
    yield problem(n_q=131_072, head_dim=64, heads=2)
    # Few blocks, many short sequences.
    yield problem(n_q=197, head_dim=64, batch=64, heads=12)
    yield problem(n_q=512, head_dim=64, batch=8, heads=12)
    yield problem(n_q=512, head_dim=128, batch=1, heads=16)
    yield problem(n_q=1024, head_dim=128, batch=1, heads=8, causal=True)
    # Grouped heads.
    yield problem(n_q=4096, head_dim=128, batch=1, heads=32, kv_heads=8, causal=True)
    yield problem(n_q=4096, head_dim=128, batch=2, heads=32, kv_heads=4, causal=True)
    yield problem(n_q=1024, head_dim=128, batch=1, heads=32, kv_heads=8, causal=True)
    # Windows.
    yield problem(n_q=8192, head_dim=128, window=(1024, 0))
    yield problem(n_q=8192, head_dim=64, window=(256, 256))
    yield problem(n_q=16_384, head_dim=64, window=(4096, 0))
    # Lengths that no tile divides, and unequal ones.
    yield from both(n_q=4173, head_dim=128, batch=2)
    yield problem(n_q=1000, n_kv=4001, head_dim=128, batch=4, causal=True)
    yield problem(n_q=1024, n_kv=16_384, head_dim=128, batch=1)
    yield problem(n_q=4001, head_dim=64, batch=3, causal=True)
    yield problem(n_q=4096, n_kv=577, head_dim=64, batch=4)
    # Packed sequences.
    for d in (64, 128):
        for packed in PACKED:
            yield problem(head_dim=d, packed=packed, causal=packed != "many")


FUSED_ALONE = frozenset(
    p
    for each in (_one_visit, _short_walks, _one_visit_held_out, _short_walks_held_out)
    for p in each()
)
CALIBRATION = (*_calibration(), *_one_visit(), *_short_walks())
HELD_OUT = (
    *(p for p in _held_out() if p not in CALIBRATION),
    *_one_visit_held_out(),
    *_short_walks_held_out(),
)
#: The shapes that the Python kernels run: those take longest to compile.
IN_PYTHON = tuple(
    p
    for p in (*CALIBRATION, *HELD_OUT)
    if p.head_dim in (64, 128)
    and p.cu_seqlens_q is None
    and p.window is None
    and p.n_q <= 16_384
    and p not in FUSED_ALONE
)
