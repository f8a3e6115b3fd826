"""Hopper's kernels in Python on a CPU: their roles run, and what they call is played.

A kernel runs as it is, each role by itself, of one block or of a cluster's. Tiles and sums are
the visits that they are of, products read what is in shared memory from when they are queued until
they are waited for, and who goes on at each step is drawn by lot. So a barrier that waits for the
wrong phase shows, as does one that is left out; of the memory model nothing does.
"""

import random
from functools import partial
from types import SimpleNamespace

import pytest
from greenlet import getcurrent, greenlet

from flashsim.backends.numba_gpu.hopper import key_gradients, kv_outer
from flashsim.backends.numba_gpu.hopper import smem_layout as layout

#: Visits of each item of a block, for each query head of its group.
ITEMS = {1: (2, 0, 1, 3, 1, 0, 0, 5, 2, 1, 4), 2: (1, 0, 2, 3, 0, 1)}
#: The same of items that a cluster has, one at a time.
SHARED = {1: (0, 1, 3, 9), 2: (1, 5)}

ROWS = 1 << 20  # of a query head
DATA = 1 << 40  # where dV is; dK is at 0

#: Roles of a block, a warp or a warpgroup each, and the first thread of the first one.
THREADS = {"producer": 0, "statistics": 32, "sender": 64, "consumer": 128}
#: What a block waits for besides mbarriers, by what `ignored` calls it: the number of a named
#: barrier, or which of the cluster's it is.
NAMED = {"tiles read": 6}
OF_CLUSTER = ("begun", "laid down", "added up")


class Stuck(Exception):
    """Every role waits."""


class Lots:
    """Roles that run one at a time; the next one is drawn by lot, some more often than others.

    Each is a greenlet. As threads they would take half as long again.
    """

    def __init__(self, seed):
        self.draw, self.ready, self.now = random.Random(seed), {}, None

    def run(self, roles):
        often = {name: self.draw.choice((1, 10, 100)) for name in roles}
        turns = {name: greenlet(role) for name, role in roles.items()}
        self.ready = {name: lambda: True for name in roles}
        while self.ready:
            able = [name for name, ready in self.ready.items() if ready()]
            if not able:
                raise Stuck(sorted(self.ready))
            self.now = self.draw.choices(able, [often[name] for name in able])[0]
            turns[self.now].switch()  # raises what the role raises
            if turns[self.now].dead:
                del self.ready[self.now]

    def step(self, ready=lambda: True):
        """Let others go on, until `ready` holds and the lot falls here."""
        self.ready[self.now] = ready
        getcurrent().parent.switch()


class Cluster:
    """Its blocks, and its barrier: a phase ends once all threads that have not ended have come."""

    def __init__(self, lots, ignored):
        self.lots, self.ignored, self.blocks = lots, ignored, []
        self.came, self.phase, self.times = set(), 0, {}

    def sync(self):
        role = self.lots.now
        time = self.times[role] = self.times.get(role, -1) + 1
        if OF_CLUSTER[time] in self.ignored:
            return
        self.came.add(role)
        now = self.phase
        self.lots.step(lambda: self.complete() or self.phase > now)

    def complete(self):
        done = bool(self.came) and self.came >= self.lots.ready.keys()
        if done:
            self.phase += 1
            self.came.clear()
        return done

    def lives(self, rank):
        """Whether a block has not ended, and its shared memory with it."""
        return any(role[2] == rank for role in self.lots.ready)


def apart_of(at):
    """The bytes of a stage of each region; of dQ a warpgroup's, of one dO a chunk's."""
    if isinstance(at, layout.OnChip):
        return {"q": at.q_bytes, "k": at.k_bytes, "v": at.v_bytes}
    scores = at.ds_bytes if isinstance(at, layout.KeysOutside) else at.scores_bytes
    dout = at.block_q * 128 if isinstance(at, layout.Roles) else at.query_bytes
    return {
        **{"k": at.key_bytes, "v": at.key_bytes, "q": at.query_bytes, "dout": dout},
        **{"p": scores, "ds": scores, "dq": at.dq_bytes},
        **{"lse": at.block_q * 4, "delta": at.block_q * 4},
    }


def roles_of(at):
    """A block's roles: name, and warpgroup (of senders: whose dQ they send)."""
    senders = 1 if isinstance(at, layout.Roles) else 2
    counts = {"producer": 1, "statistics": 1, "sender": senders, "consumer": at.groups}
    return [(name, x) for name, count in counts.items() for x in range(count)]


