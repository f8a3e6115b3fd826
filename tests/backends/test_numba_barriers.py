"""The barriers of Hopper's fused backward in Python, without a GPU: its roles run on a CPU.

The kernel's own functions run as they are, each role a thread; what they call is played. Tiles and
sums are the visits that they are of, products read what is in shared memory from when they are
queued until they are waited for, and who goes on at each step is drawn by lot. So a barrier that
waits for the wrong phase shows, as does one that is left out; of the memory model nothing does.
"""

import random
import threading
from types import SimpleNamespace

import pytest

pytest.importorskip("numba_cuda")

from flashsim.backends.numba_gpu.hopper import backward, keys_outside
from flashsim.backends.numba_gpu.hopper.onchip import (
    BASE,
    COUNT,
    END,
    FIRST,
    ITEM,
    OUTER,
    START,
    STOP,
    WALK,
    KeysOutside,
)

#: Visits of each item of a block, for each query head of its group.
ITEMS = {1: (2, 0, 1, 3, 1, 0, 0, 5, 2, 1, 4), 2: (1, 0, 2, 3, 0, 1)}
#: Tiles by rows and head_dim: scores' starts a visit early, dK a visit late, neither.
SHAPES = {"early": (128, 64), "carried": (64, 128), "neither": (80, 128)}


ROWS = 1 << 20  # of a query head


class Stuck(Exception):
    """Every role waits."""


class Lots:
    """Threads that run one at a time; the next one is drawn by lot, some more often than others."""

    def __init__(self, seed):
        self.draw, self.turn = random.Random(seed), threading.Condition()
        self.ready, self.often, self.now, self.failed = {}, {}, None, None
        self.mine = threading.local()

    def run(self, roles):
        threads = [threading.Thread(target=self._begin, args=role) for role in roles.items()]
        self.often = {name: self.draw.choice((1, 10, 100)) for name in roles}
        with self.turn:
            self.ready = {name: lambda: True for name in roles}
            self._pick()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.failed:
            raise self.failed

    def step(self, ready=lambda: True):
        """Let others go on, until `ready` holds and the lot falls here."""
        with self.turn:
            self.ready[self.mine.role] = ready
            self._pick()
            self._mine()

    def _begin(self, name, role):
        self.mine.role = name
        try:
            with self.turn:
                self._mine()
            role()
        except Exception as error:
            self.failed = self.failed or error
        with self.turn:
            del self.ready[name]
            self._pick()

    def _mine(self):
        while self.now != self.mine.role and not self.failed:
            self.turn.wait()
        if self.failed:
            raise self.failed

    def _pick(self):
        able = [name for name, ready in self.ready.items() if ready()]
        if self.ready and not able:
            self.failed = self.failed or Stuck(sorted(self.ready))
        often = [self.often[name] for name in able]
        self.now = self.draw.choices(able, often)[0] if able else None
        self.turn.notify_all()


