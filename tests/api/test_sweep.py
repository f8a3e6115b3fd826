"""Sweeps: every combination once, the figures of `count`, errors as rows, files that resume."""

import concurrent.futures
import csv
import io
import itertools
import json
import multiprocessing
import sys
import time

import pytest
from refusals import refuses

import flashsim
from flashsim import Device, FlashSimError, Problem, Tiling
from flashsim.api import sweep_point as point_module
from flashsim.api.sweep_point import COLUMNS, FIGURES, PARAMETERS

pytestmark = pytest.mark.promise("three counts equal")

sweep_module = sys.modules["flashsim.api.sweep"]  # the package's attribute is the function

SMALL = {"n": [64, 96], "head_dim": [16, 32], "tiling": [Tiling(32, 16), None]}


def without(rows, *names):
    return [{key: value for key, value in row.items() if key not in names} for row in rows]


def lines_of(path):
    return path.read_text().splitlines()


# -- points and figures ---------------------------------------------------------------------------


def test_every_combination_once_with_the_figures_of_count():
    axes = {
        "algorithm": ["flash1", "flash2"],
        "direction": ["forward", "backward"],
        "dtype": ["float16", "float32"],
        "causal": [False, True],
        "head_dim": [16, 32],
        "n": [100, 128],
    }
    tiling = Tiling(32, 16)

    rows = flashsim.sweep(**axes, tiling=tiling, heads=4, kv_heads=2, device="A100").rows

    combinations = list(itertools.product(*axes.values()))
    asked = ("algorithm", "direction", "dtype", "causal", "head_dim", "n_q")
    assert [tuple(row[name] for name in asked) for row in rows] == combinations
    for row in rows:
        sizes = {name: row[name] for name in ("n_q", "head_dim", "dtype", "causal")}
        how = {name: row[name] for name in ("algorithm", "direction", "device")}
        problem = Problem(**sizes, heads=4, kv_heads=2)
        traffic = flashsim.count(problem, tiling=tiling, **how)
        expected = {
            **{f"{op}_bytes": traffic.bytes(op) for op in ("load", "store", "reduce")},
            **{"status": "ok", "requested_bytes": traffic.bytes(), "flops": traffic.flops()},
            **{"compulsory_bytes": traffic.compulsory(), "intensity": traffic.intensity()},
            **{"matmul_flops": traffic.flops("matmul"), "peak_sram_bytes": traffic.peak_sram()},
            **{"saved_bytes": traffic.saved(), "workspace_bytes": traffic.workspace()},
        }
        assert {name: row[name] for name in expected} == expected


def test_the_simulator_gives_the_same_rows():
    axes = {
        **SMALL,
        "algorithm": ["standard", "flash1", "flash2", "flash2-fused"],
        "direction": ["forward", "backward"],
        "window": (20, 4),
        "softcap": 5.0,
        "heads": 4,
        "kv_heads": 2,
        "dtype": "float16",
    }

    counted = flashsim.sweep(**axes)
    executed = flashsim.sweep(**axes, method="run")

    assert {row["method"] for row in executed} == {"run"}
    assert without(executed, "method") == without(counted, "method")
    assert {row["status"] for row in executed} == {"ok"}


def test_a_tiling_may_be_fitted_or_named():
    rows = flashsim.sweep(
        4096, head_dim=[64, 128], dtype="float16", tiling=["fit", "fa2-forward"], device="A100"
    ).rows

    fit = Tiling.fit(Problem(n_q=4096, head_dim=64, dtype="float16"), "A100")
    preset = Tiling.preset("fa2-forward", 128)
    told = [(row["tiling"], row["block_q"], row["block_k"]) for row in rows]
    assert told[0] == ("fit", fit.block_q, fit.block_k)
    assert told[3] == ("fa2-forward", preset.block_q, preset.block_k)


