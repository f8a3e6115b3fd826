"""Measure the speed of the CPU engine: python benchmarks/cpu.py [--quick] [--out out/cpu]

Writes five tables, printed and as CSV, and a plot:

- speed: forward, and forward + backward, against PyTorch's CPU attention (if it is installed) and a
2048^3 single-precision matrix product; medians, interleaved in one process;
- extras: one head on one thread and on all, the cost of ``trace=True``, both forms of the backward;
- short: calls at N = 1024, best and median, alternating between one thread and all;
- decode: one query over a long cache, in bytes of K and V per second, and a copy of as many bytes;
- scaling: time and peak memory over N, with a separate process per method.

On a machine that other programs use too, compare CPU seconds of one thread, which exclude waiting:
OPENBLAS_NUM_THREADS=1 python benchmarks/cpu.py --only speed --threads 1 --cpu-time

FLOP/s count 4 N^2 d per head for a forward pass and 14 N^2 d with the backward; half if causal.

``--dtype bfloat16`` (or float16) runs the tables "speed" and "decode" in that type, in flashsim and
in PyTorch. The first line names the micro-kernel of "speed"; ``--micro-kernel`` selects another.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

import flashsim
from flashsim.engines.cpu import threads
from flashsim.engines.cpu.micro_kernels import registers
from flashsim.problem.problem import numpy_dtype

SHAPES = ((8, 1024, 64), (8, 4096, 64), (4, 4096, 128))  # heads, N, d
#: Batch, query heads, KV heads, keys, d.
CACHES = (
    (1, 32, 8, 16384, 128),
    (8, 32, 8, 4096, 128),
    (1, 8, 8, 16384, 128),
    (1, 32, 8, 16384, 64),
    (32, 32, 8, 512, 128),
    (1, 64, 8, 16384, 128),
)
TABLES = ("speed", "extras", "short", "decode", "scaling")
DTYPES = ("float32", "bfloat16", "float16")
LENGTHS = (1024, 2048, 4096, 8192, 16384)
METHODS = ("numba", "torch", "naive", "simulator")
#: Pause in seconds before each measurement: threads of the previous one keep spinning for a while.
REST = 0.25
HAS_TORCH = importlib.util.find_spec("torch") is not None


def alternating(
    repeats: int,
    works: dict[str, Callable[[], object]],
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Return the median seconds of each work, interleaved, without the first of several rounds."""
    rounds: dict[str, list[float]] = {name: [] for name in works}
    extra = int(repeats > 1)
    for _ in range(repeats + extra):
        for name, work in works.items():
            time.sleep(REST)
            start = clock()
            work()
            rounds[name].append(clock() - start)
    return {name: statistics.median(column[extra:]) for name, column in rounds.items()}


def inputs(heads: int, n: int, d: int, dtype: str = "float32") -> list[np.ndarray]:
    """Return random q, k, v and dout."""
    rng, kind = np.random.default_rng(0), numpy_dtype(dtype)
    draw = lambda: rng.standard_normal((1, heads, n, d), dtype=np.float32)  # noqa: E731
    return [draw().astype(kind, copy=False) for _ in range(4)]


def numba_works(arrays, causal, **options) -> dict[str, Callable[[], object]]:
    """Return flashsim's forward, and its forward with the fused backward."""
    q, k, v, dout = arrays

    def forward():
        return flashsim.run(
            q, k, v, causal=causal, backend="numba", algorithm="flash2-fused", **options
        )

    return {"forward": forward, "forward + backward": lambda: forward().backward(dout)}


def torch_works(arrays, causal, n_threads) -> dict[str, Callable[[], object]]:
    """Return PyTorch's forward, and its forward with backward, on as many threads."""
    import torch

    torch.set_num_threads(n_threads)
    attention = torch.nn.functional.scaled_dot_product_attention
    *qkv, dout = (torch_tensor(x) for x in arrays)
    leaves = [x.clone().requires_grad_() for x in qkv]

    def forward():
        with torch.no_grad():
            return attention(*qkv, is_causal=causal)

    def both():
        attention(*leaves, is_causal=causal).backward(dout)

    return {"forward": forward, "forward + backward": both}


def torch_tensor(x: np.ndarray):
    """Convert an array to a torch tensor, through float32 for bfloat16."""
    import torch

    return torch.from_numpy(x.astype(np.float32, copy=False)).to(getattr(torch, x.dtype.name))


