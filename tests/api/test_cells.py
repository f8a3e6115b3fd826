"""What a notebook or a prompt shows of everything that flashsim returns."""

import numpy as np
import pytest

import flashsim
from flashsim.report import Table
from flashsim.studies import demo

RNG = np.random.default_rng(0)
Q, K = RNG.standard_normal((1, 4, 48, 8)), RNG.standard_normal((1, 2, 48, 8))
TILING = flashsim.Tiling(16, 16)
PROBLEM = flashsim.Problem(256, head_dim=64, dtype="bfloat16")


DELTA = flashsim.exercises.get("delta")


def copied(machine):
    """An algorithm of one's own: O = Q."""
    with machine.stage("forward") as sram:
        for rows in machine.row_tiles():
            with sram.step(rows):
                sram.store(machine.hbm.O, rows, sram.load(machine.hbm.Q, rows))


def result(**options):
    return flashsim.run(Q, K, K, tiling=TILING, trace=True, **options)


RETURNED = {
    "Result": result,
    "Gradients": lambda: result().backward(Q),
    "Trace": lambda: result().trace,
    "StageTrace": lambda: result().trace.stages[0],
    "Frame": lambda: result().trace.frame(0),
    "Traffic": lambda: flashsim.count(PROBLEM),
    "Comparison": lambda: flashsim.compare(Q, K, K, dout=Q),
    "Sweep": lambda: flashsim.sweep([64, 128]),
    "Problem": lambda: PROBLEM,
    "Device": lambda: flashsim.Device.get("H100"),
    "Tiling": lambda: TILING,
    "Sample": flashsim.load_sample,
    "RandomInputs": lambda: flashsim.random_inputs(PROBLEM),
    "Climb": lambda: flashsim.ladder.climb(64, 64, 16),
    "Step": lambda: flashsim.ladder.climb(64, 64, 16, rungs=["naive"]).steps["naive"],
    "Roofline": lambda: flashsim.roofline.roofline(flashsim.count(PROBLEM)),
    "Point": lambda: flashsim.roofline.roofline(flashsim.count(PROBLEM))["dram"],
    "Table": lambda: flashsim.roofline.ridge_points("H100"),
    "Dram": lambda: flashsim.l2.dram(flashsim.count(PROBLEM)),
    "Curve": lambda: flashsim.l2.curves(flashsim.count(PROBLEM))["forward"],
    "Prediction": lambda: flashsim.predict.predict(PROBLEM),
    "Account": lambda: flashsim.distributed.count(PROBLEM, ranks=2),
    "SpreadTime": lambda: flashsim.predict.spread(PROBLEM, ranks=2),
    "Spread": lambda: flashsim.distributed.run(Q, K, K, ranks=2, tiling=TILING),
    "SpreadGradients": lambda: flashsim.distributed.run(Q, K, K, ranks=2).backward(Q),
    "OwnResult": lambda: flashsim.simulate(copied, Q, Q, Q),
    "BlockSizes": lambda: flashsim.blocks.sizes(PROBLEM),
    "Marks": lambda: flashsim.exercises.grade(DELTA.solution_source, DELTA)[0],
    "Access": lambda: flashsim.banks.access("column", "padded"),
    "DemoLayer": lambda: demo.DemoLayer(
        "layer0", flashsim.compare(Q, K, K), {"flash2": 1e-4}, []
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RETURNED)
def test_a_value_is_short_and_a_cell_a_table(name):
    value = RETURNED[name]()
    assert type(value).__name__ == name
    text = repr(value)
    assert len(text) < 700
    assert "\n" not in text
    assert "array(" not in text
    if name not in ("Tiling", "Step", "Point", "StageTrace"):  # whose one line says it all
        cell = value._repr_html_()
        assert cell.startswith("<table><caption>")
        assert cell.count("<tr>") == cell.count("</tr>") > 2
        assert "array(" not in cell


def test_a_result_shows_its_arrays_by_shape_and_what_it_moved():
    ran = result()
    assert repr(ran).startswith("<Result out float64 (1, 4, 48, 8), lse float64 (1, 4, 48), kernel")
    assert "float64 (1, 4, 48, 8)" in ran._repr_html_()
    assert ran.trace.table().html() in ran._repr_html_()
    gradients = ran.backward(Q, trace=False)
    assert "dk float64 (1, 2, 48, 8)" in repr(gradients)
    assert gradients._repr_html_().count("<table>") == 1


def test_a_cell_keeps_the_note_of_its_table():
    trace = result().trace
    cell = trace._repr_html_()
    for part in ("compulsory", "FLOPs", "FLOP/B", "peak"):
        assert part in cell.partition("<tfoot>")[2]
    assert f"compulsory {trace.compulsory():,} B" in cell
    assert "<tfoot>" not in Table("t", ("a",), [(1,)]).html()


def test_numbers_stand_whole_at_the_right_of_a_cell_and_words_at_the_left():
    cell = Table("t", ("name", "B"), [("K", 3e-7), ("V", None)]).html()
    left, whole = ' style="text-align:left"', ' style="white-space:nowrap"'
    assert f"<th{left}>name</th><th{whole}>B</th>" in cell
    assert f"<td{left}>K</td><td{whole}>3e-07</td>" in cell
    assert f"<td{left}>V</td><td{whole}></td>" in cell
