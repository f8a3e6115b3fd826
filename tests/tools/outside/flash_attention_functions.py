"""FlashAttention's tests of score and mask functions in CuTe kernels, from their published text.

Each function computes the same as the original, but is written anew in plain Python. It serves both
as the function and, on whole index tensors, as its own reference.
https://github.com/Dao-AILab/flash-attention/tree/main/tests/cute (test_score_mod.py,
test_mask_mod.py, test_block_sparsity.py)
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from function_cases import Case

from flashsim import Problem, Tiling
from flashsim.schedule.schedule import Schedule
from outside.cases import Point, Test, one_of_each, product
from outside.flash_attention import MOST
from outside.functions_judged import judged

TITLE = "flash-attention (score_mod and mask_mod of its CuTe kernels)"
LENGTHS = (
    *((1, 1), (64, 128), (128, 192), (256, 256), (239, 1), (799, 3), (113, 203), (113, 128)),
    *((128, 217), (113, 211), (108, 256), (256, 512), (384, 256), (640, 128), (512, 256)),
    *((1024, 1024), (1023, 1024), (1024, 1023), (1025, 1025), (4096, 4096), (4224, 4224)),
    (100, 100),
)
#: Query heads per KV head, and KV heads.
HEADS = ((1, 2), (4, 2))
Make = Callable[..., Any]


def scores(batch: int, heads: int, n_q: int, n_kv: int, device: str) -> dict[str, Case]:
    """Return the score functions, with captured tensors that may get a gradient."""
    draw = torch.Generator(device).manual_seed(1)
    far = max(n_q, n_kv)

    def rand(*shape: int) -> torch.Tensor:
        return 0.2 * torch.randn(shape, generator=draw, device=device)

    of_batch, of_head, of_place, table = rand(batch), rand(heads), rand(far), rand(2 * far)
    slopes = 2.0 ** (-8 * torch.arange(1, heads + 1, device=device) / heads)
    minus = -float("inf")

    def identity(s, b, h, q, k):
        return s

    def causal(s, b, h, q, k):
        return torch.where(q >= k, s, minus)

    def causal_by_difference(s, b, h, q, k):
        return torch.where(q - k >= 0, s, minus)

    def relative_bias(s, b, h, q, k):
        return s + abs(q - k)

    def relative_bias_twice(s, b, h, q, k):
        return s + 2 * abs(q - k)

    def times_two(s, b, h, q, k):
        return s * 2

    def alibi(s, b, h, q, k):
        return s - slopes[h] * abs(q - k)

    def sliding_window(s, b, h, q, k):
        return torch.where(abs(q - k) <= 256, s, minus)

    def block_diagonal(s, b, h, q, k):
        return torch.where(q // 64 == k // 64, s, minus)

    def batch_bias(s, b, h, q, k):
        return s + of_batch[b]

    def dual_buffer(s, b, h, q, k):
        return s + of_head[h] + of_place[q]

    def key_bias(s, b, h, q, k):
        return s + of_place[k]

    def query_bias(s, b, h, q, k):
        return s + of_place[q]

    def relative_plus_key_bias(s, b, h, q, k):
        return s + table[q - k + far] + of_place[k]

    def query_and_key_bias(s, b, h, q, k):
        return s + of_place[q] + of_place[k] * of_head[h]

    def complex_arithmetic(s, b, h, q, k):
        return s * 0.9 + 0.1 * torch.sin((q - k).float() * 0.01) * torch.tanh(s) + of_batch[b] * 0.5

    def conditional(s, b, h, q, k):
        near, other = (q - k) * (q - k) < 10000, (b + h) % 2 == 0
        return torch.where(near & (q >= k), s + of_place[k], torch.where(other, s * 0.5, minus))

    def many_buffers(s, b, h, q, k):
        return s + of_batch[b] * of_head[h] + of_place[q] * 0.5 - of_place[k] + table[q - k + far]

    captured = {
        **{batch_bias: {"of_batch": of_batch}, alibi: {"slopes": slopes}},
        **{dual_buffer: {"of_head": of_head, "of_place": of_place}},
        **{f: {"of_place": of_place} for f in (key_bias, query_bias, conditional)},
        relative_plus_key_bias: {"table": table, "of_place": of_place},
        query_and_key_bias: {"of_place": of_place, "of_head": of_head},
        complex_arithmetic: {"of_batch": of_batch},
        many_buffers: {
            **{"of_batch": of_batch, "of_head": of_head, "of_place": of_place, "table": table}
        },
    }
    plain = (
        *(identity, causal, causal_by_difference, relative_bias, relative_bias_twice, times_two),
        *(sliding_window, block_diagonal),
    )
    return {f.__name__: Case(None, f, captured.get(f, {})) for f in (*plain, *captured)}


def masks(batch: int, heads: int, n_q: int, n_kv: int, device: str) -> dict[str, Any]:
    """Return the mask functions; unequal lengths are aligned at the bottom right."""
    draw, offset = torch.Generator(device).manual_seed(2), n_kv - n_q
    far = max(n_q, n_kv)
    documents = torch.randint(0, 8, (batch, heads, far), generator=draw, device=device)
    documents = documents.sort(-1).values.int()
    ends = torch.randint(1, n_kv + 1, (batch, n_q), generator=draw, device=device)

    def identity(b, h, q, k):
        return q >= 0

    def causal(b, h, q, k):
        return k <= q + offset

    def block_causal(b, h, q, k):
        return k // 64 <= (q + offset) // 64

    def sliding_window(b, h, q, k):
        return (k <= q + offset + 128) & (k >= q + offset - 128)

    def causal_window(b, h, q, k):
        return (k <= q + offset) & (k > q + offset - 200)

    def block_diagonal(b, h, q, k):
        return q // 64 == k // 64

    def mini_causal(b, h, q, k):
        return q % 128 >= k % 128

    def prefix(b, h, q, k):
        return (k < 150) | (k <= q + offset)

    def dilated_window(b, h, q, k):
        return (abs(q + offset - k) <= 256) & ((q + offset - k) % 4 == 0)

    def half_identity(b, h, q, k):
        return torch.where(k < n_kv // 2, q >= 0, k <= q + offset)

    def document(b, h, q, k):
        return documents[b, h, q] == documents[b, h, k]

    def own_ends(b, h, q, k):
        return k < ends[b, q]

    def nothing_for_some(b, h, q, k):
        return (q % 97 > 3) & (k <= q)

    found = (
        *(identity, causal, block_causal, sliding_window, causal_window, block_diagonal),
        *(mini_causal, prefix, dilated_window, half_identity, document, own_ends),
        nothing_for_some,
    )
    return {f.__name__: f for f in found}


def tests(device: str, whole: bool) -> list[Test]:
    """Return the tests, with a point per function and per pair of lengths; `whole`: all points."""
    gpu = device == "cuda"

    def choose(points: Sequence[Point]) -> list[Point]:
        if whole:
            return [*points]
        if not gpu:
            points = [p for p in points if p["n"][0] * p["n"][1] <= MOST]
        return [*one_of_each("name")(points), *one_of_each("n")(points)]

    given = (1, 1, 1, 1, "cpu")
    common = {"heads": HEADS, "n": LENGTHS, "device": [device], "dtype": ("bfloat16", "float16")}
    return [
        Test("test_score_mod", score_mod, product(name=scores(*given), **common), chosen=choose),
        Test("test_mask_mod", mask_mod, product(name=masks(*given), **common), chosen=choose),
        Test(
            "test_block_sparsity",
            block_sparsity,
            product(name=masks(*given), n=LENGTHS, tile=((64, 64), (128, 128), (128, 64))),
            chosen=choose,
        ),
    ]


def _sizes(heads: tuple[int, int], n: tuple[int, int]) -> tuple[int, int, int, int, int]:
    group, kv_heads = heads
    return 2, group * kv_heads, kv_heads, *n


def score_mod(
    name: str, heads: tuple[int, int], n: tuple[int, int], device: str, dtype: str
) -> None:
    """O, LSE and gradients, also of captured tensors."""
    sizes = _sizes(heads, n)
    batch, many, *_ = sizes
    judged(scores(batch, many, *n, device)[name], sizes, d=64, dtype=dtype, device=device)


def mask_mod(
    name: str, heads: tuple[int, int], n: tuple[int, int], device: str, dtype: str
) -> None:
    """O, LSE and gradients; rows without keys are zeros."""
    sizes = _sizes(heads, n)
    batch, many, *_ = sizes
    case = Case(masks(batch, many, *n, device)[name])
    judged(case, sizes, d=64, dtype=dtype, device=device)


def block_sparsity(name: str, n: tuple[int, int], tile: tuple[int, int]) -> None:
    """Which tiles are skipped, FULL and MASKED: those that all scores say."""
    mask = masks(2, 2, *n, "cpu")[name]
    schedule = Schedule(Problem(*n, batch=2, heads=2, mask_mod=mask), Tiling(*tile))
    at = [torch.arange(size) for size in (2, 2, *n)]
    b, h, q, k = at[0][:, None, None, None], at[1][:, None, None], at[2][:, None], at[3]
    kept = mask(b, h, q, k).expand(2, 2, *n)
    pointers, columns, kinds = (x.tolist() for x in schedule.row_csr)
    found = {}
    for row, (first, last) in enumerate(pairwise(pointers)):
        found |= {(row, columns[x]): kinds[x] == 0 for x in range(first, last)}
    expected = {}
    for row, rows in enumerate(kept.split(tile[0], dim=2)):
        for column, cell in enumerate(rows.split(tile[1], dim=3)):
            if cell.any():
                expected[row, column] = bool(cell.all()) and cell.shape[3] == tile[1]
    assert found == expected, f"{len(found)} tiles of {len(expected)}, or other kinds"
