"""`flashsim.simulate`: algorithms of one's own run, and are counted, drawn and saved."""

import json
import re

import matplotlib as mpl
import numpy as np
import pytest
from commands import ok
from matplotlib import pyplot as plt
from refusals import refuses

import flashsim
from flashsim import MemoryModelError, OptionError, Tiling, TraceError, UnsupportedError, viz
from flashsim.algorithms import flash2
from flashsim.problem import oracle
from flashsim.trace.recording import Own

pytestmark = pytest.mark.promise("no byte is free")

mpl.use("Agg")
RNG = np.random.default_rng(1)
Q, K, V = RNG.standard_normal((3, 48, 16), dtype=np.float32)
TILES = Tiling(16, 24)


def in_loops(machine):
    """FlashAttention-2 as plain loops over slices, with a workspace that no one reads."""
    hbm, p = machine.hbm, machine.problem
    note = hbm.new("note", p.n_q)
    with machine.stage("forward") as sram:
        for rows in machine.row_tiles():
            with sram.step(rows):
                Q = sram.load(hbm.Q, rows)
                O = sram.alloc("O", Q.shape, fill=0.0)
                m = sram.alloc("m", len(Q), fill=-np.inf)
                l = sram.alloc("l", len(Q), fill=0.0)
                for cols in machine.key_tiles():
                    keep = machine.keep(rows, cols)
                    if keep is not None and not keep.any():
                        continue
                    with sram.visit(rows, cols):
                        K, V = sram.load(hbm.K, cols), sram.load(hbm.V, cols)
                        S = Q @ K.T
                        S *= p.scale
                        if keep is not None:
                            S[~keep] = -np.inf
                        m_new = np.maximum(m, S.max(axis=1))
                        S -= m_new[:, None]
                        np.exp(S, out=S)
                        alpha = np.exp(m - m_new)
                        l[:] = alpha * l + S.sum(axis=1)
                        O *= alpha[:, None]
                        O += S @ V
                        m[:] = m_new
                sram.store(note, rows, l)
                O /= l[:, None]
                sram.store(hbm.O, rows, O)
                sram.store(hbm.L, rows, m + np.log(l))


def by_groups(machine):
    """dV, keys outside, summed over the query heads of a key head on chip."""
    hbm, p = machine.hbm, machine.problem
    with machine.stage("dv", outer="keys", per="group") as sram:
        for cols in machine.key_tiles():
            with sram.step(cols):
                K = sram.load(hbm.K, cols)
                dV = sram.alloc("dV", (len(K), p.head_dim_v), fill=0.0)
                for g in range(p.group):
                    for rows in machine.row_tiles():
                        with sram.visit(rows, cols, member=g):
                            Q = sram.load(hbm.Q, rows, member=g)
                            P = Q @ K.T
                            P *= p.scale
                            P -= sram.load(hbm.L, rows, member=g)[:, None]
                            np.exp(P, out=P)
                            sram.accumulate(dV, P.T, sram.load(hbm.dO, rows, member=g))
                sram.store(hbm.dV, cols, dV)


@pytest.fixture(scope="module")
def ran():
    return flashsim.simulate(in_loops, Q, K, V, tiling=TILES)


