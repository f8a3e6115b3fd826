"""Masks that keep one range of keys per query and one range of queries per key."""

import numpy as np
import pytest
from random_functions import Random

from flashsim import functions as ready
from flashsim.functions.graph import Graph
from flashsim.functions.mask import MaskFunction
from flashsim.functions.spans import Spans, spans_of

pytestmark = pytest.mark.promise("right tiles")

B, H, N_Q, N_K = 2, 2, 40, 50
RNG = np.random.default_rng(5)
numbers = np.sort(RNG.integers(0, 6, N_K)).astype(np.int32)
of_batches = np.sort(RNG.integers(0, 6, (B, N_K)), axis=1)
lengths = np.array([31, 17])
shuffled = RNG.permutation(N_K)
of_queries = np.sort(RNG.integers(0, 9, N_Q))

RANGES = {
    "causal": lambda b, h, q, k: q >= k,
    "strictly": lambda b, h, q, k: k < q,
    "window": lambda b, h, q, k: (q >= k) & (q - k <= 7),
    "around": lambda b, h, q, k: np.abs(q - k) < 5,
    "diagonal": lambda b, h, q, k: q + 3 == k,
    "documents": lambda b, h, q, k: (numbers[q] == numbers[k]) & (q >= k),
    "documents per batch": lambda b, h, q, k: of_batches[b, k] == of_batches[b, q],
    "segments": lambda b, h, q, k: of_queries[q] == numbers[k],
    "padding": lambda b, h, q, k: (k < lengths[b]) & (q >= k),
    "padded queries": lambda b, h, q, k: (q < lengths[b]) & (k < 20),
    "one head": lambda b, h, q, k: (h == 1) & (2 - k <= h - q),
    "prefix": lambda b, h, q, k: (k < 12) | (q >= k),
    "prefixes": lambda b, h, q, k: (k < lengths[b]) | (q >= k),
    "a whole head": lambda b, h, q, k: (h == 0) | (q >= k),
    "chunks": lambda b, h, q, k: ((q + 3) // 8 == (k + 3) // 8) & (k <= q),
    "everything": lambda b, h, q, k: True,
}
far = np.array([5, 1 << 30], np.int32)
OTHERS = {
    "no limit": lambda b, h, q, k: k - q <= 2**31 - 1,  # q + 2**31 - 1 would overflow
    "no limit on either side": lambda b, h, q, k: abs(q - k) <= 2**31 - 1,
    "beyond 32 bits": lambda b, h, q, k: k - q <= 2**63 - 1,
    "a chunk far away": lambda b, h, q, k: k // 4 == far[b],
    "a mixed number": lambda b, h, q, k: mixed(q) + k <= 9,
    "dilated": lambda b, h, q, k: (q - k) % 3 == 0,
    "two ranges": lambda b, h, q, k: (q >= k) & ((k < 4) | (q - k <= 6)),
    "no order": lambda b, h, q, k: shuffled[q] == shuffled[k],
    "double": lambda b, h, q, k: 2 * k <= q,
    "not equal": lambda b, h, q, k: q != k,
    "by columns": lambda b, h, q, k: (shuffled[k] > 10) & (q >= k),
    "all but a range": lambda b, h, q, k: ~(q >= k) | (k < 3) | (q < 2),
}


def mixed(x):
    """A number that uses each number before it twice: there are 2**40 paths to `x`."""
    for _ in range(40):
        x = (3 * x) ^ (x >> 1)
    return x


def kept_by(mask: MaskFunction, spans: Spans) -> tuple[np.ndarray, np.ndarray]:
    """What the ranges keep, by queries' ranges of keys and by keys' ranges of queries."""
    arrays = (*mask.arrays, *spans.values)
    graph = Graph(spans.nodes, 0, (*mask.graph.arrays, *spans.arrays))
    b, h, q, k = np.ix_(*map(np.arange, (B, H, N_Q, N_K)))
    made = []
    for row, inner, kept in ((q, k, spans.keys), (k, q, spans.queries)):
        other = {"q": q, "k": k} | {"q" if inner is q else "k": np.full_like(inner, -10_000)}
        values = graph.values({"b": b, "h": h, **other}, arrays)
        low, high = (-1 if kept.low is None else values[kept.low],
                     10**9 if kept.high is None else values[kept.high])  # fmt: skip
        keep = True if kept.keep is None else values[kept.keep]
        shape = (B, H, N_Q, N_K)
        made.append(np.broadcast_to((low <= inner) & (inner <= high) & keep, shape))
        assert row is not inner
    return made[0], made[1]


def check(mask: MaskFunction, spans: Spans) -> None:
    expected = np.broadcast_to(
        mask.keep(*np.ix_(*map(np.arange, (B, H, N_Q, N_K)))), (B, H, N_Q, N_K)
    )
    for made in kept_by(mask, spans):
        np.testing.assert_array_equal(made, expected)


@pytest.mark.parametrize("name", RANGES)
def test_ranges_are_those_that_the_function_keeps(name):
    mask = MaskFunction.of(RANGES[name])
    spans = spans_of(mask)
    assert spans is not None
    check(mask, spans)


@pytest.mark.parametrize("name", OTHERS)
def test_other_masks_are_called_per_score(name):
    assert spans_of(MaskFunction.of(OTHERS[name])) is None


@pytest.mark.parametrize(
    "mask",
    [
        *(ready.causal(10), ready.window(5), ready.window(5, 2), ready.prefix_lm(9)),
        *(ready.documents(numbers), ready.documents(of_batches), ready.chunked(16)),
        *(ready.padding(lengths), ready.documents(numbers) & ready.causal() & ready.window(9)),
    ],
    ids=repr,
)
def test_ready_made_masks_keep_ranges(mask):
    made = MaskFunction.of(mask)
    spans = spans_of(made)
    assert spans is not None
    check(made, spans)


def test_random_masks_keep_the_ranges_that_are_found():
    found = 0
    for seed in range(300):
        mask = MaskFunction.of(Random(seed, B, H, N_Q, N_K).mask_mod(2))
        spans = spans_of(mask)
        if spans is not None:
            found += 1
            check(mask, spans)
    assert found > 5
