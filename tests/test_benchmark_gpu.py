"""benchmarks/gpu.py without a GPU: whatever fails, every configuration gets its row."""

import csv
import importlib
import sys
from pathlib import Path

import numpy as np
import pytest

from flashsim.errors import UnsupportedError


class OutOfMemoryError(Exception):
    """Named like CuPy's and torch's."""


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    for name in ("gpu", "gpu_lab"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module("gpu")
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
        return FakeLab.now

    def milliseconds(self, start, end):
        return end - start

    def spin(self):
        pass

    def flush(self):
        FakeLab.flushed = True

    def peak(self, work):
        return work(), 5 << 20, 3 << 20

    def release(self):
        pass


class Fake:
    """Fails as asked: at the first forward pass, or at the n-th backward."""

    def __init__(self, error=None, backward_error=None, at=1):
        self.error, self.backward_error, self.at, self.calls = error, backward_error, at, 0

    def forward(self, x):
        if self.error:
            raise self.error
        return x.q

    inference = forward

    def backward(self, x, result):
        self.calls += 1
        if self.backward_error and self.calls >= self.at:
            raise self.backward_error
        return result


IMPLEMENTATIONS = {
    "fine": Fake(),
    "no memory": Fake(OutOfMemoryError("2 GiB")),
    "not for this": Fake(UnsupportedError("float64")),
    "not there": Fake(ImportError("no numba")),
    "no kernel": Fake(RuntimeError("No available kernel. Aborting execution.")),
    "broken": Fake(TypeError("unexpected")),
    "breaks late": Fake(backward_error=RuntimeError("illegal address"), at=5),
    "fine, too": Fake(),
}


def test_every_implementation_gets_a_row_whatever_fails(bench, monkeypatch):
    monkeypatch.setattr(bench, "IMPLEMENTATIONS", IMPLEMENTATIONS)
    rows = bench.measure(bench.Shape(64, True, 1024, "float32"), 4, False)
    status = {row["implementation"]: row["status"] for row in rows}
    assert status == {
        **{"fine": "ok", "no memory": "OOM", "not for this": "unsupported"},
        **{"not there": "unsupported", "no kernel": "unsupported", "broken": "error"},
        **{"breaks late": "error", "fine, too": "ok"},
    }
    fine = rows[0]
    assert set(fine) == set(bench.COLUMNS)
    assert fine["forward_ms"] == pytest.approx(1 / 3)  # three calls between two events
    flops = 4 * 16 * 32 * 1024**2 * 64 / 2
    assert fine["backward_tflops"] == pytest.approx(2.5 * flops / fine["backward_ms"] / 1e9)
    assert fine["forward_peak_MiB"] == 5
    assert fine["saved_activations_MiB"] == pytest.approx(3 - 64 * 4 / 2**20)
    assert rows[1]["forward_ms"] == ""


def test_inputs_that_do_not_fit_are_rows_too(bench, monkeypatch):
    def full(self, shape, dtype):
        raise OutOfMemoryError("16 GiB")

    monkeypatch.setattr(FakeLab, "array", full)
    rows = bench.measure(bench.Shape(64, True, 1024, "float16"), 1, False)
    assert {row["status"] for row in rows} == {"OOM"}
    assert "torch cudnn" in {row["implementation"] for row in rows}


def test_without_torch_its_kernels_are_unsupported(bench, monkeypatch):
    torch_one = bench.IMPLEMENTATIONS["torch flash2"]
    monkeypatch.setattr(bench, "IMPLEMENTATIONS", {"torch flash2": torch_one, "fine": Fake()})
    rows = bench.measure(bench.Shape(64, True, 1024, "float16"), 1, True)
    assert [row["status"] for row in rows] == ["unsupported", "ok"]
    assert FakeLab.flushed
    assert rows[1]["forward_ms"] == 1  # one call behind a flushed cache


def test_a_process_that_dies_costs_its_own_rows_only(bench, monkeypatch, tmp_path):
    class Pool:
        made = 0

        def __init__(self, *_, **__):
            Pool.made += 1

        def submit(self, measure, shape, *rest):
            self.shape = shape
            return self

        def result(self):
            if self.shape.head_dim == 64:
                raise RuntimeError("a child process terminated abruptly")
            return bench.blank(self.shape, "fake")

        def shutdown(self):
            pass

    monkeypatch.setattr(bench, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(bench, "line", str)
    path = tmp_path / "gpu.csv"
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--shapes", "smoke", "--csv", str(path)])
    bench.main()
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert {(row["head_dim"], row["status"]) for row in rows} == {("64", "error"), ("128", "ok")}
    assert Pool.made == 2
    wanted = "implementation d_model seq_len forward_ms forward_peak_MiB backward_ms"
    wanted += " backward_peak_MiB saved_activations_MiB status gpu dtype causal"
    assert set(wanted.split()) <= set(rows[0])
