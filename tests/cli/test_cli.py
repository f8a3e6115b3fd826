"""The command line: the library's figures as tables, JSON and CSV, and one clear line of error."""

import csv
import errno
import io
import json
import subprocess
import sys
import sysconfig
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from commands import found, invoke, ok, refused
from typer.core import TyperCommand

import flashsim
from flashsim import Problem, Tiling, Trace
from flashsim.cli import attention
from flashsim.cli import output as cli_output
from flashsim.cli import pictures as cli_pictures
from flashsim.cli.app import COMMANDS, MOVED, RENAMED, SCREEN
from flashsim.problem import hardware
from flashsim.studies import demo

pytestmark = pytest.mark.promise("command line equals library")

T64 = Tiling(64, 64)
ALGORITHMS = ("standard", "flash1", "flash2")


def records(*arguments):
    """The rows a command prints, from its JSON; its CSV must say the same."""
    rows = json.loads(ok(*arguments, "--json"))
    text = csv.DictReader(io.StringIO(ok(*arguments, "--csv")))
    assert [list(row.values()) for row in text] == [
        ["" if x is None else str(x) for x in row.values()] for row in rows
    ]
    return rows


def figure(rows, quantity, of, direction="forward"):
    found = [
        row["value"]
        for row in rows
        if (row["quantity"], row["of"], row["direction"]) == (quantity, of, direction)
    ]
    assert len(found) == 1, (quantity, of, direction)
    return found[0]


def same_figures(rows, source):
    direction = source.direction
    for tensor, ops in source.by_tensor().items():
        for op, nbytes in ops.items():
            if nbytes:
                assert figure(rows, op, tensor, direction) == nbytes
    assert figure(rows, "requested", "all tensors", direction) == source.bytes()
    assert figure(rows, "load", "all tensors", direction) == source.bytes("load")
    assert figure(rows, "compulsory", "all tensors", direction) == source.compulsory()
    assert figure(rows, "flops", "matmul", direction) == source.flops("matmul")
    assert figure(rows, "flops", "all kinds", direction) == source.flops()
    assert figure(rows, "intensity", None, direction) == source.intensity()
    assert figure(rows, "on chip", "write", direction) == source.on_chip("write")
    assert figure(rows, "peak SRAM", "one block", direction) == source.peak_sram()


SIZES = (
    *("--n-q", 100, "--n-kv", 120, "--head-dim", 16, "--head-dim-v", 8),
    *("--batch", 2, "--heads", 4, "--kv-heads", 2, "--dtype", "float16"),
)
PROBLEM = Problem(
    n_q=100, n_kv=120, head_dim=16, head_dim_v=8, batch=2, heads=4, kv_heads=2, dtype="float16"
)
OPTIONS = (
    *("--causal", "--window", "30:-1", "--softcap", 5, "--algorithm", "flash1", "--backward"),
    *("--tiling", "32x16", "--backward-tiling", "16x32", "--device", "t4", "--sram", 40_000),
    *("--key-order", "descending"),
)


# -- run, count, compare --------------------------------------------------------------------------


def every_command(entries=COMMANDS, before=""):
    for name, (_, where) in entries.items():
        if isinstance(where, str):
            yield before + name
        else:
            yield from every_command(where, f"{before}{name} ")


def test_help_fits_a_screen():
    assert len(COMMANDS) == 17
    for group in ("", *(name for name, (_, where) in COMMANDS.items() if isinstance(where, dict))):
        lines = ok(group, "--help").splitlines()
        assert len(lines) <= (27 if not group else SCREEN[0]), group
        assert max(map(len, lines)) <= 80, group
        assert not any(line.startswith(" " * 6) for line in lines), group  # each on one line


