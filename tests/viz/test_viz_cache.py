"""The plot of DRAM reads over the size of L2, looked at through its artists and data."""

import pytest

import flashsim
from flashsim import Problem, l2, viz

pytestmark = pytest.mark.promise("pictures show the counts")


def test_l2_curve_ends_at_first_reads_and_marks_devices():
    requested = flashsim.count(Problem(2048, head_dim=64, dtype="bfloat16"))
    (curve,) = l2.curves(requested).values()
    ax = viz.l2_curve({"here": curve}, devices=("H100",))
    line = next(x for x in ax.lines if x.get_label() == "here")
    assert line.get_ydata()[0] == requested.bytes("load")
    assert line.get_ydata()[-1] == curve.cold < curve.reads(curve.enough() - 1)
    assert any(list(x.get_xdata()) == [50 * 2**20] * 2 for x in ax.lines)
    assert "H100" in {text.get_text() for text in ax.texts}


def test_residuals_are_in_per_cent_of_what_was_measured():
    ax = viz.predicted_against_measured({"a": [(1.1, 1.0), (9.7, 10.0)], "b": [(2.0, 2.0)]})
    lines = {x.get_label(): x for x in ax.lines}
    assert lines["a"].get_xdata().tolist() == [1.0, 10.0]
    assert lines["a"].get_ydata() == pytest.approx([10, -3])
    about = next(text.get_text() for text in ax.texts if "points" in text.get_text())
    assert about == "3 points, mean error 4.3%, 66% within 5%, 100% within 12%"  # down