@pytest.mark.parametrize("how", [{}, {"causal": True}, {"scale": 0.5}])
def test_loops_move_what_the_built_in_page_moves(how):
    mine = flashsim.simulate(in_loops, Q, K, V, tiling=TILES, **how)
    theirs = flashsim.run(Q, K, V, tiling=TILES, trace=True, **how)
    np.testing.assert_allclose(mine.out, theirs.out, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(mine.lse, theirs.lse, rtol=1e-5, atol=1e-6)
    assert mine.trace.diff(theirs.trace) == {("forward", "store", "note"): (48 * 4, 0)}
    assert mine.trace.flops("matmul") == theirs.trace.flops("matmul")
    assert (mine.trace.by_tile("load") == theirs.trace.by_tile("load")).all()


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_the_built_in_page_runs_as_ones_own(dtype):
    """The same function, the same transfers, the same bits; but temporaries take room."""
    q = RNG.standard_normal((2, 4, 20, 8)).astype(dtype)
    k, v = (RNG.standard_normal((2, 2, 33, n)).astype(dtype) for n in (8, 5))
    how = {"tiling": Tiling(8, 16), "causal": True, "softcap": 4.0}
    mine = flashsim.simulate(flash2.forward, q, k, v, **how)
    theirs = flashsim.run(q, k, v, trace=True, **how)
    assert (mine.out == theirs.out).all()
    assert (mine.lse == theirs.lse).all()
    assert mine.trace.transfers == theirs.trace.transfers
    assert mine.trace.flops("matmul") == theirs.trace.flops("matmul")
    assert mine.trace.peak_sram() > theirs.trace.peak_sram()


def test_a_walk_for_a_group():
    q, dout = RNG.standard_normal((2, 1, 4, 24, 8))
    k, v = RNG.standard_normal((2, 1, 2, 16, 8))
    p = flashsim.Problem(24, n_kv=16, head_dim=8, heads=4, kv_heads=2, dtype="float64")
    _, lse = oracle.attention(q, k, v, p)
    result = flashsim.simulate(
        by_groups, q, k, v, inputs={"dO": dout, "L": lse}, outputs=["dV"], tiling=Tiling(8, 8)
    )
    want = oracle.gradients(q, k, v, dout, p)["dv"]
    np.testing.assert_allclose(result.tensors["dV"], want, rtol=1e-10, atol=1e-12)
    assert result.out is result.tensors["dV"]
    assert result.lse is None
    trace = result.trace
    assert trace.direction == "backward"
    assert trace.bytes("load", "K") == k.nbytes  # each key tile once
    assert trace.bytes("load", "Q") == 2 * q.nbytes  # for each of two key tiles
    assert trace.compulsory() == k.nbytes + q.nbytes + dout.nbytes + lse.nbytes + v.nbytes


def test_heads_of_a_group_add_up():
    """A reduce from every query head's own walk: an atomic each."""

    def adds(machine):
        hbm = machine.hbm
        with machine.stage("clear", outer="keys", per="group") as sram, sram.step(0):
            sram.store(hbm.dV, slice(0, 8), 0.0)
        with machine.stage("add", outer="keys") as sram, sram.step(0):
            sram.reduce(hbm.dV, slice(0, 8), sram.load(hbm.dO, slice(0, 8)))

    q, dout = RNG.standard_normal((2, 1, 4, 8, 4))
    k = RNG.standard_normal((1, 2, 8, 4))
    result = flashsim.simulate(adds, q, k, k, inputs={"dO": dout}, outputs=["dV"])
    want = dout.reshape(1, 2, 2, 8, 4).sum(axis=2)
    np.testing.assert_allclose(result.tensors["dV"], want)
    assert result.trace.bytes("reduce", "dV") == 4 * 8 * 4 * 8  # of four heads


# -- results ----------------------------------------------------------------------------------


def test_the_result(ran):
    assert ran.kernel == "simulator"
    assert sorted(ran.tensors) == ["L", "O"]
    assert ran.problem == flashsim.Problem(48, head_dim=16)
    assert ran.trace.algorithm == "in_loops"
    assert ran.trace.own.workspace == 48 * 4
    # Q, K, V, O and L, once
    assert ran.trace.compulsory() == 4 * Q.nbytes + 48 * 4
    assert "note" in str(ran.trace)
    assert ran.trace.bytes("store", "note") == 48 * 4
    with pytest.raises(
        OptionError, match=r"unknown tensor 'notes'; choose from .*did you mean 'note'"
    ):
        ran.trace.bytes("store", "notes")
    with pytest.raises(
        UnsupportedError, match="in_loops' is your own algorithm, so there is no closed form"
    ):
        ran.trace.predicted()
    with pytest.raises(UnsupportedError, match="your own algorithm has no automatic"):
        ran.backward(Q)
    assert "OwnResult" in repr(ran)


def test_saved_and_read_again(ran, tmp_path):
    ran.trace.save(tmp_path / "mine.npz")
    ok("plot roofline", "-T", tmp_path / "mine.npz", "-o", tmp_path / "roofline.svg")
    assert "in_loops" in (tmp_path / "roofline.svg").read_text()
    again = flashsim.Trace.load(tmp_path / "mine.npz")
    assert again.same_events(ran.trace)
    assert again.transfers == ran.trace.transfers
    assert (again.own, again.tensors) == (ran.trace.own, ran.trace.tensors)
    assert [again.flops(), again.on_chip()] == [ran.trace.flops(), ran.trace.on_chip()]
    assert again.frame(-1).flops == ran.trace.frame(-1).flops > 0
    assert again.frame(-1).on_chip["temp"] > 0


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"tensors": [["Q", 0]]}, "a name that no other tensor has"),
        ({"tensors": [["temp", 0], ["temp", 0]]}, "a name that no other tensor has"),
        ({"tensors": [["note", 0], ["temp", 7]]}, "and one of the axes (0, 1, 2), got ['temp', 7]"),
        ({"tensors": [["no te", 0], ["temp", 0]]}, "must be a list [name, axis]"),
        ({"tensors": [["note", 0]]}, "'tensor' has unknown names: 'temp'"),
        ({"tensors": [[f"n{i}", 0] for i in range(65)]}, "at most 64 tensors, got 65"),
        ({"compulsory": -1}, "'compulsory' and 'workspace' must be from 0 to 2**62 - 1, got -1"),
        ({"workspace": 1.5}, "in own, 'workspace' must be an integer, got 1.5"),
        ({"stage": {"outer": "columns"}}, "a stage of your own algorithm must have"),
        ({"stage": {"name": "n" * 61}}, "a stage of your own algorithm must have"),
        ({"stage": {"repeat": 2}}, "'repeat' must be 1, got 2"),
        ({"costs": (3, 8)}, "a stage's table of costs must have shape"),
        ({"costs": -1}, "costs: the values must be from"),
        ({"stages": 65}, "stages"),
    ],
)
def test_a_file_that_cannot_be_true(ran, tmp_path, wrong, text):
    path = tmp_path / "wrong.npz"
    ran.trace.save(path)
    with np.load(path) as file:
        arrays = dict(file)
    header = json.loads(arrays.pop("header").tobytes())
    header["own"].update({k: v for k, v in wrong.items() if k in header["own"]})
    header["stages"][0].update(wrong.get("stage", {}))
    if wrong.get("costs") == -1:
        arrays["costs_0"] = arrays["costs_0"] - 1
    elif "costs" in wrong:
        arrays["costs_0"] = np.zeros(wrong["costs"], np.int64)
        header["members"]["costs_0"] = [*wrong["costs"]]
    header["stages"] *= wrong.get("stages", 1)
    for n in range(1, len(header["stages"])):
        for name in ("events", "costs"):
            arrays[f"{name}_{n}"] = arrays[f"{name}_0"]
            header["members"][f"{name}_{n}"] = header["members"][f"{name}_0"]
    np.savez(path, header=np.frombuffer(json.dumps(header).encode(), np.uint8), **arrays)
    with pytest.raises(TraceError, match=re.escape(text)):
        flashsim.Trace.load(path)