def test_a_point_that_does_not_fit_gets_its_error_and_stops_nothing():
    result = flashsim.sweep(
        1024, tiling=[Tiling(64, 64), Tiling(512, 512)], sram_bytes=[100_000, None], device="A100"
    )

    assert [row["sram_bytes"] for row in result] == [100_000, 100_000, 166_912, 166_912]
    statuses = [row["status"] for row in result]
    assert statuses[0] == statuses[2] == "ok"
    assert statuses[1].startswith("SramOverflow: in stage 'forward' of flash2 forward, a 512 x 512")
    assert "100,000 B" in statuses[1]
    assert "166,912 B" in statuses[3]
    assert not any("\n" in status for status in statuses)
    failed = result.rows[1]
    assert (failed["block_q"], failed["block_k"]) == (512, 512)
    assert {failed[name] for name in FIGURES[2:]} == {None}


@pytest.mark.parametrize(
    ("axes", "told"),
    [
        ({"heads": [4, 6], "kv_heads": 4}, "ShapeError: the number of query heads must be a multi"),
        ({"softcap": 1e39, "dtype": ["float64", "float32"]}, "OptionError: softcap"),
    ],
)
def test_options_that_contradict_each_other_are_a_status_too(axes, told):
    good, bad = (row["status"] for row in flashsim.sweep(64, **axes))
    assert good == "ok"
    assert bad.startswith(told)


def test_a_tile_that_fits_is_that_of_count_with_packed_heads_too():
    shape = {"n_kv": 3000, "heads": 4, "kv_heads": 1, "dtype": "bfloat16"}
    how = {"algorithm": "flash-decode", "device": "V100"}
    (row,) = flashsim.sweep([100], **shape, **how)
    counted = flashsim.count(flashsim.Problem(100, **shape), **how)
    assert row["status"] == "ok"
    assert Tiling(row["block_q"], row["block_k"]) == counted.tiling
    assert row["requested_bytes"] == counted.bytes()


def test_running_out_of_memory_is_a_status(monkeypatch):
    def exhausted(problem):
        raise MemoryError("Unable to allocate 64.0 TiB")

    monkeypatch.setattr(point_module, "random_inputs", exhausted)

    row = flashsim.sweep(64, method="run").rows[0]

    assert row["status"] == "MemoryError: Unable to allocate 64.0 TiB"


def test_too_many_values_are_refused_before_they_are_listed():
    class Long(list):
        def __len__(self):
            return 10**9

        def __iter__(self):
            pytest.fail("the values were listed")

    for values in (Long(), range(10**30)):
        with pytest.raises(FlashSimError, match="n_q has more than 1,000,000 points"):
            flashsim.sweep(n_q=values)


@pytest.mark.parametrize(
    ("axes", "name", "values"),
    [
        ({"n": range(64, 193, 64)}, "n_q", [64, 128, 192]),  # any iterable
        ({"n": (64, 64, 128), "kv_heads": [None, 1]}, "n_q", [64, 128]),  # the same points
        ({"n_q": [64, 96]}, "n_q", [64, 96]),
        ({"n": 64, "window": (8, 0)}, "window", ["8,0"]),
        ({"n": 64, "window": [(8, 0), None]}, "window", ["8,0", None]),
    ],
)
def test_the_values_of_an_axis(axes, name, values):
    rows = flashsim.sweep(**axes).rows
    assert [row[name] for row in rows] == values
    assert set(rows[0]) == set(COLUMNS)


def swept(n=64, **axes):
    return flashsim.sweep(n=n, **axes)


test_an_axis_no_point_could_have_is_refused = refuses(r"""
swept([]) -> OptionError: n_q has no values
swept(0) -> OptionError: n_q must be at least 1, got 0
swept(64.5) -> DTypeError: n_q must be an integer or a list of integers, got 64.5 (float)
swept(None) -> OptionError: sweep() needs the query lengths; pass n_q=
swept(n_q=64) -> OptionError: n= is another name of n_q=, so sweep() takes only one
swept(algorithm="flsh2") -> OptionError: unknown algorithm 'flsh2' ... did you mean 'flash2'
swept(direction=["forward", "back"])
    -> OptionError: unknown direction 'back'; choose from forward
swept(dtype="float8") -> DTypeError: float8
swept(device="H1000") -> OptionError: unknown device 'H1000' ... did you mean 'H100'
swept(tiling="fa2-foward") -> OptionError: got 'fa2-foward' ... did you mean 'fa2-forward'
swept(tiling=[(64, 64)]) -> OptionError: tiling must hold flashsim.Tiling ... got (64, 64)
swept(key_order="random") -> OptionError: unknown key_order 'random'
swept(causal="yes") -> DTypeError: causal must be True or False
swept(window=(1, 2, 3)) -> DTypeError: window
swept(method="guess") -> OptionError: unknown method 'guess'; choose from count, run
swept(tilings=Tiling(8, 8))
    -> UnknownArgumentError: sweep() has no argument 'tilings' ... did you mean 'tiling'
swept(executor=4)
    -> DTypeError: executor must be a concurrent.futures.Executor, got int ... get_executor
swept(path="missing/rows.csv") -> OptionError: does not exist; create it
swept(path=".") -> OptionError: it is a folder; pass the path of a file
swept(path="/dev/null")
    -> OptionError: /dev/null: it is not a regular file; pass the path
""")