def speed(
    repeats: int, n_threads: int, clock: Callable[[], float], dtype: str, **options
) -> list[dict]:
    """Return the rows of the table "speed", for `SHAPES`."""
    a, b = np.random.default_rng(0).standard_normal((2, 2048, 2048), dtype=np.float32)
    rows = []
    for heads, n, d in SHAPES:
        for causal in (False, True):
            arrays = inputs(heads, n, d, dtype)
            ours, theirs = numba_works(arrays, causal, threads=n_threads, **options), {}
            if HAS_TORCH:
                theirs = torch_works(arrays, causal, n_threads)
            for what, factor in (("forward", 4), ("forward + backward", 14)):
                works = {"numba": ours[what], "sgemm": lambda: a @ b}
                if theirs:
                    works["torch"] = theirs[what]
                took = alternating(repeats, works, clock)
                flops = factor * heads * n * n * d / (2 if causal else 1)
                gemm = 2 * 2048**3 / took["sgemm"]
                rows.append(
                    {
                        "heads": heads,
                        "N": n,
                        "d": d,
                        "mask": "causal" if causal else "none",
                        "pass": what,
                        "numba ms": round(took["numba"] * 1e3, 1),
                        "torch ms": round(took["torch"] * 1e3, 1) if theirs else "",
                        "x torch": round(took["torch"] / took["numba"], 2) if theirs else "",
                        "GFLOP/s": round(flops / took["numba"] / 1e9),
                        "sgemm GFLOP/s": round(gemm / 1e9),
                        "of sgemm": round(flops / took["numba"] / gemm, 2),
                    }
                )
    return rows


def extras(repeats: int, n: int, n_threads: int, clock: Callable[[], float]) -> list[dict]:
    """Return rows on one thread and all, on tracing, and on the two forms of the backward."""
    arrays = inputs(1, n, 64)
    dout = arrays[3]
    single, every = (numba_works(arrays, False, threads=t) for t in (1, n_threads))
    eight = inputs(8, n, 64)
    off, on = (numba_works(eight, False, trace=t, threads=n_threads) for t in (False, True))
    result = every["forward"]()
    cases = {
        "one head, forward: all threads against one": (single["forward"], every["forward"]),
        "one head, forward + backward: all threads against one": (
            single["forward + backward"],
            every["forward + backward"],
        ),
        "eight heads, forward: trace=False against trace=True": (off["forward"], on["forward"]),
        "one head, backward: three passes against fused": (
            lambda: result.backward(dout, deterministic=True),
            lambda: result.backward(dout),
        ),
    }
    rows = []
    for name, (first, second) in cases.items():
        if "threads" in name and (n_threads == 1 or clock is time.process_time):
            continue  # on two threads, CPU seconds equal those of one
        took = alternating(repeats, {"first": first, "second": second}, clock)
        rows.append(
            {
                "what": name,
                "N": n,
                "first ms": round(took["first"] * 1e3, 1),
                "second ms": round(took["second"] * 1e3, 1),
                "ratio": round(took["first"] / took["second"], 3),
            }
        )
    return rows


def short(calls: int, n_threads: int, clock: Callable[[], float]) -> list[dict]:
    """Return best and median of calls so short that other load shows; 8 heads, d = 64."""
    rows = []
    for causal in (False, True):
        arrays = inputs(8, 1024, 64)
        forward = {t: numba_works(arrays, causal, threads=t)["forward"] for t in {1, n_threads}}
        took: dict[int, list[float]] = {t: [] for t in forward}
        for _ in range(calls):
            for count, work in forward.items():
                start = clock()
                work()
                took[count].append((clock() - start) * 1e3)
        rows += [
            {
                "mask": "causal" if causal else "none",
                "threads": count,
                "best ms": round(min(times), 1),
                "median ms": round(statistics.median(times), 1),
            }
            for count, times in took.items()
        ]
    return rows


def decode(repeats: int, n_threads: int, clock: Callable[[], float], dtype: str) -> list[dict]:
    """Return rows for one query per head, which reads every byte of K and V once.

    The copy that is measured beside it reads and writes the bytes of K and V, half of them each. It
    uses as many threads, each pinned to a CPU.
    """
    rows = []
    for batch, heads, kv_heads, n, d in CACHES:
        rng, kind = np.random.default_rng(0), numpy_dtype(dtype)
        q = rng.standard_normal((batch, heads, 1, d), dtype=np.float32).astype(kind)
        k, v = rng.standard_normal((2, batch, kv_heads, n, d), dtype=np.float32).astype(kind)
        target = np.zeros_like(k)
        parts = list(
            zip(*(np.array_split(x.reshape(-1), n_threads) for x in (target, k)), strict=True)
        )
        with ThreadPoolExecutor(n_threads, initializer=keep_apart()) as pool:
            works: dict[str, Callable[[], object]] = {
                "numba": lambda q=q, k=k, v=v: flashsim.run(
                    q, k, v, backend="numba", threads=n_threads
                ),
                "copy": lambda pool=pool, parts=parts: list(
                    pool.map(lambda pair: np.copyto(*pair), parts)
                ),
            }
            if HAS_TORCH:
                works["torch"] = torch_decode(q, k, v, n_threads)
            took = alternating(repeats, works, clock)
        rate = {name: 2 * k.nbytes / seconds / 1e9 for name, seconds in took.items()}
        rows.append(
            {
                "batch": batch,
                "heads": f"{heads}/{kv_heads}",
                "keys": n,
                "d": d,
                "numba ms": round(took["numba"] * 1e3, 1),
                "torch ms": round(took["torch"] * 1e3, 1) if HAS_TORCH else "",
                "x torch": round(took["torch"] / took["numba"], 2) if HAS_TORCH else "",
                "GB/s": round(rate["numba"], 1),
                "copy GB/s": round(rate["copy"], 1),
                "of copy": round(rate["numba"] / rate["copy"], 2),
            }
        )
    return rows


