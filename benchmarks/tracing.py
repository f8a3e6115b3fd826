"""Measure the cost of traces on a GPU: python benchmarks/tracing.py [--backend cupy]

Compares the times of the forward and the fused backward kernel with `trace=True` and with
`trace="timeline"` to those without a trace. Times are medians of interleaved rounds, between CUDA
events around the launch alone, after a spinning kernel, so that the host's part of the launch is
over when the first event comes. Inputs are bfloat16, 16,384 tokens, heads = 2048 / d. The host's
time for a trace is not included.
"""

from __future__ import annotations

import argparse
from statistics import median
from typing import Any

import cupy
import torch

import flashsim
from flashsim.backends.cupy_gpu.calls import Call, ReadyPass

TRACES = (False, True, "timeline")
TOKENS, WIDTH, N = 16384, 2048, 4096
SPIN = 10_000_000  # cycles: about 5 ms


def time_launches(into: list[tuple[str, Any, Any]]) -> None:
    """Make each later launch append its stage and an event before and after it."""
    plain = ReadyPass.__call__

    def timed(self: ReadyPass, call: Call, report: dict[str, Any]) -> None:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(SPIN)  # hides the host's time; clocks may have fallen during it
        start.record()
        plain(self, call, report)
        end.record()
        into.append((self.one.stage.name, start, end))

    ReadyPass.__call__ = timed  # type: ignore[method-assign]


def milliseconds(launches: list[tuple[str, Any, Any]], stage: str) -> float:
    """Return the milliseconds of one stage's launches since the last call."""
    torch.cuda.synchronize()
    took = sum(start.elapsed_time(end) for name, start, end in launches if name == stage)
    launches.clear()
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="cupy", help="cupy or numba_cuda")
    parser.add_argument("--kernel", help="option `kernel` of flashsim.run")
    parser.add_argument("--rounds", type=int, default=11)
    options = parser.parse_args()
    more = {"kernel": options.kernel} if options.kernel else {}
    name = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    launches: list[tuple[str, Any, Any]] = []
    time_launches(launches)
    print(f"{name}, {options.backend}\n   d causal  pass          ms    counts  timeline")
    for d, causal in ((128, False), (128, True), (64, False), (64, True)):
        shape = (4, TOKENS // N, WIDTH // d, N, d)
        q, k, v, dout = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        took: dict[tuple[str, Any], list[float]] = {}
        for round_ in range(1 + options.rounds):  # the first round compiles
            for trace in TRACES:
                given = {"causal": causal, "backend": options.backend, "trace": trace, **more}
                result = flashsim.run(q, k, v, **given)
                forward = milliseconds(launches, "forward")
                result.backward(dout, deterministic=False)
                backward = milliseconds(launches, "fused")
                if round_:
                    took.setdefault(("forward", trace), []).append(forward)
                    took.setdefault(("backward", trace), []).append(backward)
        for one in ("forward", "backward"):
            off, counts, timeline = (median(took[one, trace]) for trace in TRACES)
            shares = f"{counts / off - 1:+10.1%}{timeline / off - 1:+10.1%}"
            print(f"{d:4} {'yes' if causal else 'no':6}  {one:9}{off:7.3f}{shares}", flush=True)


if __name__ == "__main__":
    main()
