"""`flashsim verify`: reading Nsight Compute's CSV and setting it against predictions."""

import csv
import io
import json
import stat
import sys

import pytest
from typer.testing import CliRunner

import flashsim
from flashsim import BackendUnavailable, Problem, Tiling, TraceError
from flashsim.cli import app
from flashsim.verify import METRICS, Launch, command, parse, verify, workload
from flashsim.verify.measure import measure

PROBLEM = Problem(256, head_dim=32, heads=2, dtype="bfloat16", causal=True)
HEADER = ["ID", "Process ID", "Kernel Name", "Grid Size", "Section Name"]


def predictions(algorithm="flash2"):
    return [
        flashsim.count(PROBLEM, algorithm=algorithm, direction=d, tiling=Tiling(64, 64))
        for d in ("forward", "backward")
    ]


def table(rows):
    text = io.StringIO()
    csv.writer(text, quoting=csv.QUOTE_ALL).writerows(rows)
    return text.getvalue()


def long_csv(launches):
    """One counter a row, as `ncu --csv` prints it: ``{kernel: {counter: (text, unit)}}``."""
    rows = [[*HEADER, "Metric Name", "Metric Unit", "Metric Value"]]
    for number, (kernel, counters) in enumerate(launches):
        for counter, (text, unit) in counters.items():
            rows.append([number, 77, kernel, "(4, 2, 1)", "Command line", counter, unit, text])
    return "==PROF== Connected to process 77\nprinted by the program\n" + table(rows)


READ, DRAM = METRICS["requested read"], METRICS["DRAM read"]


def test_one_counter_a_row():
    text = long_csv(
        [
            ("flash_forward", {READ: ("1,234", "sector"), DRAM: ("2.5", "Mbyte")}),
            ("flash_dq", {READ: ("7", "Ksector"), "some__other.sum": ("1", "weird")}),
        ]
    )
    launches = parse(text)
    assert launches[0] == Launch(
        "flash_forward", 0, {"requested read": 1234 * 32, "DRAM read": 2_500_000}
    )
    assert launches[1] == Launch("flash_dq", 1, {"requested read": 7000 * 32})


def test_one_launch_a_row():
    header = [*HEADER, READ, DRAM]
    units = ["", "", "", "", "", "sector", "Kbyte"]
    text = "==PROF== Disconnected\n" + table(
        [header, units, [0, 77, "flash_forward", "(4, 2, 1)", "", "10", "1.5"]]
    )
    assert parse(text) == [Launch("flash_forward", 0, {"requested read": 320, "DRAM read": 1500})]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no table here\n", "no table of Nsight Compute found"),
        (table([["ID", "Metric Name"], ["0", "x"]]), "no column 'Kernel Name'"),
        (table([["ID", "Kernel Name", "Metric Name"]]), "no column 'Metric Unit'"),
        (table([["ID", "Kernel Name", READ], ["", "", "sector"]]), "none of the counters"),
        (table([["ID", "Kernel Name", READ], ["", "", ""], ["x", "k", "1"]]), "got 'x'"),
        (long_csv([("flash_dq", {"other": ("1", "")})]), "none of the counters"),
        (long_csv([("flash_dq", {READ: ("n/a", "sector")})]), "is 'n/a', not a number"),
        (long_csv([("flash_dq", {DRAM: ("1", "furlong")})]), "is in 'furlong'"),
        (long_csv([("flash_dq", {READ: ("1", "sector")})])[:-16], "was the file cut off"),
    ],
)
def test_bad_tables_are_refused(text, message):
    with pytest.raises(TraceError, match=message):
        parse(text)


def measured(traffic, prefix="flash_", rename=None, factor=1.0):
    """Launches whose L2 counters are the prediction times a factor."""
    ops = {"requested read": "load", "requested write": "store", "requested reduce": "reduce"}
    return [
        Launch(
            prefix + (rename or {}).get(stage.name, stage.name) + "(Args)",
            number,
            {
                quantity: factor
                * sum(n for (s, o, _), n in traffic.transfers.items() if (s, o) == (stage.name, op))
                for quantity, op in ops.items()
            },
        )
        for number, stage in enumerate(traffic.stages)
    ]