def keep_apart() -> Callable[[], None]:
    """Return a function that pins each calling thread to its own CPU.

    After a pause, Linux may otherwise wake two threads on one CPU.
    """
    if not hasattr(os, "sched_setaffinity"):
        return lambda: None
    cpus = itertools.cycle(sorted(os.sched_getaffinity(0)))
    return lambda: os.sched_setaffinity(0, {next(cpus)})


def torch_decode(q, k, v, n_threads: int) -> Callable[[], object]:
    """Return a call of PyTorch's attention with one query per head."""
    import torch

    torch.set_num_threads(n_threads)
    tensors = [torch_tensor(x) for x in (q, k, v)]
    gqa = q.shape[1] != k.shape[1]
    attention = torch.nn.functional.scaled_dot_product_attention
    return lambda: attention(*tensors, enable_gqa=gqa)


def naive(q, k, v) -> np.ndarray:
    """Compute attention with the whole score matrix at once."""
    scores = (q @ k.mT) * np.float32(q.shape[-1] ** -0.5)
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    return scores @ v


def child(method: str, n: int, repeats: int, n_threads: int, clock: Callable[[], float]) -> None:
    """Print one method's median seconds at one length and its peak memory, as JSON."""

    def peak() -> int:
        """Return this process's largest memory so far, in KiB, without its parent's."""
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0])

    def work(arrays):
        if method == "torch":
            return torch_works(arrays, False, n_threads)["forward"]
        if method == "numba":
            return numba_works(arrays, False, threads=n_threads)["forward"]
        if method == "naive":
            return lambda: naive(*arrays[:3])
        return lambda: flashsim.run(*arrays[:3], tiling=flashsim.Tiling(128, 128))

    work(inputs(1, 256, 64))()  # loads and compiles everything
    forward = work(inputs(1, n, 64))
    # resets the peak, which so far is that of loading and compiling
    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    took = alternating(repeats, {"it": forward}, clock)["it"]
    print(json.dumps({"ms": round(took * 1e3, 1), "MiB": round((peak() - before) / 1024, 1)}))


def scaling(repeats: int, lengths, flags: list[str]) -> list[dict]:
    """Return rows for one head, d = 64, no mask, forward; child processes get `flags`."""
    rows = []
    for n in lengths:
        row: dict = {"N": n}
        for method in METHODS:
            if method == "torch" and not HAS_TORCH:
                continue
            rounds = 1 if n > 4096 and method in ("naive", "simulator") else repeats
            command = [sys.executable, __file__, "--child", method, str(n), str(rounds), *flags]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found = json.loads(done.stdout.splitlines()[-1])
            row[f"{method} ms"], row[f"{method} MiB"] = found["ms"], found["MiB"]
        rows.append(row)
    return rows