# -- executors ------------------------------------------------------------------------------------


def test_processes_give_the_same_rows(tmp_path):
    device = Device("mine", sram_bytes=60_000, sram_per_sm=60_000)
    axes = {**SMALL, "device": [device, "T4"], "tiling": [Tiling(32, 16), Tiling(512, 512)]}
    context = multiprocessing.get_context("spawn")

    with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as executor:
        result = flashsim.sweep(**axes, executor=executor, path=tmp_path / "rows.csv")

    assert result.rows == flashsim.sweep(**axes).rows
    assert len(lines_of(tmp_path / "rows.csv")) == 1 + len(result)


def test_a_dask_cluster_gives_the_same_rows(tmp_path):
    distributed = pytest.importorskip("distributed")
    cluster = distributed.LocalCluster(
        n_workers=1, threads_per_worker=1, processes=False, dashboard_address=None
    )
    with cluster, distributed.Client(cluster) as client:
        with pytest.raises(FlashSimError, match="for a Dask client, pass"):
            flashsim.sweep(64, executor=client)
        with client.get_executor() as executor:
            result = flashsim.sweep(**SMALL, executor=executor, path=tmp_path / "rows.csv")

    assert result.rows == flashsim.sweep(**SMALL).rows


def test_a_worker_that_dies_leaves_the_rows_so_far_and_cancels_the_rest(tmp_path, monkeypatch):
    path = tmp_path / "rows.csv"
    measure = point_module.measure
    begun = []

    def failing(point):
        begun.append(point)
        if len(begun) == 3:
            raise RuntimeError("the machine is on fire")
        if len(begun) > 3:
            time.sleep(0.02)  # let the failure be noticed while most points still wait
        return measure(point)

    monkeypatch.setattr(sweep_module, "measure", failing)
    lengths = list(range(64, 64 + 200))
    with (
        concurrent.futures.ThreadPoolExecutor(1) as executor,
        pytest.raises(RuntimeError, match="on fire"),
    ):
        flashsim.sweep(lengths, executor=executor, path=path, tiling=Tiling(16, 16))

    assert len(begun) < len(lengths)
    done = {int(line.split(",")[PARAMETERS.index("n_q")]) for line in lines_of(path)[1:]}
    assert done == {point.n_q for point in begun} - {begun[2].n_q}
    monkeypatch.setattr(sweep_module, "measure", measure)
    assert len(flashsim.sweep(lengths, path=path, tiling=Tiling(16, 16))) == len(lengths)


# -- files ----------------------------------------------------------------------------------------


def stop_after(monkeypatch, count):
    """Let `measure` be interrupted when `count` points are done; count the calls."""
    calls = []

    def measure(point):
        if len(calls) == count:
            raise KeyboardInterrupt
        calls.append(point)
        return point_module.measure(point)

    monkeypatch.setattr(sweep_module, "measure", measure)
    return calls


def test_rows_are_on_disk_as_they_come_and_an_interrupted_sweep_resumes(tmp_path, monkeypatch):
    path = tmp_path / "rows.csv"
    whole = flashsim.sweep(**SMALL).rows
    stop_after(monkeypatch, 3)
    with pytest.raises(KeyboardInterrupt):
        flashsim.sweep(**SMALL, path=path)
    assert len(lines_of(path)) == 1 + 3

    calls = stop_after(monkeypatch, 100)
    resumed = flashsim.sweep(**SMALL, path=path)

    assert len(calls) == len(whole) - 3
    assert resumed.rows == whole
    stop_after(monkeypatch, 0)  # everything is in the file: nothing is run, values keep their types
    again = flashsim.sweep(**SMALL, path=path)
    assert again.rows == whole
    assert [[type(x) for x in row.values()] for row in again] == [
        [type(x) for x in row.values()] for row in whole
    ]


