"""Measure the throughput or latency of each GPU unit with a kernel that uses only that unit.

The measurement takes about ten seconds and runs on NVIDIA GPUs from Ampere on.
"""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import cupy

from flashsim.backends.cupy_gpu import engine
from flashsim.backends.kernels import nvrtc
from flashsim.problem.hardware import Device

MIB = 1 << 20
#: Warpgroups per block and columns per product with which wgmma is timed.
WARPGROUPS, COLUMNS = (1, 2, 3), (32, 64, 80, 128, 176, 256)
_CHAINS, _UNROLLED = 8, 8
_TIMES = 5


class Unit(NamedTuple):
    """A measured property of a hardware unit: a number `value` in the unit of measure `unit`."""

    name: str
    value: float
    unit: str


def measure(device: int = 0) -> list[Unit]:
    """Return the measured rates and latencies of a GPU's units, or raise `BackendUnavailable`."""
    engine.require_gpu()
    with cupy.cuda.Device(device):
        bench = _Bench(device)
        found = [*_arithmetic(bench), *_memory(bench), *_latencies(bench)]
        if bench.gpu.compute_capability == (9, 0):
            found += _hopper(bench)
        return found


def described(base: Device, device: int = 0) -> Device:
    """Return a copy of `base` with the measured GPU's name, number of SMs and memory sizes."""
    gpu = engine.gpu_of(device)
    return replace(
        base,
        name=gpu.name,
        compute_capability=gpu.compute_capability,
        sm_count=gpu.multiprocessors,
        sram_bytes=gpu.shared_bytes,
        sram_per_sm=gpu.shared_bytes + 1024,  # CUDA reserves a KiB per block
        l2_bytes=gpu.l2_bytes,
    )


class _Bench:
    """A GPU's compiled measuring kernels, and methods to time them."""

    def __init__(self, device: int) -> None:
        self.gpu = engine.gpu_of(device)
        self.sms = self.gpu.multiprocessors
        self.out, self.cycles = cupy.zeros(4, "uint32"), cupy.zeros(self.sms, "int64")
        self._modules: dict[str, Any] = {}

    def kernel(self, file: str, name: str, shared: int = 0) -> Any:
        """Return the compiled function `name` of ``kernels/<file>/units.cu``."""
        if file not in self._modules:
            options: tuple[str, ...] = ("-std=c++17",)
            if file == "hopper":
                options += ("-arch=sm_90a", "-DFS_BF16=1")
            code = nvrtc.source(f"{file}/units.cu")
            self._modules[file] = cupy.RawModule(code=code, options=options, backend="nvrtc")
        function = self._modules[file].get_function(name)
        if shared > 48 * 1024:
            function.max_dynamic_shared_size_bytes = shared
        return function

    def in_cycles(
        self, name: str, threads: int, rounds: int, shared: int = 0, file: str = "portable"
    ) -> float:
        """Return the median number of cycles per block while every SM runs one block."""
        function, taken = self.kernel(file, name, shared), []
        keep = cupy.uint32(123) if name in _WHOLE else cupy.float32(123.5)
        for _ in range(_TIMES):
            arguments = cupy.int32(rounds), keep, self.out, self.cycles
            function((self.sms,), (threads,), arguments, shared_mem=shared)
            taken.append(float(cupy.median(self.cycles).get()))
        return statistics.median(taken)

    def in_seconds(self, work: Callable[[], None], times: int = 1) -> float:
        """Queue `times` calls of `work` on the GPU, and return the median seconds per call."""
        work()
        taken = []
        for _ in range(_TIMES):
            start, end = cupy.cuda.Event(), cupy.cuda.Event()
            start.record()
            for _ in range(times):
                work()
            end.record()
            end.synchronize()
            taken.append(cupy.cuda.get_elapsed_time(start, end) / 1e3)
        return statistics.median(taken) / times


#: Kernels whose parameter `keep` is an integer.
_WHOLE = ("integers", "conversions", "shared_reads", "barriers", "hand_overs")


def _arithmetic(bench: _Bench) -> Iterator[Unit]:
    threads, rounds = 1024, 200
    done = threads * rounds * _CHAINS * _UNROLLED
    for name in ("exponentials", "multiply_adds", "comparisons", "integers", "conversions"):
        words = name.replace("_", "-")
        yield Unit(words, done / bench.in_cycles(name, threads, rounds), "a cycle and SM")
    rounds = 2000
    flops = 2 * 16 * 8 * 16 * _CHAINS * rounds
    for warps in (4, 8):
        taken = bench.in_cycles("products", 32 * warps, rounds)
        yield Unit(f"mma.sync, {warps} warps", warps * flops / taken, "FLOP a cycle and SM")
    taken = bench.in_cycles("shared_reads", 512, 1000, shared=8 * 16 * 512)
    yield Unit("ldmatrix", 16 * 512 * 8 * 1000 / taken, "B a cycle and SM")


