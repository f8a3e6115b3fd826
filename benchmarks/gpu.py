"""Forward and backward attention on a GPU, every implementation there is: a table and a CSV.

    python benchmarks/gpu.py [--shapes papers|smoke] [--dtype bfloat16] [--flush-l2] [--csv out.csv]

Implementations: flashsim's GPU backends, and torch's FlashAttention-2, cuDNN, memory-efficient and
math kernels through `scaled_dot_product_attention`. Times are medians of interleaved repetitions
between CUDA events, after warm-up; each repetition makes several calls back to back behind a
spinning kernel, so that the host runs ahead and the GPU's time alone is measured. FLOPs are the
papers': 4 B H N^2 d forward (half for causal), 2.5 times that backward. Every configuration runs,
whatever fails; `status` says ok, OOM, unsupported or error.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashsim
from flashsim.errors import FlashSimError

MIB = 1024 * 1024
COLUMNS = (
    *("implementation", "d_model", "seq_len", "forward_ms", "forward_peak_MiB", "backward_ms"),
    *("backward_peak_MiB", "saved_activations_MiB", "status", "gpu", "dtype", "head_dim", "causal"),
    *("forward_tflops", "backward_tflops"),
)
#: The papers' twelve shapes: 16 k tokens a batch, d_model 2048.
PAPERS = [
    (d, causal, n) for d in (128, 64) for causal in (False, True) for n in (1024, 4096, 16384)
]
SMOKE = [(64, True, 1024), (128, False, 1024)]
TOKENS, D_MODEL = 16384, 2048


@dataclass
class Shape:
    """One configuration: (batch, heads, n, d) inputs and the gradient of the output."""

    head_dim: int
    causal: bool
    n: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        self.batch, self.heads = TOKENS // self.n, D_MODEL // self.head_dim
        shape = (self.batch, self.heads, self.n, self.head_dim)
        self.q, self.k, self.v, self.dout = (
            torch.randn(shape, device="cuda", dtype=self.dtype) for _ in range(4)
        )

    @property
    def flops(self) -> float:
        """FLOPs of the forward pass, as the papers count them."""
        return 4 * self.batch * self.heads * self.n**2 * self.head_dim * (0.5 if self.causal else 1)


class Torch:
    """One kernel of torch's scaled_dot_product_attention."""

    def __init__(self, backend: SDPBackend) -> None:
        self.backend = backend

    def forward(self, s: Shape) -> Any:
        """With a graph, for the backward pass."""
        self.inputs = [x.detach().requires_grad_() for x in (s.q, s.k, s.v)]
        with sdpa_kernel(self.backend):
            return functional.scaled_dot_product_attention(*self.inputs, is_causal=s.causal)

    def inference(self, s: Shape) -> Any:
        """Without one."""
        with torch.no_grad(), sdpa_kernel(self.backend):
            return functional.scaled_dot_product_attention(s.q, s.k, s.v, is_causal=s.causal)

    def backward(self, s: Shape, result: Any) -> Any:
        """The gradients of q, k and v."""
        return torch.autograd.grad(result, self.inputs, s.dout, retain_graph=True)


class Flashsim:
    """One GPU backend of flashsim; `deterministic` chooses the form of its backward pass."""

    def __init__(self, backend: str, deterministic: bool, **options: Any) -> None:
        self.backend, self.deterministic, self.options = backend, deterministic, options

    def forward(self, s: Shape) -> Any:
        """The forward pass."""
        return flashsim.run(s.q, s.k, s.v, causal=s.causal, backend=self.backend, **self.options)

    inference = forward

    def backward(self, s: Shape, result: Any) -> Any:
        """The gradients of q, k and v."""
        return result.backward(s.dout, deterministic=self.deterministic)


def implementations() -> dict[str, Any]:
    """Everything that might run here, by the name that the CSV gives it."""
    return {
        "flashsim cupy": Flashsim("cupy", deterministic=False),
        "flashsim cupy deterministic": Flashsim("cupy", deterministic=True),
        "flashsim cupy portable": Flashsim("cupy", deterministic=False, kernel="portable"),
        "flashsim numba_cuda": Flashsim("numba_cuda", deterministic=False),
        "flashsim numba_cuda deterministic": Flashsim("numba_cuda", deterministic=True),
        "torch flash2": Torch(SDPBackend.FLASH_ATTENTION),
        "torch cudnn": Torch(SDPBackend.CUDNN_ATTENTION),
        "torch efficient": Torch(SDPBackend.EFFICIENT_ATTENTION),
        "torch math": Torch(SDPBackend.MATH),
    }


