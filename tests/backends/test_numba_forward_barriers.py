"""The barriers of Hopper's forward in Python, without a GPU: its roles run on a CPU.

As those of the backwards in `test_numba_barriers`.
"""

from functools import partial
from types import SimpleNamespace

import pytest

pytest.importorskip("numba_cuda")

from hopper_roles import Arguments, Block, Lots, functions, item_functions, machine, one_fails

from flashsim.backends.numba_gpu.hopper import forward
from flashsim.backends.numba_gpu.hopper.smem_layout import COUNT, OnChip

pytestmark = pytest.mark.promise("every barrier is needed")

#: Visits of each item of a block.
ITEMS = (2, 0, 1, 3, 1, 0, 0, 5, 2, 1, 4)
#: Rows, head_dim, stages and turns.
SHAPES = {
    "no turns": (128, 128, 2, 0),
    "three stages": (192, 64, 3, 1),
    "rescaled late": (128, 256, 2, 1),
}
BLOCK_K = 128


def ring_of(block):
    """`hopper.Ring`, played."""

    def of(stages):
        lap = {2: 1, 3: 2}[stages]
        low = (1 << lap) - 1

        def after(position):
            following = position + 1
            return following + (stages == 3 and following & low == 3)

        def barrier(barriers, position):
            return barriers + 8 * (position & low)

        return SimpleNamespace(
            after=after,
            place=lambda position: position & low,
            stage=barrier,
            wait_full=lambda b, n: block.wait(barrier(b, n), n >> lap & 1),
            wait_free=lambda b, n: block.wait(barrier(b, n), n >> lap & 1 ^ 1),
        )

    return of


def played(block):
    """What the kernel's module calls, by module."""

    def copy(nbytes, to, tensor_map, barrier, row, head, last):
        name = block.where(to)
        block.memory[name] = head if name[0] == "q" else (head, row // BLOCK_K)
        block.landed(barrier, nbytes)

    def queue_scores(q, k):
        item, visit = block.read(q, k).values
        assert visit is not None, "nothing is there yet"
        assert visit[0] == item, "another item's"
        return visit

    def queue_output(o, p, v):
        assert block.read(v).values == [p]
        return (*o, p)

    def store(to, row, o, inverse, *_):
        assert o == inverse, "O and l are of other visits"
        block.stored.append((block.group, o))
        return 0

    hopper = machine(
        block,
        Ring=ring_of(block),
        arrive_behind=lambda barrier, condition, alpha: block.arrive(barrier, condition),
        my_turn=lambda barrier: block.named_sync(barrier, 256),
        pass_turn=lambda barrier: block.named_arrive(barrier, 256) and None,
        copy_tile=lambda rows, chunks, **_: partial(copy, rows * chunks * 128),
        queue_scores=lambda *_: queue_scores,
        queue_output=lambda *_: queue_output,
        store_output=lambda *_: store,
    )
    softmax = SimpleNamespace(
        scale_scores=lambda *_: None,
        mask_rows=lambda *_: None,
        row_max=lambda m, s: s,
        row_max_of_bits=lambda m, s: (s, False),
        softmax_base=lambda m, to_log2: m,
        exponentials=lambda s, base, l, alpha, to_log2: (s, (*l, s)),
        row_by_row=lambda m, top, s, l, to_log2: (s, (*l, s), (1.0, 1.0)),
        scale_rows=lambda o, alpha: o,
        finish_rows=lambda m, l, to_natural: (l, l),
    )
    tiles = SimpleNamespace(zeros=lambda n: tuple, full=lambda n, value: lambda: value)
    output = SimpleNamespace(store_rows=lambda *_: 0)
    return {"hopper": hopper, "softmax": softmax, "mma_tiles": tiles, "output": output}


@pytest.fixture
def run(monkeypatch):
    """``run(shape, seed)``: a block's roles run to their end; what they read is asserted."""

    def of(shape, seed, ignored=()):
        block_q, d, stages, turns = SHAPES[shape]
        at, lots = OnChip(block_q, BLOCK_K, d, d, stages), Lots(seed)
        block = Block(at, lots, 1, ignored)
        thread = SimpleNamespace(x=0)
        replaced = {
            **played(block),
            "cuda": SimpleNamespace(threadIdx=thread, blockIdx=thread),
            **{"int32": int, "int64": int, "float32": float},
            **{"device": lambda f: f, "quotient": lambda x, y: x // y},
            "constants": lambda kernel: kernel,
            **{**functions(scored=False), "sink_of": lambda kernel: None},
        }
        for name, value in replaced.items():
            monkeypatch.setattr(forward, name, value)
        sides = dict.fromkeys(("d", "dv", "counted", "counted_v"), d)
        no = dict.fromkeys(("scaled", "softcap", "varlen", "left", "right"), 0)
        c = SimpleNamespace(block_q=block_q, block_k=BLOCK_K, bf16=1, turns=turns, **no, **sides)
        c.sinks, c.value_row = False, None
        walk = item_functions(block, ITEMS, iter(range(1, len(ITEMS) + 1)))
        walk.visits, walk.visit_words = lambda slot: (0, block.words[slot + COUNT]), 0
        a = Arguments(heads=len(ITEMS), group=1, walks=len(ITEMS), tiles=1, scale=1.0)
        produce = forward._producer(c, at, walk)
        consume = forward._consumer(c, at, walk)
        consumers = {("consumer", g): lambda g=g: consume(a, 0, g) for g in range(at.groups)}
        lots.run({("producer", 0): lambda: produce(0, 0, 0, a, 1, 0), **consumers})
        every = [tuple((item, n) for n in range(count)) for item, count in enumerate(ITEMS)]
        for g in range(at.groups):
            assert [o for group, o in block.stored if group == g] == every
        assert not any(block.flying.values())

    return of


@pytest.mark.parametrize("shape", SHAPES)
def test_every_role_finds_what_it_waits_for(run, shape):
    """Of items without visits, of one, of two and of more, in a row."""
    for seed in range(6):
        run(shape, seed)


@pytest.mark.parametrize("kind", ["q_full", "q_free", "k_full", "k_free", "v_full", "v_free"])
@pytest.mark.parametrize("shape", SHAPES)
def test_without_a_barrier_some_do_not(run, shape, kind):
    one_fails(run, shape, ignored=(kind,))