@pytest.mark.parametrize("command", [*every_command()])
def test_a_commands_help_fits_a_screen_and_loses_nothing(command):
    short, full = (ok(command, word) for word in ("--help", "--help-all"))
    assert SCREEN == (40, 80)
    assert len(short.splitlines()) <= SCREEN[0]
    assert max(map(len, full.splitlines() + short.splitlines())) <= SCREEN[1]
    assert ("--help-all" in short) == (short != full)
    told, text = short.split(), " ".join(full.split())
    whole = text.replace("- ", "-")  # textwrap breaks after hyphens
    for parameter in found(command.split())[0].params:
        if getattr(parameter, "hidden", False):
            continue
        names = [name for name in parameter.opts if name.startswith("--")] or [parameter.name]
        assert any(word.strip(",.") in names for word in told), names
        assert " ".join((parameter.help or "").split()).replace("- ", "-") in whole, names
    about = " ".join(found(command.split())[0].help.split())
    assert about.replace("- ", "-") in whole


def test_help_all_of_another_program_is_not_ours(tmp_path):
    script = tmp_path / "program.py"
    script.write_text("import sys; print(sys.argv[1:])")
    assert "--help-all" in _words(found(["watch"])[0], [str(script), "--", "--help-all"])
    assert "--help-all" in _words(found(["watch"])[0], [str(script), "--help-all"])
    assert "--help-all" not in _words(found(["watch"])[0], ["--help-all"])


def _words(command, words):
    """What a command's parser is given, after its own `parse_args`."""
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TyperCommand, "parse_args", lambda self, ctx, args: seen.extend(args))
        command.parse_args(None, words)
    return seen


def test_help_shows_no_value_that_a_flag_would_take():
    for command in every_command():
        text = ok(command, "--help")
        assert "--help" in text
        assert "bool" not in text, command


def test_an_option_has_one_meaning():
    """A flag in one command takes no value in another, and a short name stands for one option."""
    flags, shorts = {}, {}
    for command in every_command():
        for option in found(command.split())[0].params:
            long, *short = option.opts
            if long.startswith("-"):
                assert flags.setdefault(long, option.is_flag) == option.is_flag, (command, long)
                for name in short:
                    assert shorts.setdefault(name, long) == long, (command, name)
    assert len(flags) > 80
    assert flags["--causal"]
    assert set(RENAMED) & set(flags) == {"--backward", "--limit"}  # the second of `trace show`


@pytest.mark.parametrize("old", MOVED)
def test_a_command_keeps_its_old_name_for_a_version(old):
    was, now = invoke(old, "--help"), invoke(MOVED[old], "--help")
    assert (was.exit_code, was.stdout) == (0, now.stdout)
    assert f"`flashsim {old}` is now `flashsim {MOVED[old]}`" in was.stderr
    assert now.stderr == ""


def test_old_names_leave_what_programs_read_alone():
    was = invoke("dram", "-n", 64, "-t", "16x16", "--backward", "--json")
    now = invoke("study dram", "-n", 64, "-t", "16x16", "--direction=backward", "--json")
    assert json.loads(was.stdout) == json.loads(now.stdout)
    assert "`--backward` is now `--direction backward`" in was.stderr
    assert "`--algorithms` is now `--algorithm`" in invoke("compare", "--algorithms=x").stderr


def test_an_unknown_command_is_told_what_there_is():
    assert "no command 'coun'; choose from run, " in invoke("coun").stderr
    assert "did you mean 'ladder'" in invoke("study lader").stderr


def test_a_sweep_is_causal_by_the_same_flag():
    words = ("sweep", "-n", 64, "-t", "16x16")
    assert records(*words, "--causal") == records(*words, "--mask", "causal")
    assert (
        records(*words, "--causal") == flashsim.sweep([64], tiling=Tiling(16, 16), causal=True).rows
    )


