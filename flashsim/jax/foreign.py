"""The XLA foreign functions ``flashsim_attention`` and ``flashsim_attention_backward``.

The functions work directly on XLA's memory and, on a GPU, in XLA's stream. Under `jax.vmap`, every
array has more leading axes, of the mapped length or 1, which join the batch.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache, partial
from typing import Any

import numpy as np

from flashsim.api import execution
from flashsim.api.decode_options import few_queries
from flashsim.api.inputs import Request
from flashsim.api.request import ask
from flashsim.backends.failures import require_cupy
from flashsim.functions.builder import graph_of
from flashsim.functions.graph import Graph
from flashsim.functions.tracing import Traced
from flashsim.jax import xla_ffi

FORWARD, BACKWARD = "flashsim_attention", "flashsim_attention_backward"

#: The number of axes of each operand without `jax.vmap`.
RANKS = {**dict.fromkeys(("q", "k", "v", "bias", "out", "dout"), 4), "lse": 3, "dlse": 3}
OFFSETS = ("cu_seqlens_q", "cu_seqlens_k")


def forward(arrays: dict[str, Any], question: dict[str, Any]) -> list[Any]:
    """Run `flashsim.run` on arrays whose mapped axes are part of the batch; return out and lse."""
    question.pop("deterministic")
    result = execution.run(**arrays, **question)
    return [result.out, result.lse]


def backward(arrays: dict[str, Any], question: dict[str, Any]) -> list[Any]:
    """Return dq, dk, dv and any other gradients that `flashsim.backward` computes.

    The other gradients are, in order, of the bias, the sinks and the score function's float arrays.
    """
    score = question.get("score_mod")
    wanted = [] if score is None else [spec.name for spec in score.graph.differentiable]
    got = execution.backward(**arrays, **question, captured=wanted)
    more = (got.dbias, got.dsinks, *(got.captured[name] for name in wanted))
    return [got.dq, got.dk, got.dv, *(x for x in more if x is not None)]


@lru_cache(maxsize=256)
def _graph(entry: str) -> Graph:
    return graph_of(json.loads(entry))


def take_functions(question: dict[str, Any], arrays: dict[str, Any]) -> None:
    """Replace graphs in the dict `question` by traced functions, with captured arrays `arrays`."""
    for name, entry in question.pop("functions").items():
        graph = _graph(entry)
        captured = tuple(arrays.pop(f"{name} {n}") for n in range(len(graph.arrays)))
        question[name] = Traced(graph, captured)


#: Prepared launches of forward passes on a GPU, by question, device, and arguments' types and
#: shapes. None: the pass cannot be launched directly.
_PLACED: dict[tuple[Any, ...], Any] = {}
_MOST = 256


def _forward_on_gpu(call: xla_ffi.ForeignCall) -> None:
    """Run a forward pass on XLA's memory, with a prepared launch if possible."""
    layout, addresses = call.layout()
    device = _device(addresses[0])
    run = layout.runs.get(device, call)
    if run is call:  # the layout is new
        key = layout.texts["question"], device, *layout.looks[: layout.inputs]
        run = _PLACED.get(key, call)
        if run is call:
            if len(_PLACED) >= _MOST:
                _PLACED.clear()
            run = _PLACED[key] = _placed(call)
        layout.runs[device] = run
    if run is None:
        _answer(forward, OnGpu, call)
    else:
        launch, (q, k, v) = run
        *given, out, lse = addresses
        launch(given[q], given[k], given[v], out, lse, call.stream())


@cache
def _devices() -> int:
    require_cupy("cupy")
    import cupy

    return cupy.cuda.runtime.getDeviceCount()


def _device(address: int) -> int:
    if _devices() == 1:
        return 0
    import cupy

    return cupy.cuda.runtime.pointerGetAttributes(address).device


def _placed(call: xla_ffi.ForeignCall) -> Any:
    """Return a prepared launch and the operand numbers of q, k and v, or None if impossible."""
    question = _question(call, OnGpu)
    names = question.pop("operands")
    given, backend = call.arrays[: len(names)], question["backend"]
    plain = {*names} == {*"qkv"} and not question.pop("functions")
    plain = plain and all(len(x.shape) == 4 and x.nbytes for x in given)
    if backend != "cupy" or not plain:
        return None
    here, places = OnGpu(call), [names.index(name) for name in "qkv"]
    with here.active:
        q, k, v = (here.array(given[n]) for n in places)
        question.pop("deterministic")
        asked, job = ask(Request(**question), q, k, v)
        engine: Any = asked.engine
        narrow = str(q.dtype) in ("float16", "bfloat16")
        run = engine.placed(job, few=narrow and few_queries(q.shape, k.shape, v.shape))
        return None if run is None else (run, places)


