"""Time forward and backward attention on a GPU, with every available implementation.

    python benchmarks/gpu.py [--shapes papers|short|serving|widths|smoke|float32|course]
                             [--dtype bfloat16,...] [--csv out.csv] [--impl NAME,NAME] [--flush-l2]

Prints a table and writes a CSV. Implementations are flashsim's GPU backends; torch's
FlashAttention-2, cuDNN, memory-efficient and math kernels through `scaled_dot_product_attention`;
and flash-attention's CuTe-DSL kernels, if they are installed (docs/notebooks/speed_gpu.md says
how).

Times are medians of interleaved repetitions between CUDA events, after warm-up. Each repetition
makes one untimed call and then several calls back to back, after a spinning kernel. It spins for
twice as long as such calls take on the slowest implementation's host, so that every host runs ahead
and only the GPU's time is measured. All implementations of a shape spin equally long: a spinning
chip draws little power, and its clocks are higher for some milliseconds afterwards. The order
changes in each repetition, so that a kernel that runs hot or lowers the clocks precedes all others
equally often.

FLOPs are counted as in the papers: 4 B H N^2 d forward (half for causal; with a window, the scores
that it keeps), 2.5 times that backward. Peaks are memory in use beyond the inputs, in MiB. Saved
activations are what the forward pass keeps for the backward besides the output.

Every configuration runs, whatever fails. After a failure that may have corrupted the process, the
rest of a shape is measured in a new process. `status` is ok; or OOM, unsupported or error if
nothing was timed; or OOM(backward) and so on if only the backward failed. Without a torch that sees
the GPU, flashsim's kernels run on CuPy arrays (float16 and float32).
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from gpu_implementations import IMPLEMENTATIONS, Cute, Flashsim, Inputs, Torch
from gpu_lab import MARGIN, MIB, Lab, TorchLab, csv_file, open_lab

COLUMNS = (
    *("implementation", "d_model", "seq_len", "forward_ms", "forward_peak_MiB", "backward_ms"),
    *("backward_peak_MiB", "saved_activations_MiB", "status", "gpu", "dtype", "head_dim", "causal"),
    *("batch", "forward_tflops", "backward_tflops", "heads", "kv_heads", "window", "n_kv"),
)
TOKENS, D_MODEL = 16384, 2048
DTYPES = ("bfloat16", "float16", "float32")
DIRECTIONS = {"forward": 1.0, "backward": 2.5}  # FLOPs relative to the forward pass's
#: Untimed repetitions: the first measures the hosts' times, the second spins as all later ones do.
WARM_UPS = 2
#: The status of a row that a new process must measure again.
AGAIN = "again"


@dataclass(frozen=True)
class Shape:
    """One shape, with its mask."""

    head_dim: int
    causal: bool
    n: int
    batch: int
    heads: int
    kv_heads: int = 0  # 0: as many as `heads`
    window: int = 0  # see Inputs
    n_kv: int = 0  # 0: as many keys as queries; otherwise without a mask

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Return (batch, heads, n, head_dim) of q."""
        return self.batch, self.heads, self.n, self.head_dim

    @property
    def key_sizes(self) -> tuple[int, int, int, int]:
        """Return (batch, heads, n, head_dim) of k and v."""
        return self.batch, self.kv_heads or self.heads, self.n_kv or self.n, self.head_dim

    @property
    def flops(self) -> float:
        """Return the FLOPs of the forward pass, as the papers count them."""
        batch, heads, n, d = self.sizes
        scores = n * (self.n_kv or n) * (0.5 if self.causal else 1)
        if self.window:
            scores = n * self.window - self.window * (self.window - 1) / 2
        return 4 * batch * heads * scores * d

    def __str__(self) -> str:
        group = f" on {self.kv_heads}" if self.kv_heads else ""
        window = f", window {self.window}" if self.window else ""
        mask = "causal" if self.causal else "full"
        n = f"{self.n} x {self.n_kv}" if self.n_kv else self.n
        return f"d={self.head_dim} {self.batch} x {self.heads}{group} N={n} {mask}{window}"