def test_errors_and_odd_text_survive_the_file(tmp_path, monkeypatch):
    path = tmp_path / "rows.csv"
    device = Device('a "small" chip, mine', sram_bytes=9_999, sram_per_sm=9_999)
    axes = {"n": 64, "device": device, "window": [None, (8, -1)], "softcap": [0.0, 0.1]}
    first = flashsim.sweep(**axes, tiling=[Tiling(64, 64), Tiling(4, 4)], path=path)

    stop_after(monkeypatch, 0)
    again = flashsim.sweep(**axes, tiling=[Tiling(64, 64), Tiling(4, 4)], path=path)

    assert again.rows == first.rows
    assert {row["status"][:12] for row in again} == {"ok", "SramOverflow"}


def test_a_file_cut_anywhere_resumes(tmp_path):
    path = tmp_path / "rows.csv"
    axes = {"n": [64, 128], "tiling": Tiling(32, 32)}
    whole = flashsim.sweep(**axes, path=path)
    content = path.read_bytes()

    for length in [*range(0, len(content), 13), *range(len(content) - 8, len(content) + 1)]:
        path.write_bytes(content[:length])
        assert flashsim.sweep(**axes, path=path).rows == whole.rows
        assert path.read_bytes() == content
    path.write_bytes(content + b"count,flash2,torn")  # and nothing left to run
    assert flashsim.sweep(**axes, path=path).rows == whole.rows
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("name,grade\nAda,1\n", " is not the file of such a sweep"),
        ("name,gra", " is not the file of such a sweep"),
        ("\x00\xff binary", " is not the file of such a sweep"),
        ("{header}\n{row}\n1,2,3\n{row}\n", ", line 3, is not a row of a sweep"),
        ("{header}\n{row}\n{maybe}\n{row}\n", ", line 3, is not a row of a sweep"),
    ],
)
def test_a_foreign_file_or_line_is_refused_and_left_alone(tmp_path, content, told):
    path = tmp_path / "rows.csv"
    flashsim.sweep(64, path=path)
    header, row = lines_of(path)
    path.write_text(content.format(header=header, row=row, maybe=row.replace("False", "maybe")))
    before = path.read_bytes()

    with pytest.raises(FlashSimError, match=f"rows.csv{told}"):
        flashsim.sweep(64, path=path)

    assert path.read_bytes() == before


# -- tables ---------------------------------------------------------------------------------------


def test_tables_hold_every_figure_and_people_see_what_varies():
    result = flashsim.sweep([64, 1024], tiling=[Tiling(32, 32), Tiling(1024, 1024)])

    records = list(csv.DictReader(io.StringIO(result.csv())))
    assert list(records[0]) == list(COLUMNS)
    assert [int(r["load_bytes"]) for r in records[:1]] == [result.rows[0]["load_bytes"]]
    assert json.loads(result.json()) == result.rows
    table = result.table()
    assert table.columns[:3] == ("n_q", "tiling", "tile")
    assert "dtype float32" in table.title
    assert "n_q" not in table.title
    assert table.rows[0][:4] == [64, "32 x 32", "32 x 32", result.rows[0]["load_bytes"]]
    assert table.rows[3] == [1024, "1024 x 1024", *[None] * 10, "SramOverflow"]
    assert "SramOverflow" in str(result)
    assert table.note.startswith("1 of 4 points without figures: SramOverflow: in stage")
    assert ">SramOverflow</td>" in result._repr_html_()
    assert repr(result) == "<Sweep: 4 points, 1 without figures>"


def test_a_key_length_of_its_own_is_shown():
    assert "n_kv 128" in flashsim.sweep([64, 128], n_kv=128).table().title
    assert "n_kv" in flashsim.sweep(64, n_kv=[64, 128]).table().columns
    alike = flashsim.sweep([64, 128]).table()
    assert "n_kv" not in (*alike.columns, alike.title)


