"""Record the GPU timelines that ship with flashsim (flashsim/data/*-timeline.npz).

    python benchmarks/gpu_trace.py [--out DIR] [--n 2048] [--heads 16] [--head-dim 128]

Runs a causal problem in bfloat16 on the current GPU, forward and backward, with
``trace="timeline"``. Each pass runs twice before, to exclude compilation and low clocks.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import flashsim
from flashsim import Problem
from flashsim.trace.trace import Trace


def record(n: int, heads: int, head_dim: int, kernel: str) -> tuple[Trace, Trace]:
    """Return the timed traces of a forward and of a backward pass."""
    problem = Problem(n, head_dim=head_dim, heads=heads, dtype="bfloat16", causal=True)
    q, k, v, dout = flashsim.random_inputs(problem)
    for trace in (False, False, "timeline"):
        result = flashsim.run(
            q, k, v, causal=True, backend="cupy", device="H200", kernel=kernel, trace=trace
        )
        gradients = result.backward(dout, deterministic=False, trace=trace)
    return result.trace, gradients.trace


def main() -> None:
    """Write forward-timeline.npz and backward-timeline.npz, which include the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--n", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--kernel", default="auto")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    command = f"benchmarks/gpu_trace.py --n {given.n} --heads {given.heads} --head-dim "
    command += f"{given.head_dim} --kernel {given.kernel}"
    for trace in record(given.n, given.heads, given.head_dim, given.kernel):
        trace.provenance["command"] = command
        path = given.out / f"{trace.direction}-timeline.npz"
        trace.save(path)
        spans = trace.timeline
        took = (spans["end_ns"].max() - spans["start_ns"].min()) / 1000
        print(f"{path}: {path.stat().st_size:,} B, {len(spans):,} spans, {took:.1f} µs, "
              f"{trace.provenance}")  # fmt: skip


if __name__ == "__main__":
    main()
