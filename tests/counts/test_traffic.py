"""The closed form against what the simulator measured: equal as integers, for every problem."""

import tracemalloc
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from math import ceil

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from refusals import refuses
from test_engines import OPTION_CASES

import flashsim
from flashsim import BlockMask, Device, Problem, Tiling
from flashsim.counts import bounds
from flashsim.counts.work import KINDS
from flashsim.problem.problem import numpy_dtype
from flashsim.schedule.plans import GENERAL as ALGORITHMS

pytestmark = pytest.mark.promise("three counts equal")

DIRECTIONS = ("forward", "backward")
ANSWERS = ("bytes", "flops", "on_chip", "peak_sram", "compulsory", "intensity", "by_tensor")


def arrays_for(p: Problem, seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.standard_normal(shape)  # noqa: E731
    q, k = draw(p.batch, p.heads, p.n_q, p.head_dim), draw(p.batch, p.kv_heads, p.n_kv, p.head_dim)
    v = draw(p.batch, p.kv_heads, p.n_kv, p.head_dim_v)
    results = [draw(p.batch, p.heads, p.n_q, p.head_dim_v)]
    if p.bias is not None:
        results.append(draw(*p.bias, p.n_q, p.n_kv))
    q, k, v = (x.astype(numpy_dtype(p.dtype)) for x in (q, k, v))
    dout, *bias = (x.astype(numpy_dtype(p.result_dtype)) for x in results)
    return q, k, v, dout, bias[0] if bias else None


def scales_for(p: Problem):
    """The keywords that give `run` scales as the problem says."""
    if p.scales is None:
        return {"scales": "unscaled"} if p.fp8 else {}
    sides = ((p.heads, p.n_q, 0), (p.kv_heads, p.n_kv, 1), (p.kv_heads, p.n_kv, 1))
    if not isinstance(p.scales, tuple):
        each = [(p.batch, h) if p.scales == "head" else () for h, _, _ in sides]
        return {"scales": [np.full(shape, 0.5, np.float32) for shape in each]}
    each = [(p.batch, h, -(-n // p.scales[axis])) for h, n, axis in sides]
    scales = [np.full(shape, 0.5, np.float32) for shape in each]
    return {"scales": scales, "scale_block": p.scales}


def keywords_of(p: Problem):
    """The keywords with which `run` computes a problem."""
    fields = ("causal", "window", "softcap", "scale", "mask", "block_mask")
    fields += ("cu_seqlens_q", "cu_seqlens_k")
    return {name: getattr(p, name) for name in fields} | scales_for(p)


def measure(p: Problem, algorithm, tiling, device, key_order="ascending"):
    """Traces of a forward and a backward run of this problem."""
    q, k, v, dout, bias = arrays_for(p)
    how = {"algorithm": algorithm, "tiling": tiling, "device": device, "key_order": key_order}
    result = flashsim.run(q, k, v, bias=bias, trace=True, **how, **keywords_of(p))
    assert result.problem == replace(p, dlse=False)
    dlse = np.ones_like(result.lse) if p.dlse else None
    backward = result.backward(dout, dlse=dlse, tiling=tiling).trace
    assert backward.problem == p
    return result.trace, backward


def agree(trace, closed):
    """Check that a trace and a closed form give the same answer to every question."""
    assert trace.diff(closed) == {}
    assert dict(trace.transfers) == closed.transfers
    for answer in ANSWERS:
        assert getattr(trace, answer)() == getattr(closed, answer)(), answer
    for kind in KINDS:
        assert trace.flops(kind) == closed.flops(kind), kind
    for op in ("read", "write"):
        assert trace.on_chip(op) == closed.on_chip(op), op


def assert_counted(p: Problem, algorithm, tiling, device, key_order="ascending"):
    how = {"algorithm": algorithm, "tiling": tiling, "device": device, "key_order": key_order}
    traces = measure(p, **how)
    for direction, trace in zip(DIRECTIONS, traces, strict=True):
        agree(trace, flashsim.count(p, direction=direction, **how))
    return traces


@st.composite
def offsets(draw, total, sequences):
    inner = draw(st.lists(st.integers(0, total), min_size=sequences - 1, max_size=sequences - 1))
    return (0, *sorted(inner), total)


@st.composite
def problems(draw):
    """Small problems with every option, ragged against `tilings`."""
    n_q, n_kv = draw(st.integers(1, 60)), draw(st.integers(1, 60))
    batch, kv_heads, group = (draw(st.integers(1, 2)) for _ in range(3))
    fields = {
        "n_q": n_q,
        "n_kv": n_kv,
        "head_dim": draw(st.integers(1, 9)),
        "head_dim_v": draw(st.integers(1, 9)),
        "heads": kv_heads * group,
        "kv_heads": kv_heads,
        "dtype": draw(
            st.sampled_from(["float64", "float32", "float16", "bfloat16", "float8_e4m3fn"])
        ),
        "causal": draw(st.booleans()),
        "softcap": draw(st.sampled_from([0.0, 2.0])),
        "dlse": draw(st.booleans()),
    }
    sequences = draw(st.sampled_from([0, 0, 1, 2, 3]))
    if sequences:
        fields["cu_seqlens_q"] = draw(offsets(n_q, sequences))
        fields["cu_seqlens_k"] = draw(offsets(n_kv, sequences))
    else:
        fields["batch"] = batch
    if draw(st.booleans()):
        fields["window"] = draw(st.tuples(st.integers(-1, 30), st.integers(-1, 30)))
    if draw(st.booleans()):
        lead = (1, fields.get("batch", 1)), (1, fields["heads"])
        fields["bias"] = tuple(draw(st.sampled_from(options)) for options in lead)
    sparse = draw(st.sampled_from(["no", "no", "blocks", "function"]))
    if sparse == "function":
        modulus, rest = draw(st.integers(1, 25)), draw(st.integers(0, 24))
        fields["mask"] = lambda q, k: (q // 3 + k) % modulus == rest
    elif sparse == "blocks":
        cell = draw(st.integers(3, 30)), draw(st.integers(3, 30))
        longest = [
            max(b - a for a, b in pairwise(cu))
            for cu in (fields.get("cu_seqlens_q", (0, n_q)), fields.get("cu_seqlens_k", (0, n_kv)))
        ]
        shape = [-(-n // c) for n, c in zip(longest, cell, strict=True)]
        if all(shape):
            bits = draw(st.lists(st.booleans(), min_size=shape[0] * shape[1], max_size=400))
            grid = np.resize(np.array(bits[: shape[0] * shape[1]], bool), shape)
            fields["block_mask"] = BlockMask(grid, *cell)
    return Problem(**fields)


def with_scales(p: Problem, tiling: Tiling, kind) -> Problem:
    """FP8 problems have scales, also of blocks that are parts of a tile or several tiles."""
    sides = tiling.block_q, tiling.block_k
    blocks = {
        "parts": tuple(max(x for x in range(1, side) if side % x == 0) for side in sides),
        "several": (2 * sides[0], 3 * sides[1]),
    }
    if not p.fp8 or (kind in blocks and p.cu_seqlens_q is not None):
        return p
    return replace(p, scales=blocks.get(kind, kind))


tilings = st.builds(
    lambda q, k, times: Tiling(q, k, dq_rows=times * q),
    *(st.integers(5, 64), st.integers(5, 64), st.sampled_from((1, 1, 2, 4))),
)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    p=problems(),
    tiling=tilings,
    tight=st.booleans(),
    key_order=st.sampled_from(["ascending", "descending"]),
    scales=st.sampled_from([None, "tensor", "head", "parts", "several"]),
)
def test_count_equals_measurement(algorithm, p, tiling, tight, key_order, scales):
    p = with_scales(p, tiling, scales)
    device = Device.get("H100")
    if tight:  # a chip on which the tiling fits to the byte
        need = max(tiling.footprint(p, algorithm, direction) for direction in DIRECTIONS)
        device = replace(device, name="tight", sram_bytes=need)
    assert_counted(p, algorithm, tiling, device, key_order)


def test_fp8_and_its_scales_by_hand():
    """Row tiles of 32, 32 and 32 queries, column tiles of 48, 48 and 4 keys, every one visited."""
    p = Problem(96, 100, 16, dtype="float8_e4m3fn", heads=2, scales=(16, 24))
    t = flashsim.count(p, tiling=Tiling(32, 48))
    assert t.bytes("load", "Q") == 2 * 96 * 16
    assert t.bytes("load", "K") == t.bytes("load", "V") == 3 * 2 * 100 * 16
    assert t.bytes("store", "O") == 2 * 96 * 16 * 2
    assert t.bytes("store", "L") == 2 * 96 * 4
    assert t.bytes("load", "Q_scale") == 2 * (96 // 16) * 4
    assert t.bytes("load", "K_scale") == 3 * 2 * (2 + 2 + 1) * 4  # 4 keys have a block, too
    inputs = 2 * (96 + 2 * 100) * 16 + 4 * 2 * (6 + 5 + 5)
    assert t.compulsory() == inputs + t.bytes("store")
    whole = replace(p, scales="tensor")
    assert flashsim.count(whole, tiling=Tiling(32, 48)).bytes("load", "K_scale") == 2 * 3 * 3 * 4


@pytest.mark.parametrize("case", OPTION_CASES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_fixed_problems_are_counted_exactly(algorithm, case):
    shape, options = OPTION_CASES[case]
    options = dict(options)
    key_order, tiling = options.pop("key_order", "ascending"), Tiling(32, 48)
    if not isinstance(options.get("block_mask"), BlockMask | None):
        options["block_mask"] = BlockMask(options["block_mask"], 32, 48)
    shape = {"head_dim_v" if name == "dv" else name: value for name, value in shape.items()}
    p = Problem(113, 203, 16, dtype="bfloat16", **{"heads": 2, **shape, **options})
    assert_counted(p, algorithm, tiling, Device.get("H100"), key_order)


def test_worked_example_by_hand():
    """One head, 1024 x 64 in float32, tiles of 128 x 64: 8 row tiles, 16 column tiles."""
    p = Problem(1024, head_dim=64)
    matrix, statistic = 1024 * 64 * 4, 1024 * 4
    t = flashsim.count(p, tiling=Tiling(128, 64))
    assert t.bytes("load", "Q") == matrix
    assert t.bytes("load", "K") == t.bytes("load", "V") == 8 * matrix
    assert t.bytes("load") == 17 * matrix == 4_456_448
    assert t.bytes("store") == matrix + statistic == 266_240
    assert t.bytes("reduce") == 0
    assert t.compulsory() == 4 * matrix + statistic
    standard = flashsim.count(p, algorithm="standard", tiling=Tiling(128, 64))
    scores = 1024 * 1024 * 4
    assert standard.bytes("load") == matrix + 8 * matrix + 2 * scores + 8 * matrix
    assert standard.bytes("store") == 2 * scores + matrix
    first = flashsim.count(p, algorithm="flash1", tiling=Tiling(128, 64))
    state = matrix + 2 * statistic
    assert first.bytes("load") == 2 * matrix + 16 * (matrix + state)
    assert first.bytes("store") == 17 * state


def test_backward_by_hand():
    """Two query heads share a key head; 3 row tiles (64, 64, 22), 2 column tiles (64, 36)."""
    p = Problem(150, 100, 8, 4, heads=2, kv_heads=1, dtype="bfloat16")
    three = flashsim.count(p, direction="backward", tiling=Tiling(64, 64))
    assert three.transfers["delta", "store", "delta"] == 2 * 150 * 4
    assert three.transfers["dkdv", "load", "K"] == 100 * 8 * 2
    assert three.transfers["dkdv", "load", "dO"] == 2 * 2 * 150 * 4 * 2
    assert three.transfers["dkdv", "load", "L"] == 2 * 2 * 150 * 4
    assert three.transfers["dkdv", "store", "dV"] == 100 * 4 * 2
    assert three.transfers["dq", "load", "V"] == 2 * 3 * 100 * 4 * 2
    assert three.transfers["dq", "store", "dQ"] == 2 * 150 * 8 * 2
    assert three.bytes("reduce") == 0
    fused = flashsim.count(p, algorithm="flash2-fused", direction="backward", tiling=Tiling(64, 64))
    assert fused.transfers["delta", "store", "dQ_acc"] == 2 * 150 * 8 * 4
    assert fused.transfers["fused", "reduce", "dQ_acc"] == 2 * 2 * 150 * 8 * 4
    assert fused.transfers["convert", "store", "dQ"] == 2 * 150 * 8 * 2
    wide = flashsim.count(
        replace(p, dtype="float32"),
        algorithm="flash2-fused",
        direction="backward",
        tiling=Tiling(64, 64),
    )
    assert {stage for stage, _, _ in wide.transfers} == {"delta", "fused"}
    assert wide.transfers["fused", "reduce", "dQ"] == 2 * 2 * 150 * 8 * 4


@pytest.mark.parametrize(
    ("algorithm", "direction", "factor"),
    [
        *((name, "forward", 4) for name in ("standard", "flash1", "flash2", "flash2-fused")),
        ("flash2", "backward", 14),
        ("flash2-fused", "backward", 10),
        ("flash1", "backward", 10),
        ("standard", "backward", 8),
    ],
)
def test_matmul_flops_of_the_papers(algorithm, direction, factor):
    p = Problem(512, head_dim=32, batch=2, heads=3)
    t = flashsim.count(p, algorithm=algorithm, direction=direction, tiling=Tiling(64, 64))
    assert t.flops("matmul") == 6 * factor * 512**2 * 32


def test_causal_skips_half_the_flops():
    whole, half = (
        flashsim.count(Problem(4096, causal=causal), tiling=Tiling(64, 64)).flops("matmul")
        for causal in (False, True)
    )
    assert half * 64 * 2 == whole * 65  # 64 tiles a side: 64 * 65 / 2 of 64 * 64 remain


def test_saved_and_workspace_by_hand():
    n, d = 300, 16
    p = Problem(n, head_dim=d, heads=4, kv_heads=2, dtype="bfloat16")
    q, kv, stat, scores = 4 * n * d * 2, 2 * n * d * 2, 4 * n * 4, 4 * n * n * 2
    inputs = q + 2 * kv
    count = {
        (name, direction): flashsim.count(p, algorithm=name, direction=direction)
        for name in ALGORITHMS
        for direction in DIRECTIONS
    }
    assert count["flash2", "forward"].saved() == inputs + q + stat
    assert count["flash1", "forward"].saved() == inputs + q + 2 * stat
    assert count["standard", "forward"].saved() == inputs + scores
    assert count["standard", "forward"].workspace() == scores
    assert count["flash2", "forward"].workspace() == 0
    assert count["flash1", "forward"].workspace() == 2 * q  # O in float32
    assert count["standard", "backward"].workspace() == 2 * scores
    assert count["flash2", "backward"].workspace() == stat
    assert count["flash2-fused", "backward"].workspace() == stat + 2 * q
    assert count["flash1", "backward"].workspace() == 2 * q


def test_saved_and_workspace_with_softcap_and_bias():
    p = Problem(100, heads=2, dtype="float16", softcap=3.0, bias=(1, 1))
    plain = replace(p, softcap=0.0, bias=None)
    scores, matrix = 2 * 100 * 100 * 2, 100 * 100

    def added(algorithm, direction="forward"):
        with_both, without = (
            flashsim.count(x, algorithm=algorithm, direction=direction) for x in (p, plain)
        )
        return with_both.saved() - without.saved(), with_both.workspace() - without.workspace()

    # With a softcap its derivative is saved next to P.
    assert added("standard") == (scores + matrix * 2, 0)
    # A bias adds its gradient's float32 accumulator.
    assert added("standard", "backward")[1] == matrix * 4
    assert added("flash2") == (matrix * 2, 0)
    assert added("flash2", "backward")[1] == matrix * 4


@pytest.mark.parametrize("algorithm", ["standard", "flash2"])
def test_memory_grows_as_the_papers_say(algorithm):
    small, large = (flashsim.count(Problem(n), algorithm=algorithm) for n in (1024, 4096))
    growth = large.saved() / small.saved()
    assert (growth > 10) if algorithm == "standard" else (growth == 4)


def test_a_million_queries_need_no_array_of_tiles():
    """Causal, 128 x 128: 33.6 million visits, 8192 row tiles; only the latter fit in 4 MB."""
    p = Problem(1_048_576, head_dim=128, dtype="bfloat16", causal=True)
    tracemalloc.start()
    try:
        for direction in DIRECTIONS:
            t = flashsim.count(p, direction=direction, tiling=Tiling(128, 64))
            t.bytes(), t.flops(), t.on_chip(), t.peak_sram()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4e6
    visits = 8192 * 8193  # row tile i sees 2 (i + 1) column tiles of 64
    assert t.schedule(t.stages[-1]).n_visits == visits
    assert t.transfers["dq", "load", "K"] == visits * 64 * 128 * 2


def test_key_order_moves_the_same_bytes():
    p = Problem(300, 400, causal=True, window=(90, -1))
    orders = [flashsim.count(p, key_order=order).transfers for order in ("ascending", "descending")]
    assert orders[0] == orders[1]


def test_bounds():
    """No algorithm moves less than what is compulsory."""
    p = Problem(200, 300, 16, heads=4, kv_heads=2)
    for algorithm in ALGORITHMS:
        for direction in DIRECTIONS:
            t = flashsim.count(p, algorithm=algorithm, direction=direction)
            assert t.bytes() >= t.compulsory()
    small = Problem(100, 120, 16, heads=4)
    one_tile = flashsim.count(small, tiling=Tiling(100, 120))
    assert one_tile.bytes() == one_tile.compulsory()


@pytest.mark.parametrize("algorithm", ["standard", "flash1", "flash2"])
@pytest.mark.parametrize("sides", [(8, 8), (40, 4), (4, 40), (64, 16), (160, 8)])
@pytest.mark.parametrize(("n", "d"), [(192, 16), (1024, 16), (1024, 64), (2048, 32)])
def test_nobody_gets_below_what_is_proven(algorithm, sides, n, d):
    """With what a tiling takes on chip as the chip."""
    t = flashsim.count(Problem(n, head_dim=d), algorithm=algorithm, tiling=Tiling(*sides))
    assert bounds.proven(n * n, d, t.peak_sram() // 4) <= t.bytes() // 4


def test_what_is_proven_is_of_the_order_that_is_met():
    """FlashAttention-2 with many rows and few keys: within three times, so no larger than it."""
    for n, d, rows in ((4096, 32, 256), (4096, 64, 160), (8192, 128, 200)):
        t = flashsim.count(Problem(n, head_dim=d), tiling=Tiling(rows, 4), device="H100")
        least = bounds.proven(n * n, d, t.peak_sram() // 4)
        assert 1 <= t.bytes() // 4 / least <= 3


@pytest.mark.parametrize("m", [0, 1, 5, 700, 10**12])
@pytest.mark.parametrize(("n", "d", "d_v"), [(1, 1, 1), (37, 3, 5), (10**9 + 7, 64, 96)])
def test_what_is_proven_is_exact(n, d, d_v, m):
    """Segments counted in fractions and whole powers: floats end at 2^53."""
    products, best = n * n * d_v, 0
    for eighths in range(1, 81):
        transfers = max(1, ceil(Fraction(m * eighths, 8)))
        reach = Fraction(2 * m + transfers)
        k = ceil(products / (reach**2 / (16 * d)))
        enough = lambda k, reach=reach: k * k * (reach / 3) ** 3 >= products**2  # noqa: E731
        low, high = 0, k  # the least k that is enough, if it is below
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if enough(middle) else (middle + 1, high)
        best = max(best, transfers * (max(low, 1) - 1))
    assert bounds.proven(n * n, d, m, d_v) == best


def test_of_no_scores_nothing_is_proven():
    assert bounds.proven(0, 64, 100) == 0


@pytest.mark.parametrize("d", [4, 16, 64])
@pytest.mark.parametrize("reach", [200, 3000, 50_000])
def test_the_products_of_a_segment(reach, d):
    """The most of sqrt(c o (a b / d^2 + e)), searched for, is what the proof says it is."""
    share = np.linspace(0, 1, 101)
    c, a = np.meshgrid(share, share)
    left = 1 - 2 * c - 2 * a
    products = c * np.sqrt((a * reach / d) ** 2 + np.maximum(left, 0) * reach) * reach
    most = products[left > -1e-9].max()
    claimed = max(reach**2 / (16 * d), (reach / 3) ** 1.5)
    assert 0.99 * claimed <= most <= claimed * (1 + 1e-9)


SMALL = flashsim.count(Problem(64))
test_what_is_refused_says_why = refuses(r"""
bounds.proven(9.0, 8, 100) -> DTypeError: scores must be an integer, got 9.0
bounds.proven(9, 8, -1) -> OptionError: m must be at least 0, got -1
bounds.proven(9, 0, 100) -> ShapeError: head_dim must be at least 1, got 0
SMALL.bytes("lod") -> OptionError: unknown operation 'lod'; choose from load ... mean 'load'
SMALL.bytes(tensor="X") -> OptionError: unknown tensor 'X'; choose from Q, K
SMALL.flops("expo") -> OptionError: unknown kind of FLOP 'expo' ... mean 'exp'
SMALL.on_chip("load")
    -> OptionError: unknown on-chip operation 'load'; choose from read, write
count(Problem(4096, head_dim=256), tiling=Tiling(512, 512))
    -> SramOverflow: a 512 x 512 tile ... largest tiling that fits is Tiling
""")


def test_prints_a_table():
    t = flashsim.count(Problem(1024), tiling=Tiling(128, 64))
    assert "4,456,448" in str(t)
    assert "compulsory" in str(t)
    assert t._repr_html_().startswith("<table>")
    assert repr(t) == "<Traffic flash2 forward: 4,722,688 B requested>"
