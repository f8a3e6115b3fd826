"""Tiles of an algorithm of one's own: no number leaves the chip, none comes in, all take room."""

import copy
import json
import pickle
import statistics
from types import SimpleNamespace

import numpy as np
import pytest
from refusals import refusals, refused

import flashsim
from flashsim import MemoryModelError, ShapeError, SramOverflow, Tiling
from flashsim.engines.sandbox import tape
from flashsim.engines.sandbox.operations import product  # noqa: F401 - used in a table
from flashsim.problem.hardware import Device

pytestmark = pytest.mark.promise("no byte is free")

N, D = 32, 8
Q, K, V = np.random.default_rng(0).standard_normal((3, N, D), dtype=np.float32)
ROWS = slice(0, 16)
KEPT = []


def in_a_step(work, **how):
    """Run `work(sram, machine)` inside one step; the results are made up afterwards."""

    def algorithm(machine):
        with machine.stage("forward") as sram:
            with sram.step(ROWS):
                work(sram, machine)
            finish(sram, machine)

    def finish(sram, machine):
        for rows in machine.row_tiles():
            with sram.step(rows):
                sram.store(machine.hbm.O, rows, 0.0)

    return flashsim.simulate(algorithm, Q, K, V, tiling=Tiling(16, 16), **how)


def on_a_tile(work):
    """The same with a tile of Q, (16, 8), as the first argument."""
    return in_a_step(lambda sram, machine: work(sram.load(machine.hbm.Q, ROWS), sram, machine))


# -- ways out ---------------------------------------------------------------------------------

LEAKS = {
    "np.array": lambda t: np.array(t),
    "np.asarray": lambda t: np.asarray(t),
    "np.array of tiles": lambda t: np.array([t, t]),
    "np.frombuffer": lambda t: np.frombuffer(t),
    "np.from_dlpack": lambda t: np.from_dlpack(t),
    "np.save": lambda t: np.save("/dev/null", t),
    "np.einsum": lambda t: np.einsum("ij->i", t),
    "np.array_str": lambda t: np.array_str(t),
    "np.vectorize": lambda t: np.vectorize(KEPT.append)(t),
    "np.add.outer": lambda t: np.add.outer(t, t),
    "np.add.reduce(initial=)": lambda t: np.add.reduce(t, initial=KEPT),
    "np.max(initial=)": lambda t: t.max(initial=3.0),
    "np.exp(where=) without out": lambda t: np.exp(t, where=t > 0),
    "max(out=array)": lambda t: np.maximum.reduce(t, out=np.zeros(D)),
    "np.zeros_like(dtype=)": lambda t: np.zeros_like(t, dtype=np.float64),
    "np.add.accumulate": lambda t: np.add.accumulate(t),
    "np.frexp": lambda t: np.frexp(t),
    "np.sum(out=array)": lambda t: np.sum(t, axis=0, out=np.zeros(D)),
    "np.exp(out=array)": lambda t: np.exp(t, out=np.zeros((16, D), np.float32)),
    "np.copyto(array)": lambda t: np.copyto(np.zeros((16, D)), t),
    "array[:] = tile": lambda t: np.zeros((16, D)).__setitem__(slice(None), t),
    "array += tile": lambda t: np.zeros((16, D)).__iadd__(t),
    "memoryview": lambda t: memoryview(t),
    "bytes": lambda t: bytes(t),
    "float": lambda t: float(t[0, 0]),
    "int": lambda t: int(t[0, 0]),
    "complex": lambda t: complex(t[0, 0]),
    "index": lambda t: [0][t[0, 0]],
    "tolist": lambda t: t.tolist(),
    "item": lambda t: t.item(),
    "tobytes": lambda t: t.tobytes(),
    "data": lambda t: t.data,
    "flat": lambda t: list(t.flat),
    "view": lambda t: t.view(np.int32),
    "iteration": lambda t: [float(x) for row in t for x in row],
    "unpacking": lambda t: (lambda *rows: rows)(*t),
    "in": lambda t: 0.0 in t,
    "a branch": lambda t: KEPT.append(1) if t[0, 0] > 0 else None,
    "sorted": lambda t: sorted([t[0, 0], t[1, 0]]),
    "max of Python": lambda t: max(t[0, 0], t[0, 1]),
    "math": lambda t: __import__("math").exp(t[0, 0]),
    "pickle": lambda t: pickle.dumps(t),
    "deepcopy": lambda t: copy.deepcopy(t),
    "hash": lambda t: {t: 1},
    "choice by tile": lambda t: t[t > 0],
    "index arrays": lambda t: t[np.array([0, 1])],
}