def test_run_executes_what_it_is_told(tmp_path):
    output = tmp_path / "new" / "results"

    rows = records("run", *SIZES, *OPTIONS, "--seed", 3, "--scale", 0.2, "--out", output)

    q, k, v, dout = flashsim.random_inputs(PROBLEM, seed=3)
    result = flashsim.run(
        *(q, k, v),
        algorithm="flash1",
        causal=True,
        window=(30, -1),
        softcap=5.0,
        scale=0.2,
        tiling=Tiling(32, 16),
        device=flashsim.Device.get("T4").with_sram(40_000),
        key_order="descending",
        trace=True,
    )
    same_figures(rows, result.trace)
    assert {row["tile"] for row in rows} == {"32 x 16", "16 x 32"}
    with np.load(output) as stored:
        np.testing.assert_array_equal(stored["out"], result.out)
        np.testing.assert_array_equal(stored["lse"], result.lse)
        gradients = result.backward(dout, tiling=Tiling(16, 32))
        for name in ("dq", "dk", "dv"):
            np.testing.assert_array_equal(stored[name], getattr(gradients, name))
    same_figures(rows, gradients.trace)


def test_count_predicts_the_same_figures():
    assert records("count", *SIZES, *OPTIONS) == records("run", *SIZES, *OPTIONS)


def test_people_get_tables():
    text = ok("run", "-n", 64, "-d", 16, "--backward")

    assert "flash2 forward (simulator): 1 x 1 heads, 64 x 64, d=16" in " ".join(text.split())
    assert "flash2 backward in three passes (simulator)" in " ".join(text.split())
    assert "compulsory" in text
    assert "closed form" in ok("count", "-n", 64)


def test_count_takes_a_million_tokens_and_a_kernels_tiling():
    rows = records("count", "-n", 2**20, "-d", 128, "--causal", "-t", "fa2-forward")

    problem = Problem(n_q=2**20, head_dim=128, causal=True)
    tiling = Tiling.preset("fa2-forward", 128, causal=True)
    same_figures(rows, flashsim.count(problem, tiling=tiling))


def test_run_reads_a_file(tmp_path):
    file = tmp_path / "mine.npz"
    q, k, v, dout = np.random.default_rng(5).standard_normal((4, 3, 40, 8)).astype(np.float32)
    np.savez(file, q=q, k=k, v=v, dout=dout)

    ok("run", "--input", file, "--backward", "--out", tmp_path / "out.npz")

    result = flashsim.run(q, k, v)
    with np.load(tmp_path / "out.npz") as stored:
        np.testing.assert_array_equal(stored["out"], result.out)
        np.testing.assert_array_equal(stored["dq"], result.backward(dout).dq)


def test_a_file_without_dout_gets_a_random_one(tmp_path):
    q, k, v = np.random.default_rng(5).standard_normal((3, 3, 40, 8)).astype(np.float32)
    np.savez(tmp_path / "mine.npz", q=q, k=k, v=v)
    run = ("run", "--input", tmp_path / "mine.npz", "--out", tmp_path / "out.npz")

    ok(*run)
    with np.load(tmp_path / "out.npz") as stored:
        assert set(stored) == {"out", "lse"}
    gradients = []
    for seed in (1, 1, 2):
        ok(*run, "--backward", "--seed", seed)
        with np.load(tmp_path / "out.npz") as stored:
            gradients.append(stored["dq"])

    np.testing.assert_array_equal(gradients[0], gradients[1])
    assert (gradients[0] != gradients[2]).all()


def test_run_on_the_bundled_tensors_is_held_against_the_model():
    rows = records("run", "--demo-data", "layer0")

    sample = flashsim.load_sample("layer0")
    out = flashsim.run(*sample[:3]).out
    expected = np.abs(out.astype(np.float64) - sample.out).max()
    assert figure(rows, "difference from the model", "largest of out") == expected
    text = " ".join(ok("run", "--demo-data", "layer0").split())
    assert f"largest difference from the model's output {expected:.2e}" in text


