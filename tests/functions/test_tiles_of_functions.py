"""Bounds of functions over boxes, and the tiles that a mask function keeps."""

import time

import numpy as np
import pytest
from random_functions import Random

from flashsim import BlockMask, Problem, Tiling, count, functions
from flashsim.functions.intervals import BLOCK, Bounds, RangeTable, largest_result
from flashsim.functions.mask import MaskFunction
from flashsim.functions.tracing import trace_score
from flashsim.schedule.schedule import Schedule

pytestmark = pytest.mark.promise("right tiles")

RNG = np.random.default_rng(0)
DOCUMENTS = np.sort(RNG.integers(0, 12, 700))
BYTES = np.sort(RNG.integers(0, 256, 700)).astype(np.uint8)
GAPS = np.where(np.arange(700) % 40 < 15, np.nan, np.linspace(-3, 3, 700))


def test_a_range_table_answers_with_bounds():
    values = RNG.integers(-50, 50, 500)
    table = RangeTable(values)
    first = RNG.integers(0, 500, 400)
    last = np.minimum(first + RNG.integers(0, 300, 400), 499)
    low, high = table.of(first, last)
    for a, b, least, most in zip(first, last, low, high, strict=True):
        assert least <= values[a : b + 1].min()
        assert most >= values[a : b + 1].max()
        whole = values[a // BLOCK * BLOCK : (b // BLOCK + 1) * BLOCK]  # whole blocks, no more
        assert (least, most) == (whole.min(), whole.max())


@pytest.mark.parametrize("seed", range(120))
def test_bounds_hold_for_every_value_of_a_box(seed):
    batch, heads, n_q, n_kv = 2, 2, 40, 50
    made = Random(seed, batch, heads, n_q, n_kv)
    mask = MaskFunction.of(made.mask_mod(3))
    scores, arrays = trace_score(made.score_mod(4))
    number = Bounds(scores, arrays)
    rng = np.random.default_rng(seed)
    indices = np.arange(batch)[:, None, None, None], np.arange(heads)[:, None, None]
    for _ in range(20):
        q0, k0 = (int(rng.integers(n)) for n in (n_q, n_kv))
        q1, k1 = int(rng.integers(q0, n_q)), int(rng.integers(k0, n_kv))
        q, k = np.arange(q0, q1 + 1)[:, None], np.arange(k0, k1 + 1)
        kept = np.broadcast_to(mask.keep(*indices, q, k), (batch, heads, len(q), len(k)))
        one = np.array
        low, high = mask.bounds(batch, heads, (one([q0]), one([q1])), (one([k0]), one([k1])))
        assert low[0] <= kept.min()
        assert kept.max() <= high[0]
        score = rng.uniform(-3, 3, (batch, heads, len(q), len(k)))
        given = {"score": score, **dict(zip("bhqk", (*indices, q, k), strict=True))}
        values = scores.evaluate(given, arrays)
        ends = {"score": (-3.0, 3.0), "b": (0, 1), "h": (0, 1), "q": (q0, q1), "k": (k0, k1)}
        low, high = number.of({n: (one(a), one(b)) for n, (a, b) in ends.items()})
        tiny = 1e-9 * (1 + np.abs(values).max())
        assert low - tiny <= values.min()
        assert values.max() <= high + tiny


SCALES = np.array([0.5, 2.0], np.float32)


@pytest.mark.parametrize(
    ("score", "largest"),
    [
        (lambda s, b, h, q, k: 30 * np.tanh(s / 30), 30),
        (lambda s, b, h, q, k: 2 * np.tanh(s) - abs(q - k), 2 + 49),
        (lambda s, b, h, q, k: np.minimum(np.maximum(s, -4.0), 3.0), 4),
        (lambda s, b, h, q, k: np.minimum(s, 3.0), np.inf),
        (lambda s, b, h, q, k: np.tanh(s) * SCALES[h], np.inf),
    ],
)
def test_the_largest_result_of_a_score_function(score, largest):
    """Over all scores, whatever a captured array holds."""
    extents = {"b": 1, "h": 2, "q": 40, "k": 50}
    assert largest_result(trace_score(score).graph, extents) == largest


def tiles_by_hand(problem, tiling):
    """{(i, j): whether all scores are kept} of visited tiles, from the whole matrix of scores."""
    schedule = Schedule(problem, tiling)
    found = {}
    for i in range(schedule.t_r):
        for j in range(schedule.t_c):
            s = schedule.sequence_of_row(i)
            rows, cols = schedule.row_slice(i), schedule.col_slice(j)
            if not (s.k_start <= cols.start < s.k_stop):
                continue
            q, k = np.arange(rows.start, rows.stop), np.arange(cols.start, cols.stop)
            kept = problem.keep(s, q, k, functions=False)
            of_q, of_k = q[:, None] - s.q_start, k - s.k_start
            kept = kept & problem.keep_per_head(of_q, of_k[None])
            if kept.any():
                found[i, j] = bool(kept.all()) and len(k) == tiling.block_k
    return found


def tiles_of(problem, tiling):
    schedule = Schedule(problem, tiling)
    ptr, col, kind = schedule.row_csr
    owner = np.repeat(np.arange(schedule.t_r), np.diff(ptr))
    whole = [k == 0 for k in kind.tolist()]
    return dict(zip(zip(owner.tolist(), col.tolist(), strict=True), whole, strict=True))


PLAIN = {
    "causal": functions.causal(),
    "window": functions.window(50, 7),
    "prefix": functions.prefix_lm(100),
    "documents": functions.documents(DOCUMENTS) & functions.causal(),
    "dilated": functions.dilated(5) & functions.causal(),
    "strided": functions.strided(64) | functions.window(30),
    "chunked": functions.chunked(96) & functions.causal(),
    "streaming": functions.streaming(4, 90),
    "padding": functions.padding([600, 37]),
    "heads": lambda b, h, q, k: abs(q - k) <= 40 * h,
    "none": lambda b, h, q, k: q < 0,
    "all": lambda b, h, q, k: k >= 0,
    "scattered": lambda b, h, q, k: (q * 37 + k * 101) % 977 == 5,
    # Every comparison with NaN is False, except !=.
    "more than 32 bits": lambda b, h, q, k: ((q << 31) ^ (k << 22)) >> 21 > 2**16,
    "a hash": lambda b, h, q, k: ((q * 2654435761 ^ k * 2246822519) & 0xFFFFFFFF) > 2**31,
    "64 bits wrap": lambda b, h, q, k: q * 2**40 * (k * 2**20) > q,
    "NaN of a logarithm": lambda b, h, q, k: np.log((q - k) * 1.0) <= 10,
    "NaN of a division": lambda b, h, q, k: abs((q - k) / (q - k)) >= 0,
    "NaN of infinities": lambda b, h, q, k: abs(np.exp(k * 9.0) - np.exp(q * 9.0)) >= 0,
    "NaN of a product": lambda b, h, q, k: abs(np.exp(k * 9.0) * (q % 9)) >= 0,
    "NaN of a remainder": lambda b, h, q, k: abs(q * 1.0 % (k % 9)) >= 0,
    "NaN of a sine": lambda b, h, q, k: np.sin(np.exp(k * 9.0)) <= np.inf,
    "NaN captured": lambda b, h, q, k: (abs(GAPS[k]) >= 0) & (np.clip(GAPS[q], -1, 1) <= 1),
    "NaN as an integer": lambda b, h, q, k: abs(GAPS[k] * 5).astype(int) >= 0,
    # Bounds are rounded as the values are.
    "float32 after a sine": lambda b, h, q, k: np.clip(np.sin(k), -0.1, 0.1) + 0.2 < 0.3,
    "quotient of floats": lambda b, h, q, k: k * 1.0 // 0.1 <= 309,
    "remainder below 0": lambda b, h, q, k: k * 3.3 % 0.1 >= 0,
    "remainder of the divisor": lambda b, h, q, k: k * 3.3 % 0.01 < 0.01,
    "bytes wrap": lambda b, h, q, k: BYTES[q] - BYTES[k] < 100,
}
OTHERS = {
    "alone": {},
    "causal": {"causal": True},
    "window": {"window": (100, 20)},
    "blocks": {"block_mask": BlockMask(RNG.random((7, 7)) < 0.6, 100, 100)},
    "mask": {"mask": lambda q, k: (q + k) % 3 > 0},
    "packed": {"cu_seqlens_q": (0, 130, 131, 650), "cu_seqlens_k": (0, 200, 230, 700)},
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("name", PLAIN)
def test_tiles_are_those_of_every_score(name, other):
    packed = other == "packed"
    p = Problem(
        *(650, 700), batch=1 if packed else 2, heads=2, mask_mod=PLAIN[name], **OTHERS[other]
    ) if name != "padding" or not packed else None  # fmt: skip
    if p is None:
        return
    for tiling in (Tiling(64, 32), Tiling(128, 128)):
        assert tiles_of(p, tiling) == tiles_by_hand(p, tiling)


@pytest.mark.parametrize("seed", range(40))
def test_tiles_of_random_masks(seed):
    mask = Random(seed, 2, 2, 70, 90).mask_mod(3)
    p = Problem(70, 90, batch=2, heads=2, mask_mod=mask, causal=seed % 3 == 0)
    for tiling in (Tiling(16, 8), Tiling(8, 64)):
        assert tiles_of(p, tiling) == tiles_by_hand(p, tiling)


@pytest.mark.parametrize("name", PLAIN)
def test_sums_are_those_of_the_listed_tiles(name):
    p = Problem(650, 700, batch=2, heads=2, mask_mod=PLAIN[name])
    schedule = Schedule(p, Tiling(64, 48))
    ptr, col, kind = schedule.row_csr
    heights = np.diff(schedule.rows[:, :2])[:, 0][np.repeat(np.arange(schedule.t_r), np.diff(ptr))]
    widths = np.diff(schedule.cols[:, :2])[:, 0][col]
    for sums, at in ((schedule.sums, kind >= 0), (schedule.masked_sums, kind == 1)):
        expected = at.sum(), widths[at].sum(), heights[at].sum(), (heights * widths)[at].sum()
        assert sums == expected


def test_a_million_tokens_are_classified_without_their_scores(monkeypatch):
    n = 1 << 20
    documents = np.sort(np.random.default_rng(0).integers(0, n // 1000, n)).astype(np.int32)
    mask = functions.documents(documents) & functions.causal()
    evaluated = []
    keep = MaskFunction.keep
    monkeypatch.setattr(MaskFunction, "keep", lambda *a: evaluated.append(a[3].size) or keep(*a))
    p = Problem(n, mask_mod=mask)
    began = time.process_time()
    traffic = count(p, tiling=Tiling(128, 128))
    spent = time.process_time() - began
    assert spent < 5  # 0.1 s on an idle machine; evaluating 10^12 scores takes an hour
    assert sum(evaluated) < n  # probes of the tiles at the edges of documents
    assert traffic.bytes("load", "M") > 0
    edges = np.flatnonzero(np.diff(documents)) + 1
    cuts = np.concatenate([[0], edges, [n]])
    visits = 0
    for row in range(n // 128):  # from the first key of the row tile's first document
        first = cuts[np.searchsorted(cuts, row * 128, "right") - 1]
        visits += row - first // 128 + 1
    assert traffic.schedule(traffic.stages[0]).sums.visits == visits
