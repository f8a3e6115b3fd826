"""Kernels of Numba-CUDA, run in the simulator by `test_cuda_trace.py`; prints facts as JSON.

The simulator is chosen as Numba is imported, so it needs a process of its own.
"""

import contextlib
import importlib.util
import io
import json
import math
import runpy
import sys
import time
from pathlib import Path

import numpy as np
from numba import cuda, float32

import flashsim.cuda
from flashsim.errors import FlashSimError

FOLDER = Path(__file__).parents[2] / "examples/numba_cuda"
spec = importlib.util.spec_from_file_location("forward", FOLDER / "forward.py")
flash2 = importlib.util.module_from_spec(spec)
spec.loader.exec_module(flash2)
RNG = np.random.default_rng(0)


@cuda.jit
def column_sums(x, out):
    j = cuda.grid(1)
    total = 0.0
    for i in range(x.shape[0]):
        total += x[i, j]
    out[j] = total


@cuda.jit
def row_sums(x, out):
    row = x[cuda.grid(1)]
    total = 0.0
    for j in range(row.size):
        total += row[j]
    out[cuda.grid(1)] = total


@cuda.jit
def histogram(x, bins):
    i = cuda.grid(1)
    if i < x.size:
        cuda.atomic.add(bins, x[i] % 4, 1)
        cuda.atomic.max(bins, 4, x[i])


@cuda.jit
def past_the_end(x, out):
    i = cuda.grid(1)
    out[i] = x[i] + 1


@cuda.jit
def same_place(out):
    out[0] = cuda.blockIdx.x


@cuda.jit
def shared_on_one_line(x):
    a, b = cuda.shared.array(4, float32), cuda.shared.array(4, float32)
    a[0], b[0] = x[0], x[1]


@cuda.jit
def shuffles(x):
    x[0] = cuda.shfl_sync(0xFFFFFFFF, x[0], 0)


@cuda.jit
def divides(x):
    i = cuda.grid(1)
    x[i] = math.log(-1.0)


@cuda.jit
def slices(x):
    x[0:2] = 1.0


class SlowSize:
    """A size of an array whose reading lets the other threads run."""

    def __index__(self):
        time.sleep(1e-3)
        return 4


SLOW = SlowSize()


@cuda.jit
def exchanges(x, out):
    held = cuda.shared.array(SLOW, float32)
    i = cuda.threadIdx.x
    held[i] = x[i]
    cuda.syncthreads()
    out[i] = held[3 - i]


@cuda.jit
def never_launched(x):
    x[0] = 1


def moved(traced):
    return {
        f"{op} {tensor}": nbytes
        for op in ("load", "store", "reduce")
        for tensor in traced.tensors
        if (nbytes := traced.bytes(op, tensor))
    }


def forward(n, causal):
    heads, d = 2, flash2.D
    q, k, v = RNG.standard_normal((3, heads, n, d)).astype(np.float32)
    o, lse = np.zeros_like(q), np.zeros((heads, n), np.float32)
    grid = (-(-n // flash2.BLOCK_Q), heads)
    kernel = flash2.forward[grid, flash2.BLOCK_Q]
    traced = flashsim.cuda.trace(kernel, q, k, v, o, lse, d**-0.5, causal)
    s = q @ k.transpose(0, 2, 1) * d**-0.5
    if causal:
        s = np.where(np.tril(np.ones((n, n), bool)), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    expected = p / p.sum(-1, keepdims=True) @ v
    trace = traced.trace
    return {
        "bytes": moved(traced),
        "error": float(np.abs(o - expected).max()),
        "output": bool((traced.outputs["O"] == o).all()),
        "problem": [traced.problem.n_q, traced.problem.heads, traced.problem.causal],
        "tiling": [trace.tiling.block_q, trace.tiling.block_k],
        "held": sorted(nbytes for _, nbytes in traced.record.launches[0].held.values()),
        "lines": sorted({line for _, line in traced.record.lines}),
        "notes": list(traced.record.notes),
    }


def facts(kernel, *args):
    traced = flashsim.cuda.trace(kernel, *args)
    a = traced.record.accesses
    return {
        "bytes": moved(traced),
        "notes": list(traced.record.notes),
        "outside": int(a["outside"].sum()),
        "clashes": [clash.kind for clash in traced.record.clashes],
        "programs": sorted(set(a["program"].tolist())),
        "args": [x.tolist() for x in args if isinstance(x, np.ndarray)],
    }


def refused(call):
    try:
        call()
    except FlashSimError as error:
        return f"{type(error).__name__}: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error} {error.__notes__}"
    return "nothing"


def main():
    wide = RNG.standard_normal((8, 64)).astype(np.float32)
    simulator = sys.modules[type(column_sums).__module__]
    plain, interval = simulator.BlockThread.syncthreads, sys.getswitchinterval()
    found = {
        "forward 32 causal": forward(32, True),
        "forward 28": forward(28, False),
        "columns": facts(column_sums[2, 32], wide, np.zeros(64, np.float32)),
        "rows": facts(row_sums[1, 8], wide, np.zeros(8, np.float32)),
        "strided": facts(column_sums[1, 32], wide[:, ::2], np.zeros(32, np.float32)),
        "histogram": facts(histogram[3, 4], np.arange(10), np.zeros(5, np.int64)),
        "past": facts(past_the_end[2, 4], np.arange(6.0), np.zeros(8)),
        "device": facts(past_the_end[2, 4], cuda.to_device(np.arange(8.0)), np.zeros(8)),
        "same": facts(same_place[2, 1], np.zeros(1)),
        "exchanged": facts(exchanges[1, 4], np.arange(4.0), np.zeros(4)),
        "one line": refused(lambda: flashsim.cuda.trace(shared_on_one_line[1, 1], np.zeros(4))),
        "shuffles": refused(lambda: flashsim.cuda.trace(shuffles[1, 1], np.zeros(4))),
        "divides": refused(lambda: flashsim.cuda.trace(divides[1, 2], np.zeros(4))),
        "slices": refused(lambda: flashsim.cuda.trace(slices[1, 1], np.zeros(4))),
        "list": refused(lambda: flashsim.cuda.trace(slices[1, 1], [1.0])),
        "big": refused(lambda: flashsim.cuda.trace(slices[1, 2048], np.zeros(4))),
        "function": refused(lambda: flashsim.cuda.trace(len, np.zeros(4))),
        "names": refused(
            lambda: flashsim.cuda.trace(same_place[1, 1], np.zeros(1), names={"x": "Q"})
        ),
    }
    found["no grid"] = refused(lambda: flashsim.cuda.trace(never_launched, np.zeros(4)))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(FOLDER / "forward.py"), run_name="__main__")
    found["example"] = printed.getvalue()
    found["restored"] = [
        simulator.BlockThread.syncthreads is plain,
        sys.getswitchinterval() == interval,
    ]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
