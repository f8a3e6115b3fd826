"""Time attention over several GPUs, beside one GPU and torch's own context parallelism.

    torchrun --nproc-per-node 2 benchmarks/ring.py [--csv FILE] [--check] [--lengths 16384,65536]
        [--masks causal,full] [--schemes zigzag] [--rivals cuDNN,FlashAttention-2] [--vary]

Inputs are bfloat16, 16 heads, d = 128, random values; causal and without a mask; the forward pass
alone, and with its backward pass (fused, dQ by atomics, on one GPU as on several). Every round
starts after a spinning kernel on all ranks, so that the host's time counts only where it exceeds
the GPU's. A round's time is that of its slowest rank; figures are medians. "host_ms" is the host's
time for a call.

"nothing sent" is flashsim's ring attention without communication: each rank uses its own data in
place of the received. Its distance from twice the speed of "one GPU" is the cost of smaller blocks
and of merging. The distance of the real ring from it is the cost of the link. `--check` first
checks out and gradients against float64: at most twice plain attention's error. NVLink's own
counters are read where NVML provides them. `--vary` times flashsim with other head starts for NCCL,
and on a high-priority stream.

NVLink multicast stays off: NCCL_NVLS_ENABLE=0 is set unless the variable is set already.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

import torch
import torch.distributed as dist
from ring_table import HEAD_DIM, HEADS
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashsim.torch
from flashsim.distributed import count
from flashsim.problem.problem import Problem
from flashsim.report import Table
from flashsim.torch import count_sent, process_group, ring_attention, shard

COLUMNS = (
    *("gpu", "ranks", "n", "causal", "pass", "implementation", "ms", "tflops", "of_one"),
    *("sent_bytes", "counted_bytes", "nvlink_bytes", "host_ms"),
)
RIVALS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FlashAttention-2": SDPBackend.FLASH_ATTENTION}
HEAD_STARTS = (0, 5_000, 20_000, 60_000)
SPIN = 8_000_000  # cycles: a few milliseconds

Work = Callable[[], object]


def flops(n: int, causal: bool, backward: bool) -> float:
    """Return the FLOPs of a pass, as the papers count them."""
    return 4 * HEADS * n * n * HEAD_DIM * (0.5 if causal else 1) * (3.5 if backward else 1)


def seconds(work: Work, calls: int, rounds: int) -> tuple[float, float]:
    """Return the median times of a call and of the host, on each round's slowest rank."""
    took = []
    for _ in range(rounds + 2):  # the first rounds compile and warm up
        torch.cuda.synchronize()
        dist.barrier(group=HOST)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(SPIN)
        start.record()
        begun = time.perf_counter()
        for _ in range(calls):
            work()
        host = (time.perf_counter() - begun) / calls
        end.record()
        torch.cuda.synchronize()
        slowest = torch.tensor([start.elapsed_time(end) / calls / 1e3, host])
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=HOST)
        took.append(slowest.tolist())
    gpu, host = (statistics.median(x) for x in zip(*took[2:], strict=True))
    return gpu, host


