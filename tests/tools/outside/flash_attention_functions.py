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
from outside.flash_attention_files import MOST
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
    minus, batches = -float("inf"), {"of_batch": of_batch}
    head, place, distance = {"of_head": of_head}, {"of_place": of_place}, {"table": table}

    def complex_arithmetic(s, b, h, q, k):
        return s * 0.9 + 0.1 * torch.sin((q - k).float() * 0.01) * torch.tanh(s) + of_batch[b] * 0.5

    def conditional(s, b, h, q, k):
        near, other = (q - k) * (q - k) < 10000, (b + h) % 2 == 0
        return torch.where(near & (q >= k), s + of_place[k], torch.where(other, s * 0.5, minus))

    def many_buffers(s, b, h, q, k):
        return s + of_batch[b] * of_head[h] + of_place[q] * 0.5 - of_place[k] + table[q - k + far]

    found: dict[str, tuple[Any, dict[str, Any]]] = {
        "identity": (lambda s, b, h, q, k: s, {}),
        "causal": (lambda s, b, h, q, k: torch.where(q >= k, s, minus), {}),
        "causal_by_difference": (lambda s, b, h, q, k: torch.where(q - k >= 0, s, minus), {}),
        "relative_bias": (lambda s, b, h, q, k: s + abs(q - k), {}),
        "relative_bias_twice": (lambda s, b, h, q, k: s + 2 * abs(q - k), {}),
        "times_two": (lambda s, b, h, q, k: s * 2, {}),
        "sliding_window": (lambda s, b, h, q, k: torch.where(abs(q - k) <= 256, s, minus), {}),
        "block_diagonal": (lambda s, b, h, q, k: torch.where(q // 64 == k // 64, s, minus), {}),
        "batch_bias": (lambda s, b, h, q, k: s + of_batch[b], batches),
        "alibi": (lambda s, b, h, q, k: s - slopes[h] * abs(q - k), {"slopes": slopes}),
        "dual_buffer": (lambda s, b, h, q, k: s + of_head[h] + of_place[q], head | place),
        "key_bias": (lambda s, b, h, q, k: s + of_place[k], place),
        "query_bias": (lambda s, b, h, q, k: s + of_place[q], place),
        "conditional": (conditional, place),
        "relative_plus_key_bias": (
            *(lambda s, b, h, q, k: s + table[q - k + far] + of_place[k], distance | place),
        ),
        "query_and_key_bias": (
            *(lambda s, b, h, q, k: s + of_place[q] + of_place[k] * of_head[h], place | head),
        ),
        "complex_arithmetic": (complex_arithmetic, batches),
        "many_buffers": (many_buffers, batches | head | place | distance),
    }
    return {name: Case(None, *one) for name, one in found.items()}


def masks(batch: int, heads: int, n_q: int, n_kv: int, device: str) -> dict[str, Any]:
    """Return the mask functions; unequal lengths are aligned at the bottom right."""
    draw, offset = torch.Generator(device).manual_seed(2), n_kv - n_q
    far = max(n_q, n_kv)
    documents = torch.randint(0, 8, (batch, heads, far), generator=draw, device=device)
    documents = documents.sort(-1).values.int()
    ends = torch.randint(1, n_kv + 1, (batch, n_q), generator=draw, device=device)

    return {
        "identity": lambda b, h, q, k: q >= 0,
        "causal": lambda b, h, q, k: k <= q + offset,
        "block_causal": lambda b, h, q, k: k // 64 <= (q + offset) // 64,
        "sliding_window": lambda b, h, q, k: (k <= q + offset + 128) & (k >= q + offset - 128),
        "causal_window": lambda b, h, q, k: (k <= q + offset) & (k > q + offset - 200),
        "block_diagonal": lambda b, h, q, k: q // 64 == k // 64,
        "mini_causal": lambda b, h, q, k: q % 128 >= k % 128,
        "prefix": lambda b, h, q, k: (k < 150) | (k <= q + offset),
        "dilated_window": lambda b, h, q, k: (
            (abs(q + offset - k) <= 256) & ((q + offset - k) % 4 == 0)
        ),
        "half_identity": lambda b, h, q, k: torch.where(k < n_kv // 2, q >= 0, k <= q + offset),
        "document": lambda b, h, q, k: documents[b, h, q] == documents[b, h, k],
        "own_ends": lambda b, h, q, k: k < ends[b, q],
        "nothing_for_some": lambda b, h, q, k: (q % 97 > 3) & (k <= q),
    }


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