def peak_mib(work: Callable[[], Any]) -> tuple[Any, float, float]:
    """What `work` returns, its peak memory beyond what was there, and what it keeps, in MiB."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = work()
    torch.cuda.synchronize()
    peak, after = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
    return result, (peak - before) / MIB, (after - before) / MIB


def interleaved(
    works: dict[str, Callable[[], Any]], repetitions: int, flush: torch.Tensor | None
) -> dict[str, float]:
    """Median milliseconds a call of each, their repetitions taken in turn."""
    times: dict[str, list[float]] = {name: [] for name in works}
    calls = 1 if flush is not None else 3
    for work in works.values():
        work()
    for _ in range(repetitions):
        for name, work in works.items():
            if flush is not None:
                flush.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(1_000_000)
            start.record()
            for _ in range(calls):
                work()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) / calls)
    return {name: statistics.median(t) for name, t in times.items()}


def measure(s: Shape, repetitions: int, flush: torch.Tensor | None) -> Iterator[dict[str, Any]]:
    """One row for each implementation."""
    rows: dict[str, dict[str, Any]] = {}
    forward: dict[str, Callable[[], Any]] = {}
    backward: dict[str, Callable[[], Any]] = {}
    for name, one in implementations().items():
        row = rows[name] = dict.fromkeys(COLUMNS, "")
        try:
            one.inference(s)  # compiles, and fails here if it must
            _, row["forward_peak_MiB"], _ = peak_mib(lambda one=one: one.inference(s))
            result, _, kept = peak_mib(lambda one=one: one.forward(s))
            out = getattr(result, "out", result)
            row["saved_activations_MiB"] = kept - out.nbytes / MIB
            one.backward(s, result)
            _, row["backward_peak_MiB"], _ = peak_mib(
                lambda one=one, result=result: one.backward(s, result)
            )
            forward[name] = lambda one=one: one.inference(s)
            backward[name] = lambda one=one, result=result: one.backward(s, result)
            row["status"] = "ok"
        except torch.cuda.OutOfMemoryError:
            row["status"] = "OOM"
        except FlashSimError as error:
            row["status"] = "OOM" if "out of GPU memory" in str(error) else "unsupported"
        except RuntimeError as error:
            row["status"] = "unsupported" if "No available kernel" in str(error) else "error"
        finally:
            torch.cuda.empty_cache()
    for key, works, factor in (("forward", forward, 1.0), ("backward", backward, 2.5)):
        for name, ms in interleaved(works, repetitions, flush).items():
            rows[name][f"{key}_ms"] = ms
            rows[name][f"{key}_tflops"] = factor * s.flops / ms / 1e9
    for name, row in rows.items():
        row |= {
            "implementation": name,
            "d_model": D_MODEL,
            "seq_len": s.n,
            "gpu": torch.cuda.get_device_name(),
            "dtype": str(s.dtype).removeprefix("torch."),
            "head_dim": s.head_dim,
            "causal": s.causal,
        }
        yield row


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
    if not torch.cuda.is_available():
        sys.exit("benchmarks/gpu.py needs an NVIDIA GPU and a torch that sees it")
    flush = torch.empty(256 * MIB, dtype=torch.uint8, device="cuda") if options.flush_l2 else None
    with open(options.csv, "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for head_dim, causal, n in PAPERS if options.shapes == "papers" else SMOKE:
            shape = Shape(head_dim, causal, n, getattr(torch, options.dtype))
            print(f"d={head_dim} N={n} {'causal' if causal else 'full'} {options.dtype}")
            for row in measure(shape, options.repetitions, flush):
                writer.writerow(row)
                file.flush()
                speed = "".join(
                    f"  {key} {row[f'{key}_ms']:8.3f} ms {row[f'{key}_tflops']:4.0f} TFLOP/s"
                    for key in ("forward", "backward")
                    if row[f"{key}_ms"] != ""
                )
                print(f"  {row['implementation']:<28}{row['status']:<12}{speed}", flush=True)


if __name__ == "__main__":
    main()