def _memory(bench: _Bench) -> Iterator[Unit]:
    reads, copies = bench.kernel("portable", "reads"), bench.kernel("portable", "copies")
    additions = bench.kernel("portable", "additions")
    blocks, threads = (4 * bench.sms,), (512,)

    def read(size: int, rounds: int) -> float:
        buffer = cupy.zeros(size // 4, "uint32")
        given = buffer, cupy.int64(size // 16), cupy.int32(rounds), bench.out
        taken = bench.in_seconds(lambda: reads(blocks, threads, given))
        return size * rounds / taken

    yield Unit("L2 reads", read(16 * MIB, 40), "B/s")
    yield Unit("HBM reads", read(2048 * MIB, 1), "B/s")
    size = 1024 * MIB
    a, b = (cupy.zeros(size // 4, "uint32") for _ in range(2))
    many = (32 * bench.sms,)
    taken = bench.in_seconds(lambda: copies(many, threads, (a, cupy.int64(size // 16), b)))
    yield Unit("HBM copy, read and written", 2 * size / taken, "B/s")
    to, rounds = cupy.zeros(8 * MIB // 4, "float32"), 10
    given = to, cupy.int64(to.size), cupy.int32(rounds)
    taken = bench.in_seconds(lambda: additions(blocks, threads, given))
    yield Unit("reductions at L2, 4 B", to.nbytes * rounds / taken, "B/s")


def _latencies(bench: _Bench) -> Iterator[Unit]:
    for threads in (128, 256):
        taken = bench.in_cycles("barriers", threads, 1000)
        yield Unit(f"barrier of {threads} threads", taken / 1000, "cycles")
    nothing = bench.kernel("portable", "nothing")
    launches = 500
    function = bench.kernel("portable", "multiply_adds")
    wait = cupy.int32(40_000), cupy.float32(123.5), bench.out, bench.cycles

    def row() -> None:  # queued after a kernel that runs for longer than the host needs to queue
        function((bench.sms,), (1024,), wait)
        for _ in range(launches):
            nothing((bench.sms,), (128,), ())

    alone = bench.in_seconds(lambda: function((bench.sms,), (1024,), wait))
    yield Unit("launch, in a row", (bench.in_seconds(row) - alone) / launches, "s")
    given = cupy.int32(20_000), cupy.float32(123.5), bench.out, bench.cycles
    seconds = bench.in_seconds(lambda: function((bench.sms,), (1024,), given))
    cycles = float(cupy.median(bench.cycles).get())
    yield Unit("SM clock, multiply-adds", cycles / seconds, "Hz")


def _hopper(bench: _Bench) -> Iterator[Unit]:
    rounds, shared = 2000, 96 * 1024
    for source in ("shared", "registers"):
        for n in COLUMNS:
            if source == "registers" and n == 256:
                continue  # needs more registers than a thread has
            for groups in WARPGROUPS:
                name = f"wgmma_{source}_{n}"
                taken = bench.in_cycles(name, 128 * groups, rounds, shared, "hopper")
                flops = groups * rounds * 4 * 2 * 64 * n * 16
                words = f"wgmma, A in {source}, {n} columns, {groups} warpgroups"
                yield Unit(words, flops / taken, "FLOP a cycle and SM")
    taken = bench.in_cycles("hand_overs", 64, 2000, 0, "hopper")
    yield Unit("mbarrier, there and back", taken / 2000, "cycles")
    pieces, piece, whole = 2000, 16384, cupy.int64(16 * MIB)
    buffer = cupy.zeros(16 * MIB // 4, "float32")
    for name, words, threads in (
        ("bulk_reads", "L2 reads, copy engine", 32),
        ("bulk_additions", "reductions at L2, copy engine", 128),
    ):
        function = bench.kernel("hopper", name, 8 * piece)
        given = buffer, whole, cupy.int32(pieces)
        launch = partial(function, (bench.sms,), (threads,), given, shared_mem=8 * piece)
        seconds = bench.in_seconds(launch)
        yield Unit(words, bench.sms * pieces * piece / seconds, "B/s")