def test_compare_prints_the_comparison():
    words = ("compare", *SIZES, "--algorithm", "flash2, flash1", "-t", "32x16", "--backward")
    rows = records(*words, "--backward-tiling", "32x16", "--execute")

    q, k, v, dout = flashsim.random_inputs(PROBLEM)
    comparison = flashsim.compare(
        q, k, v, algorithms=["flash2", "flash1"], tiling=Tiling(32, 16), dout=dout,
        backward_tiling=Tiling(32, 16),
    )  # fmt: skip
    assert rows == comparison.table().records()
    counted = records(*words, "--backward-tiling", "32x16")
    assert counted == [{k: x for k, x in row.items() if k != "max |diff|"} for row in rows]
    assert "x compulsory" in ok("compare", "-n", 64, "-d", 16)


def test_compare_counts_what_no_machine_could_run():
    text = ok("compare", "-n", 1 << 20, "--heads", 32, "-a", "flash1,flash2")
    assert "counted by formula; --execute simulates" in text
    assert "tiles of 64 x 64 in every row" in text


@pytest.mark.parametrize("execute", [(), ("--execute",)])
def test_comparisons_have_one_tile_unless_told_otherwise(execute):
    words = ("compare", "-n", 128, "-d", 256, "--backward", *execute)
    same = records(*words)
    assert len({row["tile"] for row in same}) == 1
    fit = records(*words, "--tiling", "fit", "--backward-tiling", "fit")
    assert len({row["tile"] for row in fit}) > 1
    q, k, v, dout = flashsim.random_inputs(Problem(128, head_dim=256))
    tiles = [str(t.tiling) for t in flashsim.compare(q, k, v, dout=dout).traces]
    assert tiles == [row["tile"] for row in same]
    own = [t.tiling for t in flashsim.compare(q, k, v, tiling="fit").traces]
    assert own == [Tiling.fit(Problem(128, head_dim=256), "H100", a) for a in ALGORITHMS]


# -- sweep, devices, traces -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "axes"),
    [
        (
            "-n 64,128 --mask full,causal --batch 1,2 --window none,8:0",
            {"n": [64, 128], "causal": [False, True], "batch": [1, 2], "window": [None, (8, 0)]},
        ),
        (
            "-n 64 --algorithm flash1,flash2 --direction forward,backward --sram 10000,60000",
            {
                **{"n": 64, "algorithm": ["flash1", "flash2"]},
                **{"direction": ["forward", "backward"], "sram_bytes": [10_000, 60_000]},
            },
        ),
        (
            "-n 64 --tiling 32x32,8x8 --device A100,T4",
            {"n": 64, "tiling": [Tiling(32, 32), Tiling(8, 8)], "device": ["A100", "T4"]},
        ),
    ],
)
def test_sweep_takes_lists_and_writes_a_file(words, axes, tmp_path):
    words += " --head-dim 16 --heads 4 --kv-heads 2 --dtype float16"
    rows = records("sweep", *words.split(), "--out", tmp_path / "rows.csv")
    result = flashsim.sweep(head_dim=16, heads=4, kv_heads=2, dtype="float16", **axes)
    assert rows == result.rows
    assert (tmp_path / "rows.csv").read_text() == result.csv()


def test_sweep_takes_both_directions_and_simulates_in_processes():
    both = records("sweep", "-n", "64", "--direction", "both")
    assert both == records("sweep", "-n", "64", "--direction", "forward,backward")
    assert len(both) == 2
    rows = records("sweep", "-n", "64,96", "--method", "run", "--workers", "1")
    assert rows == flashsim.sweep([64, 96], method="run").rows


def test_a_sweep_starts_no_more_workers_than_it_has_points(monkeypatch):
    started = []

    def pool(workers, **_):
        started.append(workers)
        return nullcontext()

    monkeypatch.setattr(attention, "ProcessPoolExecutor", pool)
    ok("sweep", "-n", "64,96", "--workers", 200)
    assert started == [2]
    assert "256" in refused("sweep", "-n", "64", "--workers", 10**30)
    assert started == [2]


def test_sweep_prints_what_varies():
    text = ok("sweep", "-n", "64,128", "-t", "16x16")

    assert "tiling 16 x 16" in text
    assert "n_q" in text