def paper(head_dim: int, causal: bool, n: int) -> Shape:
    """Return a shape of the papers: 16 k tokens per batch, d_model 2048."""
    return Shape(head_dim, causal, n, TOKENS // n, D_MODEL // head_dim)


SHAPES = {
    "papers": [
        paper(d, causal, n)
        for d in (128, 64)
        for causal in (False, True)
        for n in (1024, 4096, 16384)
    ],
    "short": [
        Shape(d, causal, n, batch, heads)
        for d, heads in ((64, 12), (128, 16))
        for n in (128, 197, 256, 384, 512, 768)
        for batch in (1, 8, 64)
        for causal in (False, True)
    ],
    "serving": [
        *(
            Shape(128, True, n, batch, heads, 8)
            for heads in (32, 64)
            for n, batch in ((1024, 1), (1024, 4), (4096, 1), (4096, 4), (32768, 1))
        ),
        Shape(128, True, 4173, 1, 32, 8),
        Shape(128, True, 4096, 1, 32, 8, window=1024),
        Shape(128, True, 32768, 1, 32, 8, window=1024),
    ],
    "widths": [
        paper(d, causal, 4096)
        for d in (32, 64, 80, 96, 128, 160, 192, 256)
        for causal in (False, True)
    ],
    "smoke": [paper(64, True, 1024), paper(128, False, 1024)],
    "float32": [Shape(64, False, n, batch=8, heads=1) for n in (1024, 4096, 8192)],
    "course": [Shape(64, False, n, batch=8, heads=1) for n in (256, 1024, 4096, 8192, 16384)],
}


def status_of(error: Exception) -> str:
    """Return the table's status for a failure."""
    from flashsim.errors import FlashSimError

    kind, text = type(error).__name__, str(error)
    if kind == "OutOfMemoryError" or "out of GPU memory" in text or "out of memory" in text:
        return "OOM"
    if "refused the launch" in text:
        return "error"  # the driver's failure, reported by flashsim
    unsupported = isinstance(
        error, (FlashSimError, ImportError, AttributeError, NotImplementedError)
    )
    return "unsupported" if unsupported or "No available kernel" in text else "error"


class Spoilt(Exception):
    """Raised after an error that makes all later measurements of this process unreliable."""


@dataclass
class Contender:
    """An implementation at one shape: its row of the table, and the call that is timed."""

    one: Torch | Cute | Flashsim
    row: dict[str, Any]
    work: Callable[[], Any] | None = None
    times: list[float] = field(default_factory=list)
    hosts: list[float] = field(default_factory=list)  # seconds of the host per repetition

    def attempt(self, direction: str, step: Callable[[], None]) -> None:
        """Take a step of a direction, unless an earlier step failed, and record a failure.

        Raises
        ------
        Spoilt
            If the failure is not known to be harmless.
        """
        if self.row["status"] != "ok":
            return
        try:
            step()
        except Exception as error:
            status = status_of(error)
            self.row["status"] = status if direction == "forward" else f"{status}(backward)"
            self.work = None
            print(f"  {self.row['implementation']}: {type(error).__name__}: {error}"[:300])
            if status == "error":
                raise Spoilt from error

    def prepare(self, lab: Lab, x: Inputs, direction: str) -> None:
        """Compile the kernels and measure memory."""
        if direction == "forward":
            self.work = partial(self.one.inference, x)
        else:
            result, _, kept = lab.peak(lambda: self.one.forward(x))
            output = getattr(result, "out", result).nbytes
            self.row["saved_activations_MiB"] = (kept - output) / MIB
            self.work = partial(self.one.backward, x, result)
        self.work()
        _, peak, _ = lab.peak(self.work)
        self.row[f"{direction}_peak_MiB"] = peak / MIB
        self.times.clear()
        self.hosts.clear()

    def time(self, lab: Lab, spin: float, *, flush: bool) -> None:
        """Run one repetition after `spin` seconds.

        It times the mean of a few calls after an untimed one, or one call after a flush of the
        cache.
        """
        assert self.work is not None
        calls = 1 if flush else 3
        if flush:
            lab.flush()
        lab.spin(spin)
        began = time.perf_counter()
        if not flush:
            self.work()  # leaves the chip in this kernel's state, not the previous one's
        start = lab.event()
        for _ in range(calls):
            self.work()
        end = lab.event()
        self.hosts.append(time.perf_counter() - began)
        self.times.append(lab.milliseconds(start, end) / calls)

    def report(self, direction: str, flops: float) -> None:
        """Write the median of the timed repetitions into the row."""
        ms = statistics.median(self.times[WARM_UPS:])
        self.row[f"{direction}_ms"] = ms
        self.row[f"{direction}_tflops"] = flops / ms / 1e9


def measure(
    s: Shape, dtype: str, names: Sequence[str], repetitions: int, flush: bool, at_work: Path
) -> list[dict[str, Any]]:
    """Measure a row per named implementation; the file `at_work` names the one that is running.

    After an error, incomplete rows have the status `AGAIN`. With 0 repetitions, each
    implementation runs once, so that its kernels are compiled; no time is measured.
    """
    lab, why = open_lab()
    if why:
        print(f"  no torch kernels, arrays are CuPy's: {why}")
    rows = blank(s, dtype, names, lab.name)
    for one in IMPLEMENTATIONS.values():
        # of the previous shape: otherwise its memory would be freed during the measurement
        vars(one).pop("inputs", None)
    try:
        sizes = s.sizes, s.key_sizes, s.key_sizes, s.sizes
        x = Inputs(*(lab.array(shape, dtype) for shape in sizes), s.causal, s.window)
    except Exception as error:
        print(f"  inputs: {type(error).__name__}: {error}"[:300])
        return [row | {"status": status_of(error)} for row in rows]
    everyone = [Contender(IMPLEMENTATIONS[row["implementation"]], row) for row in rows]
    if not isinstance(lab, TorchLab):
        for c in everyone:
            if isinstance(c.one, (Torch, Cute)):
                c.row["status"] = "unsupported"

    def each(
        direction: str, step: Callable[[Contender], None], order: Sequence[Contender] = everyone
    ) -> None:
        for c in order:
            at_work.write_text(c.row["implementation"])
            c.attempt(direction, partial(step, c))

    def prepare(direction: str, c: Contender) -> None:
        c.prepare(lab, x, direction)
        lab.release()

    try:
        for direction, factor in DIRECTIONS.items():
            each(direction, partial(prepare, direction))
            if not repetitions:
                continue
            shuffled = random.Random(0)
            for _ in range(WARM_UPS + repetitions):
                order = shuffled.sample(everyone, len(everyone))
                # The minimum of each, which did not wait for the GPU.
                spin = MARGIN * max(min(c.hosts, default=0.0) for c in everyone)
                each(direction, lambda c, s=spin: c.time(lab, s, flush=flush), order)
            for c in everyone:
                if c.row["status"] == "ok":
                    c.report(direction, factor * s.flops)
    except Spoilt:
        return [
            again if row["status"] == "ok" else row
            for row, again in zip(rows, blank(s, dtype, names, lab.name, AGAIN), strict=True)
        ]
    return rows


def blank(
    s: Shape, dtype: str, names: Sequence[str], gpu: str, status: str = "ok"
) -> list[dict[str, Any]]:
    """Return the rows of a shape before any measurement."""
    d_model = s.heads * s.head_dim
    return [
        dict.fromkeys(COLUMNS, "")
        | {"implementation": name, "d_model": d_model, "seq_len": s.n, "status": status}
        | {"gpu": gpu, "dtype": dtype, "head_dim": s.head_dim, "causal": s.causal, "batch": s.batch}
        | {"heads": s.heads, "kv_heads": s.key_sizes[1], "window": s.window}
        | {"n_kv": s.key_sizes[2]}
        for name in names
    ]


class Worker:
    """A process that measures shapes; it is replaced after a failure that may have corrupted it."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None
        self._folder = tempfile.TemporaryDirectory()
        self._at_work = Path(self._folder.name) / "at_work"

    def measure(
        self, s: Shape, dtype: str, names: Sequence[str], repetitions: int, flush: bool
    ) -> list[dict[str, Any]]:
        """Measure in new processes until every row has a result or its own failure."""
        done: dict[str, dict[str, Any]] = {}
        while waiting := [name for name in names if name not in done]:
            rows = self._once(s, dtype, waiting, repetitions, flush)
            if any("error" in row["status"] for row in rows):
                self._end()
            done |= {row["implementation"]: row for row in rows if row["status"] != AGAIN}
        return [done[name] for name in names]

    def _once(
        self, s: Shape, dtype: str, names: Sequence[str], repetitions: int, flush: bool
    ) -> list[dict[str, Any]]:
        """Measure in one process; at least one row is always complete."""
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(1, mp_context=context)
        self._at_work.write_text("")
        given = s, dtype, names, repetitions, flush, self._at_work
        try:
            return self._pool.submit(measure, *given).result()
        except Exception as error:
            print(f"  {type(error).__name__}: {error}"[:300])
            guilty = self._at_work.read_text() if isinstance(error, BrokenProcessPool) else ""
            rows = blank(s, dtype, names, "", "error")
            for row in rows:
                if guilty in names and row["implementation"] != guilty:
                    row["status"] = AGAIN
            return rows

    def _end(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def close(self) -> None:
        """End the process."""
        self._end()
        self._folder.cleanup()


def chosen(only: str | None, dtype: str, shapes: str = "course") -> list[str]:
    """Return the names of the implementations to run.

    Slow compilers, and our kernels with one form of grouped heads, run only on request.

    Raises
    ------
    OptionError
        If an implementation does not exist.
    """
    from flashsim.errors import OptionError, choices

    names = only.split(",") if only else list(IMPLEMENTATIONS)
    if not only and shapes != "course":
        names = [name for name in names if not name.endswith("compiled")]
    if not only:
        names = [name for name in names if " heads " not in name]
    for name in names:
        if name not in IMPLEMENTATIONS:
            raise OptionError(f"no implementation {name!r}; {choices(name, IMPLEMENTATIONS)}")
    return [name for name in names if dtype == "float32" or "tf32" not in name]


def types(given: str) -> list[str]:
    """Return the element types to run.

    Raises
    ------
    OptionError
        If a type does not exist.
    """
    from flashsim.problem import checks

    return [checks.one_of("dtype", name, DTYPES) for name in given.split(",")]


def main() -> None:
    """Measure, print and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", choices=tuple(SHAPES), default="papers")
    parser.add_argument(
        "--dtype",
        help=f"of {', '.join(DTYPES)}, separated by commas; default: bfloat16, but float32 for "
        "--shapes float32, and both for --shapes course",
    )
    parser.add_argument(
        "--impl",
        "--only",
        dest="only",
        metavar="NAMES",
        help="implementations, separated by commas",
    )
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument(
        "--flush-l2", action="store_true", help="empty the L2 cache before each call"
    )
    parser.add_argument("--csv", default="gpu.csv", help="file for the table")
    options = parser.parse_args()
    usual = {"float32": "float32", "course": "float32,bfloat16"}.get(options.shapes, "bfloat16")
    try:
        dtypes = types(options.dtype or usual)
        names = {dtype: chosen(options.only, dtype, options.shapes) for dtype in dtypes}
        open_lab()
    except (ValueError, RuntimeError) as error:
        sys.exit(f"benchmarks/gpu.py: {error}")
    worker = Worker()
    with csv_file(options.csv, COLUMNS) as write:
        for shape, dtype in product(SHAPES[options.shapes], dtypes):
            print(f"{shape} {dtype}", flush=True)
            rows = worker.measure(shape, dtype, names[dtype], options.repetitions, options.flush_l2)
            write(*rows)
            for row in rows:
                print(line(row), flush=True)
    worker.close()


def line(row: dict[str, Any]) -> str:
    """Return a row as a line of text."""
    speed = "".join(
        f"  {key} {row[f'{key}_ms']:8.3f} ms {row[f'{key}_tflops']:4.0f} TFLOP/s"
        f" {row[f'{key}_peak_MiB']:7.1f} MiB"
        for key in DIRECTIONS
        if row[f"{key}_ms"] != ""
    )
    return f"  {row['implementation']:<38}{row['status']:<21}{speed}"


if __name__ == "__main__":
    main()
