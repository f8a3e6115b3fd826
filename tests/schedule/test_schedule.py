"""`Schedule` against brute force: which tiles are visited, in what order, and which need a mask."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_traffic import offsets

import flashsim
from flashsim import BlockMask, Problem, Schedule, Tiling
from flashsim.schedule import tables
from flashsim.schedule.schedule import FULL, MASKED
from flashsim.schedule.split import Split

pytestmark = pytest.mark.promise("right tiles")

QUICK = settings(max_examples=150, deadline=None)


class Patterned:
    """A mask that keeps what a modulus leaves; an object, so that examples print."""

    def __init__(self, a, b, modulus, rest):
        self.numbers = a, b, modulus, rest

    def __call__(self, q, k):
        a, b, modulus, rest = self.numbers
        return (a * q + b * k) % modulus != rest

    def __repr__(self):
        return f"Patterned{self.numbers}"


@st.composite
def problems(draw, *, banded=None):
    n_q, n_kv = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    side = st.integers(-1, 45)
    options = {"causal": draw(st.booleans()), "window": draw(st.none() | st.tuples(side, side))}
    longest_q, longest_k = n_q, n_kv
    if draw(st.booleans()):
        sequences = draw(st.integers(1, 4))  # empty ones included: cuts may coincide
        q, k = draw(offsets(n_q, sequences)), draw(offsets(n_kv, sequences))
        options |= {"cu_seqlens_q": q, "cu_seqlens_k": k}
        longest_q, longest_k = max(np.diff(q)), max(np.diff(k))
    if banded is None:
        banded = draw(st.booleans())
    if not banded:
        which = draw(st.integers(1, 3))
        if which & 1:
            cell_q, cell_k = draw(st.integers(1, 12)), draw(st.integers(1, 12))
            shape = int(-(-longest_q // cell_q)), int(-(-longest_k // cell_k))
            cells = draw(
                st.lists(st.booleans(), min_size=shape[0] * shape[1], max_size=shape[0] * shape[1])
            )
            grid = np.array(cells, bool).reshape(shape)
            options["block_mask"] = BlockMask(grid, cell_q, cell_k)
        if which & 2:
            modulus = draw(st.integers(1, 7))
            numbers = [draw(st.integers(0, 6)) for _ in range(3)]
            options["mask"] = Patterned(numbers[0], numbers[1], modulus, numbers[2])
    return Problem(n_q, n_kv, head_dim=4, **options)


@st.composite
def schedules(draw, **kind):
    tiling = Tiling(draw(st.integers(1, 45)), draw(st.integers(1, 45)))
    return Schedule(
        draw(problems(**kind)),
        tiling,
        draw(st.sampled_from(["queries", "keys"])),
        draw(st.sampled_from(["ascending", "descending"])),
        draw(st.booleans()),
    )


def kept_matrix(p):
    """Boolean (n_q, n_kv): `Problem.keep` (tested in test_problem.py), sequence by sequence."""
    kept = np.zeros((p.n_q, p.n_kv), bool)
    for s in p.sequences:
        rows, cols = np.arange(s.q_start, s.q_stop), np.arange(s.k_start, s.k_stop)
        kept[np.ix_(rows, cols)] = p.keep(s, rows, cols)
    return kept


def expected_kinds(schedule):
    """{(i, j): kind} straight from the definition, tile by tile."""
    kept, kinds = kept_matrix(schedule.problem), {}
    for i in range(schedule.t_r):
        s = schedule.sequence_of_row(i)
        for j in range(schedule.t_c):
            rows, cols = schedule.row_slice(i), schedule.col_slice(j)
            if not (s.k_start <= cols.start and cols.stop <= s.k_stop and s.k_start < s.k_stop):
                continue  # a tile of another sequence
            tile = kept[rows, cols]
            if not (tile.any() or schedule.dense):
                continue
            whole = tile.all() and cols.stop - cols.start == schedule.tiling.block_k
            if schedule.dense and not schedule.problem.banded:
                whole = False  # a dense walk does not evaluate masks to find FULL tiles
            kinds[i, j] = FULL if whole else MASKED
    return kinds


def by_row(schedule):
    ptr, col, kind = schedule.row_csr
    return {
        (i, int(col[v])): int(kind[v])
        for i in range(schedule.t_r)
        for v in range(ptr[i], ptr[i + 1])
    }


def by_col(schedule):
    ptr, row, kind = schedule.col_csr
    return {
        (int(row[v]), j): int(kind[v])
        for j in range(schedule.t_c)
        for v in range(ptr[j], ptr[j + 1])
    }


@QUICK
@given(schedules())
def test_tiles_cover_the_matrix_and_stay_in_their_sequence(schedule):
    p, t = schedule.problem, schedule.tiling
    for table, block, n, which in (
        (schedule.rows, t.block_q, p.n_q, "q"),
        (schedule.cols, t.block_k, p.n_kv, "k"),
    ):
        owners = np.full(n, -1)
        assert table.dtype == np.int32
        assert table.shape[1:] == (4,)
        for number, (start, stop, offset, other_stop) in enumerate(table.tolist()):
            assert 0 < stop - start <= block
            assert (owners[start:stop] == -1).all()
            owners[start:stop] = number
            (s,) = (
                s
                for s in p.sequences
                if (s.q_start, s.k_start)[which == "k"]
                <= start
                < (s.q_stop, s.k_stop)[which == "k"]
            )
            assert stop <= (s.q_stop, s.k_stop)[which == "k"]
            assert offset == s.k_stop - s.q_stop
            assert other_stop == (s.k_stop, s.q_stop)[which == "k"]
            full = stop - start == block
            assert full or stop == (s.q_stop, s.k_stop)[which == "k"]  # only the last is ragged
        assert (owners >= 0).all()
        assert (np.diff(owners) >= 0).all()


@QUICK
@given(schedules())
def test_visits_are_the_tiles_that_brute_force_finds(schedule):
    expected = expected_kinds(schedule)

    assert by_row(schedule) == expected
    assert by_col(schedule) == expected
    assert schedule.n_visits == len(expected)


@QUICK
@given(schedules())
def test_every_kept_score_lies_in_exactly_one_visit(schedule):
    seen = np.zeros((schedule.problem.n_q, schedule.problem.n_kv), int)
    for visit in schedule:
        tile = np.ones((len(seen[visit.rows]), len(seen[0, visit.cols])), bool)
        if visit.keep is not None:
            assert visit.kind == MASKED
            assert not visit.keep.all()
            tile = visit.keep
        seen[visit.rows, visit.cols] += tile

    np.testing.assert_array_equal(seen, kept_matrix(schedule.problem))


@QUICK
@given(schedules())
def test_the_walk_follows_its_loop_orders(schedule):
    visits = list(schedule)
    keys = [visit.j for visit in visits]
    queries = [visit.i for visit in visits]
    sign = -1 if schedule.key_order == "descending" else 1

    if schedule.outer == "queries":
        assert queries == sorted(queries)
        order = list(zip(queries, [sign * j for j in keys], strict=True))
        assert [visit.index for visit in visits] == list(range(len(visits)))
    else:
        order = list(zip([sign * j for j in keys], queries, strict=True))
        assert sorted(visit.index for visit in visits) == list(range(len(visits)))
    assert order == sorted(set(order))
    csr = schedule.row_csr if schedule.outer == "queries" else schedule.col_csr
    for visit in visits:
        inner = visit.j if schedule.outer == "queries" else visit.i
        assert (csr[1][visit.index], csr[2][visit.index]) == (inner, visit.kind)
        assert visit.rows == schedule.row_slice(visit.i)
        assert visit.cols == schedule.col_slice(visit.j)


@QUICK
@given(schedules())
def test_csr_has_the_layout_that_kernels_read(schedule):
    for (ptr, inner, kind), outer, count in (
        (schedule.row_csr, schedule.t_r, schedule.t_c),
        (schedule.col_csr, schedule.t_c, schedule.t_r),
    ):
        assert ptr.shape == (outer + 1,)
        assert ptr[0] == 0
        assert ptr[-1] == len(inner) == len(kind)
        assert (np.diff(ptr) >= 0).all()
        assert ((inner >= 0) & (inner < count)).all()
        assert set(kind.tolist()) <= {FULL, MASKED}
        for array in (ptr, inner, kind):
            assert array.dtype == np.int32
            assert array.flags.c_contiguous
            with pytest.raises(ValueError, match="read-only"):
                array[:1] = 0


@QUICK
@given(schedules(banded=True))
def test_spans_say_the_same_as_brute_force(schedule):
    expected = expected_kinds(schedule)
    for spans, axis, count in (
        (schedule.row_spans, 0, schedule.t_r),
        (schedule.col_spans, 1, schedule.t_c),
    ):
        assert spans.shape == (count, 4)
        assert spans.dtype == np.int32
        found = {}
        for outer, (lo, full_lo, full_hi, hi) in enumerate(spans.tolist()):
            assert lo <= full_lo <= full_hi <= hi
            for inner in range(lo, hi):
                place = (outer, inner) if axis == 0 else (inner, outer)
                found[place] = FULL if full_lo <= inner < full_hi else MASKED
        assert found == expected


@QUICK
@given(schedules(banded=False))
def test_spans_exist_exactly_where_rows_are_contiguous_by_construction(schedule):
    assert (schedule.row_spans is None) == (not schedule.dense)
    assert (schedule.col_spans is None) == (not schedule.dense)


@QUICK
@given(schedules())
def test_sums_and_extents(schedule):
    heights = np.diff(schedule.rows[:, :2]).ravel()
    widths = np.diff(schedule.cols[:, :2]).ravel()
    tiles = list(expected_kinds(schedule))

    assert schedule.sums == (
        len(tiles),
        sum(int(widths[j]) for _, j in tiles),
        sum(int(heights[i]) for i, _ in tiles),
        sum(int(heights[i]) * int(widths[j]) for i, j in tiles),
    )
    own, largest = schedule.extents()
    if schedule.outer == "queries":
        visited = [[int(widths[j]) for a, j in tiles if a == i] for i in range(schedule.t_r)]
        np.testing.assert_array_equal(own, heights)
    else:
        visited = [[int(heights[i]) for i, b in tiles if b == j] for j in range(schedule.t_c)]
        np.testing.assert_array_equal(own, widths)
    np.testing.assert_array_equal(largest, [max(sizes, default=0) for sizes in visited])


@QUICK
@given(schedules())
def test_equal_schedules_are_one_key(schedule):
    again = replace(schedule)

    assert again == schedule
    assert hash(again) == hash(schedule)
    other = "ascending" if schedule.key_order == "descending" else "descending"
    assert replace(schedule, key_order=other) != schedule


@QUICK
@given(schedules())
def test_key_counts(schedule):
    expected = [
        schedule.sequence_of_row(i).k_stop - schedule.sequence_of_row(i).k_start
        for i in range(schedule.t_r)
    ]
    np.testing.assert_array_equal(schedule.key_counts, expected)


def test_a_causal_square_by_hand():
    """8 x 8, tiles 4 x 2: the diagonal tiles are masked, below it they are full."""
    schedule = Schedule(Problem(8, causal=True), Tiling(4, 2))

    np.testing.assert_array_equal(schedule.row_spans, [[0, 2, 2, 2], [0, 0, 2, 4]])
    ptr, col, kind = schedule.row_csr
    np.testing.assert_array_equal(ptr, [0, 2, 6])
    np.testing.assert_array_equal(col, [0, 1, 0, 1, 2, 3])
    np.testing.assert_array_equal(kind, [1, 1, 0, 0, 1, 1])
    np.testing.assert_array_equal(schedule.rows, [[0, 4, 0, 8], [4, 8, 0, 8]])


def test_a_mask_is_asked_about_one_row_of_tiles_at_a_time():
    asked = []

    def mask(q, k):
        asked.append(q.size * k.size)
        return q >= k

    n, block = 512, 32
    schedule = Schedule(Problem(n, mask=mask), Tiling(block, block))

    assert schedule.n_visits == 16 * 17 // 2
    assert max(asked) <= n * block
    assert sum(asked) <= n * n


def test_a_million_causal_queries_cost_rows_not_tiles():
    n, block = 1 << 20, 128
    schedule = Schedule(Problem(n, causal=True), Tiling(block, block))
    tiles = n // block

    assert schedule.sums.visits == tiles * (tiles + 1) // 2
    assert schedule.sums.area == schedule.sums.visits * block * block
    cached = [x for x in vars(schedule).values() if isinstance(x, np.ndarray)]
    cached += schedule._edges
    assert len(cached) == 5  # rows, cols, two tables of sequences, row_spans
    assert sum(x.nbytes for x in cached) <= 64 * tiles
    assert "row_csr" not in vars(schedule)


def test_mask_errors_surface_from_the_schedule():
    schedule = Schedule(Problem(4, mask=lambda q, k: q / 0 > k), Tiling(2, 2))

    with np.errstate(divide="raise"), pytest.raises(flashsim.MaskError, match="FloatingPointError"):
        _ = schedule.row_csr


# -- sizes at the edges of 32 and 64 bits ---------------------------------------------------------

LARGE = flashsim.Device("large", sram_bytes=2**60, sram_per_sm=2**60)


def test_a_tile_of_any_size_is_the_sequences_own():
    packed = Problem(32, head_dim=8, cu_seqlens_q=(0, 10, 32), cu_seqlens_k=(0, 10, 32))
    snug = flashsim.count(packed, tiling=Tiling(32, 32))

    for tiling in (Tiling(2**63 - 1, 32), Tiling(32, 2**63 - 1), Tiling(2**63 - 1, 2**63 - 1)):
        assert flashsim.count(packed, tiling=tiling).transfers == snug.transfers
        for name in ("rows", "cols", "row_spans", "col_spans"):
            large, small = (getattr(Schedule(packed, t), name) for t in (tiling, Tiling(33, 33)))
            np.testing.assert_array_equal(large, small)
    with pytest.raises(flashsim.TilingError, match=r"at most 2\*\*63 - 1"):
        Tiling(2**63, 1)


@pytest.mark.parametrize("n", [2**31 - 1, 2**31, 2**31 + 1, 3_037_000_499])
def test_lengths_past_int32_are_counted_if_rows_are_contiguous(n):
    tiling = Tiling(2**20, 2**20)
    dense = flashsim.count(Problem(n, head_dim=1), tiling=tiling, device=LARGE)
    tiles = -(-n // 2**20)

    assert dense.bytes("load", "K") == tiles * n * 4
    assert dense.flops("matmul") == 4 * n * n
    causal = Schedule(Problem(n, causal=True), tiling).sums
    last = n - (tiles - 1) * 2**20  # rows and columns of the ragged tile
    assert causal.visits == tiles * (tiles + 1) // 2
    assert causal.area == (tiles - 1) * tiles // 2 * 4**20 + last * n


def most(pairs):
    """Of (rows, columns), those that no other has more of both of."""
    return {x for x in pairs if not any(x != y and x[0] <= y[0] and x[1] <= y[1] for y in pairs)}


@given(
    problem=problems(banded=True),
    tiling=st.builds(Tiling, st.integers(1, 12), st.integers(1, 12)),
    dense=st.booleans(),
    packed=st.booleans(),
)
@QUICK
def test_closed_sums_and_extents_are_those_of_the_tables(problem, tiling, dense, packed):
    problem = replace(problem, heads=3 * problem.kv_heads)
    for outer in ("queries", "keys"):
        split = Split(1, pack_gqa=packed and outer == "queries")
        own = Schedule(problem, tiling, outer, "ascending", dense, split)
        table = own.sums, most(set(zip(*(x.tolist() for x in own.extents()), strict=True)))
        limit = "FEW_TILES" if packed else "MOST_TILES"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tables, limit, 0)
            closed = Schedule(problem, tiling, outer, "ascending", dense, split)
            assert closed.sums == table[0]
            assert most(set(zip(*(x.tolist() for x in closed.extents()), strict=True))) == table[1]
            if outer == "queries" and not dense:
                bands = closed._bands("queries")
                spans = [b.full(i) for b in bands for i in range(b.tiles)]
                full = own.row_spans[:, 2] - own.row_spans[:, 1]
                assert [hi - lo for lo, hi in spans] == full.tolist()
                assert sum(b.fulls() for b in bands) == full.sum()
            assert "_edges" not in vars(closed)


@pytest.mark.parametrize("n", [2**31 - 1, 2**31, 2**36, 2**63 - 1])
def test_any_length_is_counted_with_the_default_tile(n):
    counted = flashsim.count(Problem(n))
    tiles = -(-n // counted.tiling.block_q)
    assert counted.bytes("load", "K") == tiles * n * 64 * 4
    assert counted.flops("matmul") == 4 * n * n * 64
    backward = flashsim.count(Problem(n), direction="backward", algorithm="flash2-fused")
    assert backward.flops("matmul") == 10 * n * n * 64
    assert flashsim.count(Problem(n, 128), algorithm="standard").bytes("store", "S") == n * 128 * 4


@pytest.mark.parametrize("how", [{}, {"causal": True}, {"window": (1000, 0)}, {"n_kv": 1}])
def test_a_count_of_many_tiles_builds_no_table(how):
    counted = flashsim.count(Problem(2**31 - 1, **how), tiling=Tiling(128, 128))
    assert counted.bytes() > 0
    assert counted.peak_sram() > 0
    assert all("_edges" not in vars(counted.schedule(stage)) for stage in counted.stages)


def test_what_tables_cannot_hold_is_refused_before_it_is_allocated():
    tracemalloc.start()
    try:
        with pytest.raises(flashsim.TilingError, match=r"67,108,864 row tiles.*larger block_q"):
            flashsim.count(Problem(2**30, 1, mask=np.greater), tiling=Tiling(16, 1))
        with pytest.raises(flashsim.UnsupportedError, match="mask or block_mask need a table"):
            flashsim.count(
                Problem(2**31, 1, mask=np.greater), tiling=Tiling(2**20, 1), device=LARGE
            )
        with pytest.raises(
            flashsim.UnsupportedError, match="more scores than the 64-bit sums of a table"
        ):
            _ = Schedule(Problem(2**32), Tiling(2**20, 2**20)).rows
        with pytest.raises(flashsim.TilingError, match=r"column tiles.*larger block_k"):
            flashsim.count(Problem(1, 2**36), algorithm="flash-decode")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20
    with pytest.raises(flashsim.TilingError, match="visits 4,294,967,296 tile pairs"):
        _ = Schedule(Problem(2**16), Tiling(1, 1)).row_csr


def test_cells_of_any_size():
    whole = BlockMask([[True]], 2**63 - 1, 2**63 - 1)
    schedule = Schedule(Problem(10, block_mask=whole), Tiling(4, 4))
    assert schedule.sums == Schedule(Problem(10), Tiling(4, 4)).sums