class Block:
    """What a block's roles share: tiles in shared memory, barriers, products under way.

    `heads` query heads have a key head; the barriers of kinds that are `ignored` nobody waits for.
    """

    def __init__(self, at, lots, heads, ignored):
        self.at, self.lots, self.heads, self.memory, self.words = at, lots, heads, {}, {}
        self.left = dict(at.barrier_arrivals)  # arrivals that end each mbarrier's phase
        self.phase, self.named, self.waiting = dict.fromkeys(self.left, 0), {}, {}
        self.ignored = [at.barrier(kind) + 8 * x for kind in ignored for x in range(2)]
        self.flying = {0: [], 1: []}  # of each warpgroup: what a group of products reads
        self.owed = {}  # copies of each mbarrier
        self.sent, self.stored = [], []

    @property
    def group(self):
        """The warpgroup, of a consumer or of a warp that sends its dQ."""
        return self.lots.mine.role[1]

    def where(self, address):
        """Region and stage (of dQ: warpgroup) of an address."""
        for name, size in self.at.regions.items():
            first = self.at.region(name)
            if first <= address < first + size:
                return name, 0 if name in "kv" else (address - first) // (size // 2)
        raise ValueError(address)

    def wait(self, barrier, parity):
        if barrier not in self.ignored:
            self.lots.step(lambda: self.phase[barrier] % 2 != parity)

    def arrive(self, barrier, condition):
        """Of a warp, as a rule; of a whole warpgroup; or of all lanes with statistics."""
        if condition:
            role, full = self.lots.mine.role[0], self.at.barrier("full")
            lanes = role == "statistics" and barrier in (full, full + 8)
            self.left[barrier] -= 32 if lanes else 4 if role == "consumer" else 1
            assert self.left[barrier] >= 0, "more arrivals than a phase takes"
            if not self.left[barrier]:
                self.left[barrier] = self.at.barrier_arrivals[barrier]
                self.phase[barrier] += 1
        self.lots.step()

    def landed(self, barrier):
        """One of two copies; the producer arrives with the second."""
        self.owed[barrier] -= 1
        self.arrive(barrier, not self.owed[barrier])

    def named_arrive(self, barrier, threads):
        count, laps = self.named.get(barrier, (0, 0))
        count += 128 if self.lots.mine.role[0] == "consumer" else 32
        self.named[barrier] = (count % threads, laps + count // threads)
        return laps

    def named_sync(self, barrier, threads):
        laps = self.named_arrive(barrier, threads)
        self.lots.step(lambda: self.named[barrier][1] > laps)

    def read(self, *addresses):
        """Queue a product that reads tiles; what is in them."""
        places = [self.where(x) for x in addresses]
        values = [self.memory.get(place) for place in places]
        values = [dict(x) if isinstance(x, dict) else x for x in values]
        product = SimpleNamespace(places=places, values=values, whole=True)
        self.flying[self.group].append(product)
        self.lots.step()
        return product

    def done(self, pending):
        flying = self.flying[self.group]
        while len(flying) > pending:
            product = flying.pop(0)
            product.whole = product.values == [self.memory.get(x) for x in product.places]
            # dQ of an item's first visit reads what is there, and is not used.
            assert product.whole or product.places[-1][0] == "ds", "overwritten while it is read"
        self.lots.step()


def played(block):
    """What the kernel's modules call, by module."""
    memory, ring = block.memory, lambda barriers, n: barriers + 8 * (n & 1)

    def passed(pending):
        return lambda value: block.done(pending) or value

    def scores(*_, more, **__):
        def queue(*operands):
            start, (own, visited) = operands[:-2], operands[-2:]
            key_head, visit = block.read(own, visited).values
            assert visit is not None, "nothing is there yet"
            assert visit[0] // block.heads == key_head, "another item's"
            assert start in ((), (visit,)), "starts at another visit's statistics"
            return visit

        return queue

    def queue_dv(bf16, n, d, slices, **_):
        def queue(s, dp, dv, to_log2, lse, cap, dout):
            for _ in range(slices):
                assert block.read(dout).values == [s] == [dp]
            block.done(slices)
            return s, dp, (*dv, s)

        return queue

    def store_ds(address, ds):
        memory.setdefault(block.where(address), {})[block.group] = ds
        block.lots.step()

    def queue_dk(dk, ds, queries):
        assert block.read(queries).values == [ds]
        return (*dk, ds)

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
        block.sent.append((block.group, *visit))
        block.lots.step()

    def put_rows(address, values):
        memory[block.where(address)] = values

    def copy(to, tensor_map, barrier, row, head, last):
        name = block.where(to)
        memory[name] = head if name[0] in "kv" else (head, row)
        block.landed(barrier)

    def statistics(lse, delta, rows, unit):
        visit = divmod(lse // 4, ROWS)
        return visit, visit

    hopper = SimpleNamespace(
        named_arrive=lambda n: lambda barrier: block.named_arrive(barrier, n) and None,
        named_sync=lambda n: lambda barrier: block.named_sync(barrier, n),
        get=lambda address: block.words[address],
        put=block.words.__setitem__,
        speaks=lambda: True,
        map_address=lambda x: x,
        uncounted=lambda x: x,
        wait=block.wait,
        wait_full=lambda b, n: block.wait(ring(b, n), n >> 1 & 1),
        wait_free=lambda b, n: block.wait(ring(b, n), n >> 1 & 1 ^ 1),
        arrive=block.arrive,
        stage=ring,
        expect=lambda count: lambda barrier: block.owed.update({barrier: 2}),
        copy_tile=lambda *_, **__: copy,
        queue_scores=scores,
        product_wait=lambda pending, n: passed(pending),
        queue_output=lambda *_: queue_dk,
        store_output=lambda *_: lambda to, row, sums, *_: block.stored.append(sums) or 0,
    )
    gradients = SimpleNamespace(
        load_statistics=lambda n: statistics,
        put_rows=lambda n: put_rows,
        unit_of_starts=lambda start: lambda scale: 1.0,
        start_columns=lambda n: lambda values: values,
        queue_dv=queue_dv,
        score_gradients=lambda *_: lambda p, dp: p,
        ds_place=lambda wide: lambda ds, group: ds,
        dq_place=lambda rows: lambda dq: dq,
        store_ds=lambda *_: store_ds,
        stage_dq=lambda rows: stage_dq,
        queue_dq=lambda *_: block.read,
        reduce_dq=lambda rows, packed: reduce_dq,
        reduce_wait_read=lambda: None,
        wait_turn=None,
        pass_turn=None,
        mask_columns=lambda *_: None,
        fence_shared=lambda: None,
    )
    zeros = SimpleNamespace(zeros=lambda n: tuple)
    columns = SimpleNamespace(load_columns=lambda n: lambda at: memory.get(block.where(at)))
    return hopper, gradients, zeros, columns


class Arguments(SimpleNamespace):
    """A kernel's; addresses that nothing is at are 0."""

    def __getattr__(self, name):
        return 0


def item_functions(block, counts):
    """Those of `items` and `walk`, of a block's only items, which are `counts`."""
    at, numbers = block.at, iter(range(1, len(counts) + 1))
    full, free = at.barrier("item_full"), at.barrier("item_free")

    def take(shared, item):
        block.wait(full + 8 * (item & 1), item >> 1 & 1)
        return at.items + (item & 1) * ITEM

    def write(a, slot, number):
        fields = {WALK: number, COUNT: counts[number], END: ROWS}
        for field in (OUTER, START, STOP, BASE, FIRST):
            block.words[slot + field] = 0
        block.words.update({slot + field: value for field, value in fields.items()})

    nothing = lambda *_: None  # noqa: E731
    items = SimpleNamespace(
        take=take,
        leave=lambda shared, item, speaking: block.arrive(free + 8 * (item & 1), speaking),
        write=write,
        after=lambda a, counter: next(numbers),
        visits=nothing,
        place=lambda row, stop, batch: (row, batch),
        visit_stamps=nothing,
        tile_stamps=nothing,
    )
    walk = SimpleNamespace(
        visit=lambda a, visits, n: (n, False),
        **dict.fromkeys(("report", "report_one", "stamp", "stamp_block"), nothing),
        wait_for_what_ran_before=nothing,
        let_what_runs_next_start=nothing,
    )
    return items, walk


@pytest.fixture
def run(monkeypatch):
    """``run(shape, heads, seed)``: a block's roles run to their end; what they read is asserted."""

    def of(shape, heads, seed, *, deferred, ignored=()):
        block_q, d = SHAPES[shape]
        at = KeysOutside(block_q, 128, d, fused=True, deferred=deferred)
        lots, counts = Lots(seed), ITEMS[heads]
        block = Block(at, lots, heads, ignored)
        hopper, gradients, zeros, columns = played(block)
        thread = SimpleNamespace(x=0)
        played_cuda = SimpleNamespace(threadIdx=thread, blockIdx=thread, syncwarp=lambda: None)
        for module in (backward, keys_outside):
            for name in ("int32", "int64"):
                monkeypatch.setattr(module, name, int)
            for name, value in {
                **{"cuda": played_cuda, "hopper": hopper, "gradients": gradients},
                **{"device": lambda f: f, "quotient": lambda x, y: x // y},
            }.items():
                monkeypatch.setattr(module, name, value)
        monkeypatch.setattr(backward, "float32", float)
        monkeypatch.setattr(backward, "tiles", zeros)
        monkeypatch.setattr(backward, "tensor_gradients", columns)
        yes = dict.fromkeys(("bf16", "fused"), 1) | {"deferred": int(deferred)}
        no = dict.fromkeys(("scaled", "softcap", "ordered", "varlen", "left", "right"), 0)
        sides = dict.fromkeys(("d", "head_dim", "head_dim_v", "counted", "counted_v"), d)
        c = SimpleNamespace(block_q=block_q, block_k=128, **yes, **no, **sides)
        items, walk = item_functions(block, counts)
        given = c, at, walk, items
        a = Arguments(
            heads=heads * len(counts), group=heads, walks=len(counts), tiles=1, n_q=ROWS, scale=1.0
        )
        consume, send = backward._consumer(*given), backward._sender(*given)
        produce, statistics = keys_outside.producer(*given), keys_outside.statistics(*given)
        lots.run(
            {
                ("producer", 0): lambda: produce(0, 0, 0, 0, a, 1, 0),
                ("statistics", 0): lambda: statistics(a, 0),
                **{("sender", g): lambda g=g: send(0, a, 0, g) for g in range(2)},
                **{("consumer", g): lambda g=g: consume(a, 0, g) for g in range(2)},
            }
        )
        visits = [
            tuple((item * heads + h, n * block_q) for h in range(heads) for n in range(count))
            for item, count in enumerate(counts)
        ]
        every = [visit for item in visits for visit in item]
        for g in range(2):
            assert [x[1:] for x in block.sent if x[0] == g] == every
        # Of both warpgroups, dK and dV of each item have all its visits.
        assert sorted(block.stored) == sorted(visits * 4)
        assert not any(block.flying.values())

    return of


@pytest.mark.parametrize("heads", ITEMS)
@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_role_finds_what_it_waits_for(run, shape, deferred, heads):
    """Of items without visits, of one, of two and of more, in a row."""
    for seed in range(6):
        run(shape, heads, seed, deferred=deferred)


@pytest.mark.parametrize(
    "kind", ["ds_full", "ds_free", "full", "free", "kv_full", "k_free", "v_free"]
)
@pytest.mark.parametrize("shape", SHAPES)
def test_without_a_barrier_some_do_not(run, shape, kind):
    def twenty_times():
        for seed in range(20):
            run(shape, 1, seed, deferred=True, ignored=(kind,))

    with pytest.raises((AssertionError, Stuck)):
        twenty_times()
