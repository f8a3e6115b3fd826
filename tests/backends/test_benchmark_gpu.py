"""benchmarks/gpu.py without a GPU: whatever fails, every configuration gets its row."""

import sys
import time
from collections import Counter
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
from repository import recorded, script

from flashsim.backends.failures import Explaining
from flashsim.errors import BackendUnavailable, UnsupportedError

pytestmark = pytest.mark.promise("failures end in words")


class OutOfMemoryError(Exception):
    """Named like CuPy's and torch's."""


@pytest.fixture
def bench(monkeypatch):
    for name in ("gpu_implementations", "gpu_lab"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    module = script("gpu")
    monkeypatch.setattr(module, "open_lab", lambda: (FakeLab(), "no torch"))
    return module


class FakeLab:
    """A clock that ticks once an event, and memory of which every call keeps 3 MiB."""

    name = "fake"
    now = 0.0

    def array(self, shape, dtype):
        return np.zeros(shape[-1], dtype)

    def event(self):
        FakeLab.now += 1
        self.seen("event")
        return FakeLab.now

    def seen(self, what):
        """For those who want to know."""

    def milliseconds(self, start, end):
        return end - start

    def spin(self, seconds=0.0):
        FakeLab.spun = seconds

    def flush(self):
        FakeLab.flushed = True

    def peak(self, work):
        return work(), 5 << 20, 3 << 20

    def release(self):
        pass


class Fake:
    """Fails as asked: at the n-th forward pass, or at the n-th backward."""

    def __init__(self, error=None, backward_error=None, at=1):
        self.error, self.backward_error, self.at = error, backward_error, at
        self.calls = self.forwards = 0

    def forward(self, x):
        self.forwards += 1
        if self.error and self.forwards >= self.at:
            raise self.error
        return x.q

    inference = forward

    def backward(self, x, result):
        self.calls += 1
        if self.backward_error and self.calls >= self.at:
            raise self.backward_error
        return result


@pytest.fixture
def worker(bench, monkeypatch):
    """A Worker whose processes are calls, counted."""

    asked_for = []

    class Pool:
        made, asked = 0, asked_for

        def __init__(self, *_, **__):
            Pool.made += 1

        def submit(self, measure, *given):
            Pool.asked.append(given[2])
            self.measure = partial(measure, *given)
            return self

        def result(self):
            try:
                return self.measure()
            except SystemExit as end:
                raise bench.BrokenProcessPool("terminated abruptly") from end

        def shutdown(self):
            pass

    monkeypatch.setattr(bench, "ProcessPoolExecutor", Pool)
    made = bench.Worker()
    made.pool = Pool
    yield made
    made.close()


def rows_of(worker, bench, monkeypatch, implementations, repetitions=4):
    monkeypatch.setattr(bench, "IMPLEMENTATIONS", implementations)
    shape = bench.paper(64, True, 1024)
    return worker.measure(shape, "float32", list(implementations), repetitions, False)


def test_nobody_always_follows_the_same_one(bench, worker, monkeypatch):
    ran = []
    monkeypatch.setattr(FakeLab, "seen", lambda _, what: ran.append(what))

    class Noted(Fake):
        def backward(self, x, result):
            ran.append(self.at)
            return result

    five = {str(n): Noted(at=n) for n in range(5)}
    rows_of(worker, bench, monkeypatch, five, repetitions=30)
    times = bench.WARM_UPS + 30
    start = len(ran) - 5 * times * 6  # behind forward passes, and a warm-up and memory call each
    repetitions = [ran[at : at + 6] for at in range(start, len(ran), 6)]
    order = [repetition[0] for repetition in repetitions]
    # The first call is not timed, the next three are.
    assert repetitions == [[n, "event", n, n, n, "event"] for n in order]
    assert Counter(order) == {n: times for n in range(5)}
    followed = Counter(pairwise(order))
    for n in range(5):
        before = [followed[m, n] for m in range(5) if m != n]
        assert max(before) < sum(before) / 2


def test_the_gpu_is_kept_busy_for_longer_than_the_slowest_host_needs(bench, worker, monkeypatch):
    """A call of one takes the host 2 ms, of the other nothing; both spin for four of these."""
    spun = {"slow": [], "fast": []}

    class Noted(Fake):
        def __init__(self, name, seconds):
            super().__init__()
            self.name, self.seconds = name, seconds

        def forward(self, x):
            spun[self.name].append(FakeLab.spun)
            time.sleep(self.seconds)
            return x.q

        inference = forward

    monkeypatch.setattr(FakeLab, "spun", None, raising=False)
    both = {"slow": Noted("slow", 2e-3), "fast": Noted("fast", 0)}
    rows_of(worker, bench, monkeypatch, both, repetitions=3)
    # Behind what compiles and what is asked for its memory, four calls a repetition.
    slow, fast = (spun[name][2:-1:4] for name in ("slow", "fast"))
    assert slow[0] == fast[0] == 0
    assert min(slow[1:]) >= bench.MARGIN * 4 * 2e-3
    assert fast[bench.WARM_UPS :] == slow[bench.WARM_UPS :]


def test_the_inputs_of_the_shape_before_are_let_go_first(bench, worker, monkeypatch):
    """Their memory, freed while another's is measured, would be taken off what it keeps."""
    one, seen = Fake(), []
    one.inputs = ["of the shape before"]
    monkeypatch.setattr(FakeLab, "array", lambda *_: seen.append(hasattr(one, "inputs")), False)
    rows_of(worker, bench, monkeypatch, {"one": one})
    assert seen
    assert not any(seen)


def test_every_implementation_gets_a_row_whatever_fails(bench, worker, monkeypatch):
    refused = BackendUnavailable("the GPU refused the launch: illegal address; if it was an ...")
    implementations = {
        "fine": Fake(),
        "no memory": Fake(OutOfMemoryError("2 GiB")),
        "not for this": Fake(UnsupportedError("float64")),
        "not there": Fake(ImportError("no numba")),
        "no kernel": Fake(RuntimeError("No available kernel. Aborting execution.")),
        "broken": Fake(TypeError("unexpected")),
        "refused": Fake(refused, at=4),
        "no memory back": Fake(backward_error=OutOfMemoryError("2 GiB")),
        "forward only": Fake(backward_error=UnsupportedError("head_dim")),
        "breaks late": Fake(backward_error=RuntimeError("illegal address"), at=5),
        "fine, too": Fake(),
    }
    rows = rows_of(worker, bench, monkeypatch, implementations)
    status = {row["implementation"]: row["status"] for row in rows}
    assert status == {
        **{"fine": "ok", "no memory": "OOM", "not for this": "unsupported"},
        **{"not there": "unsupported", "no kernel": "unsupported", "broken": "error"},
        **{"refused": "error", "no memory back": "OOM(backward)"},
        **{"forward only": "unsupported(backward)", "breaks late": "error(backward)"},
        **{"fine, too": "ok"},
    }
    assert list(status) == list(implementations)
    fine = rows[0]
    assert set(fine) == set(bench.COLUMNS)
    assert fine["forward_ms"] == pytest.approx(1 / 3)  # three calls between two events
    flops = 4 * 16 * 32 * 1024**2 * 64 / 2
    assert fine["backward_tflops"] == pytest.approx(2.5 * flops / fine["backward_ms"] / 1e9)
    assert fine["forward_peak_MiB"] == 5
    assert fine["saved_activations_MiB"] == pytest.approx(3 - 64 * 4 / 2**20)
    assert (fine["batch"], fine["d_model"]) == (16, 2048)
    for row in rows:
        timed = row["status"] == "ok" or "backward" in row["status"]
        assert (row["forward_ms"] != "") == timed, row
        assert (row["backward_ms"] != "") == (row["status"] == "ok"), row
        assert bench.line(row)


def test_after_an_error_the_rest_is_measured_in_a_new_process(bench, worker, monkeypatch):
    class Fragile(Fake):
        """Fails wherever anything has failed before, as every kernel does after a bad address."""

        def forward(self, x):
            if spoilt == worker.pool.made:
                raise RuntimeError("an earlier kernel failed")
            return super().forward(x)

        inference = forward

    class Breaks(Fake):
        def backward(self, x, result):
            nonlocal spoilt
            spoilt = worker.pool.made
            raise RuntimeError("illegal address")

    spoilt = None
    implementations = {"first": Fragile(), "breaks": Breaks(), "last": Fragile()}
    rows = rows_of(worker, bench, monkeypatch, implementations)
    assert [row["status"] for row in rows] == ["ok", "error(backward)", "ok"]
    assert rows[1]["forward_ms"] != ""
    assert worker.pool.asked == [["first", "breaks", "last"], ["first", "last"]]
    assert worker.pool.made == 2


def test_what_the_driver_refused_is_an_error(bench):
    """The words are those of backend "cupy", whose failures they are."""
    cupy = pytest.importorskip("cupy")

    def status_of(error):
        with pytest.raises(BackendUnavailable) as explained, Explaining():
            raise error
        return bench.status_of(explained.value)

    assert status_of(cupy.cuda.runtime.CUDARuntimeError(700)) == "error"  # an illegal address
    assert status_of(cupy.cuda.memory.OutOfMemoryError(1, 2, 3)) == "OOM"
    assert bench.status_of(BackendUnavailable("no GPU")) == "unsupported"


def test_a_process_that_dies_costs_one_row(bench, worker, monkeypatch):
    class Dies(Fake):
        def forward(self, x):
            sys.exit()

        inference = forward

    rows = rows_of(worker, bench, monkeypatch, {"fine": Fake(), "dies": Dies(), "too": Fake()})
    assert [row["status"] for row in rows] == ["ok", "error", "ok"]
    assert worker.pool.asked == [["fine", "dies", "too"], ["fine", "too"]]


def test_inputs_that_do_not_fit_are_rows_too(bench, worker, monkeypatch):
    def full(self, shape, dtype):
        raise OutOfMemoryError("16 GiB")

    monkeypatch.setattr(FakeLab, "array", full)
    rows = rows_of(worker, bench, monkeypatch, bench.IMPLEMENTATIONS)
    assert {row["status"] for row in rows} == {"OOM"}
    assert "torch cudnn" in {row["implementation"] for row in rows}
    assert worker.pool.made == 1


def test_without_torch_its_kernels_are_unsupported(bench, monkeypatch, tmp_path):
    torch_one = bench.IMPLEMENTATIONS["torch flash2"]
    monkeypatch.setattr(bench, "IMPLEMENTATIONS", {"torch flash2": torch_one, "fine": Fake()})
    names = list(bench.IMPLEMENTATIONS)
    rows = bench.measure(bench.paper(64, True, 1024), "float16", names, 1, True, tmp_path / "at")
    assert [row["status"] for row in rows] == ["unsupported", "ok"]
    assert FakeLab.flushed
    assert rows[1]["forward_ms"] == 1  # one call behind a flushed cache


def test_a_courses_lengths_run_in_both_types_compiled_only_there(
    worker, bench, monkeypatch, tmp_path
):
    QUICK = ("--repetitions", "1")
    names = {"fine": Fake(), "torch sdpa compiled": Fake()}
    monkeypatch.setattr(bench, "IMPLEMENTATIONS", names)
    rows = main(bench, monkeypatch, tmp_path / "gpu.csv", "--shapes", "course", *QUICK)
    assert list(rows[0])[:10] == [
        *("implementation", "d_model", "seq_len", "forward_ms", "forward_peak_MiB", "backward_ms"),
        *("backward_peak_MiB", "saved_activations_MiB", "status", "gpu"),
    ]
    lengths = ("256", "1024", "4096", "8192", "16384")
    found = {(row["seq_len"], row["dtype"], row["implementation"]) for row in rows}
    assert found == {(n, d, i) for n in lengths for d in ("float32", "bfloat16") for i in names}
    for row in main(
        bench, monkeypatch, tmp_path / "x.csv", "--shapes", "smoke", "--dtype", "float16"
    ):
        assert (row["implementation"], row["dtype"]) == ("fine", "float16")
    with pytest.raises(SystemExit, match="did you mean 'float32'"):
        main(bench, monkeypatch, tmp_path / "x.csv", "--dtype", "float3")
    rows = main(
        bench, monkeypatch, tmp_path / "x.csv", "--shapes", "smoke", "--impl", "fine", *QUICK
    )
    assert {row["implementation"] for row in rows} == {"fine"}


def main(bench, monkeypatch, path, *arguments):
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--csv", str(path), *arguments])
    bench.main()
    return recorded(path)


@pytest.mark.usefixtures("worker")
def test_the_table_has_every_shape_and_every_implementation(bench, monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "IMPLEMENTATIONS", {"fine": Fake(), "tf32": Fake()})
    rows = main(bench, monkeypatch, tmp_path / "gpu.csv", "--shapes", "smoke")
    assert [(row["implementation"], row["head_dim"]) for row in rows] == [
        ("fine", "64"),
        ("fine", "128"),
    ]
    wanted = "implementation d_model seq_len forward_ms forward_peak_MiB backward_ms"
    wanted += " backward_peak_MiB saved_activations_MiB status gpu dtype causal"
    assert set(wanted.split()) <= set(rows[0])
    rows = main(bench, monkeypatch, tmp_path / "gpu.csv", "--shapes", "float32")
    assert {row["implementation"] for row in rows} == {"fine", "tf32"}
    shapes = {(row["dtype"], row["batch"], row["d_model"], row["seq_len"]) for row in rows}
    assert shapes == {("float32", "8", "64", n) for n in ("1024", "4096", "8192")}


@pytest.mark.usefixtures("worker")
def test_some_implementations_can_be_picked(bench, monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "IMPLEMENTATIONS", {"fine": Fake(), "other": Fake()})
    rows = main(bench, monkeypatch, tmp_path / "x.csv", "--shapes", "smoke", "--only", "other")
    assert {row["implementation"] for row in rows} == {"other"}
    with pytest.raises(SystemExit, match=r"no implementation 'othe'.*did you mean 'other'"):
        main(bench, monkeypatch, tmp_path / "x.csv", "--only", "fine,othe")


def test_the_forms_that_docs_quote_can_be_timed(bench):
    tensor = bench.IMPLEMENTATIONS["flashsim numba_cuda tensor"]
    assert tensor.options == {"kernel": "tensor"}
    passes = bench.IMPLEMENTATIONS["flashsim cupy three passes"]
    assert (passes.backend, passes.deterministic, passes.options) == ("cupy", None, {})


def test_shapes_say_what_they_are(bench):
    for shapes in bench.SHAPES.values():
        assert len(set(shapes)) == len(shapes)
        assert all(s.heads % s.key_sizes[1] == 0 for s in shapes)
    window = bench.Shape(128, True, 4, 1, 32, kv_heads=8, window=2)
    assert str(window) == "d=128 1 x 32 on 8 N=4 causal, window 2"
    assert window.key_sizes == (1, 8, 4, 128)
    assert window.flops == 4 * 32 * 128 * (1 + 2 + 2 + 2)
    assert {s.n for s in bench.SHAPES["short"]} >= {128, 768}
    assert {s.head_dim for s in bench.SHAPES["widths"]} >= {32, 256}
    assert {(s.heads, s.kv_heads) for s in bench.SHAPES["serving"]} == {(32, 8), (64, 8)}


def test_torch_kernels_without_windows_say_so(bench):
    inputs = sys.modules["gpu_implementations"].Inputs
    x = inputs(*[np.zeros((1, 1, 2, 8))] * 4, True, window=1)
    torch_one = bench.IMPLEMENTATIONS["torch cudnn"]
    with pytest.raises(NotImplementedError, match="no windows"):
        torch_one._attend(x.q, x.k, x.v, x)


def test_the_picture_shows_the_table():
    draw, measured = script("gpu_plot").gpu, recorded("gpu-papers-h200.csv")
    axes = draw(measured).axes
    drawn = sorted(bar.get_height() for ax in axes for bar in ax.patches)
    named = [r for r in measured if r["implementation"] in sys.modules["gpu_plot"].GPU]
    figures = [float(r[f"{way}_tflops"]) for r in named for way in ("forward", "backward")]
    assert drawn == pytest.approx(sorted(figures))
    assert axes[0].get_title() == "d = 128, no mask"