@pytest.mark.parametrize("algorithm", ["flash2", "flash2-fused"])
def test_counters_meet_their_predictions_kernel_by_kernel(algorithm):
    forward, backward = predictions(algorithm)
    rename = {"fused": "dkdv"}
    launches = [*measured(forward), *measured(backward, rename=rename)]
    launches += measured(backward, prefix="hopper_", rename={"fused": "backward"}, factor=1.02)
    found = verify([forward, backward], launches)
    assert found.worst("requested read") == pytest.approx(0.01)  # the mean of 1 and 1.02
    assert {row.kernel for row in found.rows} == {
        s.name for t in (forward, backward) for s in t.stages
    }
    ratios = [row.ratio for row in found.rows if row.kernel == "forward" and row.ratio]
    assert ratios == [1, 1]
    assert "not yet calibrated" in str(found.table().note)


def test_other_kernels_are_left_alone():
    forward, _ = predictions()
    launches = [*measured(forward), Launch("ampere_sgemm", 9, {"requested read": 1.0})]
    assert verify([forward], launches).launches == 1
    with pytest.raises(TraceError, match="none of the kernels measured"):
        verify([forward], launches[1:])
    with pytest.raises(TraceError, match="no kernel has a predicted"):
        verify([forward], launches).worst("DRAM read")


def test_dram_and_plain_counters_have_their_rows():
    forward, _ = predictions()
    counters = {"DRAM read": 3.0, "shared bank conflicts": 5.0}
    rows = {r.quantity: r for r in verify([forward], [Launch("flash_forward", 0, counters)]).rows}
    from flashsim import l2

    assert rows["DRAM read"].predicted == l2.dram(forward).bytes("read")
    assert rows["shared bank conflicts"].predicted is None
    assert rows["shared bank conflicts"].ratio is None


def test_without_ncu_the_error_says_what_to_do(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(BackendUnavailable, match="--from FILE"):
        command(["program"])


WANTED = {
    "problem": {"n_q": 32, "head_dim": 8, "causal": True},
    "tilings": [(16, 16), (16, 16)],
    **{"algorithm": "flash2", "backend": "numpy", "backward": True, "device": "H100"},
}


def stand_in(folder, body):
    """A program called ncu: no profiler, but the same way of being called."""
    path = folder / "ncu"
    path.write_text(f"#!{sys.executable}\nimport sys\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IEXEC)


def test_a_workload_is_run_twice_and_its_table_read(tmp_path, monkeypatch):
    text = long_csv([("flash_forward", {READ: ("10", "sector")})])
    stand_in(
        tmp_path,
        f"assert '--clock-control' in sys.argv and 'flashsim.verify.workload' in sys.argv\n"
        f"print({text!r})",
    )
    monkeypatch.setenv("PATH", str(tmp_path))
    launches, traces, kept = measure(WANTED)
    assert launches == parse(kept) == [Launch("flash_forward", 0, {"requested read": 320})]
    assert [trace.direction for trace in traces] == ["forward", "backward"]
    problem = Problem(32, head_dim=8, causal=True)
    expected = flashsim.count(problem, tiling=Tiling(16, 16))
    assert traces[0].transfers == expected.transfers
    row = verify([t.predicted() for t in traces], launches, traces=traces).rows[0]
    assert row.counted == row.predicted == expected.bytes("load")


@pytest.mark.parametrize("backward", [False, True])
def test_the_workload_counts_only_where_it_is_told_to(tmp_path, backward):
    wanted = json.dumps({**WANTED, "backward": backward})
    workload.main([wanted])
    assert not list(tmp_path.iterdir())
    workload.main([wanted, str(tmp_path)])
    names = ["backward.npz", "forward.npz"] if backward else ["forward.npz"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_the_command_measures_and_keeps_the_table(tmp_path, monkeypatch):
    text = long_csv([("flash_forward", {READ: ("10", "sector")})])
    stand_in(tmp_path, f"print({text!r})")
    monkeypatch.setenv("PATH", str(tmp_path))
    kept = tmp_path / "kept.csv"
    arguments = ["-n", "64", "-d", "8", "--heads", "1", "--batch", "1", "--backend", "numpy"]
    result = CliRunner().invoke(app, ["verify", *arguments, "--save", str(kept), "--json"])
    assert result.exit_code == 0, result.output
    (row,) = json.loads(result.stdout)
    problem = Problem(64, head_dim=8, dtype="bfloat16")
    assert row["predicted"] == row["counted"] == flashsim.count(problem).bytes("load")
    assert row["measured"] == 320
    assert parse(kept.read_text()) == parse(text)


def test_a_profiler_that_fails_is_quoted(tmp_path, monkeypatch):
    stand_in(tmp_path, "print('ERR_NVGPUCTRPERM'); sys.exit(1)")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BackendUnavailable, match="exit code 1: ERR_NVGPUCTRPERM"):
        measure(WANTED)
