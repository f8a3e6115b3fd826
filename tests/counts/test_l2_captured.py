"""Captured arrays and sinks in the L2 model: which lines a tile touches, and their DRAM bytes."""

import numpy as np
import pytest
from l2_cases import small_device, streams

import flashsim
from flashsim import Problem, Tiling, UnsupportedError, count, functions, l2
from flashsim.functions.graph import place
from flashsim.l2 import captured
from flashsim.schedule.tables import MASKED

pytestmark = pytest.mark.promise("predictions are judged")

N, TILE = 256, Tiling(32, 32)
#: One block at a time in a textbook cache, so that reads can be derived by hand.
IN_ORDER = l2.L2Model(ways=None, jitter=0, blocks_per_sm=1)


def dram(problem, l2_bytes, tiling=TILE, model=IN_ORDER, **how):
    device = small_device(l2_bytes, sms=1)
    return count(problem, tiling=tiling, level="dram", device=device, l2=model, **how)


# -- by hand ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("ways", [None, 16])
def test_an_array_that_fits_is_read_once_for_all_heads_and_tiles(ways):
    bias, slopes = np.zeros((N, N), np.float32), np.zeros(4, np.float32)
    p = Problem(N, heads=4, score_mod=lambda s, b, h, q, k: s + slopes[h] * bias[q, k])
    read = dram(p, 1 << 24, model=l2.L2Model(ways=ways))
    assert read.requested.bytes("load", "F") == 4 * N * N * 4
    assert read.bytes("read", "F") == N * N * 4 + 4 * 4  # the bias, and a slope per head
    assert read.bytes("read", "F_own") == 0  # its elements are part of F