def test_pictures(ran, tmp_path):
    for draw in (viz.traffic, viz.cumulative, viz.sram_timeline, viz.tile_map, viz.roofline):
        assert draw(ran) is not None
    bars = {bar.get_gid() for bar in viz.traffic([ran, flashsim.run(Q, K, V, trace=True)]).patches}
    assert "in_loops, 16 x 24/store/note" in bars
    viz.diff(ran, flashsim.run(Q, K, V, trace=True))
    both = viz.page([ran, flashsim.run(Q, K, V, tiling=TILES, trace=True)])
    data = json.loads(re.search(r'id="data">(.*?)</script>', both.html, re.S)[1])
    assert data["tensors"][-2:] == ["note", "temp"]
    assert data["themes"]["light"]["tensors"]["note"] in viz.palette.OWN
    ran.trace.to_perfetto(tmp_path / "mine.json", heads=1)
    slices = json.loads((tmp_path / "mine.json").read_text())["traceEvents"]
    assert sum(e.get("name") == "work" for e in slices) == len(ran.trace.stages[0].costs)
    plt.close("all")


# -- questions --------------------------------------------------------------------------------


def nothing(machine):
    pass


def forgets_the_member(machine):
    with machine.stage("dv", outer="keys", per="group") as sram, sram.step(0):
        sram.load(machine.hbm.Q, slice(0, 4))


def clears_both_heads(machine):  # for the bytes of one
    with machine.stage("clear", per="group") as sram, sram.step(0):
        sram.store(machine.hbm.O, slice(0, 8), 0.0)


def miscounts_members(machine):
    with machine.stage("dv", outer="keys", per="group") as sram, sram.step(0):
        sram.load(machine.hbm.Q, slice(0, 4), member=2)


def races(machine):
    with machine.stage("dv", outer="keys") as sram, sram.step(0):
        sram.store(machine.hbm.dV, slice(0, 8), 0.0)


def moves_nothing(machine):
    with machine.stage("forward") as sram, sram.step(0):
        pass


def forgets_the_last_tile(machine):
    with machine.stage("forward") as sram:
        for rows in machine.row_tiles()[:-1]:
            with sram.step(rows):
                sram.store(machine.hbm.O, rows, 0.0)