def test_devices_lists_the_presets():
    rows = records("study devices")

    assert [row["name"] for row in rows] == list(hardware.PRESETS)
    a100 = flashsim.Device.get("A100")
    row = next(row for row in rows if row["name"] == "A100")
    assert row["SRAM B/block"] == a100.sram_bytes
    assert row["HBM GB/s"] == a100.hbm_bandwidth / 1e9
    assert row["float16 TFLOP/s"] == a100.peak("float16") / 1e12
    assert row["source"] == a100.source
    assert "H100" in ok("study devices")


def test_ring_shows_ranks_and_draws_them(tmp_path):
    words = ("study ring", "-n", 512, "--heads", 2, "--kv-heads", 2, "--ranks", 2, "--causal")
    rows = records(*words)
    assert [row["rows"] for row in rows] == ["0:128 384:512", "128:384"]
    assert "communication prolongs the pass by" in ok(*words)
    page = tmp_path / "ring.html"
    assert f"animation in {page}" in invoke(*words, "-o", page).stderr
    assert "Zigzag: 2 GPUs" in page.read_text()


def test_a_trace_is_saved_and_shown(tmp_path):
    file = tmp_path / "new" / "trace.npz"
    result = invoke("run", "-n", 64, "-d", 16, "-t", "32x32", "--backward", "--save", file)
    assert result.exit_code == 0
    assert f"trace in {file}" in result.stderr

    trace = Trace.load(file)
    assert trace.direction == "forward"
    assert Trace.load(tmp_path / "new" / "trace-backward.npz").direction == "backward"
    same_figures(records("trace", "show", file), trace)
    assert "flash2 forward" in ok("trace", "show", file)
    ok("trace", "perfetto", file, "--out", tmp_path / "new" / "walk.json")
    written = json.loads((tmp_path / "new" / "walk.json").read_text())["traceEvents"]
    assert sum("visit (" in event["name"] for event in written) == trace.n_visits
    assert "flash2 forward (cupy)" in ok("trace", "show", "h200-forward")  # a bundled one
    events = records("trace", "show", file, "--events", "--limit", 7)
    assert len(events) == 7
    assert events[0] == {
        **{"stage": "forward", "op": "load", "tensor": "Q", "level": "hbm"},
        **{"head": 0, "i": 0, "j": -1, "visit": -1, "bytes": 32 * 16 * 4},
    }
    assert sum(e["bytes"] for e in records("trace", "show", file, "--events") if e["op"] == "load")
    whole = ok("trace", "show", file, "--events", "--limit", 10**6)
    assert f"{trace.n_events:,} events, all" in whole


# -- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["text", "array", "missing", "pickle"])
def test_a_file_that_does_not_serve_is_refused(kind, tmp_path):
    file = tmp_path / "bad.npz"
    if kind == "text":
        file.write_text("q, k, v")
    elif kind == "array":
        with file.open("wb") as stream:
            np.save(stream, np.zeros(3))
    elif kind == "missing":
        np.savez(file, q=np.zeros((4, 4)), key=np.zeros((4, 4)))
    else:
        np.savez(file, q=np.array([{}], dtype=object))

    expected = "add k, v" if kind == "missing" else "is not an .npz file of plain arrays"
    assert expected in refused("run", "--input", file)


# -- demo -----------------------------------------------------------------------------------------


