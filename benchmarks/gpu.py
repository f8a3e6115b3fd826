"""Forward and backward attention on a GPU, every implementation there is: a table and a CSV.

    python benchmarks/gpu.py [--shapes papers|smoke] [--dtype bfloat16] [--flush-l2] [--csv out.csv]

Implementations: flashsim's GPU backends, and torch's FlashAttention-2, cuDNN, memory-efficient and
math kernels through `scaled_dot_product_attention`. Times are medians of interleaved repetitions
between CUDA events, after warm-up; each repetition makes several calls back to back behind a
spinning kernel, so that the host runs ahead and the GPU's time alone is measured. FLOPs are the
papers': 4 B H N^2 d forward (half for causal), 2.5 times that backward. Peaks are memory in use
beyond the inputs, MiB; saved activations what the forward pass keeps for the backward beside the
output. Every configuration runs, whatever fails, in another process after a failure that may have
spoilt this one; `status` says ok, OOM, unsupported or error. Without a torch that sees the GPU,
flashsim's kernels run on CuPy arrays (float16 and float32).
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from gpu_lab import MIB, Lab, TorchLab, open_lab

COLUMNS = (
    *("implementation", "d_model", "seq_len", "forward_ms", "forward_peak_MiB", "backward_ms"),
    *("backward_peak_MiB", "saved_activations_MiB", "status", "gpu", "dtype", "head_dim", "causal"),
    *("forward_tflops", "backward_tflops"),
)
#: (head_dim, causal, sequence length). The papers' twelve shapes: 16 k tokens, d_model 2048.
PAPERS = [
    (d, causal, n) for d in (128, 64) for causal in (False, True) for n in (1024, 4096, 16384)
]
SMOKE = [(64, True, 1024), (128, False, 1024)]
TOKENS, D_MODEL = 16384, 2048


@dataclass(frozen=True)
class Shape:
    """One configuration: batch and heads follow from the tokens and d_model."""

    head_dim: int
    causal: bool
    n: int
    dtype: str

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """(batch, heads, n, head_dim)."""
        return TOKENS // self.n, D_MODEL // self.head_dim, self.n, self.head_dim

    @property
    def flops(self) -> float:
        """FLOPs of the forward pass, as the papers count them."""
        batch, heads, n, d = self.sizes
        return 4 * batch * heads * n**2 * d * (0.5 if self.causal else 1)


@dataclass(frozen=True)
class Inputs:
    """The arrays of one shape."""

    q: Any
    k: Any
    v: Any
    dout: Any
    causal: bool


class Torch:
    """One kernel of torch's scaled_dot_product_attention, by its name in `SDPBackend`."""

    def __init__(self, backend: str) -> None:
        self.backend = backend

    def _attend(self, q: Any, k: Any, v: Any, causal: bool) -> Any:
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention

        with sdpa_kernel(getattr(SDPBackend, self.backend)):
            return scaled_dot_product_attention(q, k, v, is_causal=causal)

    def forward(self, x: Inputs) -> Any:
        """With a graph, for the backward pass."""
        self.inputs = [a.detach().requires_grad_() for a in (x.q, x.k, x.v)]
        return self._attend(*self.inputs, x.causal)

    def inference(self, x: Inputs) -> Any:
        """Without one."""
        import torch

        with torch.no_grad():
            return self._attend(x.q, x.k, x.v, x.causal)

    def backward(self, x: Inputs, result: Any) -> Any:
        """The gradients of q, k and v."""
        import torch

        return torch.autograd.grad(result, self.inputs, x.dout, retain_graph=True)


class Flashsim:
    """One GPU backend of flashsim; `deterministic` chooses the form of its backward pass."""

    def __init__(self, backend: str, deterministic: bool, **options: Any) -> None:
        self.backend, self.deterministic, self.options = backend, deterministic, options

    def forward(self, x: Inputs) -> Any:
        """The forward pass."""
        import flashsim

        return flashsim.run(x.q, x.k, x.v, causal=x.causal, backend=self.backend, **self.options)

    inference = forward

    def backward(self, x: Inputs, result: Any) -> Any:
        """The gradients of q, k and v."""
        return result.backward(x.dout, deterministic=self.deterministic)


#: Everything that might run, by the name that the CSV gives it.
IMPLEMENTATIONS: dict[str, Torch | Flashsim] = {
    "flashsim cupy": Flashsim("cupy", deterministic=False),
    "flashsim cupy deterministic": Flashsim("cupy", deterministic=True),
    "flashsim cupy portable": Flashsim("cupy", deterministic=False, kernel="portable"),
    "flashsim cupy portable deterministic": Flashsim("cupy", deterministic=True, kernel="portable"),
    "flashsim cupy tf32": Flashsim("cupy", deterministic=False, allow_tf32=True),
    "flashsim numba_cuda": Flashsim("numba_cuda", deterministic=False),
    "flashsim numba_cuda deterministic": Flashsim("numba_cuda", deterministic=True),
    "torch flash2": Torch("FLASH_ATTENTION"),
    "torch cudnn": Torch("CUDNN_ATTENTION"),
    "torch efficient": Torch("EFFICIENT_ATTENTION"),
    "torch math": Torch("MATH"),
}


def status_of(error: Exception) -> str:
    """What a failure is called in the table."""
    from flashsim.errors import FlashSimError

    kind, text = type(error).__name__, str(error)
    if kind == "OutOfMemoryError" or "out of GPU memory" in text or "out of memory" in text:
        return "OOM"
    unsupported = isinstance(
        error, (FlashSimError, ImportError, AttributeError, NotImplementedError)
    )
    return "unsupported" if unsupported or "No available kernel" in text else "error"