def report(name: str, title: str, rows: list[dict], out: Path) -> None:
    """Print one table and write it as CSV."""
    table = Table(*rows[0], title=title)
    for row in rows:
        table.add_row(*(f"{x:,}" if isinstance(x, int) else str(x) for x in row.values()))
    Console(width=150).print(table)
    with (out / f"{name}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def plot(rows: list[dict], path: Path) -> None:
    """Plot time and peak memory over N, both axes logarithmic."""
    import matplotlib as mpl
    from line_labels import end_labels
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    from flashsim.viz import palette
    from flashsim.viz.style import DASHES, MARKERS, count_axis, rc

    look = palette.theme("light")
    names = {"numba": "CPU engine", "naive": "naive NumPy", "torch": "PyTorch"}
    with mpl.rc_context(rc(look)):
        figure = Figure(figsize=(9.6, 5.4), layout="constrained", dpi=120)
        axes, last = figure.subplots(1, 2), rows[-1]
        ends: list[list[tuple[float, float, str, str]]] = []
        lengths = [int(row["N"]) for row in rows]
        for ax, unit, label in zip(
            axes, ("ms", "MiB"), ("time (ms)", "memory beyond inputs and output (MiB)"), strict=True
        ):
            ends.append([])
            for n, method in enumerate(METHODS):
                if f"{method} {unit}" not in rows[0]:
                    continue
                values = [max(float(row[f"{method} {unit}"]), 0.1) for row in rows]
                color = look.cycle[(2, 1, 0, 4)[n % 4]]
                ax.loglog(
                    lengths, values, color=color, ls=DASHES[n % 4], marker=MARKERS[n % 4], ms=6
                )
                ends[-1].append((lengths[-1], values[-1], names.get(method, method), color))
            ax.set(xlabel="N, queries and keys", xlim=(lengths[0] * 0.85, lengths[-1] * 8))
            ax.set_title(label, fontsize=13, fontweight="normal")
            ax.set_xticks(lengths[::2])
            ax.xaxis.set_minor_locator(NullLocator())
            count_axis(ax.xaxis)
            ax.yaxis.set_minor_locator(NullLocator())
            ax.grid(axis="y")
        count_axis(axes[0].yaxis)
        axes[1].yaxis.set_major_formatter(lambda y, _: f"{y:g}")
        less = float(last["naive MiB"]) / max(float(last["numba MiB"]), 0.1)
        faster = float(last["naive ms"]) / float(last["numba ms"])
        figure.suptitle(
            f"At N = {lengths[-1]:,} the CPU engine takes {faster:.1f}× less time than naive\n"
            f"attention, and {less:.0f}× less memory (forward, one head, d = 64, float32)",
            fontsize=14, fontweight="bold", x=0.02, ha="left",
        )  # fmt: skip
        figure.canvas.draw()
        for ax, found in zip(axes, ends, strict=True):
            end_labels(ax, found)
        figure.savefig(path)


def machine() -> str:
    """Return a line that names the CPU, its threads and registers, and versions."""
    name = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((x.split(": ", 1)[1] for x in lines if x.startswith("model name")), name)
    kind = type(registers.best("float32")).__name__
    versions = [f"numpy {np.__version__}"]
    if HAS_TORCH:
        import torch

        versions.append(f"torch {torch.__version__}")
    return f"{name}, {threads.available()} CPUs, {kind}; {', '.join(versions)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds, shorter sequences")
    parser.add_argument("--out", type=Path, default=Path("out/cpu"), help="folder for CSV and plot")
    parser.add_argument("--only", choices=TABLES, help="measure only this table")
    parser.add_argument(
        "--threads", type=int, default=threads.available(), help="maximum number of threads"
    )
    parser.add_argument("--rounds", type=int, help="rounds per median (9, with --quick 3)")
    parser.add_argument(
        "--cpu-time", action="store_true", help="measure CPU seconds, not wall time"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="type of speed, decode")
    parser.add_argument("--micro-kernel", help="micro-kernel of the table 'speed'")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument(
        "--draw", nargs=2, type=Path, metavar=("CSV", "PNG"), help="only plot a CSV of 'scaling'"
    )
    options = parser.parse_args()
    if options.draw is not None:
        table, picture = options.draw
        with table.open(newline="") as file:
            plot(list(csv.DictReader(file)), picture)
        return
    for name in ("threads", "rounds"):
        given = getattr(options, name)
        if given is not None and given < 1:
            parser.error(f"--{name} must be at least 1, got {given}")
    clock = time.process_time if options.cpu_time else time.perf_counter
    if options.child:
        method, n, rounds = options.child
        child(method, int(n), int(rounds), options.threads, clock)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    repeats = options.rounds or (3 if options.quick else 9)
    unit = "CPU" if options.cpu_time else "wall"
    title = f"{machine()}; {options.threads} threads, {unit} time"
    if options.only in (None, "speed"):
        chosen = {"micro_kernel": options.micro_kernel} if options.micro_kernel else {}
        small = inputs(1, 16, 16, options.dtype)
        ran = numba_works(small, False, threads=options.threads, **chosen)["forward"]().kernel
        rows = speed(repeats, options.threads, clock, options.dtype, **chosen)
        report("speed", f"{options.dtype}, {ran}; {title}", rows, options.out)
    if options.only in (None, "extras"):
        rows = extras(repeats, 2048 if options.quick else 4096, options.threads, clock)
        report("extras", title, rows, options.out)
    if options.only in (None, "short"):
        report("short", title, short(8 * repeats, options.threads, clock), options.out)
    if options.only in (None, "decode"):
        rows = decode(repeats, options.threads, clock, options.dtype)
        report("decode", f"{options.dtype}, {title}", rows, options.out)
    if options.only in (None, "scaling"):
        flags = ["--threads", str(options.threads), *["--cpu-time"] * options.cpu_time]
        rows = scaling(min(repeats, 5), LENGTHS[:3] if options.quick else LENGTHS, flags)
        report("scaling", f"One head, d = 64; {title}", rows, options.out)
        plot(rows, options.out / "scaling.png")


if __name__ == "__main__":
    main()