def test_demo_compares_checks_and_saves(tmp_path, monkeypatch):
    animate = flashsim.viz.animate  # of fewer frames: their drawing is tests/viz's
    few = lambda *given, **more: animate(*given, **more | {"max_frames": 9})  # noqa: E731
    monkeypatch.setattr(flashsim.viz, "animate", few)
    result = invoke("study demo", "--out", tmp_path / "out")

    assert result.exit_code == 0, result.output
    for name in flashsim.api.samples.SAMPLES:
        for direction in ("forward", "backward"):
            file = tmp_path / "out" / f"{name}-flash2-{direction}.npz"
            assert f"wrote {file}" in result.stderr
            assert Trace.load(file).direction == direction
    *lines, one, two = result.stdout.splitlines()
    assert sum(line.startswith("FlashAttention-2 ") for line in lines) == 2  # one table
    sample = flashsim.load_sample("layer0")
    problem = Problem(512, head_dim=32, heads=12, dtype="float16")
    few, many = (flashsim.count(problem, algorithm=a, tiling=T64) for a in ("flash2", "standard"))
    assert sample.q.shape == (12, 512, 32)
    assert f"{one} {two}" == (
        f"FlashAttention-2 moves {many.bytes() / few.bytes():.1f} times fewer bytes between HBM "
        "and the chip than standard attention; the output is the same."
    )


def test_demo_fails_where_the_output_is_not_the_models(tmp_path, monkeypatch):
    real = flashsim.load_sample

    def off(name):
        sample = real(name)
        return sample._replace(out=sample.out + np.float32(0.01))

    monkeypatch.setattr(demo, "SAMPLES", ["layer5"])
    monkeypatch.setattr(demo, "load_sample", off)
    monkeypatch.setattr(cli_pictures, "demo_figures", lambda *_: ["a", "b", "c"])

    result = invoke("study demo", "--out", tmp_path)

    assert result.exit_code == 1
    assert "differs from the model's" in result.stderr


# -- the terminal, the process --------------------------------------------------------------------


def test_a_spinner_on_a_terminal_only(monkeypatch, capfd):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as CI sets it; it makes no terminal of a log file
    with cli_output.working("thinking"):
        pass
    assert capfd.readouterr() == ("", "")
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)

    with cli_output.working("thinking"):
        pass

    assert "thinking" in terminal.getvalue()


@pytest.mark.parametrize("option", ["--version", "--help"])
def test_a_version_and_a_list_of_commands_need_no_numpy(option):
    code = (
        "import sys\nfrom flashsim.cli import main\n"
        f"sys.argv = ['flashsim', {option!r}]\ntry:\n main()\nexcept SystemExit: pass\n"
        "print([x for x in ('numpy', 'rich', 'flashsim.cli.options') if x in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_installed_command_runs_and_fails_cleanly():
    command = Path(sysconfig.get_path("scripts")) / "flashsim"
    call = lambda *a: subprocess.run([command, *a], capture_output=True, text=True)  # noqa: E731

    good = call("count", "-n", "128", "--json")
    bad = call("count", "-n", "128", "--device", "abacus")

    assert (good.returncode, good.stderr) == (0, "")
    same_figures(json.loads(good.stdout), flashsim.count(Problem(n_q=128)))
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr.startswith("flashsim: unknown device 'abacus'")
    assert "Traceback" not in bad.stderr


def test_a_broken_pipe_is_left_to_click(monkeypatch):
    def broken(*_):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(cli_output, "show", broken)

    result = invoke("study devices")

    assert "flashsim:" not in result.output


def test_fp8_is_scaled_run_and_counted():
    sizes = ("-n", 96, "-d", 16, "--dtype", "float8_e5m2", "--scales", "32x48", "-t", "32x48")
    ran, counted = (records(name, *sizes) for name in ("run", "count"))
    assert figure(ran, "load", "Q_scale") == figure(counted, "load", "Q_scale") == 3 * 4
    assert figure(ran, "load", "K") == figure(counted, "load", "K") == 3 * 96 * 16
    turned = records("run", "-n", 64, "-d", 16, "--scales", "head", "--rotate", "--backward")
    assert figure(turned, "store", "dQ", "backward") == 64 * 16 * 2
    for words, text in (
        (("--scales", "row"), "--scales must be tensor, head or QUERIESxKEYS"),
        (("--rotate",), "so it needs --scales"),
        (("--scales", "head", "--dtype", "float16"), "unknown FP8 dtype 'float16'"),
    ):
        assert text in " ".join(refused("run", "-n", 64, *words).split())
