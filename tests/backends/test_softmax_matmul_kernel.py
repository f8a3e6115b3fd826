"""The kernel of softmax(X) V without a GPU: compiled for every architecture, run by the emulator
through its own launcher; its benchmark.
"""

import ctypes
import re
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
from repository import recorded, script
from test_benchmark_gpu import FakeLab

from flashsim import softmax_matmul
from flashsim.errors import TilingError

pytest.importorskip("cupy")
import emulator
from barriers import left_out
from compiled import compiled, thorough
from test_cuda_kernels import GPUS, SPILL_BYTES
from test_decode_launch import Space

from flashsim.backends.cupy_gpu import arrays, engine
from flashsim.backends.cupy_gpu import softmax_matmul as gpu
from flashsim.backends.kernels import nvrtc
from flashsim.backends.launch_policy import softmax_matmul as family

pytestmark = pytest.mark.promise("kernels compile")


@pytest.mark.parametrize(
    ("arch", "block", "d3"),
    [
        *(("sm_80", 64, 64), ("sm_90", 16, 40)),
        *(thorough(arch, block, d3) for arch in GPUS for block in (16, 32, 64) for d3 in (64, 512)),
    ],
)
def test_it_compiles_and_stays_in_registers(arch, block, d3):
    kernel = family.kernel(block, block, d3, counts=arch == "sm_90")
    log, cubin = compiled(kernel, (*kernel.options, f"-arch={arch}"))
    assert cubin, log
    assert "warning" not in log
    assert int(re.search(r"(\d+) bytes spill stores", log)[1]) <= SPILL_BYTES
    assert kernel.shared_bytes <= 48 * 1024  # what every GPU gives without being asked


@pytest.mark.parametrize("given", [(48, 64, 64), (64, 128, 64), (16, 16, 513)])
def test_what_it_is_not_built_for_is_said(given):
    with pytest.raises(TilingError, match="the GPU kernel"):
        family.kernel(*given)


class Lab(Space):
    """The CPU's memory as a GPU's, and a current device."""

    def on_device(self):
        return nullcontext()

    active = on_device

    def stream(self):
        return 0

    def result(self, array, keep=0, width=0):
        return array[..., :keep]


@pytest.fixture
def machine(monkeypatch):
    """`gpu.forward` on the emulator."""
    cpu, lab = emulator.Faulty(800, left_out("portable/softmax_matmul.cu")), Lab()
    monkeypatch.setattr(engine, "require_gpu", lambda: None)
    monkeypatch.setattr(engine, "gpu_of", lambda device: None)
    monkeypatch.setattr(arrays, "space_of", lambda given, dtype: lab)
    monkeypatch.setattr(nvrtc, "load", lambda kernel, device: kernel)
    monkeypatch.setattr(gpu.cupy, "zeros", lab.zeros)
    monkeypatch.setattr(
        gpu, "launch_once", lambda made, grid, record, space: cpu.run(made, record, grid)
    )
    return cpu


@pytest.mark.parametrize(
    ("sizes", "blocks"),
    [
        ((2, 37, 45, 40), (16, 16)),
        *(thorough((1, 70, 130, 33), (32, 64)), thorough((1, 5, 20, 8), (64, 32))),
    ],
)
def test_values_and_counted_bytes_are_the_simulators(machine, sizes, blocks):
    batch, d1, d2, d3 = sizes
    rng = np.random.default_rng(0)
    x = (4 * rng.standard_normal((batch, d1, d2))).astype(np.float32)
    v = rng.standard_normal((batch, d2, d3)).astype(np.float32)
    x[0, 1, : blocks[1]] = -np.inf
    x[0, 2] = -np.inf
    given = {"block": blocks[0], "block_2": blocks[1]}
    ours = softmax_matmul.run(x, v, backend="cupy", **given)
    simulated = softmax_matmul.run(x, v, **given)
    np.testing.assert_allclose(ours.out, simulated.out, atol=3e-6)
    assert np.isnan(ours.out[0, 2]).all()
    assert dict(ours.moved) == dict(simulated.moved)
    untraced = softmax_matmul.run(x, v, backend="cupy", trace=False, **given)
    assert not untraced.moved
    np.testing.assert_array_equal(untraced.out, ours.out)


@pytest.mark.parametrize("barrier", ["B0", "B1"])
def test_a_barrier_left_out_shows(machine, barrier):
    x = np.random.default_rng(0).standard_normal((1, 40, 80)).astype(np.float32)
    v = np.random.default_rng(1).standard_normal((1, 80, 8)).astype(np.float32)
    machine.seeded = barrier
    out = softmax_matmul.run(x, v, block=16, backend="cupy").out
    expected = softmax_matmul.run(x, v, block=16).out
    assert not np.allclose(out, expected, atol=1e-3)


def test_a_launch_hands_the_driver_the_struct(monkeypatch):
    seen, record = [], np.zeros((), family.ARGS)
    record["d1"] = 12

    def launch(*given):
        (at,) = ctypes.cast(given[9], ctypes.POINTER(ctypes.c_void_p))[:1]
        data = ctypes.string_at(at, family.ARGS.itemsize)
        seen.append((given[:9], np.frombuffer(data, family.ARGS)["d1"]))

    monkeypatch.setattr(gpu.cupy.cuda.driver, "launchKernel", launch)
    monkeypatch.setattr(nvrtc, "load", lambda kernel, device: SimpleNamespace(ptr=7))
    made = family.kernel(32, 32, 64)
    gpu.launch_once(made, (3, 2), record, Lab())
    assert seen == [((7, 3, 2, 1, 256, 1, 1, made.shared_bytes, 0), 12)]


# -- benchmarks/softmax_matmul.py ------------------------------------------------------------------


def test_the_benchmark_has_a_row_for_every_configuration(monkeypatch, tmp_path, capsys):
    bench = script("softmax_matmul")

    def fused(x, v, block):
        if block == 64:
            raise MemoryError("no room")

    monkeypatch.setattr(bench, "fused", fused)
    monkeypatch.setattr(bench, "open_lab", lambda: (FakeLab(), ""))
    monkeypatch.setattr(FakeLab, "array", lambda self, shape, dtype: np.zeros((1, 1, 1), dtype))
    out = tmp_path / "table.csv"
    given = ["softmax_matmul.py", "--d2", "64,128", "--passes", "3", "--csv", str(out)]
    monkeypatch.setattr(sys, "argv", given)
    bench.main()
    rows = recorded(out)
    assert list(rows[0]) == list(bench.COLUMNS)
    assert len(bench.COLUMNS) == 9
    blocks = [(row["d2"], row["BLOCK"], row["triton"]) for row in rows]
    expected = [(b, "True") for b in ("16", "32", "64")] + [("NA", "False")]
    assert blocks == [(d2, *b) for d2 in ("64", "128") for b in expected]
    for row in rows:
        figures = [row[name] for name in bench.COLUMNS[-3:]]
        assert figures == (["NA"] * 3 if row["BLOCK"] == "64" else ["1.0", "0.0", "5.0"])
    printed = capsys.readouterr()
    assert "d2=64, BLOCK=64: MemoryError: no room" in printed.err
    assert printed.out.count("failed") == 2
