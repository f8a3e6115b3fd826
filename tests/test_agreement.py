"""Summing up tables of counters; the tables of docs/truth.md are what the kept measurement says."""

import csv
import importlib.util
import io
import json
from operator import itemgetter
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flashsim import TraceError
from flashsim.cli import app
from flashsim.verify import summary

ROOT = Path(__file__).parent.parent
KEPT = ROOT / "docs" / "verify-h200.csv"
TRUTH = (ROOT / "docs" / "truth.md").read_text(encoding="utf-8")
COLUMNS = ("shape", "kernels", "pass", "tile", "kernel", "quantity", "predicted", "measured")


def table(*rows):
    """CSV of rows (shape, kernel, quantity, predicted, measured)."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(COLUMNS)
    for shape, kernel, quantity, predicted, measured in rows:
        writer.writerow((shape, "hopper", "flash2", "8 x 8", kernel, quantity, predicted, measured))
    return text.getvalue()


ROWS = table(
    ("a on X", "dq", "requested read", 1000, 1000),
    ("b on X", "dq", "requested read", 1000, 998),
    ("a on X", "dq", "requested write", 64, 64),
    ("a on X", "dq", "requested reduce", 0, 0),
    ("a on X", "delta", "requested read", 10, 10),
    ("a on X", "delta", "requested write", 10, 40),
    ("a on X", "dq", "tensor FLOPs", 512, 512),
    ("a on X", "dq", "DRAM read", 100, 104),
    ("b on X", "dq", "DRAM read", 100, 92),
    ("a on X", "dq", "shared-memory wavefronts", "", 200),
    ("a on X", "dq", "shared bank conflicts", 0, 3),
)


def test_summary_by_hand():
    requested, dram, conflicts, missed = summary(ROWS)
    where = ("hopper", "flash2", "dq")
    assert requested.rows[0] == [*where, 2, "-0.200", "exact", None, "exact"]
    assert dram.rows == [
        (*where, 2, "6.0", "-8.0", 1, 2),
        ("all", "", "", 2, "6.0", "-8.0", 1, 2),
    ]
    assert conflicts.rows == [(*where, 1, "1.50", "1.50", "a")]
    assert [row[3:] for row in missed.rows] == [
        ("requested read", "b", "-0.20"),
        ("DRAM read", "b", "-8.00"),
    ]


def test_other_files_are_refused():
    with pytest.raises(TraceError, match=r"no column 'shape'.*--from"):
        summary('"ID","Kernel Name"\n')


@pytest.mark.parametrize("number", [0, 1, 2])
def test_docs_print_what_the_measurement_says(number):
    assert summary(KEPT.read_text())[number].markdown() in TRUTH


def test_docs_count_what_misses_its_target():
    """11 rows of requested bytes, four of the smallest shapes aside; 25 rows of DRAM reads."""
    rows = summary(KEPT.read_text())[3].records()
    requested = [
        row
        for row in rows
        if row["quantity"] != "DRAM read"
        and not (" 1,024 x " in row["shape"] and abs(float(row["difference, %"])) <= 0.5)
    ]
    assert f"{len(requested)} of 448 rows" in TRUTH
    assert f"{len(rows) - len([r for r in rows if r['quantity'] != 'DRAM read'])} of 128" in TRUTH


def test_kernels_counted_what_was_predicted():
    """Equal but for the boxes of the copy engine that hang over the ends, which are not counted."""
    key = itemgetter("shape", "kernels", "pass", "kernel")
    with KEPT.open(newline="") as stream:
        everything = list(csv.DictReader(stream))
    rows = [row for row in everything if row["quantity"].startswith("requested")]
    different = [row for row in rows if row["counted"] != row["predicted"]]
    assert {(row["kernels"], row["quantity"]) for row in different} == {
        ("hopper", "requested read")
    }
    assert all(int(row["counted"]) < int(row["predicted"]) for row in different)
    without_boxes = {
        key(row): row["predicted"] for row in everything if row["quantity"] == "reads at L2"
    }
    assert all(row["counted"] == without_boxes[key(row)] for row in different)
    assert f"{len(rows)} figures" in TRUTH
    assert f"{len(different)} figures of Hopper reads" in TRUTH


def test_the_command_sums_up_and_says_what_is_no_table(tmp_path):
    file = tmp_path / "table.csv"
    file.write_text(ROWS)
    shown = CliRunner().invoke(app, ["verify", "--summary", str(file)])
    assert shown.exit_code == 0, shown.output
    assert "DRAM reads" in shown.stdout
    missed = CliRunner().invoke(app, ["verify", "--summary", str(file), "--json"])
    assert [row["shape"] for row in json.loads(missed.stdout)] == ["b", "b"]
    absent = CliRunner().invoke(app, ["verify", "--summary", str(tmp_path / "absent.csv")])
    assert "cannot read" in absent.stderr
    wrong = CliRunner().invoke(app, ["verify", "--from", str(file), "--tiling", "64x64"])
    assert "no table of Nsight Compute" in wrong.stderr


# -- time: benchmarks/predict.py -------------------------------------------------------------------


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("predict", ROOT / "benchmarks" / "predict.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_docs_print_the_errors_of_predicted_times(benchmark):
    assert benchmark.errors_table(benchmark.measured()).markdown() in TRUTH


def test_shapes_kept_out_of_the_fit_are_predicted(benchmark):
    """As docs/truth.md claims: held-out passes within 14 %, 5 % rms; fitted ones 2.5 %."""
    errors = benchmark.pass_errors(benchmark.measured())
    held = [x for (_, _, group), known in errors.items() if group != "fitted" for x in known]
    assert len(held) == 6 * 12 - 4
    assert max(map(abs, held)) < 0.14
    assert benchmark.rms(held) < 0.05
    fitted = [x for (_, _, group), known in errors.items() if group == "fitted" for x in known]
    assert max(map(abs, fitted)) < 0.025


def test_a_newer_kernels_times_replace_older_ones(benchmark):
    """Hopper's fused pass: calls of docs/hopper.md, less the row-wise kernels beside it."""
    seconds = benchmark.measured()
    dense = next(x for x in benchmark.cases("hopper") if x.problem.n_q == 4096)
    p, key = dense.problem, (str(dense), "hopper", "flash2-fused")
    flops = 10 * p.batch * p.heads * p.n_q**2 * p.head_dim
    call = sum(seconds[*key, stage] for stage in ("delta", "fused", "convert"))
    assert f"| 128 | no | 4096 | 670 | 679 | 0.95 | {flops / call / 1e12:.0f} |" in (
        ROOT / "docs" / "hopper.md"
    ).read_text(encoding="utf-8")
    others = [x for x in benchmark.cases("hopper") if benchmark.group_of(x) == "others"]
    assert len(others) == 4
    assert all((str(x), "hopper", "flash2-fused", "fused") not in seconds for x in others)
