"""The barriers of Hopper's backwards in Python, without a GPU: their roles run on a CPU."""

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

pytest.importorskip("numba_cuda")

from hopper_roles import (
    DATA,
    ITEMS,
    NAMED,
    OF_CLUSTER,
    ROWS,
    SHARED,
    constants,
    machine,
    one_fails,
    parts,
    run_roles,
    same,
)

from flashsim.backends.numba_gpu.hopper import backward, backward_roles, backward_wide
from flashsim.backends.numba_gpu.hopper.smem_layout import ColumnsDivided, KeysOutside, Roles

pytestmark = pytest.mark.promise("every barrier is needed")


def played(block):
    """What the kernel's modules call, by module."""
    memory = block.memory
    of_hopper, of_gradients = parts(block, block.at.d // 2)

    def scores(*_, more, **__):
        def queue(*operands):
            start, (own, visited) = operands[:-2], operands[-2:]
            key_head, visit = block.read(own, visited).values
            assert visit is not None, "nothing is there yet"
            assert visit[0] // block.heads == key_head, "another item's"
            assert start in ((), (visit,)), "starts at another visit's statistics"
            return visit

        return queue

    def queue_dv(bf16, slices, **_):
        def queue(s, dp, dv, to_log2, lse, cap, dout):
            for _ in range(slices):
                assert block.read(dout).values == [s] == [dp]
            block.done(slices)
            return s, dp, (*dv, s)

        return queue

    def store_ds(address, ds):
        memory.setdefault(block.where(address), {})[block.group] = ds
        block.lots.step()

    def queue_more(sums, left, right):
        assert block.read(right).values == [left]
        return (*sums, left)

    def stage_dq(place, dq):
        assert dq.whole, "dS was overwritten while it was read"
        _, ds = dq.values
        assert len(ds) == 2, "a warpgroup's dS is missing"
        assert len(set(ds.values())) == 1, "dS of two visits"
        memory[block.where(place)] = ds[0]
        block.lots.step()

    def reduce_dq(tensor_map, source, column, row, head, last):
        visit = head, row - row % block.at.block_q  # a piece may begin at half of the tile's rows
        assert memory[block.where(source)] == visit, "another visit's dQ is sent"
        block.sent.append((block.group, 0, block.at.d, *visit))
        block.lots.step()

    gradients = SimpleNamespace(
        start_columns=lambda values: values,
        queue_dv=queue_dv,
        score_gradients=lambda *_: lambda p, dp: p,
        ds_place=lambda wide: lambda ds, group: ds,
        dq_place=lambda rows: lambda dq: dq,
        store_ds=lambda *_: store_ds,
        stage_dq=stage_dq,
        queue_dq=lambda *_: block.read,
        reduce_dq=lambda rows, wide, packed: reduce_dq,
        **of_gradients,
    )
    columns = SimpleNamespace(load_columns=lambda n: lambda at: memory.get(block.where(at)))
    return {
        "hopper": machine(
            block, queue_scores=scores, queue_output=lambda *_: queue_more, **of_hopper
        ),
        **{"gradients": gradients, "mma_tiles": SimpleNamespace(zeros=lambda n: tuple)},
        "softmax": SimpleNamespace(scale_scores=lambda *_: lambda s, *_: s),
        "tensor_gradients": columns,
    }


def played_wide(block):
    """What the kernels' modules call, by module."""
    memory, at = block.memory, block.at
    roles = isinstance(at, Roles)

    def visit_of(address):
        value = memory.get(block.where(address))
        assert value is not None, "nothing is there yet"
        return value

    def queue_scores(*operands):
        own, visited = operands if not roles else operands[::-1]
        chunks = range(at.chunks if roles and block.where(visited)[0] == "dout" else 1)
        values = block.read(own, *(visited + x * at.block_q * 128 for x in chunks)).values
        key_head, visit, *others = values
        assert visit is not None, "nothing is there yet"
        assert visit[0] // block.heads == key_head, "another item's"
        assert others in ([], [visit, visit]), "chunks of several visits"
        return visit

    def whole_scores(value):
        """The visit of P or dS in shared memory."""
        if roles:
            return value
        assert len(value) == 2, "a warpgroup's scores are missing"
        return same(*value.values())

    def store_scores(address, scores):
        if roles:
            memory[block.where(address)] = scores
        else:
            memory.setdefault(block.where(address), {})[block.group] = scores
        block.lots.step()

    def queue_columns(bf16, at, down, more):
        parts = range(2 if at.narrow else 1)

        def queue(*operands):
            *sums, scores, tile, _ = operands
            products = [block.read(scores, tile) for _ in parts]
            if down:
                return products
            visit = whole_scores(products[0].values[0])
            assert products[0].values[1] == visit, "another visit's"
            return (*sums[0], visit)

        return queue

    def queue_sum(sums, chunk, scores):
        tile, visit = block.read(chunk, scores).values
        assert tile == visit is not None, "another visit's"
        return (*sums, visit)

    def stage(place, dq):
        for product in dq:
            assert product.whole, "dS was overwritten while it was read"
        memory[block.where(place)] = whole_scores(dq[0].values[0])
        block.lots.step()

    def reduce_dq(rows, wide, packed):
        def reduce(tensor_map, source, column, row, head, last):
            assert memory.get(block.where(source)) == (head, row), "another visit's dQ is sent"
            block.sent.append((block.group, column, wide, head, row))
            block.lots.step()

        return reduce

    def add_columns(at, row_of):
        def add(address, dq, rows, group):
            for product in dq:
                assert product.whole, "dS was overwritten while it was read"
            visit = divmod(address // (at.d * 4), ROWS)
            assert whole_scores(dq[0].values[0]) == visit, "another visit's dQ is added"
            block.sent.append((group, 128 * group, 128, *visit))
            return 0

        return add

    def copy_chunks(rows, chunks, packed):
        def copy(to, tensor_map, full, free, parity, row, head, last):
            for x in range(chunks):
                block.wait(free + 8 * x, parity ^ 1)
                block.expect(full + 8 * x, rows * 128)
                memory["dout", x] = head, row
                block.landed(full + 8 * x, rows * 128)

        return copy

    def store_columns(bf16, at, row_of):
        def store(to, row_bytes, sums, factors, key, stop, group):
            block.stored.append((to // DATA, group, 0, sums))
            return 0

        return store

    def store_sums(to, row_bytes, low, middle, high, factor, start, stop):
        assert low == middle == high, "chunks of several visits"
        block.stored.append((to // DATA, 0, 0, low))
        return 0

    of_hopper, of_gradients = parts(block, at.d // 4)
    hopper = machine(
        block, copy_chunks=copy_chunks, queue_scores=lambda *_, **__: queue_scores, **of_hopper
    )
    gradients = SimpleNamespace(
        store_ds=lambda *_: store_scores, reduce_dq=reduce_dq, **of_gradients
    )
    wide_gradients = SimpleNamespace(
        scores_place=lambda tile, group: tile,
        column_probabilities=lambda *_: lambda s, lse, *_: (same(s, lse), s),
        column_gradients=lambda *_: lambda p, dp, delta: same(p, dp, delta),
        add_to_columns=same,
        queue_columns=queue_columns,
        add_columns=add_columns,
        store_columns=store_columns,
        load_rows=visit_of,
        keys_place=lambda tile: tile,
        store_probabilities=lambda *_: (
            lambda place, s, lse, *_: store_scores(place, same(s, lse)) or s
        ),
        store_gradients=lambda *_: (
            lambda place, p, dp, delta: store_scores(place, same(p, dp, delta))
        ),
        queue_dq=lambda *_: lambda ds, k: [block.read(ds, k)],
        queue_sum=lambda *_: queue_sum,
        store_sums=lambda *_: store_sums,
        rows_place=lambda dq: dq,
        stage_rows=lambda *_: stage,
    )
    softmax = SimpleNamespace(scale_scores=lambda *_: lambda s, *_: s, mask_rows=lambda *_: None)
    return {
        **{"hopper": hopper, "gradients": gradients, "wide_gradients": wide_gradients},
        **{"softmax": softmax, "mma_tiles": SimpleNamespace(zeros=lambda n: tuple)},
        "tensor_gradients": SimpleNamespace(load_columns=lambda n: visit_of),
    }


class Shape(NamedTuple):
    """A kernel's shared memory, its module and what its constants are besides; what is played.

    `pieces` are the first column and the width of each piece of dQ that a warpgroup sends.
    """

    at: Any
    module: Any
    make: str
    played: Any
    more: dict[str, int]
    pieces: dict[int, list[tuple[int, int]]]

    @property
    def clustered(self):
        """Whether several blocks may share an item."""
        return self.module is not backward_roles


def alike(block_q, d, deferred):
    """Up to 128 columns: both warpgroups do the same."""
    at = KeysOutside(block_q, 128, d, fused=True, deferred=deferred)
    more = {"fused": 1, "after": 1, "deferred": int(deferred)}
    pieces = {g: [(0, d)] for g in (0, 1)}
    return Shape(at, backward, "hopper_backward_kernel", played, more, pieces)


def divided(d, fused):
    """Beyond 128 columns, which are divided among the warpgroups."""
    ranges = ((0, 128, 128),) if d == 256 else ((0, 128, 64), (64, 32, 32))
    pieces = {g: [(at_0 + g * apart, n) for at_0, apart, n in ranges] for g in (0, 1)}
    at, make = ColumnsDivided(64, 64, d, fused), "hopper_backward_wide_kernel"
    return Shape(at, backward_wide, make, played_wide, {"fused": int(fused)}, pieces)


#: Scores' starts a visit early, dK a visit late, neither; dQ a visit late. Warpgroups with roles.
SHAPES = {
    **{"early": alike(128, 64, False), "early, deferred": alike(128, 64, True)},
    **{"carried": alike(64, 128, False), "carried, deferred": alike(64, 128, True)},
    **{"neither": alike(80, 128, False), "neither, deferred": alike(80, 128, True)},
    **{"192": divided(192, False), "192 fused": divided(192, True)},
    **{"256": divided(256, False), "256 fused": divided(256, True)},
    "roles": Shape(
        *(Roles(64, 96, 192, 192), backward_roles, "hopper_backward_roles_kernel"),
        *(played_wide, {"fused": 1}, {0: [(0, 192)]}),
    ),
}
DEFERRED = [name for name in SHAPES if "deferred" in name]
CLUSTERED = [name for name, shape in SHAPES.items() if shape.clustered]


@pytest.fixture
def run(monkeypatch):
    """``run(shape, heads, seed)``: all roles of a block, which has all items, run to their end; or
    (`item`) of a cluster of so many `blocks`, which has that one. What they read is asserted."""

    def of(name, heads, seed, *, blocks=1, scored=False, **how):
        at, module, make, calls, more, pieces = SHAPES[name]
        c, kernel = constants(at, blocks, scored, **more), getattr(module, make)
        given = monkeypatch, module, kernel, calls, at, c, heads, seed, blocks, scored
        cluster, visits = run_roles(*given, **how)
        every = [visit for own in visits.values() for visit in own]
        sent = [x for block in cluster.blocks for x in block.sent]
        for g, columns in pieces.items() if more["fused"] else ():
            for column, wide in columns:
                assert [x[3:] for x in sent if x[:3] == (g, column, wide)] == every
        assert len(sent) == more["fused"] * len(every) * sum(map(len, pieces.values()))
        # dK and dV of each item have all its visits.
        stored = sorted(x for block in cluster.blocks for x in block.stored)
        if blocks == 1:
            assert stored == sorted(
                (w, g, 0, own) for w in (0, 1) for g in pieces for own in visits.values()
            )
            return
        firsts = {g: [x for at_0, n in of_g for x in range(at_0, at_0 + n, 32)]
                  for g, of_g in pieces.items()}  # fmt: skip
        places = [(w, g, x) for w in (0, 1) for g in (0, 1) for x in sorted(firsts[g])]
        assert [x[:3] for x in stored] == places
        for _, g, column, sums in stored:  # always in the same order
            assert {first for first, _, _ in sums} == {16 * firsts[g].index(column)}
            assert [rank for _, rank, _ in sums] == list(range(blocks))
            assert [visit for *_, share in sums for visit in share] == every
            shares = [len(share) for *_, share in sums]
            assert max(shares) <= min(shares) + 1

    return of


@pytest.mark.parametrize("heads", ITEMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_role_finds_what_it_waits_for(run, shape, heads):
    """Of items without visits, of one, of two and of more, in a row."""
    for seed in range(6):
        run(shape, heads, seed)


@pytest.mark.parametrize("shape", CLUSTERED)
def test_every_role_finds_what_it_waits_for_with_a_score_function(run, shape):
    for seed in range(6):
        run(shape, 2, seed, scored=True)


MBARRIERS = "full", "free", "kv_full", "k_free", "v_free"
#: Barriers by shape: mbarriers, and the numbers of named ones (see the kernels' constants). With
#: divided columns K is released together with V, which the producer waits for first.
BARRIERS = {
    **dict.fromkeys(DEFERRED, (*MBARRIERS, "ds_full", "ds_free")),
    "192": ("full", "free", "kv_full", "v_free", 1),
    "192 fused": ("free", 1, 2, 4),
    # 4 is between a warpgroup's warps, which here are one role
    "roles": (*MBARRIERS, "dout_full", "dout_free", 1, 2, 3, 5, 6),
}


@pytest.mark.parametrize(
    ("shape", "kind"), [(shape, kind) for shape, kinds in BARRIERS.items() for kind in kinds]
)
def test_without_a_barrier_some_do_not(run, shape, kind):
    one_fails(run, shape, 1, times=40, ignored=(kind,))


@pytest.mark.parametrize("blocks", [2, 8])
@pytest.mark.parametrize("heads", SHARED)
@pytest.mark.parametrize("shape", CLUSTERED)
def test_every_role_of_a_cluster_finds_what_it_waits_for(run, shape, heads, blocks):
    """Blocks with a visit, with several and with none share an item, and add up dK and dV."""
    for item in range(len(SHARED[heads])):
        run(shape, heads, item, blocks=blocks, item=item)


@pytest.mark.parametrize("kind", [*NAMED, *OF_CLUSTER])
@pytest.mark.parametrize("shape", [*DEFERRED, "256"])
def test_without_a_barrier_some_of_a_cluster_do_not(run, shape, kind):
    one_fails(run, shape, 1, ignored=(kind,), blocks=2, item=3)