def _question(call: xla_ffi.ForeignCall, place: Any) -> dict[str, Any]:
    """Return the keywords of `flashsim.run`, and the names of the foreign call's operands."""
    question = json.loads(call.layout()[0].texts["question"])
    question.pop("options")
    question["backend"] = question["backend"] or place.backend
    for name in ("window", *OFFSETS):  # JSON has no tuples
        if question.get(name) is not None:
            question[name] = tuple(question[name])
    return question


def _answer(function: Callable[..., list[Any]], place: Any, call: xla_ffi.ForeignCall) -> None:
    question = _question(call, place)
    names = question.pop("operands")
    here = place(call)
    with here.active:
        inputs, outputs = call.arrays[: len(names)], call.arrays[len(names) :]
        arrays = dict(zip(names, map(here.array, inputs), strict=True))
        take_functions(question, arrays)
        question = {name: x for name, x in question.items() if name not in arrays}
        lead = folded(arrays)
        results = function(arrays, question)
        for buffer, x in zip(outputs, results, strict=True):
            here.store(buffer, unfolded(x, lead, buffer.shape))


def folded(arrays: dict[str, Any]) -> tuple[int, ...]:
    """Fold each array's `jax.vmap` axes into the batch axis, in place; return the axes' lengths."""
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
    """Split `jax.vmap`'s axes off the batch axis; sum gradients of a bias that entries share."""
    if not lead:
        return x
    x = x.reshape(*lead, -1, *shape[len(lead) + 1 :])
    return x if x.shape == shape else x.sum(len(lead), keepdims=True)


def _cupy() -> Any:
    import cupy

    return cupy


class OnCpu:
    """Gives XLA's memory as NumPy arrays."""

    backend = "numba"

    def __init__(self, call: xla_ffi.ForeignCall) -> None:
        self.active: AbstractContextManager[Any] = nullcontext()

    def array(self, buffer: xla_ffi.XlaArray) -> Any:
        """Return the contents of an XLA buffer."""
        memory: Any = (ctypes.c_char * buffer.nbytes).from_address(buffer.address)
        return np.frombuffer(memory, buffer.dtype).reshape(buffer.shape)

    def store(self, buffer: xla_ffi.XlaArray, x: Any) -> None:
        """Write a result to an XLA buffer."""
        np.copyto(self.array(buffer), x)


class OnGpu:
    """Gives XLA's memory as CuPy arrays, on XLA's stream."""

    backend = "cupy"

    def __init__(self, call: xla_ffi.ForeignCall) -> None:
        require_cupy("cupy")
        import cupy

        from flashsim.backends.cupy_gpu.arrays import ForeignStream

        self.cupy, self.stream = cupy, call.stream()
        self.device = _device(call.arrays[0].address)
        self.active: AbstractContextManager[Any] = ForeignStream(self.device, self.stream)

    def array(self, buffer: xla_ffi.XlaArray) -> Any:
        """Return the contents of an XLA buffer."""
        cuda = self.cupy.cuda
        memory = cuda.UnownedMemory(buffer.address, buffer.nbytes, None, self.device)
        return self.cupy.ndarray(buffer.shape, buffer.dtype, cuda.MemoryPointer(memory, 0))

    def store(self, buffer: xla_ffi.XlaArray, x: Any) -> None:
        """Write a result to an XLA buffer, in stream order."""
        x = self.cupy.ascontiguousarray(x)
        to_device = self.cupy.cuda.runtime.memcpyDeviceToDevice
        self.cupy.cuda.runtime.memcpyAsync(
            buffer.address, x.data.ptr, buffer.nbytes, to_device, self.stream
        )


xla_ffi.register(FORWARD, "cpu", partial(_answer, forward, OnCpu))
xla_ffi.register(FORWARD, "CUDA", _forward_on_gpu)
xla_ffi.register(BACKWARD, "cpu", partial(_answer, backward, OnCpu))
xla_ffi.register(BACKWARD, "CUDA", partial(_answer, backward, OnGpu))