@pytest.fixture
def reached():
    """What was reached before the error: the machine itself did work."""
    KEPT.clear()
    yield KEPT
    KEPT.clear()


@pytest.mark.parametrize("leak", LEAKS)
def test_no_number_leaves_the_chip(leak, reached):
    with pytest.raises((MemoryModelError, TypeError, AttributeError)):
        on_a_tile(lambda tile, sram, machine: (reached.append(tile * 2), LEAKS[leak](tile)))
    assert len(reached) == 1


def test_repr_and_errors_hold_no_numbers():
    seen = []
    on_a_tile(lambda tile, sram, machine: seen.extend([repr(tile), str(tile), f"{tile}"]))
    assert len(set(seen)) == 1
    assert seen[0].startswith("<tile Q (16, 8): 512 B on chip, made at line ")


def test_an_error_inside_pythons_library_names_the_users_line():
    with pytest.raises(MemoryModelError, match=r"line \d+, `on_a_tile\(lambda t, \*_: statistics"):
        on_a_tile(lambda t, *_: statistics.mean(t))


def test_show_prints_and_returns_nothing(capsys):
    on_a_tile(lambda tile, sram, machine: KEPT.append(sram.show(tile[0, :2])))
    assert KEPT.pop() is None
    assert f"{Q[0, 0]:.3f}"[:4] in capsys.readouterr().out


# -- ways in ----------------------------------------------------------------------------------

