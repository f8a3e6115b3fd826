"""Records of readers' kernels: totals, traces, comparison, warnings, verdicts. Needs no Triton."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hand_written import attention, decoding, gradients, without_stages

import flashsim
from flashsim import Problem, Tiling, oracle, viz
from flashsim.errors import OptionError, ShapeError, TraceError, UnsupportedError
from flashsim.own_kernels import ATOMIC, LOAD, STORE, KernelTrace, Recorder
from flashsim.own_kernels.answer import LINES, answer
from flashsim.own_kernels.check import matrices
from flashsim.own_kernels.mistakes import Back, Way, backward, forward
from flashsim.own_kernels.names import identifier, labels, paper_name
from flashsim.own_kernels.record import float64
from flashsim.own_kernels.steps import Follower
from flashsim.viz.style import human

pytestmark = pytest.mark.promise("three counts equal")


def one_tensor(shape=(64, 32), programs=2, **layout):
    r = Recorder("hand")
    strides = layout.pop("strides", None) or [
        int(np.prod(shape[n + 1 :])) for n in range(len(shape))
    ]
    code = r.tensor("x", shape, strides, "float32", 4, **layout)
    r.launch("kernel", (programs,))
    return r, code


def noted(*steps, **layout):
    """Record accesses to one tensor: (program, operation, rows, line).

    `rows` is a range of rows (first, end), or a dict of `Recorder.access` arguments.
    """
    r, code = one_tensor(**layout)
    for program, op, rows, line in steps:
        r.program((program,))
        if isinstance(rows, tuple):
            r.block(op, code, (slice(*rows),), line=("mine.py", line))
        else:
            tensor = code if len(rows["offsets"]) else -1
            r.access(op, tensor, line=("mine.py", line), **rows)
    return r


# -- totals and traces --------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("n", "block_q", "block_k"), [(256, 64, 32), (250, 64, 32), (96, 16, 48)])
def test_bytes_are_those_of_the_closed_form(n, block_q, block_k, causal):
    traced = attention(n, 64, block_q, block_k, causal=causal)

    counted = flashsim.count(
        Problem(n, head_dim=64, heads=2, causal=causal), tiling=Tiling(block_q, block_k)
    )
    assert traced.problem == counted.problem
    assert traced.tiling == counted.tiling
    assert without_stages(traced.trace.transfers) == without_stages(counted.transfers)
    assert traced.bytes() == counted.bytes() == traced.trace.bytes()
    assert traced.compulsory() == counted.compulsory() == traced.trace.compulsory()
    assert all(row.nbytes == row.expected and not row.why for row in traced.byte_rows)
    assert traced.bytes("load", "K") == counted.bytes("load", "K")


def test_visits_are_in_the_order_of_the_loop():
    traced = attention(128, block_q=64, block_k=32, heads=1)

    events = traced.trace.stages[0].events
    visited = events[(events["op"] == 5) & (events["visit"] >= 0)]
    assert [(int(e["i"]), int(e["j"])) for e in visited] == [
        *((0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (1, 3))
    ]
    # K and V of a visit belong to it; Q, O and L to the step.
    assert set(events["tensor"][(events["op"] == LOAD) & (events["visit"] >= 0)]) == {2, 3}
    assert traced.trace.flops("matmul") == 6 * 4 * 64 * 32 * 64


def test_a_loop_that_runs_down_or_twice_has_a_visit_per_tile():
    r = Recorder("hand")
    q, k = (r.tensor(x, (64, 16), (16, 1), "float32", 4) for x in "qk")
    r.launch("mine", (1,))
    r.program((0,))
    r.block(LOAD, q, (slice(0, 64),))
    for j in (3, 2, 1, 0, 0, 1):
        r.block(LOAD, k, (slice(16 * j, 16 * j + 16),))

    events = KernelTrace(r.done()).trace.stages[0].events

    visited = events[(events["op"] == 5) & (events["visit"] >= 0)]
    assert visited["j"].tolist() == [3, 2, 1, 0, 1]
    assert visited["visit"].tolist() == [0, 1, 2, 3, 4]


def test_heads_that_differ_are_spelled_out():
    r, code = one_tensor((2, 64, 32), strides=(2048, 32, 1), programs=2)
    for head in range(2):
        r.program((head,))
        for first in range(0, 64 >> head, 16):
            r.block(LOAD, code, (head, slice(first, first + 16)))

    traced = KernelTrace(r.done(), problem=Problem(64, head_dim=32, heads=2))

    assert traced.trace.stages[0].repeat == 1
    assert traced.trace.bytes() == traced.bytes() == (64 + 32) * 32 * 4
    assert "forward: all 2 heads, 64" in viz.page(traced).html


def test_a_group_of_query_heads_shares_keys():
    traced = attention(heads=4, group=2)

    counted = flashsim.count(
        Problem(256, head_dim=64, heads=4, kv_heads=2, causal=True), tiling=Tiling(64, 32)
    )
    assert traced.bytes("load", "K") == counted.bytes("load", "K")
    assert traced.trace.stages[0].repeat == 4  # one head stands for all that do the same


def test_a_trace_is_saved_and_loaded(tmp_path):
    traced = attention()
    traced.trace.save(tmp_path / "mine.npz")

    again = flashsim.Trace.load(tmp_path / "mine.npz")

    assert again.transfers == traced.trace.transfers
    assert again.same_events(traced.trace)


def test_pictures_take_it(tmp_path):
    traced = attention(128)
    page = tmp_path / "mine.html"

    viz.page(traced).save(page)
    axes = viz.traffic([traced, attention(128, twice=True)])

    assert "forward" in page.read_text(encoding="utf-8")
    assert axes is not None
    assert viz.tile_map(traced) is not None


def test_rows_of_queries_and_keys_are_told_apart_without_names():
    """Tensors a, b, c: one tile per program is the outer side, several are the inner side."""
    r = Recorder("hand")
    a, b, c = (r.tensor(x, (64, 16), (16, 1), "float16", 2) for x in "abc")
    r.launch("mine", (4,))
    for i in range(4):
        r.program((i,))
        r.block(LOAD, a, (slice(16 * i, 16 * i + 16),))
        for j in range(2):
            r.block(LOAD, b, (slice(32 * j, 32 * j + 32),))
        r.block(STORE, c, (slice(16 * i, 16 * i + 16),))

    traced = KernelTrace(r.done())

    assert traced.trace.axes["a"] == traced.trace.axes["c"] == 0
    assert traced.trace.axes["b"] == 1
    assert traced.tiling == Tiling(16, 32)
    assert traced.expected is None
    assert traced.compulsory() == 3 * 64 * 16 * 2


def test_strided_tensors_and_views_of_one_buffer():
    """Two views, one after the other in each row of a buffer: a packed KV."""
    r = Recorder("hand")
    k = r.tensor("k", (8, 4), (8, 1), "float32", 4, buffer=7)
    v = r.tensor("v", (8, 4), (8, 1), "float32", 4, buffer=7, start=16)
    r.launch("mine", (1,))
    r.program((0,))
    r.block(LOAD, k, (slice(0, 4),))
    r.block(STORE, v, (slice(0, 4),))
    r.block(STORE, v, (slice(4, 8),))

    record = r.done()

    assert record.accesses["distinct"].tolist() == [16, 16, 16]
    assert record.accesses["sectors"].tolist() == [4, 4, 4]  # each row has half a sector of each
    assert list(record.stored) == [v]
    assert record.stored[v].all()
    assert not record.clashes


def test_one_tensor_under_two_parameters_keeps_both_names():
    r = Recorder("hand")
    first = r.tensor("q", (8, 4), (4, 1), "float32", 4, buffer=7)
    second = r.tensor("k", (8, 4), (4, 1), "float32", 4, buffer=7, unlike=[first])
    again = r.tensor("query", (8, 4), (4, 1), "float32", 4, buffer=7)

    assert first != second
    assert again == first


def test_a_million_accesses_take_less_than_200_mb():
    """At most 200 B for each of 10,000, from the first note to all that is said of them."""
    warm, number = one_tensor(shape=(4096, 16), programs=64)
    offsets = np.arange(64)
    warm.program((0,))
    warm.access(LOAD, number, offsets)
    KernelTrace(warm.done()).byte_rows  # noqa: B018 - what is imported and cached once
    r, number = one_tensor(shape=(4096, 16), programs=64)
    tracemalloc.start()
    for n in range(10_000):
        if n % 100 == 0:
            r.program((n // 100 % 64,))
        r.access(LOAD, number, offsets + 64 * (n % 4), line=("kernel.py", n % 7))
    traced = KernelTrace(r.done())
    assert traced.findings == []
    assert traced.byte_rows[0].nbytes == 10_000 * 64 * traced.record.tensors[0].itemsize
    traced.by_line()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert traced.n_events == 10_000
    assert peak < 10_000 * 200 + 4 * 2**20  # and what the tensor's elements and imports take


def test_names():
    assert paper_name("k_ptr") == paper_name("K_desc_ptr") == "K"
    assert paper_name("Out") == "O"
    assert paper_name("weights") is None
    assert labels(["q", "a_ptr", "b"], {"a_ptr": "K"}) == ["Q", "K", "b"]
    assert labels(["out", "o"]) == ["O", "o"]
    assert labels(["k_desc", "K"]) == ["K", "K_2"]  # two tensors, as where K is scaled for backward
    with pytest.raises(OptionError, match="names= contains 'c'"):
        labels(["q"], {"c": "K"})
    assert identifier("a-b", ["a_b"]) == "a_b_2"


# -- against what is needed ---------------------------------------------------------------------


def test_a_tile_that_is_loaded_twice_is_named_with_its_line():
    row = next(r for r in attention(twice=True).byte_rows if r.tensor == "K")

    assert row.nbytes == 2 * row.expected
    assert "each K tile is loaded twice by every program, line 21 (first in line 20)" in row.why
    assert sum(reason.nbytes for reason in row.reasons) == row.more


def test_masked_tiles_are_named_with_their_line():
    traced = attention(skip=False)

    for tensor, line in (("K", 20), ("V", 25)):
        row = next(r for r in traced.byte_rows if r.tensor == tensor)
        assert row.more == sum(reason.nbytes for reason in row.reasons) > 0
        assert f"{tensor} tiles whose scores are all masked are loaded" in row.why
        assert f"line {line}" in row.why

    unknown = KernelTrace(traced.record, names={"q_ptr": "a", "o_ptr": "b"}, problem=traced.problem)
    assert not any("masked" in row.why for row in unknown.byte_rows)  # which rows read a key tile?


def test_tables():
    traced = attention(twice=True)

    assert [row[0] for row in traced.by_line().rows] == [10, 20, 21, 25, 30, 31]
    assert "each K tile" in str(traced.compared())
    assert "forward" in str(traced)
    assert "accesses" in repr(traced)


def test_predictions_replay_the_kernel_s_own_accesses():
    traced = attention(heads=1, causal=False)

    dram = traced.dram()
    roof = traced.roofline("A100")

    # Everything fits in L2: each tensor comes once.
    assert dram.bytes("read") == 3 * 256 * 64 * 4
    assert dram.bytes("pending") == 256 * 64 * 4 + 256 * 4
    assert roof["requested"].bytes == traced.bytes()
    assert roof["requested"].flops == 4 * 256 * 256 * 64
    small = replace(flashsim.Device.get("H100"), l2_bytes=16384)
    assert dram.bytes("read") < traced.dram(small).bytes("read") <= traced.bytes("load")


def test_launches_apart():
    r = Recorder("hand")
    x, y = (r.tensor(name, (64, 16), (16, 1), "float32", 4) for name in "xy")
    for number, kernel in enumerate(("first", "second")):
        r.launch(kernel, (1,))
        r.program((0,))
        r.block(LOAD, x, (slice(0, 32 * (number + 1)),))
        r.work("matmul", 100 * (number + 1))
        r.block(STORE, y, (slice(0, 64),))

    traced = KernelTrace(r.done())
    second = traced.only("second")

    assert second.bytes("load") == 64 * 16 * 4
    assert second.trace.flops() == 200
    assert traced.trace.flops() == 300
    title = viz.traffic(traced).get_title("left")
    assert title == f"first, second move {human(traced.bytes())}"  # not only the first
    with pytest.raises(OptionError, match="unknown kernel 'third'"):
        traced.only("third")


@pytest.mark.parametrize(("causal", "group"), [(True, 1), (False, 1), (True, 2)])
def test_a_backward_pass_of_three_launches(causal, group):
    traced = gradients(causal=causal, group=group)

    counted = flashsim.count(traced.problem, tiling=Tiling(32, 32), direction="backward")
    assert without_stages(traced.trace.transfers) == without_stages(counted.transfers)
    assert traced.compulsory() == counted.compulsory()
    assert traced.expected.algorithm == "flash2 backward"
    assert all(row.more == 0 for row in traced.byte_rows if row.expected is not None)
    assert traced.check().right
    assert traced.trace.direction == "backward"


def test_decoding_in_parts():
    traced = decoding()

    counted = flashsim.count(
        Problem(1, 256, head_dim=16, heads=2),
        algorithm="flash-decode",
        splits=4,
        tiling=Tiling(1, 32),
    )
    assert without_stages(traced.trace.transfers) == without_stages(counted.transfers)
    assert traced.expected.transfers == without_stages(counted.transfers)
    assert traced.expected.algorithm == "flash-decode, 4 splits"
    assert traced.check().right
    assert traced.trace.own.workspace == 4 * 2 * 17 * 4


def test_mistakes_of_a_backward_pass():
    """dS without delta or a scale, and dK, dV of one head of a group, in a plain computation."""
    traced = gradients(group=2)
    q, k, v, _, lse, do, delta, dq, dk, _ = (x.astype(np.float64) for x in traced.values)
    keep, scale = np.tril(np.ones((96, 96), bool)), traced.problem.scale
    e = np.exp(np.where(keep, q @ k[0].T * scale, -np.inf) - lse[..., None])
    ds = e * (do @ v[0].T - delta[..., None])
    without = e * (do @ v[0].T)
    unscaled = {"dq": 4.0 * dq, "dk": 4.0 * dk}
    cases = {
        "dQ is not multiplied by the scale": {"dq": unscaled["dq"]},
        "dK is not multiplied by the scale": {"dk": unscaled["dk"]},
        "neither dQ nor dK is multiplied by the scale": unscaled,
        "delta is not subtracted": {
            "dq": scale * without @ k[0],
            "dk": scale * np.einsum("hqk,hqd->kd", without, q)[None],
        },
        "those of the group's last query head": {
            "dk": (scale * ds[1].T @ q[1])[None],
            "dv": (e[1].T @ do[1])[None],
        },
        "dQ has only the last key tile's": {"dq": scale * ds[:, :, 64:] @ k[0, 64:]},
    }
    for text, wrong in cases.items():
        verdict = gradients(group=2, wrong=wrong).check()
        assert not verdict.right
        assert text in verdict.mistake, text


# -- warnings -----------------------------------------------------------------------------------


def test_a_clean_kernel_has_no_warnings():
    assert attention().findings == []


RACE = "line 9: in one launch, one of programs (1,) and (0,) loads x"
RUN = np.arange(32 * 8)
WARNINGS = [
    ("two stores", "line 6: programs (0,) and (1,) both store x[20, 0]",
     [(0, STORE, (0, 32), 5), (1, STORE, (20, 52), 6)], {}),
    ("never stored", "384 of 2,048 elements are never stored, first x[52, 0]",
     [(0, STORE, (0, 32), 5), (1, STORE, (20, 52), 6)], {}),
    ("race", RACE, [(0, LOAD, (0, 64), 9), (1, STORE, (0, 64), 9)], {}),
    ("race", RACE, [(0, STORE, (0, 64), 9), (1, LOAD, (0, 64), 9)], {}),
    ("outside", "line 4: load outside of x (64, 32): 12 of 32 lanes in program (0,)",
     [(0, LOAD, {"offsets": RUN[:16], "masked": 4, "outside": 12}, 4)], {}),
    ("never stored", "1,024 of 2,048 elements are never stored, first x[32, 0]",
     [(0, STORE, (0, 32), 3)], {}),
    ("uncoalesced", "line 8: load of x touches 64 sectors of 32 B for 256 B (12% used)",
     [(0, LOAD, {"offsets": RUN[:64] * 64}, 8)], {"shape": (64, 64)}),
    ("masked lanes", "line 8: 54 of 64 lanes of the load of x are masked off (84%)",
     [(0, LOAD, {"offsets": RUN[:10], "masked": 54}, 8)], {}),
    ("masked lanes", "line 9: 1 stores with every lane masked off",
     [(0, LOAD, (0, 1), 8), (0, STORE, {"offsets": RUN[:0], "masked": 64}, 9)], {}),
    ("next head", "line 8: load of x goes past its head's last row",
     [(0, LOAD, {"offsets": RUN}, 8), (0, LOAD, {"offsets": RUN + 256}, 8)],
     {"shape": (2, 50, 8), "strides": (400, 8, 1)}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "text", "steps", "layout"), WARNINGS)
def test_a_warning_names_line_and_program(kind, text, steps, layout):
    found = KernelTrace(noted(*steps, **layout).done()).findings

    assert any(one.kind == kind and text in one.text for one in found), found


def test_the_only_program_of_a_launch_may_start_unsaid():
    r, code = one_tensor(programs=1)
    r.access(LOAD, code, RUN, outside=4)

    (found,) = KernelTrace(r.done()).findings
    assert "4 of 260 lanes in program (0,)" in found.text


def test_atomic_additions_by_two_programs_are_no_clash_but_a_store_is():
    r = noted((0, ATOMIC, (0, 64), 1), (1, ATOMIC, (0, 64), 1))
    assert not r.done().clashes

    r.block(STORE, 0, (slice(0, 1),))
    assert [one.kind for one in r.done().clashes] == ["two stores"]


def test_launches_are_ordered_so_there_is_no_race_between_them():
    r = noted((0, STORE, (0, 64), 1))
    r.launch("second", (1,))
    r.program((0,))
    r.block(LOAD, 0, (slice(0, 64),))

    assert not r.done().clashes


# -- right or wrong -----------------------------------------------------------------------------


@pytest.mark.parametrize("column", [False, True])
def test_right_results_are_right(column):
    traced = attention(column=column)
    verdict = traced.check()

    assert verdict.right
    assert traced.expected.transfers["store", "L"] == traced.bytes("store", "L")
    assert [one.tensor for one in verdict.outputs] == ["O", "L"]
    assert "O right" in str(verdict)


PROBLEM = Problem(50, n_kv=70, head_dim=16, heads=2, causal=True)


def inputs(p, rng):
    shapes = {"Q": (p.heads, p.n_q, p.head_dim), "K": (p.kv_heads, p.n_kv, p.head_dim)}
    shapes |= {"V": shapes["K"], "dO": shapes["Q"]}
    return {name: rng.standard_normal(shape) for name, shape in shapes.items()}


def test_the_computation_without_a_mistake_is_the_oracle_s():
    p = PROBLEM
    x = inputs(p, np.random.default_rng(0))
    four = {name: array[None] for name, array in x.items()}

    made = forward(p, x, Way(), 32)
    back = backward(p, x, Back(), 32)

    out, lse = oracle.attention(four["Q"], four["K"], four["V"], p)
    exact = oracle.gradients(four["Q"], four["K"], four["V"], four["dO"], p)
    np.testing.assert_allclose(made["O"], out[0], rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(made["L"], lse[0], rtol=1e-12)
    for name in ("dQ", "dK", "dV"):
        np.testing.assert_allclose(back[name], exact[name.lower()][0], rtol=1e-11, atol=1e-12)


def guessed(traced, text, o, l):
    """Assert that results O and L are wrong, and the words for it."""
    values = [*traced.values[:3], o.astype(np.float32), l.astype(np.float32)]
    verdict = KernelTrace(traced.record, problem=traced.problem, values=values).check()
    assert not verdict.right
    assert text in verdict.mistake, (text, verdict.mistake)
    assert f"if {verdict.mistake}" in str(verdict)


def test_each_known_mistake_is_guessed_and_no_other():
    """A plain attention that shares no code has each mistake seeded."""
    traced = attention(n=80, d=16, block_q=32, block_k=32)
    p, q, k, v = traced.problem, *(x.astype(np.float64) for x in traced.values[:3])
    keep = np.tril(np.ones((80, 80), bool))

    def plain(scale=p.scale, keep=keep):
        s = np.where(keep, np.einsum("hqd,hkd->hqk", q, k) * scale, -np.inf)
        m = s.max(axis=-1, initial=-np.inf, keepdims=True)
        e = np.exp(s - m)
        l = e.sum(axis=-1, keepdims=True)
        return e / l @ v, (m + np.log(l))[..., 0], e @ v, m[..., 0]

    out, lse, undivided, m = plain()
    seen = np.arange(80) < ((np.arange(80) // 32 + 1) * 32)[:, None]  # the loop ends there
    later = keep | (np.eye(80, k=1) > 0)
    cases = {
        "the LSE is in base 2": (out, lse * np.log2(np.e)),
        "the LSE is m alone": (out, m),
        "O is not divided by l": (undivided, lse),
        "not multiplied by the scale": plain(1.0)[:2],
        "by the scale twice": plain(1 / 16)[:2],
        "there is no causal mask": plain(keep=seen)[:2],
        "a query also sees the next key": plain(keep=later & seen)[:2],
    }
    for text, results in cases.items():
        guessed(traced, text, *results)


def test_mistakes_at_the_ends_of_tiles_and_among_heads():
    """Without a mask: 80 keys in tiles of 32, two query heads per key head."""
    traced = attention(n=80, d=16, block_q=32, block_k=32, heads=4, group=2, causal=False)
    q, k, v = (x.astype(np.float64) for x in traced.values[:3])
    groups = {"right": [0, 0, 1, 1], "first": [0, 0, 0, 0], "modulo": [0, 1, 0, 1]}

    def plain(keys=slice(0, 80), padded=0, heads="right", axis=-1):
        k_, v_ = k[groups[heads]][:, keys], v[groups[heads]][:, keys]
        s = np.einsum("hqd,hkd->hqk", q, k_) / 4
        s = np.concatenate([s, np.zeros((4, 80, padded))], axis=2)
        v_ = np.concatenate([v_, np.zeros((4, padded, 16))], axis=1)
        e = np.exp(s)
        total = np.log(e.sum(axis=-1))
        return e / e.sum(axis=axis, keepdims=True) @ v_, total

    cases = {
        "the padded keys of the last tile are not masked": plain(padded=16),
        "the last key tile, which is not whole, is left out": plain(slice(0, 64)),
        "all heads read K and V of the first head": plain(heads="first"),
        "h % kv_heads": plain(heads="modulo"),
        "the softmax is over the queries": plain(axis=1),
    }
    for text, results in cases.items():
        guessed(traced, text, *results)


def test_masks_of_blocks_and_gaps_between_elements():
    r, code = one_tensor((8, 8), strides=(16, 2))
    r.program((0,))
    mask = np.arange(8) < 5
    r.block(LOAD, code, (slice(0, 4),), mask=mask, line=("mine.py", 2))

    record = r.done()

    assert record.accesses[["active", "masked", "distinct"]].tolist() == [(20, 12, 20)]
    assert record.accesses["sectors"].tolist() == [
        8
    ]  # 5 elements, 8 B apart, reach into a second one
    with pytest.raises(TraceError, match="offsets outside of the tensor"):
        r.access(LOAD, code, np.array([1]))
    with pytest.raises(TraceError, match="pass a view with the smaller elements to the earlier"):
        r.tensor("narrow", (4,), (1,), "int8", 1, buffer=-1)


def test_the_answer_of_a_kernel_with_everything_wrong():
    r, code = one_tensor((64, 64))
    other = r.tensor("y", (64, 64), (64, 1), "float32", 4)
    for i in range(2):
        r.program((i,))
        r.access(LOAD, code, np.arange(64) * 64, masked=64, outside=3, line=("mine.py", 8))
        r.block(STORE, other, (slice(0, 32),), line=("mine.py", 9))
    x = np.zeros((64, 64), np.float32)
    traced = KernelTrace(r.done(), values=[x, x], device="RTX 4090")
    traced.check(lambda given: {"y": given["x"] + 1})

    text = answer(traced, note="")

    for words in (
        "y WRONG (error 1.0e+00",
        "no known mistake gives these numbers",
        "line 8: load outside of x",
        "of all lanes are masked off, mostly in line 8",
        "2,048 of 4,096 elements are never stored",
        "both store y[0, 0]",
        "touches 64 sectors",
    ):
        assert words in " ".join(text.split()), words
    assert "not checked: no reference" in answer(KernelTrace(r.done()), note="no reference")


def test_the_first_wrong_element_has_its_program_and_line():
    traced = attention()
    values = [x.copy() for x in traced.values]
    values[3][1, 130, 5] += 1

    verdict = KernelTrace(traced.record, values=values).check()

    assert (verdict.tensor, verdict.head, verdict.row, verdict.column) == ("O", 1, 130, 5)
    assert (verdict.program, verdict.line) == ((2, 1), 30)
    assert verdict.mistake == ""
    assert "no known mistake" in str(verdict)


def test_a_reader_s_own_reference():
    r, code = one_tensor((4, 8))
    other = r.tensor("y", (4, 8), (8, 1), "float32", 4)
    r.program((0,))
    r.block(LOAD, code, (slice(0, 4),))
    r.block(STORE, other, (slice(0, 4),))
    x = np.arange(32, dtype=np.float32).reshape(4, 8)
    traced = KernelTrace(r.done(), values=[x, 2 * x])

    assert traced.check(lambda given: 2 * given["x"]).right
    wrong = traced.check(lambda given: {"y": 2 * given["x"] + (given["x"] == 9)})
    assert (wrong.tensor, wrong.row, wrong.column, wrong.program) == ("y", 1, 1, (0,))
    with pytest.raises(TraceError, match="asks for 'a', but the kernel's tensors are x, y;"):
        traced.check(lambda given: 2 * given["a"])
    with pytest.raises(TraceError, match="the reference returns 'z'"):
        traced.check(lambda given: {"z": x})
    with pytest.raises(TraceError, match="but the reference's y has shape"):
        traced.check(lambda given: x[:2])
    with pytest.raises(TraceError, match="none of the stored tensors"):
        traced.check()


def test_a_causal_mask_without_an_argument_of_that_name():
    traced = attention(96, causal=True)
    launches = tuple(replace(one, constants={}) for one in traced.record.launches)
    nameless = KernelTrace(replace(traced.record, launches=launches), values=traced.values)

    assert nameless.expected.transfers != traced.expected.transfers
    assert nameless.check().right
    assert nameless.problem == traced.problem
    assert nameless.expected.transfers == traced.expected.transfers


def test_the_problem_has_the_type_of_q():
    r = Recorder("hand")
    for name, dtype in (("M", "float32"), ("q", "float16"), ("mask", "bool")):
        code = r.tensor(name, (8, 4), (4, 1), dtype, np.dtype(dtype).itemsize)
    r.launch("mine", (1,))
    r.program((0,))
    r.block(LOAD, code - 1, (slice(0, 8),))

    assert KernelTrace(r.done()).problem.dtype == "float16"


def test_values_in_any_layout_become_heads_rows_columns():
    """(batch, rows, heads, columns), as flash-attn lays tensors out."""
    r = Recorder("hand")
    x = np.arange(2 * 8 * 3 * 4, dtype=np.float32).reshape(2, 8, 3, 4)
    code = r.tensor("q", x.shape, [s // 4 for s in x.strides], "float32", 4)
    r.launch("mine", (2, 3))
    for b in range(2):
        for h in range(3):
            r.program((b, h))
            r.block(LOAD, code, (b, slice(0, 8), h))

    traced = KernelTrace(r.done())

    np.testing.assert_array_equal(
        matrices(traced.geometry, code, x), x.transpose(0, 2, 1, 3).reshape(6, 8, 4)
    )
    assert traced.problem.heads * traced.problem.batch == 6


def test_a_program_is_followed_tile_by_tile():
    rng = np.random.default_rng(0)
    scores, v = rng.standard_normal((4, 12)), rng.standard_normal((12, 3))
    follower = Follower(scores, v, 8, 1e-6)

    def state(n, rescale=True):
        m, l, acc = np.full(4, -np.inf), np.zeros(4), np.zeros((4, 3))
        for first in range(0, n, 4):
            s = scores[:, first : first + 4]
            new = np.maximum(m, s.max(1))
            e, alpha = np.exp(s - new[:, None]), np.exp(m - new)
            l = alpha * l + e.sum(1)
            acc = (alpha[:, None] if rescale else 1) * acc + e @ v[first : first + 4]
            m = new
        return {"highest": m, "total": l, "sum": acc}

    for first in (0, 4, 8):
        follower.tile(first, first + 4, state(first, rescale=False))
    assert "step 2, keys 4 to 7: sum is wrong from row" in follower.found
    assert "highest and total are still right" in follower.found

    good = Follower(scores, v, 8, 1e-6)
    for first in (0, 0, 4, 8):  # a tile that is loaded twice is no step of its own
        good.tile(first, first + 4, state(first))
    good.end(state(12))
    assert good.found == ""


# -- the answer, and what is refused ------------------------------------------------------------


@pytest.mark.parametrize("made", [{}, {"twice": True}, {"skip": False, "n": 1000}])
def test_the_answer_fits_a_terminal(made):
    traced = attention(**made)
    traced.check()

    lines = answer(traced, ["out/mine.html: the page"]).splitlines()

    assert len(lines) <= LINES == 32
    assert max(map(len, lines)) <= 100
    for word in ("results", "bytes", "bounds", "stored", "races", "sectors", "on chip", "time"):
        assert any(line.startswith(word) for line in lines), word
    assert any("out/mine.html" in line for line in lines)


def test_an_answer_that_is_too_long_says_what_it_leaves_out():
    traced = attention(twice=True)

    text = answer(traced, most=14)

    assert len(text.splitlines()) <= 14
    assert "more lines: --all" in text


def test_what_is_refused():
    with pytest.raises(ShapeError, match="strides"):
        one_tensor((4, 4), strides=(4, -1))
    with pytest.raises(ShapeError, match="2 axes but 1 strides"):
        one_tensor((4, 4), strides=(4,))
    with pytest.raises(TraceError, match="no kernel was launched"):
        KernelTrace(Recorder("hand").done())
    r, _ = one_tensor()
    with pytest.raises(TraceError, match="loaded and stored nothing"):
        KernelTrace(r.done())
    traced = attention()
    for call, text in (
        (lambda: traced.bytes("fetch"), "unknown operation 'fetch'"),
        (lambda: traced.bytes("load", "X"), "unknown tensor 'X'"),
        (lambda: traced.record.tensor("X"), "unknown tensor 'X'"),
    ):
        with pytest.raises(OptionError, match=text):
            call()
    with pytest.raises(TraceError, match="does not hold the tensors' values"):
        KernelTrace(traced.record).check()
    r, code = one_tensor()
    for n in range(65):
        r.launch(f"kernel{n}", (1,))
        r.program((0,))
        r.block(LOAD, code, (slice(0, 8),))
    with pytest.raises(UnsupportedError, match="at most 64 launches"):
        KernelTrace(r.done()).trace  # noqa: B018


@pytest.mark.parametrize(("bits", "dtype"), [(0x7FA00000, np.float32), (0x7D00, np.float16)])
def test_memory_that_no_program_wrote_may_hold_any_bits(bits, dtype):
    signaling = np.array([bits, 0], f"u{np.dtype(dtype).itemsize}").view(dtype)
    values = float64(signaling)
    assert values.dtype == np.float64
    assert np.isnan(values[0])
    assert values[1] == 0
