"""benchmarks/limits.py without a GPU: what it measures first, and what it has when it stops."""

import csv
import sys

import pytest
from repository import recorded, script

SHAPE = ("head_dim", "seq_len", "causal", "batch", "window", "heads", "kv_heads")
#: Passes that are behind, the worst last: backward of N = 8, 16 and 32.
BEHIND = {8: 0.9, 16: 0.8, 32: 0.7}


@pytest.fixture
def limits():
    return script("limits")


@pytest.fixture
def bench(limits, tmp_path, monkeypatch):
    """With tables of its own, and a profiler that says what it was asked for."""
    with (tmp_path / "gpu-papers-h200.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow((*SHAPE, "implementation", "forward_ms", "backward_ms"))
        for n, ratio in BEHIND.items():
            shape = 64, n, True, 1, 0, 4, 2
            writer.writerow((*shape, "flashsim cupy", 1.0, 1.0))
            writer.writerow((*shape, "torch cudnn", 2.0, 1.5))
            writer.writerow((*shape, "flash-attn cute", 3.0, ratio))
    monkeypatch.setattr(limits.speed_tables, "DATA", tmp_path)
    monkeypatch.setattr(limits.nsight, "tool", lambda: "ncu")
    monkeypatch.setattr(limits.nsight, "profile", profiler(limits))
    monkeypatch.setattr(limits, "compile_all", lambda runs, jobs: limits.compiled.append(len(runs)))
    monkeypatch.setenv(limits.CUTE_CACHE, "1")  # as main leaves it
    limits.compiled, limits.asked, limits.file = [], [], tmp_path / "limits.csv"
    return limits


def profiler(limits, *, stops_after=99, fails_at=None):
    def profile(*how, launch):
        limits.asked.append(launch)
        if len(limits.asked) > stops_after:
            raise KeyboardInterrupt
        if len(limits.asked) == fails_at:
            return "==ERROR== out of memory"
        return table(*(("main",) for _ in launch.split(",")))

    return profile


def table(*runs):
    """As ncu prints it: kernels of some runs, each a microsecond."""
    columns = (
        '"ID","Kernel Name","gpu__time_duration.sum","sm__x.avg.pct_of_peak_sustained_elapsed"'
    )
    lines = ["left out: nothing", "==PROF== x", columns, '"","","ns","%"']
    for names in runs:
        lines += [f'"0","{name}","1,000","50"' for name in ("spin_kernel", *names)]
    return "\n".join(lines)


def run(bench, monkeypatch, *options):
    monkeypatch.setattr(sys, "argv", ["limits.py", "--sets", "papers", "--each", "1", *options])
    bench.main()


def kept(bench):
    """N of the rows in the file."""
    found = recorded(bench.file)
    assert all(row["us"] == "1.0" and row["sm__x"] == "50" for row in found)
    return [(int(row["n"]), row["implementation"]) for row in found]


def both(*lengths):
    return [(n, who) for n in lengths for who in ("flashsim cupy", "flash-attn cute")]


def test_kernels_are_told_apart_by_run(limits):
    found = limits.kernels(table(("delta", "main, wide"), ("main",)))
    assert [[one["Kernel Name"] for one in run] for run in found] == [
        ["delta", "main, wide"],
        ["main"],
    ]
    with pytest.raises(SystemExit, match="no Nsight Compute table"):
        limits.kernels("==ERROR== permission")


def test_the_worst_come_first(bench):
    pairs = bench.behind(["papers"], 1.0)
    assert [ours.shape.n for ours, _ in pairs] == [32, 16, 8]
    assert {(x.direction, x.implementation) for pair in pairs for x in pair} == {
        ("backward", "flashsim cupy"),
        ("backward", "flash-attn cute"),
    }
    assert [ours.shape.n for ours, _ in bench.behind(["papers"], 0.8)] == [32]


def test_a_process_has_few_passes_and_its_rows_are_written_when_it_ends(bench, monkeypatch):
    monkeypatch.setattr(bench.nsight, "profile", profiler(bench, stops_after=2))
    with pytest.raises(KeyboardInterrupt):
        run(bench, monkeypatch, "--csv", str(bench.file))
    assert bench.asked == ["0,1", "2,3", "4,5"]
    assert kept(bench) == both(32, 16)


def test_what_the_file_has_is_not_measured_again(bench, monkeypatch):
    run(bench, monkeypatch, "--csv", str(bench.file), "--rows", "2")
    run(bench, monkeypatch, "--csv", str(bench.file))
    assert bench.asked == ["0,1", "2,3", "4,5"]
    assert bench.compiled == [4, 2]
    assert kept(bench) == both(32, 16, 8)


def test_no_process_begins_that_would_end_too_late(bench, monkeypatch, capsys):
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr(bench.time, "monotonic", lambda: next(clock))
    run(bench, monkeypatch, "--csv", str(bench.file), "--seconds", "45")
    assert kept(bench) == both(32)
    said = capsys.readouterr().err
    assert said.count("no time left for") == 4
    assert "N=16 causal, backward, flash-attn cute" in said
    assert "N=32" not in said


def test_a_process_that_fails_is_said_and_the_others_run(bench, monkeypatch, capsys):
    monkeypatch.setattr(bench.nsight, "profile", profiler(bench, fails_at=2))
    with pytest.raises(SystemExit):
        run(bench, monkeypatch, "--csv", str(bench.file))
    assert kept(bench) == both(32, 8)
    assert "failed: d=64 1 x 4 on 2 N=16" in capsys.readouterr().err


def test_without_a_file_rows_are_printed(bench, monkeypatch, capsys):
    run(bench, monkeypatch, "--rows", "1")
    assert capsys.readouterr().out.count("main") == 2


def test_other_counters_than_the_files_are_an_error(bench):
    bench.file.write_text("kernel,us\n")
    with pytest.raises(ValueError, match="sm__x"):
        bench.Table(bench.file).write([{"kernel": "main", "us": 1.0, "sm__x": "50"}])


def test_the_profiled_program_is_told_which_runs(limits, monkeypatch):
    """And nothing where a benchmark's flag takes none."""
    monkeypatch.setattr(limits.nsight, "tool", lambda: "ncu")
    monkeypatch.setattr(sys, "argv", ["x.py", "--rows", "2"])
    commands = []

    def done(command, **options):
        commands.append(command)
        return limits.nsight.subprocess.CompletedProcess(command, 0, "out", "err")

    monkeypatch.setattr(limits.nsight.subprocess, "run", done)
    assert limits.nsight.profile("--page", "raw", launch="0,3") == "errout"
    limits.nsight.profile()
    assert commands[0][-5:] == ["x.py", "--rows", "2", "--launch", "0,3"]
    assert commands[1][-4:] == ["x.py", "--rows", "2", "--launch"]