ENTRIES = {
    "tile + array": lambda t, s, m: t + np.ones((16, D), np.float32),
    "array * tile": lambda t, s, m: np.ones((16, D)) * t,
    "integers": lambda t, s, m: t * np.arange(D),
    "a list": lambda t, s, m: t + [1.0] * D,
    "tile[:] = array": lambda t, s, m: t.__setitem__(slice(None), np.ones((16, D))),
    "tile @ array": lambda t, s, m: t @ np.ones((D, 4)),
    "np.where": lambda t, s, m: np.where(t > 0, np.ones((16, D)), t),
    "store an array": lambda t, s, m: s.store(m.hbm.O, ROWS, np.ones((16, D))),
    "a tensor in HBM": lambda t, s, m: t + m.hbm.K,
    "hbm.Q.data": lambda t, s, m: m.hbm.Q.data,
    "hbm.Q[...]": lambda t, s, m: m.hbm.Q[0:16],
    "hbm.Q * 2": lambda t, s, m: m.hbm.Q * 2,
    "np.exp(hbm.Q)": lambda t, s, m: np.exp(m.hbm.Q),
    "np.asarray(hbm.Q)": lambda t, s, m: np.asarray(m.hbm.Q),
    "hbm.O[...] =": lambda t, s, m: m.hbm.O.__setitem__(slice(0, 1), 0.0),
    "load an array": lambda t, s, m: s.load(Q, ROWS),
    "tile[array] =": lambda t, s, m: t.__setitem__(np.arange(3), 0.0),
    "tile[0, tile] =": lambda t, s, m: t.__setitem__((0, t[0] > 0), 0.0),
    "write to an input": lambda t, s, m: s.store(m.hbm.Q, ROWS, t),
    "pickle a handle": lambda t, s, m: pickle.dumps(m.hbm.Q),
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_no_number_comes_in(entry, reached):
    with pytest.raises(MemoryModelError):
        on_a_tile(lambda *all_of_them: (reached.append(1), ENTRIES[entry](*all_of_them)))
    assert reached == [1]


def test_what_is_public_lets_nothing_by():
    """Every public name of the machine; whoever adds one thinks of what it lets out or in."""

    def public(thing):
        return {name for name in dir(thing) if not name.startswith("_")}

    def work(tile, sram, machine):
        assert public(tile) == {
            *("T", "all", "any", "astype", "copy", "dtype", "mT", "max", "mean", "min", "nbytes"),
            *("ndim", "shape", "size", "sum"),
        }
        assert public(sram) == {
            *("accumulate", "alloc", "device", "free", "hbm", "load", "multiply", "name", "peak"),
            *("positions", "problem", "reduce", "rounded", "schedule", "show", "stage", "step"),
            *("steps", "store", "strip", "used", "visit"),
        }
        assert public(machine) == {
            *("device", "hbm", "keep", "key_tiles", "problem", "row_tiles", "stage", "stages"),
            "tiling",
        }
        assert public(machine.hbm) == {"new", "tensors"}
        assert public(machine.hbm.Q) == {"dtype", "name", "shape", "width"}
        for thing in (sram, machine):
            with pytest.raises(AttributeError):
                thing.device = Device.get("B200")
        assert machine.stages == ()

    on_a_tile(work)


def test_a_closure_over_an_input_is_found():
    def cheat(machine):
        with machine.stage("forward") as sram, sram.step(slice(0, N)):
            KEPT.append(Q.sum())  # the module's own Q, a global
            sram.store(machine.hbm.O, slice(0, N), 0.0)

    with pytest.raises(MemoryModelError, match=r"cheat uses Q, which is the q .* machine\.hbm"):
        flashsim.simulate(cheat, Q, K, V)
    mine = Q[4:9]

    def closed(machine, other=K[::2]):
        return lambda: mine

    with pytest.raises(MemoryModelError, match="closed uses mine, which is the q"):
        flashsim.simulate(closed, Q, K, V)
    held = {"mine": mine}
    with pytest.raises(MemoryModelError, match="uses held, which is the q"):
        flashsim.simulate(lambda machine: held, Q, K, V)
    with pytest.raises(MemoryModelError, match="a default argument, which is the k"):
        flashsim.simulate(closed, Q.copy(), K, V)
    KEPT.clear()


def test_inputs_are_copies():
    """What is done to a tile is not done to them; what is done to them, a load does not see."""
    given = SimpleNamespace(q=Q.copy())

    def work(machine):
        given.q[8:] = 0.0
        with machine.stage("forward") as sram, sram.step(slice(0, N)):
            tile = sram.load(machine.hbm.Q, slice(0, N))
            tile *= 2.0
            sram.store(machine.hbm.O, slice(0, N), tile)

    assert (flashsim.simulate(work, given.q, K, V).out == 2 * Q).all()
    assert (given.q[:8] == Q[:8]).all()


# -- room -------------------------------------------------------------------------------------


def peak(work):
    return on_a_tile(work).trace.peak_sram() - Q[ROWS].nbytes


@pytest.mark.parametrize(
    ("work", "rooms"),
    [
        (lambda t, s, m: t * 2, 16 * D * 4),
        (lambda t, s, m: (t * 2) * 3, 2 * 16 * D * 4),  # the first is there until the second is
        (lambda t, s, m: [t * 2, t * 3, t * 4], 3 * 16 * D * 4),
        (lambda t, s, m: t.copy(), 16 * D * 4),
        (lambda t, s, m: copy.copy(t), 16 * D * 4),
        (lambda t, s, m: t.astype(np.float16), 16 * D * 4),
        (lambda t, s, m: np.where(t > 0, t, 0), 16 * D * (1 + 4)),
        (lambda t, s, m: t > 0, 16 * D),
        (lambda t, s, m: t.max(axis=1), 16 * 4),  # a row of m
        (lambda t, s, m: t.sum(), 4),
        (lambda t, s, m: t @ t.T, 16 * 16 * 4),
        (lambda t, s, m: t.T[0] @ t, D * 4),
        (lambda t, s, m: np.zeros_like(t), 16 * D * 4),
        (lambda t, s, m: s.positions(slice(16, 32)), 16 * 4),
        (lambda t, s, m: s.alloc("S", (16, 16)), 16 * 16 * 4),
        (lambda t, s, m: s.accumulate(s.alloc("S", (16, 16), 0.0), t, t.T), 16 * 16 * 4),
        (lambda t, s, m: [t.T, t[:4], t[:, None], t[..., 0]], 0),  # views
        (lambda t, s, m: np.exp(t, out=t), 0),
        (lambda t, s, m: t.__imul__(2.0), 0),
        (lambda t, s, m: s.free(t) or s.load(m.hbm.K, ROWS), 0),
    ],
)
def test_what_a_line_holds(work, rooms):
    assert peak(work) == rooms


def test_a_temporary_goes_when_its_last_name_does():
    def work(tile, sram, machine):
        for _ in range(8):
            double = tile * 2
        assert sram.used == 2 * tile.nbytes
        part = double[:2]
        del double
        assert sram.used == 2 * tile.nbytes  # a view keeps it
        del part
        assert sram.used == tile.nbytes
        with sram.strip():
            half = sram.name("half", tile * 0.5)
            del half  # one with a name stays until its scope ends
            assert sram.used == 2 * tile.nbytes
        assert sram.used == tile.nbytes

    trace = on_a_tile(work).trace
    assert trace.tensors[-2:] == ("temp", "half")
    assert trace.peak_sram() == 3 * Q[ROWS].nbytes  # a ninth product while the eighth is there


def test_an_overflow_names_what_is_held_and_where_it_was_made():
    small = Device(name="small", sram_bytes=2_000, sram_per_sm=2_000)

    def greedy(machine):
        with machine.stage("forward") as sram, sram.step(slice(0, 16)):
            tile = sram.load(machine.hbm.Q, slice(0, 16))
            S = sram.alloc("S", (16, 8))
            both = tile + S
            sram.store(machine.hbm.O, ROWS, tile * both)

    first = greedy.__code__.co_firstlineno
    with pytest.raises(SramOverflow) as caught:
        flashsim.simulate(greedy, Q, K, V, device=small)
    text = str(caught.value)
    line = "sram.store(machine.hbm.O, ROWS, tile * both)"
    assert text.startswith(f"greedy, line {first + 5}, `{line}`: stage 'forward' holds 2,048 B")
    assert f"temp                 512 B, made at line {first + 4}" in text
    assert text.endswith("np.exp(S, out=S), sram.accumulate(O, P, V)")
    assert "2,048 B on chip, but a thread block of small has 2,000 B" in text


def test_a_narrow_tile_is_rounded(capsys):
    """What takes two bytes on chip holds two bytes' worth, whatever is written into it."""
    q = Q.astype(np.float16)
    third = float(np.float32(1) / 3)

    def work(machine):
        with machine.stage("forward") as sram, sram.step(slice(0, N)):
            tile, wide = sram.load(machine.hbm.Q, slice(0, N)), sram.alloc("S", (N, D))
            assert sram.used == N * D * (2 + 4)
            tile[:] = third
            wide[:] = third
            for target in (tile, wide):
                sram.show(np.abs(target - third).max())
            sram.accumulate(tile, wide, wide[:D])
            sram.show(np.abs(tile - tile.astype(np.float16)).max())
            tile *= third
            sram.show(np.abs(tile - tile.astype(np.float16)).max())
            sram.store(machine.hbm.O, slice(0, N), tile)

    flashsim.simulate(work, q, q, q)
    shown = [float(line) for line in capsys.readouterr().out.split("\n")[1::2]]
    assert shown[0] == pytest.approx(abs(float(np.float16(third)) - third), rel=1e-6)
    assert shown[0] > 0
    assert shown[1:] == [0, 0, 0]


# -- scopes -----------------------------------------------------------------------------------


def test_what_outlives_its_scope_names_both_lines():
    def cheat(machine):
        kept = []
        with machine.stage("forward") as sram:
            for rows in machine.row_tiles():
                with sram.step(rows):
                    if not kept:
                        kept.append(sram.load(machine.hbm.K, slice(0, N)).copy())
                    S = sram.load(machine.hbm.Q, rows) @ kept[0].T
                    sram.store(machine.hbm.O, rows, S[:, :D])

    first = cheat.__code__.co_firstlineno
    with pytest.raises(MemoryModelError) as caught:
        flashsim.simulate(cheat, Q, K, V, tiling=Tiling(16, 16))
    text = str(caught.value)
    assert text.startswith(f"cheat, line {first + 7}, `S = ")
    assert f"the tile 'temp' made at line {first + 6} is used after its memory was freed" in text
    assert f"the scope of line {first + 4} ended" in text
    assert "O[:] = ..." in text


def outlives(make, use):
    def work(tile, sram, machine):
        with sram.visit(ROWS, ROWS):
            kept = make(tile, sram)
        use(kept, tile, sram, machine)

    with pytest.raises(MemoryModelError, match="after its memory was freed"):
        on_a_tile(work)


@pytest.mark.parametrize(
    "use",
    [
        lambda k, t, s, m: k + 1,
        lambda k, t, s, m: t + k,
        lambda k, t, s, m: k[0],
        lambda k, t, s, m: k.T,
        lambda k, t, s, m: k.sum(),
        lambda k, t, s, m: k.copy(),
        lambda k, t, s, m: k @ t.T,
        lambda k, t, s, m: t.__setitem__(slice(None), k),
        lambda k, t, s, m: k.__setitem__(slice(None), 0.0),
        lambda k, t, s, m: np.where(k > 0, 1, 0),
        lambda k, t, s, m: np.where(True, k, t),
        lambda k, t, s, m: s.store(m.hbm.O, ROWS, k),
        lambda k, t, s, m: s.show(k),
        lambda k, t, s, m: s.free(k),
        lambda k, t, s, m: np.exp(t, out=k),
    ],
)
def test_nothing_is_done_with_a_tile_that_is_gone(use):
    outlives(lambda tile, sram: tile * 1, use)
    outlives(lambda tile, sram: sram.alloc("S", (16, D), 0.0), use)


def test_tiles_of_another_stage_and_of_another_run():
    def two(machine):
        with machine.stage("one") as sram, sram.step(ROWS):
            KEPT.append(sram.load(machine.hbm.Q, ROWS))
            KEPT.append(sram)
        with machine.stage("two") as sram, sram.step(ROWS):
            sram.store(machine.hbm.O, ROWS, KEPT[0])

    with pytest.raises(MemoryModelError, match="was freed"):
        flashsim.simulate(two, Q, K, V)

    def late(machine):
        with machine.stage("one") as sram, sram.step(ROWS):
            KEPT[1].load(machine.hbm.Q, ROWS)

    with pytest.raises(MemoryModelError, match=r"stage 'one' has ended"):
        flashsim.simulate(late, Q, K, V)

    def nested(machine):
        with machine.stage("one"), machine.stage("two"):
            pass

    with pytest.raises(MemoryModelError, match="'two' begins before 'one' has ended"):
        flashsim.simulate(nested, Q, K, V)
    KEPT.clear()


def visit_in_visit(sram):
    with sram.visit(ROWS, ROWS), sram.visit(ROWS, ROWS):
        pass


#: What the machine `m` and its SRAM `s` refuse inside a step. Calls are text: an error quotes the
#: line of a call in a file, and with it the text that the error should have.
REFUSED = refusals(r"""
s.step(0).__enter__() -> MemoryModelError: a step (sram.step) cannot contain another step
s.visit(slice(16, 32), ROWS).__enter__()
    -> MemoryModelError: visit to query tile 1 cannot lie within the step of query tile 0
s.visit(ROWS).__enter__() -> MemoryModelError: a visit works on a tile of scores
s.visit(slice(0, 32), ROWS).__enter__() -> ShapeError: past the end of a tile of 16
s.visit(slice(40, 50), ROWS).__enter__() -> ShapeError: must select at least one of the 32
s.load(m.hbm.Q, slice(40, 50)) -> ShapeError: Q has 32 rows; 40:50 lie outside
s.load(m.hbm.Q, slice(0, 8, 2)) -> ShapeError: must be contiguous, got a slice with step 2
s.load(m.hbm.Q, 3) -> ShapeError: rows of Q must be a slice
s.load(m.hbm.Q, slice(0.0, 8)) -> ShapeError: slice of integers, got slice(0.0, 8
s.positions("x") -> ShapeError: positions must be a slice of integers, got 'x'
m.keep(ROWS, 3) -> ShapeError: keys must be a slice of integers, got 3
s.alloc("S", (2, 2), "x") -> DTypeError: fill must be a number, got 'x'
s.alloc("S", (2, 2), np.zeros(3)) -> DTypeError: fill must be a number, got array
s.alloc("S", (10**9, 10**9)) -> SramOverflow: holds 4,000,000,000,000,000,000 B on chip
m.hbm.new("W", 10**12, 10**6)
    -> OptionError: this computer has too little memory for a workspace 'W'
s.store(m.hbm.O, slice(0, 1), slice(0, 4), s.alloc("t", (1, 4)))
    -> ShapeError: the tile must come before the columns: sram.store(tensor, rows, tile, cols)
s.load(m.hbm.O, ROWS) -> MemoryModelError: O, rows 0:16, was never stored
s.reduce(m.hbm.O, ROWS, s.load(m.hbm.Q, ROWS)) -> MemoryModelError: was never stored
s.store(m.hbm.O, ROWS, s.load(m.hbm.Q, slice(0, 8)))
    -> ShapeError: rows 0:16 of O have shape (16, 8), but the tile has shape (8, 8)
visit_in_visit(s) -> MemoryModelError: a visit (sram.visit) cannot contain another visit; use
s.alloc("S", (0, 3)) -> ShapeError: sides of a tile must be at least 1
product(*[s.alloc("S", (2, 2), 0.0)] * 2, out=s.alloc("S", (2, 3))) -> ShapeError: but out= has
in_a_step(lambda inner, n: inner.store(n.hbm.O, ROWS, s.positions(ROWS)))
    -> MemoryModelError: lies in another stage's SRAM
in_a_step(lambda inner, n: inner.load(m.hbm.Q, ROWS)) -> MemoryModelError: another machine
in_a_step(lambda inner, n: inner.positions(ROWS) + s.positions(ROWS))
    -> MemoryModelError: lies in another stage's SRAM
s.alloc("no name", 3) -> OptionError: must be an identifier of at most 24 characters
s.alloc("S", (2, 3), 0.0) @ s.alloc("S", (2, 3), 0.0) -> ShapeError: inner dimensions differ
s.alloc("S", (2, 3), 0.0) + s.alloc("S", (4, 3), 0.0)
    -> ShapeError: np.add: tiles of (2, 3), (4, 3) do not broadcast
s.alloc("S", (2, 3), 0.0).sum(axis=2) -> ShapeError: sum got axis 2
s.alloc("S", (2, 3), 0.0) @ 2.0 -> ShapeError: multiplies two tiles
s.alloc("S", (2, 3), 0.0).__setitem__(0, s.alloc("m", 2, 0.0))
    -> ShapeError: the shapes [(2, 3), (2,)] do not broadcast
np.where(s.alloc("S", (2, 3), 0.0) > 0, s.alloc("m", 2, 0.0), 1) -> ShapeError: of np.where have
m.hbm.W -> MemoryModelError: HBM holds no tensor 'W'
m.hbm.new("Q", 3) -> OptionError: HBM already has a tensor 'Q'
[m.hbm.new(f"W{n}", 3) for n in range(70)] -> OptionError: at most 64 different names
""")


@pytest.mark.parametrize(("call", "said"), REFUSED)
def test_what_a_machine_refuses(call, said):
    error = refused(f"in_a_step(lambda s, m: {call})", said, globals())
    assert str(error).startswith("algorithm, line ")


@pytest.mark.parametrize(
    ("outer", "text"),
    [
        (2, "there are 2 tiles of queries, numbered from 0, got tile number 2"),
        ("0:16", "must be a slice of integers, got '0:16'"),
    ],
)
def test_steps_that_are_none(outer, text):
    def algorithm(machine):
        with machine.stage("forward") as sram, sram.step(outer):
            pass

    with pytest.raises(ShapeError, match=text):
        flashsim.simulate(algorithm, Q, K, V, tiling=Tiling(16, 16))


def test_too_much_is_recorded_for_a_file(monkeypatch):
    monkeypatch.setattr("flashsim.engines.sandbox.sram.MOST_EVENTS", 12)
    with pytest.raises(MemoryModelError, match="more than 12 events"):
        on_a_tile(lambda tile, sram, machine: [tile * 2 for _ in range(9)])


def test_a_step_is_needed():
    def bare(machine):
        with machine.stage("forward") as sram:
            sram.load(machine.hbm.K, ROWS)

    with pytest.raises(
        MemoryModelError, match="works in steps, one per thread block, which do not share"
    ):
        flashsim.simulate(bare, Q, K, V)


# -- arithmetic -------------------------------------------------------------------------------


def compared(work, *arrays):
    """What `work` gives of tiles, taken out through a store of the first 16 x 8 numbers."""
    found = {}

    def algorithm(machine):
        with machine.stage("forward") as sram, sram.step(slice(0, N)):
            tiles = [sram.load(getattr(machine.hbm, name), slice(0, N)) for name in "QKV"]
            value = work(*tiles)
            found["shape"] = value.shape
            into = sram.alloc("O", (N, D), 0.0)
            view = into
            for at, size in enumerate(value.shape):
                view = view[(slice(None),) * at + (slice(0, size),)]
            view = view if value.ndim == 2 else view[:, 0] if value.ndim == 1 else view[0, 0]
            view[...] = value
            sram.store(machine.hbm.O, slice(0, N), into)

    out = flashsim.simulate(algorithm, Q, K, V).out
    want = np.asarray(work(Q, K, V))
    assert found["shape"] == want.shape
    got = out[tuple(slice(0, n) for n in want.shape)]
    got = got if want.ndim == 2 else got[:, 0] if want.ndim == 1 else got[0, 0]
    np.testing.assert_allclose(
        got.astype(np.float64), want.astype(np.float64), rtol=2e-6, atol=1e-5
    )


@pytest.mark.parametrize(
    "work",
    [
        lambda q, k, v: q + k * v - 2,
        lambda q, k, v: 1 / (2 + np.tanh(q)),
        lambda q, k, v: np.exp(-np.square(q)),
        lambda q, k, v: q**2 + 2**k * np.cos(v) - np.sin(q),
        lambda q, k, v: (q.T @ k)[:4],
        lambda q, k, v: q.T @ v[:, 0],
        lambda q, k, v: q[:, 0] @ v,
        lambda q, k, v: np.dot(q[:, 0], k[:, 0]),
        lambda q, k, v: q * k.max(axis=1)[:, None],
        lambda q, k, v: q * k.sum(axis=0),
        lambda q, k, v: np.maximum(q, k).mean(axis=1),
        lambda q, k, v: np.mean(q, axis=0),
        lambda q, k, v: np.sum(q, axis=-1, keepdims=True),
        lambda q, k, v: q.min() + np.max(k) - np.min(v, axis=None),
        lambda q, k, v: np.where(q > k, q, np.float64(0.5)),
        lambda q, k, v: (q > 0).any(axis=1) & (k > 0).all(axis=1),
        lambda q, k, v: np.any(q > 2, axis=0) | np.all(np.isneginf(q), axis=0),
        lambda q, k, v: np.full_like(q, fill_value=3.0) + np.ones_like(q) - np.transpose(q.mT),
        lambda q, k, v: np.copy(q[..., 1:3]) * (~np.isposinf(q[:, 1:3])),
        lambda q, k, v: q[3] * np.ones((4, 1), bool),
        lambda q, k, v: np.where(q > 0, q, True) + np.add.reduce(k, axis=0, keepdims=True),
        lambda q, k, v: np.sum(q[:, 0] * 0 + 1.5) + np.maximum.reduce(q[0]),
    ],
)
def test_arithmetic_is_numpys(work):
    compared(work)


def test_writing_in_place():
    def work(q, k, v):
        q = q.copy()
        q[:, 0] += k[:, 0]
        q[2:4, 1] = 7.0
        q[q > 1] = 1.0
        q[np.eye(N, D, dtype=bool)] = -1.0
        q[..., np.eye(N, D, 1, dtype=bool)] = -2.0
        np.multiply(q, 2.0, out=q, where=q > 0)
        q[0] = k[0]
        np.add.reduce(v, axis=0, out=q[1])
        return q

    compared(work)


def test_work_is_counted():
    trace = on_a_tile(lambda t, s, m: (t @ t.T).max(axis=1) * 2).trace
    assert trace.flops("matmul") == 2 * 16 * 16 * D
    assert trace.flops("max") == 16 * 16
    assert trace.flops("multiply") == 16
    assert trace.flops() == trace.flops("matmul") + 16 * 16 + 16
    tile, scores, row = 16 * D * 4, 16 * 16 * 4, 16 * 4
    assert trace.on_chip("read") == 2 * tile + scores + row
    assert trace.on_chip("write") == scores + row + row


# -- a program on tape -------------------------------------------------------------------------


def written(value):
    recorded = tape.Tape()
    recorded.write("load", (value,), {"key": value})
    return recorded.instructions[0]


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (np.float32(1.5), 1.5),
        ({"a": (1, np.int64(2))}, {"a": [1, 2]}),
        (slice(2, np.int64(5)), {"slice": [2, 5, None]}),
        (..., {"dots": 0}),
        (np.array([[True, False]]), {"mask": [[1, 2], "80"]}),
        (np.maximum, {"ufunc": "maximum"}),
        (Tiling(16, 8), {"tiling": [16, 8]}),
        (np.float32, {"type": "float32"}),
    ],
)
def test_arguments_are_written_as_json(value, plain):
    _, name, args, kwargs = json.loads(written(value))
    assert (name, args, kwargs) == ("load", [plain], {"key": plain})


def test_what_is_no_argument_or_too_long_is_refused(monkeypatch):
    with pytest.raises(MemoryModelError, match="do not support the argument"):
        written(object())
    monkeypatch.setattr(tape, "MOST", 100)
    with pytest.raises(MemoryModelError, match="more than 100 characters; use larger tiles"):
        written("x" * 100)


def test_an_operation_inside_another_is_not_written():
    recorded = tape.Tape()
    inner = lambda: recorded.run("inner", lambda: 3, (), {})  # noqa: E731
    assert recorded.run("outer", inner, (), {}) == 3
    assert [json.loads(one)[1] for one in recorded.instructions] == ["outer"]
