"""The XLA foreign functions ``flashsim_attention`` and ``flashsim_attention_backward``.

Each works directly on XLA's memory. On the CPU it wraps that memory in NumPy arrays; on a GPU in
CuPy arrays, on XLA's stream. Under `jax.vmap` every array has additional leading axes, of the
mapped length or 1. The mapped problems are independent, so these axes become part of the batch.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np

from flashsim.api import execution
from flashsim.backends.failures import require_cupy
from flashsim.jax import xla_ffi

FORWARD, BACKWARD = "flashsim_attention", "flashsim_attention_backward"

#: How many axes each operand has where nothing is mapped.
RANKS = {**dict.fromkeys(("q", "k", "v", "bias", "out", "dout"), 4), "lse": 3, "dlse": 3}
OFFSETS = ("cu_seqlens_q", "cu_seqlens_k")


def forward(arrays: dict[str, Any], question: dict[str, Any]) -> list[Any]:
    """Run `flashsim.run` on folded arrays; return out and lse."""
    question.pop("deterministic")
    result = execution.run(**arrays, **question)
    return [result.out, result.lse]


def backward(arrays: dict[str, Any], question: dict[str, Any]) -> list[Any]:
    """Run `flashsim.backward`; return dq, dk, dv and, if there is a bias, dbias."""
    got = execution.backward(**arrays, **question)
    return [got.dq, got.dk, got.dv, *([] if got.dbias is None else [got.dbias])]


def _answer(function: Callable[..., list[Any]], place: Any, call: xla_ffi.ForeignCall) -> None:
    question = json.loads(call.text("question"))
    names, _ = question.pop("operands"), question.pop("options")
    question["backend"] = question["backend"] or place.backend
    for name in ("window", *OFFSETS):  # JSON knows no tuples
        if question.get(name) is not None:
            question[name] = tuple(question[name])
    here = place(call)
    with here.active:
        arrays = dict(zip(names, map(here.array, call.arguments), strict=True))
        question = {name: x for name, x in question.items() if name not in arrays}
        lead = folded(arrays)
        results = function(arrays, question)
        for buffer, x in zip(call.results, results, strict=True):
            here.store(buffer, unfolded(x, lead, buffer.shape))


def folded(arrays: dict[str, Any]) -> tuple[int, ...]:
    """Fold mapped axes into each array's batch, in place; return the mapped axes' lengths.

    An array shared by all mapped entries is repeated.
    """
    leads = {name: x.shape[: x.ndim - RANKS[name]] for name, x in arrays.items() if name in RANKS}
    lead = np.broadcast_shapes(*leads.values())
    if not lead:
        return ()
    batch = arrays["q"].shape[-4]
    for name in leads:
        x = arrays[name]
        *_, first = x.shape[: x.ndim - RANKS[name] + 1]
        own = x.shape[x.ndim - RANKS[name] + 1 :]
        x = x.reshape((1,) * (len(lead) + RANKS[name] - x.ndim) + x.shape)
        namespace = np if isinstance(x, np.ndarray) else _cupy()
        whole = namespace.broadcast_to(x, (*lead, batch if name == "bias" else first, *own))
        arrays[name] = namespace.ascontiguousarray(whole.reshape(-1, *own))
    return lead


def unfolded(x: Any, lead: tuple[int, ...], shape: tuple[int, ...]) -> Any:
    """Return a result with its mapped axes restored.

    For a bias shared by a batch, the gradients are summed.
    """
    if not lead:
        return x
    x = x.reshape(*lead, -1, *shape[len(lead) + 1 :])
    return x if x.shape == shape else x.sum(len(lead), keepdims=True)


def _cupy() -> Any:
    import cupy

    return cupy


class OnCpu:
    """NumPy arrays over XLA's memory."""

    backend = "numba"

    def __init__(self, call: xla_ffi.ForeignCall) -> None:
        self.active: AbstractContextManager[Any] = nullcontext()

    def array(self, buffer: xla_ffi.XlaArray) -> Any:
        """Return the contents of a buffer."""
        memory: Any = (ctypes.c_char * buffer.nbytes).from_address(buffer.address)
        return np.frombuffer(memory, buffer.dtype).reshape(buffer.shape)

    def store(self, buffer: xla_ffi.XlaArray, x: Any) -> None:
        """Write a result to a buffer."""
        np.copyto(self.array(buffer), x)


class OnGpu:
    """CuPy arrays over XLA's memory, on XLA's stream."""

    backend = "cupy"

    def __init__(self, call: xla_ffi.ForeignCall) -> None:
        require_cupy("cupy")
        import cupy

        from flashsim.backends.cupy_gpu.arrays import ForeignStream

        self.cupy, self.stream = cupy, call.stream()
        address = call.arguments[0].address
        self.device = cupy.cuda.runtime.pointerGetAttributes(address).device
        self.active: AbstractContextManager[Any] = ForeignStream(self.device, self.stream)

    def array(self, buffer: xla_ffi.XlaArray) -> Any:
        """Return the contents of a buffer."""
        cuda = self.cupy.cuda
        memory = cuda.UnownedMemory(buffer.address, buffer.nbytes, None, self.device)
        return self.cupy.ndarray(buffer.shape, buffer.dtype, cuda.MemoryPointer(memory, 0))

    def store(self, buffer: xla_ffi.XlaArray, x: Any) -> None:
        """Write a result to a buffer, in stream order."""
        x = self.cupy.ascontiguousarray(x)
        to_device = self.cupy.cuda.runtime.memcpyDeviceToDevice
        self.cupy.cuda.runtime.memcpyAsync(
            buffer.address, x.data.ptr, buffer.nbytes, to_device, self.stream
        )


for _name, _function in ((FORWARD, forward), (BACKWARD, backward)):
    for _platform, _place in (("cpu", OnCpu), ("CUDA", OnGpu)):
        xla_ffi.register(_name, _platform, partial(_answer, _function, _place))