def leaves_out_l(machine):
    with machine.stage("forward") as sram:
        for n, rows in enumerate(machine.row_tiles()):
            with sram.step(n):
                sram.store(machine.hbm.O, rows, 0.0)
                if n:
                    sram.store(machine.hbm.L, slice(rows.start, rows.start + 1), 0.0)


def runs_a_stage_twice(machine):
    for _ in range(2):
        with machine.stage("forward") as sram, sram.step(0):
            sram.store(machine.hbm.O, slice(0, 48), 0.0)


GROUPED = RNG.standard_normal((1, 4, 8, 4)), *RNG.standard_normal((2, 1, 2, 8, 4))
test_questions_that_make_no_sense = refuses(r"""
simulate("flash2", Q, K, V)
    -> DTypeError: takes a function with one argument, the machine, got 'flash2'
simulate(lambda machine, q: None, Q, K, V) -> DTypeError: with one argument, the machine
simulate(nothing, Q, K, V, outputs=["W"]) -> OptionError: no input or output is named 'W'
simulate(nothing, Q, K, V, outputs=["Q"]) -> OptionError: outputs must not contain an input
simulate(nothing, Q, K, V, outputs=[]) -> OptionError: outputs must not contain an input
simulate(nothing, Q, K, V, inputs={"O": Q}) -> OptionError: outputs must not contain an input
simulate(nothing, Q, K, V, inputs={"dO": Q[:3]}) -> ShapeError: inputs['dO'] must have the shape
simulate(nothing, Q, K, V, tiling=16) -> DTypeError: tiling must be
simulate(nothing, Q, K, V) -> MemoryModelError: nothing ran no stage
simulate(forgets_the_member, *GROUPED) -> MemoryModelError: whose Q you mean by member=g
simulate(clears_both_heads, *GROUPED) -> MemoryModelError: whose O you mean by member=g
simulate(miscounts_members, *GROUPED) -> ShapeError: must be from 0 to 1, ... got member=2
simulate(races, *GROUPED, outputs=["dV"])
    -> MemoryModelError: each query head of a group would store dV
simulate(moves_nothing, Q, K, V)
    -> MemoryModelError: without storing all of O: nothing of it was stored
simulate(forgets_the_last_tile, Q, K, V, tiling=TILES)
    -> MemoryModelError: without storing all of O: rows 32 to 47 were never stored
simulate(leaves_out_l, Q, K, V, tiling=TILES)
    -> MemoryModelError: without storing all of L: rows 0 to 47
simulate(runs_a_stage_twice, Q, K, V) -> MemoryModelError: stage 'forward' ran already
""")


def test_other_errors_name_the_line_in_a_note():
    def divides(machine):
        with machine.stage("forward") as sram, sram.step(0):
            return 1 / 0

    with pytest.raises(ZeroDivisionError) as caught:
        flashsim.simulate(divides, Q, K, V)
    line = divides.__code__.co_firstlineno + 2
    assert caught.value.__notes__ == [f"in divides, line {line}: return 1 / 0"]


def test_stages_have_tilings_of_their_own():
    def wide(machine):
        with machine.stage("wide", tiling=Tiling(48, 48)) as sram, sram.step(slice(0, 48)):
            sram.store(machine.hbm.O, slice(0, 48), sram.load(machine.hbm.V, slice(0, 48)))

    trace = flashsim.simulate(wide, Q, K, V, tiling=TILES).trace
    assert (trace.schedule.t_r, trace.own) == (1, Own({}, 2 * Q.nbytes))


def test_the_machine_says_what_it_has():
    def asks(machine):
        assert repr(machine.hbm.Q) == "<Q (48, 16) in HBM, float32>"
        assert machine.hbm.L.shape == (48,)
        assert sorted(machine.hbm.tensors) == ["K", "L", "O", "Q", "V"]
        with pytest.raises(AttributeError, match="has no attribute 'numbers'"):
            machine.hbm.Q.numbers  # noqa: B018
        with machine.stage("forward") as sram, sram.step(0):
            tile = sram.load(machine.hbm.Q, slice(0, 8))
            assert (len(tile), tile.ndim, tile.size, tile.dtype) == (8, 2, 128, np.float32)
            sram.store(machine.hbm.O, slice(0, 48), 1.0)
        with pytest.raises(MemoryModelError, match="has ended"):
            sram.step(0).__enter__()

    assert (flashsim.simulate(asks, Q, K, V, tiling=Tiling(48, 48)).out == 1).all()