def test_an_array_larger_than_l2_is_read_again_by_every_row_tile():
    """K, V and weights[k] are read in a cycle, which LRU never hits in a cache that is smaller."""
    weights = np.zeros(N)
    p = Problem(N, head_dim=8, score_mod=lambda s, b, h, q, k: s * weights[k])
    cycle = 2 * N * 8 * 4 + N * 8  # bytes of K, V and weights
    assert dram(p, 2 * cycle).bytes("read", "F") == N * 8
    assert dram(p, cycle // 2).bytes("read", "F") == N // 32 * N * 8
    assert dram(p, cycle // 2).bytes("read", "K") == N // 32 * N * 8 * 4


def test_a_heads_own_array_is_read_once_per_head():
    """bias[h, q, k] is used by one row tile only, so L2's size does not matter."""
    bias = np.zeros((2, N, N), np.float16)
    p = Problem(N, heads=2, head_dim=8, score_mod=lambda s, b, h, q, k: s + bias[h, q, k])
    for l2_bytes in (1 << 14, 1 << 24):
        assert dram(p, l2_bytes).bytes("read", "F") == 2 * N * N * 2


def test_only_masked_tiles_read_the_masks_array():
    """A tile is MASKED if a document ends inside it; here the documents end at tile borders."""
    numbers = np.repeat([0, 1, 2, 3], N // 4).astype(np.int64)
    aligned = Problem(N, mask_mod=lambda b, h, q, k: numbers[k] == numbers[q])
    assert dram(aligned, 1 << 24).bytes("read", "M") == N * 8  # as M_own, by every row tile
    of_keys = Problem(N, mask_mod=lambda b, h, q, k: numbers[k] == q // 64)
    assert dram(of_keys, 1 << 24).bytes("read", "M") == 0
    inside = np.repeat([0, 1, 2], [80, 96, 80]).astype(np.int64)
    p = Problem(N, mask_mod=lambda b, h, q, k: (inside[k] == 1) & (q >= 0))
    # Borders 80 and 176 are in tiles 2 (keys 64 to 95) and 5 (keys 160 to 191), of 256 B each.
    assert dram(p, 1 << 24).bytes("read", "M") == 2 * 32 * 8


@pytest.mark.parametrize("algorithm", ["flash2", "flash2-fused"])
def test_gradients_are_added_in_l2_and_written_back(algorithm):
    table = np.zeros((2, 600), np.float32)
    p = Problem(
        N,
        heads=2,
        score_mod=lambda s, b, h, q, k: s + table[h, k - q + N],
        score_grads=("table",),
        sinks=True,
    )
    result = dram(p, 1 << 24, algorithm=algorithm, direction="backward")
    # Elements 1 to 511 of each head's 600, which are bytes 4 to 2047 of 2400, in lines of 128 B.
    lines = 2048 // 128 + (2400 + 2048 + 127) // 128 - 2400 // 128
    adds = "dq" if algorithm == "flash2" else "fused"
    stages = {stage.name: stage for stage in result.stages}
    for tensor in ("F", "dF"):
        assert stages[adds].read[tensor] == lines * 128
    assert stages[adds].pending["dF"] == lines * 128
    assert stages["delta"].read["sink"] == stages["delta"].pending["dSink"] == 2 * 4


def test_curves_of_an_array():
    weights = np.zeros(N)
    p = Problem(N, head_dim=8, score_mod=lambda s, b, h, q, k: s * weights[k])
    traffic = count(p, tiling=TILE, device=small_device(1 << 20, sms=1))
    curve = l2.curves(traffic, IN_ORDER)["forward"]
    for l2_bytes in (1 << 12, 1 << 13, 1 << 16, 1 << 24):
        replayed = dram(p, l2_bytes)
        assert curve.reads(l2_bytes) == replayed.bytes("read")


def test_a_small_array_is_counted_in_a_sampled_cache():
    """With 8 MB of bias in a sample of the sets, one line of slopes must not get lost."""
    slopes, bias = np.ones(2, np.float32), np.zeros((2048, 2048), np.float32)
    p = Problem(2048, heads=2, score_mod=lambda s, b, h, q, k: s * slopes[h] + bias[q, k])
    read = count(p, tiling=Tiling(128, 64), level="dram").bytes("read", "F")
    assert read == pytest.approx(2048 * 2048 * 4 + 8, rel=0.02)
    alone = Problem(4096, heads=16, score_mod=functions.alibi(16))
    assert count(alone, level="dram").bytes("read", "F") == 16 * 4


def test_a_trace_replays_the_same_lines():
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 1, 2, 64, 8), dtype=np.float32)
    how = {"score_mod": functions.alibi(2), "tiling": TILE}
    trace = flashsim.run(q, k, v, sinks=np.zeros(2, np.float32), trace=True, **how).trace
    assert trace.dram().bytes("read", "F") == trace.dram().bytes("read", "sink") == 2 * 4


# -- against evaluation of every index -------------------------------------------------------------

TABLE, KEYS, SLOPES = np.zeros((4, 130)), np.zeros((2, 70), np.float16), np.zeros(4, np.float32)
MARKS = np.random.default_rng(0).integers(0, 3, (2, 70)).astype(np.int32)
ORDER = np.random.default_rng(1).permutation(70)
NEAR = np.random.default_rng(1).integers(0, 2, (4, 140)).astype(bool)


def score(s, b, h, q, k):
    return s * SLOPES[3 - h] + TABLE[h, 2 * abs(q - k)] + KEYS[b, k] * TABLE[(q + h) % 4, 7 * h]


def mask(b, h, q, k):
    return (MARKS[b, ORDER[k]] == MARKS[b, q]) | NEAR[h, q - k]


PACKED = {"cu_seqlens_q": (0, 25, 70), "cu_seqlens_k": (0, 30, 70)}
CASES = {
    "heads": Problem(60, 70, heads=4, batch=2, score_mod=score, mask_mod=mask),
    "groups, causal": Problem(
        70, heads=4, kv_heads=2, batch=2, causal=True, score_mod=score, score_grads=("TABLE",)
    ),
    "packed": Problem(70, heads=4, score_mod=score, mask_mod=mask, **PACKED),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("algorithm", ["flash1", "flash2", "flash2-fused"])
def test_every_tile_touches_the_lines_of_its_elements(case, direction, algorithm):
    p = CASES[case]
    how = {"algorithm": algorithm, "direction": direction, "tiling": Tiling(16, 24)}
    traffic = count(p, device=small_device(1 << 20, sms=1), **how)
    tiles, parts = streams(traffic, IN_ORDER)
    for part in parts:
        for name in {"F", "M", "dF"} & {captured.lined(m.tensor) for m in part.stage.moves}:
            its = tiles.range_of(name)
            asked = np.bincount(part.ids, minlength=len(tiles.size))[its]
            assert (asked > 0).tolist() == _touched(traffic, part.stage, name, len(asked)).tolist()


def _touched(traffic, stage, name, count):
    """Evaluate the indices of every score of every visit; no tile, side or head is told apart."""
    p, schedule = traffic.problem, traffic.schedule(stage)
    graph, values = (
        (p.mask_graph, p.mask_mod.arrays)
        if name == "M"
        else (p.score_mod, tuple(np.zeros(a.shape) for a in p.score_mod.arrays))
    )
    sizes = [p.compute_itemsize if name == "dF" else a.itemsize for a in graph.arrays]
    if name == "dF":
        sizes = [n * (a.name in p.score_grads) for n, a in zip(sizes, graph.arrays, strict=True)]
    starts = [0]
    for spec, n in zip(graph.arrays, sizes, strict=True):
        starts.append(starts[-1] + -(-int(np.prod(spec.shape)) * n // 128))
    touched = np.zeros(starts[-1], bool)
    b, h = np.arange(p.batch)[:, None, None, None], np.arange(p.heads)[:, None, None]
    own = {"fixed", "row"} if stage.outer == "queries" and name != "dF" else set()
    visits = [(v.rows, v.cols, v.kind, v.i) for v in schedule]
    # What a Q-outer loop reads at the start of a step is read for rows without visits, too.
    visits += [(schedule.row_slice(i), slice(0, 0), None, i) for i in range(schedule.t_r)]
    for rows, cols, kind, i in visits:
        s = schedule.sequence_of_row(i)
        q = np.arange(rows.start, rows.stop)[:, None] - s.q_start
        k = np.arange(cols.start, cols.stop) - s.k_start if kind is not None else np.zeros(1, int)
        given = {"b": b, "h": h, "q": q, "k": k, "score": np.zeros(())}
        nodes = graph.values(given, values)
        for n in graph.loads:
            early = graph.side(n) in own
            array = graph.nodes[n].value
            if early != (kind is None) or not sizes[array]:
                continue
            if name == "M" and not early and kind != MASKED:
                continue
            shape = graph.arrays[array].shape
            at = place([nodes[a] for a in graph.nodes[n].args], shape)
            elements = np.ravel_multi_index(np.broadcast_arrays(*at), shape)
            touched[starts[array] + elements * sizes[array] // 128] = True
    assert len(touched) == count
    return touched


# -- limits ----------------------------------------------------------------------------------------


def test_an_index_that_depends_on_unknown_values_is_refused():
    buckets, table = np.zeros(N, np.int64), np.zeros(8)
    p = Problem(N, score_mod=lambda s, b, h, q, k: s + table[buckets[k]])
    with pytest.raises(UnsupportedError, match=r"captured array table with .*level='requested'"):
        count(p, level="dram")


def test_limits_name_the_array_and_the_way_out(monkeypatch):
    bias = np.zeros((N, N))
    p = Problem(N, score_mod=lambda s, b, h, q, k: s + bias[q, k])
    monkeypatch.setattr(captured, "MOST_EVALUATED", N * N - 1)
    with pytest.raises(UnsupportedError, match=r"at 6.6e\+04 scores, but the limit is 6.6e\+04"):
        count(p, level="dram", tiling=TILE)
    monkeypatch.undo()
    # Q, K and V, O and L: 8 + 128 + 16 tiles. The bias: 32 rows of 2 lines in 64 tiles.
    monkeypatch.setattr(l2.requests, "MOST_REQUESTS", 2000)
    with pytest.raises(UnsupportedError, match="'forward' makes 4,248 tile requests"):
        count(p, level="dram", tiling=TILE)
