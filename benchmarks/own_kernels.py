"""Measure the cost of tracing a Triton or Pallas kernel: seconds and bytes. Needs no GPU.

    python benchmarks/own_kernels.py                       # Triton
    python benchmarks/own_kernels.py pallas --n 256 1024   # JAX

Triton: FlashAttention-2's forward of examples/triton/flash_attention.py, one head of 64 columns.
The plain interpreter runs the same kernel untraced in the same process, interleaved with the traced
runs. Memory is that of a record's columns. Pallas: the forward of examples/pallas and JAX's own.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import sys
import time
import tracemalloc
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # for the untraced runs; must be set before Triton is imported
sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "triton"))
sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "pallas"))

import numpy as np

from flashsim.own_kernels import LOAD, Recorder


def plain(array: np.ndarray) -> Any:
    """The attributes of an array that the plain interpreter needs."""
    made = SimpleNamespace(dtype="fp32", shape=array.shape)
    made.data_ptr = lambda: array.ctypes.data
    made.untyped_storage = made.cpu = lambda: made
    made.new_empty = lambda *_, **__: plain(array)
    made.set_ = made.copy_ = lambda *_: made
    made.storage_offset = lambda: 0
    made.size = lambda: array.shape
    made.stride = lambda: tuple(step // 4 for step in array.strides)
    return made


def run(n: int, tile: tuple[int, int], causal: bool, kind: str) -> float:
    """Return the CPU seconds of one launch."""
    import flash_attention as fa

    q, k, v, o = np.random.default_rng(0).standard_normal((4, 1, n, 64), dtype=np.float32)
    lse = np.zeros((1, n), np.float32)
    given = [x if kind == "traced" else plain(x) for x in (q, k, v, o, lse)]
    block_q, block_k = tile
    grid = (-(-n // block_q), 1)

    def launch() -> None:
        fa.attention_forward[grid](*given, n, 0.125, causal, BLOCK_Q=block_q, BLOCK_K=block_k, D=64)

    start = time.process_time()
    if kind == "traced":
        from flashsim.triton import watch

        with watch() as seen:
            launch()
        traced = seen.result()
        assert traced.bytes("load", "Q") == n * 64 * 4
    else:
        with np.errstate(all="ignore"):
            launch()
    return time.process_time() - start


def memory(events: int) -> float:
    """Return the peak MB of a recorder that records so many accesses of a 64 x 64 tile."""
    r = Recorder("benchmark")
    k = r.tensor("k", (4096, 64), (64, 1), "float16", 2)
    r.launch("kernel", (64,))
    offsets = np.arange(64 * 64)
    tracemalloc.start()
    for n in range(events):
        if n % 100 == 0:
            r.program((n // 100 % 64,))
        r.access(LOAD, k, offsets, line=("kernel.py", n % 7))
    record = r.done()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(record.accesses) == events
    return peak / 1e6


def pallas(lengths: list[int]) -> None:
    """Print the seconds and the memory of a trace: one head, d = 64, float32, tile 64 x 64."""
    from gpu_forward import forward

    from flashsim.jax import trace_kernel

    with warnings.catch_warnings():  # JAX 0.11 warns that the kernel moves to another package
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu import attention

    sizes = attention.BlockSizes(64, 64)
    print("     n  kernel            seconds  accesses  record MB  peak of process MB")
    for n in lengths:
        q = np.random.default_rng(0).standard_normal((1, n, 64)).astype(np.float32)
        for name, function, x in (
            ("examples/pallas", lambda q: forward(q, q, q, False, 64, 64), q),
            ("JAX's mha", lambda q: attention.mha(q, q, q, None, 1.0, False, sizes), q[:, :, None]),
        ):
            start = time.perf_counter()
            seen = trace_kernel(function, x)
            took = time.perf_counter() - start
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            size = seen.record.nbytes / 1e6
            print(f"{n:6}  {name:16} {took:8.2f}  {seen.n_events:8,}  {size:9.2f}  {peak:18.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", nargs="?", choices=("triton", "pallas"), default="triton")
    parser.add_argument("--n", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--tile", default="64x64")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--events", type=int, default=100_000)
    options = parser.parse_args()
    if options.kind == "pallas":
        pallas(options.n)
        return
    block_q, block_k = map(int, options.tile.split("x"))
    run(64, (64, 64), False, "traced")
    run(64, (64, 64), False, "plain")
    print("n, causal, tile: CPU seconds traced, plain interpreter, traced / plain")
    for n in options.n:
        for causal in (False, True):
            took: dict[str, list[float]] = {"traced": [], "plain": []}
            for _ in range(options.rounds):
                for kind, seconds in took.items():
                    seconds.append(run(n, (block_q, block_k), causal, kind))
            traced, plain = (statistics.median(took[kind]) for kind in ("traced", "plain"))
            print(
                f"{n:6} {causal!s:6} {options.tile}: {traced:.2f} {plain:.2f} {traced / plain:.2f}"
            )
    peak = memory(options.events)
    each = peak * 1e6 / options.events
    print(f"{options.events:,} accesses: {peak:.1f} MB at most, {each:.0f} B each")


if __name__ == "__main__":
    main()