def both(attention: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> tuple[Work, Work]:
    """Return a forward pass, and one with its backward pass."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    dout = torch.randn_like(inputs[0])

    def forward() -> object:
        with torch.no_grad():
            return attention(*leaves)

    return forward, lambda: torch.autograd.grad(attention(*leaves), leaves, dout)


@contextmanager
def nothing_sent() -> Iterator[None]:
    """Replace communication: a rank receives what it would send, or zeros."""
    exchange = process_group.Member.exchange
    process_group.Member.exchange = _at_home  # type: ignore[method-assign]
    try:
        yield
    finally:
        process_group.Member.exchange = exchange  # type: ignore[method-assign]


def _at_home(
    self: process_group.Member, going: Any, coming: Any, what: str
) -> process_group.Pending:
    for (mine, _), (other, _) in zip(going, coming, strict=True):
        for name, x in other.items():
            same = name in mine and mine[name].shape == x.shape
            other[name] = mine[name] if same else _zeros(x.shape, x.dtype, x.device)
    return process_group.Pending([], (), what)


@lru_cache
def _zeros(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def nvlink_bytes() -> int | None:
    """Return the bytes that this GPU has ever sent over NVLink; None if they cannot be read."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(torch.cuda.current_device())
        field = pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX
        (value,) = pynvml.nvmlDeviceGetFieldValues(handle, [(field, 0xFFFFFFFF)])
        if value.nvmlReturn == 0:
            return int(value.value.ullVal) * 1024
        print(f"NVML: NVLink counters answer {value.nvmlReturn}", file=sys.stderr)
    except Exception as error:
        print(f"NVML: {type(error).__name__}: {error}", file=sys.stderr)
    return None


class Bench:
    """The rows of the table, which are written as they are measured."""

    def __init__(
        self, path: Path | None, rounds: int, schemes: list[str], rivals: list[str], vary: bool
    ) -> None:
        self.path, self.rounds, self.vary = path, rounds, vary
        self.schemes, self.rivals = schemes, rivals
        first = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        self.urgent = dist.new_group(backend="nccl", pg_options=first) if vary else None
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.rows: list[tuple[Any, ...]] = []
        self.reads_nvlink = nvlink_bytes() is not None

    def shape(self, n: int, causal: bool) -> None:
        """Measure all implementations at one length."""
        torch.manual_seed(0)
        make = lambda: torch.randn(  # noqa: E731
            (1, HEADS, n, HEAD_DIM), device="cuda", dtype=torch.bfloat16
        )
        whole = [make() for _ in range(3)]

        def one(*x: torch.Tensor) -> torch.Tensor:
            return flashsim.torch.attention(*x, causal=causal, deterministic=False)

        def ours(*x: torch.Tensor, scheme: str = "zigzag", group: Any = None) -> torch.Tensor:
            how = {"causal": causal, "deterministic": False, "group": group}
            return ring_attention(*x, scheme=scheme, **how)

        self.measure("one GPU", n, causal, both(one, *whole))
        for scheme in self.schemes:
            mine = [shard(x, scheme=scheme) for x in whole]
            works = both(partial(ours, scheme=scheme), *mine)
            self.measure(f"flashsim, {scheme}", n, causal, works, scheme)
        mine = [shard(x, scheme="zigzag") for x in whole]
        with nothing_sent():
            self.measure("flashsim, nothing sent", n, causal, both(ours, *mine))
        default = process_group.HEAD_START
        for cycles in HEAD_STARTS if self.vary and causal else ():
            process_group.HEAD_START = cycles
            self.measure(f"head start {cycles}", n, causal, both(ours, *mine))
            urgent = partial(ours, group=self.urgent)
            self.measure(f"head start {cycles}, high priority", n, causal, both(urgent, *mine))
        process_group.HEAD_START = default
        for name in self.rivals:
            try:
                self.rival(name, RIVALS[name], [x.clone() for x in whole], n, causal)
            except Exception as error:  # one that this version of torch lacks
                print(f"context_parallel, {name}: {type(error).__name__}: {error}", file=sys.stderr)

    def rival(
        self, name: str, backend: SDPBackend, qkv: list[torch.Tensor], n: int, causal: bool
    ) -> None:
        """Measure torch's context parallelism."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.experimental import _attention, context_parallel

        # It balances the load, as zigzag does, and requires a causal mask for that.
        _attention._cp_options.enable_load_balance = causal
        mesh = init_device_mesh("cuda", (self.ranks,))

        def sdpa(*x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(*x, is_causal=causal)

        with (
            context_parallel(
                mesh, buffers=qkv, buffer_seq_dims=[2] * 3, no_restore_buffers=set(qkv)
            ),
            sdpa_kernel(backend),
        ):
            self.measure(f"context_parallel, {name}", n, causal, both(sdpa, *qkv))

    def measure(
        self, name: str, n: int, causal: bool, works: tuple[Work, Work], scheme: str = ""
    ) -> None:
        """Measure one implementation's two rows; with a scheme, also the bytes sent."""
        for work, backward in zip(works, (False, True), strict=True):
            work_flops = flops(n, causal, backward)
            calls = max(1, min(20, round(0.02 * 6e14 / work_flops)))
            took, host = seconds(work, calls, self.rounds)
            passes = "forward + backward" if backward else "forward"
            same = [r for r in self.rows if r[2:5] == (n, causal, passes) and r[5] == "one GPU"]
            of_one = same[0][6] / (took * 1e3) if same else 1.0
            row = (
                *(torch.cuda.get_device_name(), 1 if name == "one GPU" else self.ranks),
                *(n, causal, passes, name, took * 1e3, work_flops / took / 1e12, of_one),
                *(self.link(work, scheme, n, causal, backward) if scheme else (None,) * 3),
                host * 1e3,
            )
            self.rows.append(row)
            if self.rank == 0:
                print(*(f"{x:.4g}" if isinstance(x, float) else x for x in row[2:]), flush=True)
                if self.path:
                    with self.path.open("w", newline="") as file:
                        csv.writer(file).writerows([COLUMNS, *self.rows])

    def link(
        self, work: Work, scheme: str, n: int, causal: bool, backward: bool
    ) -> tuple[int, int, int | None]:
        """Return the bytes sent per call: by the program, the closed form, and NVLink."""
        with count_sent() as sent:
            work()
        p = Problem(n, head_dim=HEAD_DIM, heads=HEADS, dtype="bfloat16", causal=causal)
        counted = sum(
            count(p, ranks=self.ranks, scheme=scheme, direction=direction, device="H200")
            .link_bytes(rank=self.rank)
            for direction in ("forward", "backward")[: 1 + backward]
        )  # fmt: skip
        on_link = None
        if self.reads_nvlink:
            torch.cuda.synchronize()
            dist.barrier(group=HOST)
            time.sleep(0.2)
            before, calls = nvlink_bytes() or 0, 10
            for _ in range(calls):
                work()
            torch.cuda.synchronize()
            dist.barrier(group=HOST)
            time.sleep(0.2)
            on_link = ((nvlink_bytes() or 0) - before) // calls
        return sum(sent.values()), counted, on_link


def check() -> None:
    """Check out and gradients: the error is at most twice plain attention's in bfloat16."""
    n = 2048
    for scheme, causal in (
        ("zigzag", True),
        ("zigzag", False),
        ("striped", True),
        ("ring", True),
        ("ulysses", True),
    ):
        torch.manual_seed(1)
        given = [
            torch.randn((1, HEADS, n, HEAD_DIM), device="cuda", dtype=torch.bfloat16)
            for _ in range(4)
        ]
        mine = [shard(x, scheme=scheme).requires_grad_() for x in given]
        out = ring_attention(*mine[:3], scheme=scheme, causal=causal, deterministic=False)
        found = [out.detach(), *torch.autograd.grad(out, mine[:3], mine[3].detach())]
        exact, plain = (
            _plain([x.to(t) for x in given], causal) for t in (torch.float64, torch.bfloat16)
        )
        for name, x, e, p in zip(("out", "dq", "dk", "dv"), found, exact, plain, strict=True):
            e, p = (shard(y, scheme=scheme).double() for y in (e, p))
            error, budget = (
                (x.double() - e).abs().max(),
                2 * (p - e).abs().max() + 2**-8 * e.abs().max(),
            )
            verdict = "within" if error <= budget else "BEYOND"
            print(
                f"{scheme} causal={causal} {name}: {error:.2e} {verdict} {budget:.2e}", flush=True
            )


def _plain(qkvg: list[torch.Tensor], causal: bool) -> list[torch.Tensor]:
    q, k, v = (x.detach().requires_grad_() for x in qkvg[:3])
    s = q @ k.mT * HEAD_DIM**-0.5
    if causal:
        s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), float("-inf"))
    out = torch.softmax(s, -1) @ v
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), qkvg[3])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", default="16384,65536")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--masks", default="causal,full")
    parser.add_argument("--schemes", default="zigzag")
    parser.add_argument("--rivals", default=",".join(RIVALS))
    parser.add_argument("--vary", action="store_true")
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    global HOST
    HOST = dist.new_group(backend="gloo")
    if options.check:
        check()
    rivals = options.rivals.split(",") if options.rivals else []
    schemes = options.schemes.split(",")
    bench = Bench(options.csv, options.rounds, schemes, rivals, options.vary)
    for n in map(int, options.lengths.split(",")):
        for mask in options.masks.split(","):
            bench.shape(n, mask == "causal")
    if dist.get_rank() == 0:
        print(Table("", COLUMNS[2:], [row[2:] for row in bench.rows]).text(width=160))
    dist.destroy_process_group()


HOST: Any = None

if __name__ == "__main__":
    main()
