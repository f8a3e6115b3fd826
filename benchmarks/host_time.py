"""Time the Python of a GPU call without a GPU: python benchmarks/host_time.py

    python benchmarks/host_time.py [--profile DIR] [--count]

The CUDA driver and CuPy's runtime are replaced by functions that do nothing, and tensors lie in the
CPU's memory. So the figures are the host time of a call without the driver's own part. Each row is
the median of repeated rows of calls, as in `benchmarks/doors.py`. `nothing` rows are lower bounds:
the same path through torch or JAX, with an operator or a gradient that does nothing. In the rows
"new addresses" and "new length", q's memory or the number of keys differs from all recent calls.
`--count` also prints how many Python and C functions a call enters.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from contextlib import nullcontext
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import cupy
import numpy as np
import torch
from doors import Nothing, Work, in_a_row, nothing, profiled

import flashsim.torch
from flashsim.backends.cupy_gpu import arrays, decode, engine, launching, tensor_maps
from flashsim.backends.kernels import nvrtc
from flashsim.backends.launch.kernel import Gpu
from flashsim.problem.hardware import Device
from flashsim.torch import direct


class _Memory:
    """A CuPy array's replacement, in the CPU's memory."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.data, self.size = array, self, array.size
        self.ptr = array.ctypes.data


class _Function:
    """A compiled kernel that does nothing."""

    ptr, max_dynamic_shared_size_bytes = 1, 0

    @property
    def kernel(self) -> _Function:
        """The kernel itself, as of CuPy's `RawKernel`."""
        return self


def _nothing(*_: Any) -> int:
    return 0


def without_a_gpu() -> None:
    """Replace the driver, CuPy's runtime and allocations by functions that do nothing."""
    runtime: Any = cupy.cuda.runtime
    runtime.streamIsCapturing, runtime.memsetAsync = _nothing, _nothing
    runtime.getDevice = torch.empty(0).get_device  # -1, as of every CPU tensor
    cupy.cuda.driver.launchKernel = _nothing
    cupy.asarray = lambda x: _Memory(np.ascontiguousarray(x))
    cupy.zeros = lambda shape, dtype: _Memory(np.zeros(shape, dtype))
    launch = ctypes.CDLL(None).getpid  # a C function that ignores its arguments
    launch.argtypes, launch.restype = (ctypes.c_void_p,) * 4, None
    launching._launch = lambda: launch  # type: ignore[assignment]
    launching.aside = engine.aside = decode.aside = nullcontext  # type: ignore[assignment]
    tensor_maps._encoded = lambda *_: (np.zeros(128, np.uint8), 0)  # type: ignore[assignment]
    nvrtc._compiled = lambda *_: _Function()  # type: ignore[assignment]
    gpu = Gpu.like(Device.get("H100"))
    engine.require_gpu = _nothing  # type: ignore[assignment]
    engine.gpu_of = lambda device: gpu  # type: ignore[assignment]
    engine._EXPLAINING = nullcontext()  # type: ignore[assignment]
    arrays.Space.active = lambda self: nullcontext()  # type: ignore[assignment,method-assign]
    arrays.TorchSpace.active = lambda self: nullcontext()  # type: ignore[method-assign]
    made = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    empty = torch._C._dynamo.guards._empty_strided_cpu  # `maker` uses the same for CUDA
    arrays.TorchSpace.maker = lambda self, shape, dtype="float32": partial(  # type: ignore[method-assign]
        empty, shape, torch.empty(shape, device="meta").stride(), made[dtype]
    )
    space = arrays.TorchSpace.__new__(arrays.TorchSpace)
    space.torch, space.device = torch, -1
    space._float32, space._stream = torch.empty(0), lambda device: 7
    arrays._OF_TORCH[-1] = space
    arrays._TENSORS.add(torch.Tensor)
    direct._few = lambda q, k, v: q.shape[2] == 1  # type: ignore[assignment]


def torch_works() -> dict[str, Work]:
    """Return calls by name."""
    q, k, v, dout = (torch.randn(1, 4, 128, 64, dtype=torch.bfloat16) for _ in range(4))
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    ours, one = flashsim.torch.attention, torch.randn(4, 32, 1, 64, dtype=torch.bfloat16)
    cache = [torch.randn(4, 8, 512, 64, dtype=torch.bfloat16) for _ in "kv"]

    def backward(out: torch.Tensor) -> Work:
        return lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)

    others = cycle([torch.randn_like(q) for _ in range(300)])  # more than the launches kept

    result = flashsim.run(q, k, v, backend="cupy")

    def at_a_new_length() -> None:
        direct._EXACT.clear()
        ours(one, *cache, backend="cupy")

    compiled = torch.compile(lambda q, k, v: ours(q, k, v, backend="cupy"), fullgraph=True)
    bare = torch.compile(lambda q, k, v: nothing(q, k, v), fullgraph=True)
    return {
        "run": lambda: flashsim.run(q, k, v, backend="cupy"),
        "run, backward": lambda: result.backward(dout, deterministic=False),
        "eager": lambda: ours(q, k, v, backend="cupy"),
        "eager, new addresses": lambda: ours(next(others), k, v, backend="cupy"),
        "eager, decode": lambda: ours(one, *cache, backend="cupy"),
        "eager, decode, new length": at_a_new_length,
        "gradient": lambda: ours(*inputs, backend="cupy"),
        "backward": backward(ours(*inputs, backend="cupy")),
        "backward, any order": backward(ours(*inputs, backend="cupy", deterministic=False)),
        "backward, nothing": backward(Nothing.apply(*inputs)),
        "compiled": lambda: compiled(q, k, v),
        "compiled, nothing": lambda: bare(q, k, v),
    }


def entered(work: Work) -> tuple[int, int]:
    """Return the number of Python and of C functions that a call enters."""
    counts = {"call": 0, "c_call": 0}

    def saw(frame: Any, event: str, arg: Any) -> None:
        if event in counts:
            counts[event] += 1

    work()
    sys.setprofile(saw)
    work()
    sys.setprofile(None)
    return counts["call"] - 0, counts["c_call"] - 1


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--profile", type=Path, help="folder for profiles")
    parser.add_argument("--count", action="store_true", help="count the functions entered")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--only", default="", help="rows whose name begins so")
    options = parser.parse_args()
    without_a_gpu()
    works = {name: x for name, x in torch_works().items() if name.startswith(options.only)}
    for name, us in in_a_row(works, _nothing, options.rounds).items():
        calls = entered(works[name]) if options.count else ""
        print(f"{name:36}{us:9.2f} us   {calls}")
    if options.profile:
        for name, work in works.items():
            profiled(name, work, _nothing, options.profile)


if __name__ == "__main__":
    main()
