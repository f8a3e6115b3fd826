"""Arrays, clocks and memory counters for benchmarks on a GPU, by torch or by CuPy."""

from __future__ import annotations

import csv
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

MIB = 1024 * 1024
#: The minimum seconds of `Lab.spin`, and a clock (Hz) that no SM exceeds.
SPIN, CLOCK = 500e-6, 3e9
#: The time of a repetition's spinning kernel, relative to the host's time for its calls.
MARGIN = 2.0

Work = Callable[[], Any]


class Lab:
    """Arrays on the GPU, elapsed time and memory in use.

    `array` returns a random array. `event` and `milliseconds` are a clock on the GPU. `spin` keeps
    the GPU busy for at least so many seconds, while the host runs ahead. `flush` empties the L2
    cache. `peak` returns the result of a call, the peak of memory in use beyond what was allocated
    before, and the memory that the result keeps, in bytes.
    """

    name: str
    array: Callable[[tuple[int, ...], str], Any]
    event: Callable[[], Any]
    milliseconds: Callable[[Any, Any], float]
    spin: Callable[..., None]
    flush: Callable[[], None]
    peak: Callable[[Callable[[], Any]], tuple[Any, int, int]]
    release: Callable[[], None]


class TorchLab(Lab):
    """A lab with torch, which must see a GPU."""

    def __init__(self) -> None:
        import torch

        self.torch, self.name = torch, torch.cuda.get_device_name()
        self._wide: Any = None

    def array(self, shape: tuple[int, ...], dtype: str) -> Any:
        """See `Lab`."""
        return self.torch.randn(shape, device="cuda", dtype=getattr(self.torch, dtype))

    def event(self) -> Any:
        """See `Lab`."""
        event = self.torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def milliseconds(self, start: Any, end: Any) -> float:
        """See `Lab`."""
        end.synchronize()
        return start.elapsed_time(end)

    def spin(self, seconds: float = SPIN) -> None:
        """See `Lab`."""
        self.torch.cuda._sleep(cycles(seconds))

    def flush(self) -> None:
        """See `Lab`."""
        if self._wide is None:
            self._wide = self.torch.empty(256 * MIB, dtype=self.torch.uint8, device="cuda")
        self._wide.zero_()

    def peak(self, work: Callable[[], Any]) -> tuple[Any, int, int]:
        """See `Lab`."""
        cuda = self.torch.cuda
        cuda.synchronize()
        cuda.reset_peak_memory_stats()
        before = cuda.memory_allocated()
        result = work()
        cuda.synchronize()
        return result, cuda.max_memory_allocated() - before, cuda.memory_allocated() - before

    def release(self) -> None:
        """Return unused memory to the driver."""
        self.torch.cuda.empty_cache()


class CupyLab(Lab):
    """A lab with CuPy, for when no torch sees the GPU."""

    def __init__(self) -> None:
        import cupy

        self.cupy = cupy
        self.name = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
        self._wide: Any = None

    def array(self, shape: tuple[int, ...], dtype: str) -> Any:
        """See `Lab`."""
        return self.cupy.random.standard_normal(shape, dtype="float32").astype(dtype)

    def event(self) -> Any:
        """See `Lab`."""
        event = self.cupy.cuda.Event()
        event.record()
        return event

    def milliseconds(self, start: Any, end: Any) -> float:
        """See `Lab`."""
        end.synchronize()
        return self.cupy.cuda.get_elapsed_time(start, end)

    def spin(self, seconds: float = SPIN) -> None:
        """See `Lab`."""
        _spinning(self.cupy)((1,), (1,), (np.int64(cycles(seconds)),))

    def flush(self) -> None:
        """See `Lab`."""
        if self._wide is None:
            self._wide = self.cupy.empty(256 * MIB, "uint8")
        self._wide.fill(0)

    def peak(self, work: Callable[[], Any]) -> tuple[Any, int, int]:
        """See `Lab`."""
        pool = self.cupy.get_default_memory_pool()

        class Meter(self.cupy.cuda.MemoryHook):
            name = "flashsim peak"
            most = before = pool.used_bytes()

            def malloc_postprocess(self, **_: Any) -> None:
                self.most = max(self.most, pool.used_bytes())

        meter = Meter()
        with meter:
            result = work()
        # makes a kernel's failure show here, not in the next call
        self.cupy.cuda.Device().synchronize()
        return result, meter.most - meter.before, pool.used_bytes() - meter.before

    def release(self) -> None:
        """See `TorchLab`."""
        self.cupy.get_default_memory_pool().free_all_blocks()


def cycles(seconds: float) -> int:
    """Return the cycles that a spinning kernel counts."""
    return int(max(SPIN, seconds) * CLOCK)


def medians(
    lab: Lab, works: Mapping[str, Work], repetitions: int, calls: int = 3, warm_ups: int = 2
) -> dict[str, float]:
    """Return the median µs per call of each work, on the GPU alone.

    All are interleaved, in a new order in each repetition. A repetition makes `calls` calls after
    an untimed one, and after a spinning kernel that hides the host's time. All spin equally long,
    since a spinning chip draws little power, and its clocks are then higher for some milliseconds.
    """
    times: dict[str, list[float]] = {name: [] for name in works}
    hosts: dict[str, list[float]] = {name: [] for name in works}
    shuffled = random.Random(0)
    for _ in range(warm_ups + repetitions):
        # The minimum of each, which did not wait for the GPU.
        spin = MARGIN * max((min(host, default=0.0) for host in hosts.values()), default=0.0)
        for name in shuffled.sample(list(works), len(works)):
            lab.spin(spin)
            began = time.perf_counter()
            works[name]()  # leaves the chip in this kernel's state, not the previous one's
            start = lab.event()
            for _ in range(calls):
                works[name]()
            end = lab.event()
            hosts[name].append(time.perf_counter() - began)
            times[name].append(lab.milliseconds(start, end) / calls * 1e3)
    return {name: statistics.median(each[warm_ups:]) for name, each in times.items()}


@contextmanager
def csv_file(path: str | Path, columns: Sequence[str]) -> Iterator[Callable[..., None]]:
    """Open a CSV file, and yield a function that writes rows to it at once."""
    with Path(path).open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()

        def write(*rows: Mapping[str, Any]) -> None:
            writer.writerows(rows)
            file.flush()

        yield write


def read_table(*paths: str | Path) -> list[dict[str, str]]:
    """Return the rows of CSV files, one file after the other."""
    rows: list[dict[str, str]] = []
    for path in paths:
        with Path(path).open(encoding="utf-8", newline="") as file:
            rows += csv.DictReader(file)
    return rows


def _spinning(cupy: Any) -> Any:
    loop = "long long t = clock64(); while (clock64() - t < n);"
    return cupy.RawKernel('extern "C" __global__ void spin(long long n) {' + loop + "}", "spin")


def open_lab() -> tuple[Lab, str]:
    """Return a lab, and the reason why it is not torch's, if it is not.

    Raises
    ------
    RuntimeError
        If neither torch nor CuPy sees a GPU.
    """
    why = []
    for lab in (TorchLab, CupyLab):
        try:
            return lab(), "; ".join(why)
        except Exception as error:
            why.append(f"{lab.__name__.removesuffix('Lab')}: {type(error).__name__}: {error}")
    raise RuntimeError("no NVIDIA GPU can be used: " + "; ".join(why))