def test_a_dataframe_has_typed_columns():
    pandas = pytest.importorskip("pandas")
    frame = flashsim.sweep([64, 1024], tiling=[Tiling(32, 32), Tiling(1024, 1024)]).dataframe()

    assert list(frame.columns) == list(COLUMNS)
    assert frame["load_bytes"].dtype == pandas.Int64Dtype()
    assert frame["load_bytes"].isna().tolist() == [False, False, False, True]
    assert frame["causal"].dtype == pandas.BooleanDtype()
    assert frame.groupby("n_q").size().to_dict() == {64: 2, 1024: 2}


def test_without_pandas_a_dataframe_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)

    with pytest.raises(FlashSimError, match=r"pip install 'flashsim-attention\[pandas\]'"):
        flashsim.sweep(64).dataframe()


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_is_shown_on_a_terminal_only(monkeypatch, capfd):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as CI sets it; it makes no terminal of a log file
    flashsim.sweep(**SMALL)
    assert capfd.readouterr() == ("", "")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    flashsim.sweep(**SMALL, progress=False)
    assert terminal.getvalue() == ""

    flashsim.sweep(**SMALL)

    assert "sweep" in terminal.getvalue()
    assert "100%" in terminal.getvalue()


# -- files that went through other hands ----------------------------------------------------------


@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_a_file_that_was_saved_again_is_read_and_goes_on_as_it_is(tmp_path, bom, end, monkeypatch):
    path = tmp_path / "rows.csv"
    axes = {"tiling": [Tiling(32, 32), Tiling(1024, 1024)], "window": [None, (8, -1)]}
    whole = flashsim.sweep([64, 128], **axes).rows
    flashsim.sweep(64, **axes, path=path)
    path.write_bytes(bom + path.read_bytes().replace(b"\n", end))

    calls = stop_after(monkeypatch, 100)
    assert flashsim.sweep([64, 128], **axes, path=path).rows == whole

    assert {point.n_q for point in calls} == {128}
    content = path.read_bytes()
    assert content.startswith(bom + b"method,")
    assert content.count(end) == content.count(b"\n") == 1 + len(whole)
    path.write_bytes(content[:-9])  # a torn line in such a file
    assert flashsim.sweep([64, 128], **axes, path=path).rows == whole
    of_128 = [row for row in whole if row["n_q"] == 128]
    assert flashsim.sweep(128, **axes, path=path).rows == of_128  # other rows stay in the file
    assert path.read_bytes() == content
    path.write_bytes(bom)
    assert flashsim.sweep(64, **axes, path=path).rows == flashsim.sweep(64, **axes).rows
    assert flashsim.sweep(64, **axes, path=path).rows == flashsim.sweep(64, **axes).rows


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda row: row | {"status": "x" * 200_000}, "field larger than field limit"),
        (lambda row: row | {"load_bytes": ""}, "is ok, but it lacks values of load_bytes"),
        (lambda row: row | {"intensity": "", "flops": ""}, "lacks values of flops, intensity"),
        (
            lambda row: row | {"status": "fine"},
            "the row's status must be 'ok' or an error's name and text, got 'fine'",
        ),
        (lambda row: row | {"status": ""}, "must be 'ok' or"),
        (lambda row: row | {"status": "ValueError: x"}, "must be 'ok' or"),
        (lambda row: row | {"algorithm": ""}, "lacks the columns algorithm"),
        (lambda row: row | {"n_q": "64.0"}, "invalid literal"),
        (lambda row: row | {"n_q": "9" * 5000}, "integer string"),
        (lambda row: row | {"softcap": "\0"}, "could not convert|line contains NUL"),
    ],
)
def test_a_row_that_no_sweep_writes_is_refused_and_left_alone(tmp_path, change, text):
    path = tmp_path / "rows.csv"
    flashsim.sweep([64, 128], path=path)
    rows = list(csv.DictReader(io.StringIO(path.read_text())))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows([rows[0], change(rows[1])])
    content = path.read_bytes()

    with pytest.raises(
        FlashSimError, match=rf"rows.csv, line 3, is not a row of a sweep \(.*{text}"
    ):
        flashsim.sweep([64, 128], path=path)

    assert path.read_bytes() == content