@dataclass
class Contender:
    """An implementation at one shape: its row of the table, and what is timed."""

    one: Torch | Flashsim
    row: dict[str, Any]
    works: dict[str, Callable[[], Any]] = field(default_factory=dict)
    times: dict[str, list[float]] = field(default_factory=dict)

    def attempt(self, work: Callable[[], None]) -> None:
        """Do it, unless something failed before; note a failure."""
        if self.row["status"] != "ok":
            return
        try:
            work()
        except Exception as error:
            self.row["status"] = status_of(error)
            self.works.clear()
            print(f"  {self.row['implementation']}: {type(error).__name__}: {error}"[:300])

    def prepare(self, lab: Lab, x: Inputs) -> None:
        """Compile, measure memory."""
        self.one.inference(x)
        _, peak, _ = lab.peak(lambda: self.one.inference(x))
        self.row["forward_peak_MiB"] = peak / MIB
        result, _, kept = lab.peak(lambda: self.one.forward(x))
        self.row["saved_activations_MiB"] = (kept - getattr(result, "out", result).nbytes) / MIB
        self.one.backward(x, result)
        _, peak, _ = lab.peak(lambda: self.one.backward(x, result))
        self.row["backward_peak_MiB"] = peak / MIB
        self.works["forward"] = lambda: self.one.inference(x)
        self.works["backward"] = lambda: self.one.backward(x, result)

    def time(self, lab: Lab, direction: str, *, flush: bool) -> None:
        """One repetition: the mean of a few calls, or one behind a flushed cache."""
        calls = 1 if flush else 3
        if flush:
            lab.flush()
        lab.spin()
        start = lab.event()
        for _ in range(calls):
            self.works[direction]()
        self.times.setdefault(direction, []).append(lab.milliseconds(start, lab.event()) / calls)


def measure(s: Shape, repetitions: int, flush: bool) -> list[dict[str, Any]]:
    """One row for each implementation."""
    lab, why = open_lab()
    if why:
        print(f"  no torch kernels, arrays are CuPy's: {why}")
    rows = blank(s, lab.name)
    everyone = [Contender(IMPLEMENTATIONS[row["implementation"]], row) for row in rows]
    try:
        x = Inputs(*(lab.array(s.sizes, s.dtype) for _ in range(4)), s.causal)
    except Exception as error:
        print(f"  inputs: {type(error).__name__}: {error}"[:300])
        return [row | {"status": status_of(error)} for row in rows]
    for c in everyone:
        if isinstance(c.one, Torch) and not isinstance(lab, TorchLab):
            c.row["status"] = "unsupported"
        c.attempt(partial(c.prepare, lab, x))
        lab.release()
    for direction in ("forward", "backward"):
        for _ in range(1 + repetitions):  # the first one warms up
            for c in everyone:
                c.attempt(partial(c.time, lab, direction, flush=flush))
    for c in everyone:
        for direction, factor in (("forward", 1.0), ("backward", 2.5)):
            if c.row["status"] == "ok":
                ms = statistics.median(c.times[direction][1:])
                c.row[f"{direction}_ms"] = ms
                c.row[f"{direction}_tflops"] = factor * s.flops / ms / 1e9
    return rows


def blank(s: Shape, gpu: str) -> list[dict[str, Any]]:
    """The rows of a shape before anything was measured."""
    return [
        dict.fromkeys(COLUMNS, "")
        | {"implementation": name, "d_model": D_MODEL, "seq_len": s.n, "status": "ok", "gpu": gpu}
        | {"dtype": s.dtype, "head_dim": s.head_dim, "causal": s.causal}
        for name in IMPLEMENTATIONS
        if s.dtype == "float32" or "tf32" not in name
    ]


class Worker:
    """A process that measures shapes; a fresh one after any that a failure may have spoilt."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None

    def measure(self, s: Shape, repetitions: int, flush: bool) -> list[dict[str, Any]]:
        """As `measure`; rows of status "error" if the process died."""
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(1, mp_context=context)
        try:
            rows = self._pool.submit(measure, s, repetitions, flush).result()
        except Exception as error:
            print(f"  {type(error).__name__}: {error}"[:300])
            rows = [row | {"status": "error"} for row in blank(s, "")]
        if any(row["status"] == "error" for row in rows):
            self.close()
        return rows

    def close(self) -> None:
        """End the process."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


def main() -> None:
    """Run, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", choices=("papers", "smoke"), default="papers")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument(
        "--flush-l2", action="store_true", help="empty the L2 cache before each call"
    )
    parser.add_argument("--csv", default="gpu.csv", help="where the table goes")
    options = parser.parse_args()
    try:
        open_lab()
    except RuntimeError as error:
        sys.exit(f"benchmarks/gpu.py: {error}")
    worker = Worker()
    with open(options.csv, "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for head_dim, causal, n in PAPERS if options.shapes == "papers" else SMOKE:
            shape = Shape(head_dim, causal, n, options.dtype)
            print(
                f"d={head_dim} N={n} {'causal' if causal else 'full'} {options.dtype}", flush=True
            )
            rows = worker.measure(shape, options.repetitions, options.flush_l2)
            writer.writerows(rows)
            file.flush()
            for row in rows:
                print(line(row), flush=True)
    worker.close()


def line(row: dict[str, Any]) -> str:
    """A row for people."""
    speed = "".join(
        f"  {key} {row[f'{key}_ms']:8.3f} ms {row[f'{key}_tflops']:4.0f} TFLOP/s"
        f" {row[f'{key}_peak_MiB']:7.1f} MiB"
        for key in ("forward", "backward")
        if row["status"] == "ok"
    )
    return f"  {row['implementation']:<38}{row['status']:<12}{speed}"


if __name__ == "__main__":
    main()