class Block:
    """What a block's roles share: tiles in shared memory, barriers, products under way.

    `heads` query heads have a key head; the barriers (by kind, or named ones by number) that are
    `ignored` nobody waits for. Without a `cluster` its roles run alone, and not the kernel around
    them.
    """

    def __init__(self, at, lots, heads, ignored, cluster=None):
        self.at, self.lots, self.heads, self.memory, self.words = at, lots, heads, {}, {}
        self.cluster, self.begun, self.laid = cluster, cluster is None, {}
        if cluster:
            self.rank = len(cluster.blocks)
            cluster.blocks.append(self)
        self.left = dict(at.barrier_arrivals)  # arrivals that end each mbarrier's phase
        self.phase, self.named, self.waiting = dict.fromkeys(self.left, 0), {}, {}
        counts = {kind: count for kind, (count, _) in at.arrivals.items() if kind in ignored}
        self.ignored = [at.barrier(kind) + 8 * x for kind, n in counts.items() for x in range(n)]
        self.passed = [NAMED.get(kind, kind) for kind in ignored]
        # of each warpgroup: what a group of products reads
        self.flying = {group: [] for group in range(at.groups)}
        self.apart = apart_of(at)
        self.owed = dict.fromkeys(self.left, 0)  # bytes of copies of each mbarrier
        self.sent, self.stored = [], []

    @property
    def thread(self):
        """The first one of the role."""
        kind, number = self.lots.now[:2]
        return THREADS[kind] + number * (128 if kind == "consumer" else 32)

    @property
    def group(self):
        """The warpgroup, of a consumer or of a warp that sends its dQ."""
        return self.lots.now[1]

    def where(self, address):
        """Region and stage of an address (see `apart_of`; of the forward's Q: warpgroup)."""
        for name, size in self.at.regions.items():
            first = self.at.region(name)
            if first <= address < first + size:
                return name, (address - first) // self.apart[name]
        raise ValueError(address)

    def begin(self, shared):
        self.begun = True
        self.lots.step()

    def wait(self, barrier, parity):
        assert self.begun, "a barrier that does not exist yet"
        if barrier not in self.ignored:
            self.lots.step(lambda: self.phase[barrier] % 2 != parity)

    def arrive(self, barrier, condition):
        """Of a warp, as a rule; of a whole warpgroup; or of all lanes with statistics."""
        assert self.begun, "a barrier that does not exist yet"
        if condition:
            role = self.lots.now[0]
            full = self.at.barrier("full") if role == "statistics" else None
            lanes = role == "statistics" and barrier in (full, full + 8)
            self.left[barrier] -= 32 if lanes else 4 if role == "consumer" else 1
            assert self.left[barrier] >= 0, "more arrivals than a phase takes"
            if not self.left[barrier]:
                self.left[barrier] = self.at.barrier_arrivals[barrier]
                self.phase[barrier] += 1
        self.lots.step()

    def expect(self, barrier, nbytes):
        """The producer arrives with the last of so many bytes, some of which may be there."""
        self.owed[barrier] += nbytes
        self.arrive(barrier, not self.owed[barrier])

    def landed(self, barrier, nbytes):
        self.expect(barrier, -nbytes)

    def named_arrive(self, barrier, threads):
        count, laps = self.named.get(barrier, (0, 0))
        count += 128 if self.lots.now[0] == "consumer" else 32
        self.named[barrier] = (count % threads, laps + count // threads)
        return laps

    def sync_all(self):
        """As many threads as roles."""
        (count, laps), roles = self.named.get(0, (0, 0)), len(roles_of(self.at))
        self.named[0] = ((count + 1) % roles, laps + (count + 1) // roles)
        self.lots.step(lambda: self.named[0][1] > laps)

    def named_sync(self, barrier, threads):
        if barrier in self.passed:
            return
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


def ring(barriers, n):
    """The barrier of a ring's stage for its n-th tile."""
    return barriers + 8 * (n & 1)


def machine(block, **more):
    """What the kernels call of Hopper's own: registers and barriers as played, and `more`."""
    return SimpleNamespace(
        warpgroup=lambda: block.thread // 128,
        warp=lambda: block.thread // 32,
        registers=lambda *_, **__: lambda: None,
        barriers_begin=lambda counts: block.begin,
        cluster_sync=block.cluster and block.cluster.sync,
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
        expect=lambda count: lambda barrier: block.expect(barrier, count),
        product_wait=lambda pending: lambda value: block.done(pending) or value,
        round_operand=lambda *_: lambda s: s,
        **more,
    )


def same(*visits):
    """The visit that all of these are of."""
    assert len(set(visits)) == 1, visits
    return visits[0]


def functions(scored):
    """What the kernels call of mask and score functions; with `scored`, of a score function."""
    made = dict.fromkeys(("mask", "masked_probabilities", "slope_alone"))
    made |= {
        "has_mask": False,
        "has_score": scored,
        "score": lambda a, b, h, s, *_: s,
        "probabilities": lambda a, b, h, s, lse, *_: same(s, lse),
        "slope": lambda a, b, h, s, ds, *_: same(s, ds),
    }
    return {
        "fragment_functions": lambda *_, **__: SimpleNamespace(**made),
        "first_rows_of": lambda kernel: lambda a, outer: (0, 0),
    }


def parts(block, half):
    """What the kernels of all backwards call: of Hopper's own, and gradients.

    A thread has `half` numbers of dK, and as many of dV.
    """
    memory, at = block.memory, block.at

    def copy_tile(rows, chunks, packed, blocks=1):
        def copy(to, tensor_map, barrier, row, head, last):
            name = block.where(to)
            memory[name] = head if name[0] in "kv" else (head, row)
            block.landed(barrier, rows * chunks * 128)

        def copy_to_all(to, tensor_map, barrier, row, head, last):
            for _ in range(block.rank, chunks, blocks):
                for other in block.cluster.blocks:
                    assert other.begun, "a barrier that does not exist yet"
                    other.memory[other.where(to)] = head
                    other.landed(barrier, rows * 128)

        return copy if blocks == 1 else copy_to_all

    def lay_down(apart):
        def lay(place, sums):
            for name in "k", "v", "q", "dout":
                for stage in range(2):
                    memory.pop((name, stage), None)
            block.laid[place] = sums
            block.lots.step()

        return lay

    def add_from(apart):
        def add(sums, place, rank):
            there, own = block.cluster.blocks[rank], at.region("k") + 128 * block.group * 4
            which, first = divmod((place - own) // apart, half)
            assert block.cluster.lives(rank), "a block that has ended"
            assert own + which * half * apart in there.laid, "nothing is there yet"
            assert first % 16 == 0
            block.lots.step()
            return (*sums, (first, rank, there.laid[own + which * half * apart]))

        return add

    def store_output(bf16, row_of, later=False):
        def store(to, row_bytes, sums, factors, key, stop, column=0):
            block.stored.append((to // DATA, block.group, column, sums))
            return 0

        return store

    def statistics(lse, delta, rows, unit):
        visit = divmod(lse // 4, ROWS)
        return visit, visit

    return {"copy_tile": copy_tile, "store_output": store_output}, {
        "load_statistics": lambda n: statistics,
        "put_rows": lambda n: lambda address, rows: memory.update({block.where(address): rows}),
        "unit_of_starts": lambda start: lambda scale: 1.0,
        "reduce_wait_read": lambda: None,
        **{"wait_turn": None, "pass_turn": None, "mask_columns": lambda *_: None},
        **{"fence_shared": lambda: None, "lay_down": lay_down, "add_from": add_from},
        "score_products": lambda *_: same,
    }


class Arguments(SimpleNamespace):
    """A kernel's; addresses that nothing is at are 0."""

    def __getattr__(self, name):
        return 0


def arguments(heads, counts, mine):
    """Those of a kernel whose items have `counts` visits, and whose block starts with `mine`."""
    return Arguments(
        **{"heads": heads * len(counts), "group": heads, "walks": len(counts), "tiles": 1},
        **{"n_q": ROWS, "scale": 1.0, "dk_data": 0, "dv_data": DATA},
        **{"first": mine[0], "stop": mine[-1] + 1},
    )


def constants(at, blocks, scored, **more):
    """The constants of a kernel with this shared memory."""
    no = ("softcap", "ordered", "varlen", "left", "right", "timeline", "after", "more")
    sides = dict.fromkeys(("d", "head_dim", "head_dim_v", "counted", "counted_v"), at.d)
    sides |= {"key_row": None, "value_row": None}
    own = {"block_q": at.block_q, "block_k": at.block_k, "cluster": blocks, "scaled": scored}
    return SimpleNamespace(**{**dict.fromkeys(no, 0), **sides, **own, "bf16": 1, **more})


def replace_all(monkeypatch, module, block, walk, scored, played):
    """Let a kernel's module call what is `played`."""
    for name, value in {
        **{"int32": int, "int64": int, "float32": float, "cuda": Cuda(block.cluster)},
        **{"device": lambda f: f, "quotient": lambda x, y: x // y},
        **{"shared_base": lambda: 0, "constants": lambda kernel: kernel},
        **{"item_functions": lambda *_, **__: walk},
        **{**functions(scored), **played(block)},
    }.items():
        for where in (module, key_gradients, kv_outer):
            if hasattr(where, name):
                monkeypatch.setattr(where, name, value)


def item_functions(block, counts, numbers):
    """Those of items of which `counts` says how many visits they have; after its first one a block
    gets those of `numbers`."""
    at = block.at
    full, free = at.barrier("item_full"), at.barrier("item_free")

    def take(shared, item):
        block.wait(full + 8 * (item & 1), item >> 1 & 1)
        return at.items + (item & 1) * layout.ITEM

    def write(a, slot, number):
        fields = {layout.WALK: number, layout.COUNT: counts[number], layout.END: ROWS}
        for field in (layout.OUTER, layout.START, layout.STOP, layout.BASE, layout.FIRST):
            block.words[slot + field] = 0
        block.words.update({slot + field: value for field, value in fields.items()})

    nothing = lambda *_: None  # noqa: E731
    return SimpleNamespace(
        take=take,
        leave=lambda shared, item, speaking: block.arrive(free + 8 * (item & 1), speaking),
        write=write,
        first=lambda a: a.first,
        stop=lambda a: a.stop,
        after=lambda a, counter: next(numbers, a.stop),
        visits=nothing,
        place=lambda row, stop, batch: (row, batch),
        visit=lambda a, visits, n: (n, False),
        batch_and_head=divmod,
        **dict.fromkeys(("tile_count", "visit_count"), lambda *_: 0),
        **dict.fromkeys(("visit_stamps", "tile_stamps", "stamp", "stamp_block"), nothing),
        **dict.fromkeys(("report", "report_one"), nothing),
        wait_for_what_ran_before=nothing,
        let_what_runs_next_start=nothing,
    )


class Cuda:
    """Numba's `cuda`, of whichever role runs."""

    def __init__(self, cluster):
        self._cluster = cluster

    @property
    def _block(self):
        return self._cluster.blocks[self._cluster.lots.now[2]]

    @property
    def threadIdx(self):
        return SimpleNamespace(x=self._block.thread)

    @property
    def blockIdx(self):
        return SimpleNamespace(x=self._block.rank)

    def syncthreads(self):
        self._block.sync_all()

    def syncwarp(self):
        pass


def run_roles(
    monkeypatch, module, make, played, at, c, heads, seed, blocks, scored, *, ignored=(), item=None
):
    """Run all roles of a block that has all items, or of a cluster that has one, to their end.

    `make` returns the kernel. Returns the cluster, and the visits of each of its items.
    """
    lots, counts = Lots(seed), (ITEMS if item is None else SHARED)[heads]
    cluster, mine = Cluster(lots, ignored), range(len(counts)) if item is None else (item,)
    a, roles = arguments(heads, counts, mine), {}
    for rank in range(blocks):
        block = Block(at, lots, heads, ignored, cluster)
        walk = item_functions(block, counts, iter(mine[1:]))
        replace_all(monkeypatch, module, block, walk, scored, played)
        kernel = make(c)
        roles |= {(*role, rank): partial(kernel, *[0] * 5, a, 1) for role in roles_of(at)}
    lots.run(roles)
    assert not any(any(block.flying.values()) for block in cluster.blocks)
    return cluster, {
        x: tuple((x * heads + h, n * at.block_q) for h in range(heads) for n in range(counts[x]))
        for x in mine
    }


def one_fails(run, *what, times=20, **how):
    """Assert that of so many draws of who goes on, one shows what a kernel lacks."""
    with pytest.raises((AssertionError, Stuck)):
        [run(*what, seed=seed, **how) for seed in range(times)]
