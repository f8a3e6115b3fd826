"""Convert CPU arrays of any library to NumPy arrays that share memory with them, and back.

NumPy's and torch's arrays are recognised by their package's name; other arrays are read through
DLPack. If the inputs' library has an array namespace, as JAX does, results are arrays of that
library; otherwise they are NumPy arrays. For a subclass of torch.Tensor, results are plain tensors.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from flashsim.api.arrays import require_numpy
from flashsim.errors import DTypeError
from flashsim.problem.checks import DTYPES, FP8
from flashsim.problem.problem import numpy_dtype

_DLPACK_CPU = 1


class Host(NamedTuple):
    """Two functions: `take(name, x)` converts a library's array to NumPy, and `give` converts back.

    `library` is the array library's package name, or "" if the functions return any array
    unchanged.
    """

    library: str
    take: Callable[[str, Any], Any]
    give: Callable[[np.ndarray], Any]


def library_of(x: Any) -> str:
    """Return the package name of an array's class, or "torch" for any subclass of torch.Tensor."""
    packages = [base.__module__.partition(".")[0] for base in type(x).__mro__]
    return "torch" if "torch" in packages else packages[0]


def host_of(x: Any) -> Host:
    """Return the functions that convert arrays like `x`; they return other arrays unchanged."""
    library = library_of(x)
    if library == "torch":
        return Host(library, from_torch, _to_torch)
    if library == "jax" and hasattr(x, "aval"):  # arrays with values are jaxlib's
        return Host(library, _traced, NUMPY.give)
    if isinstance(x, np.ndarray) or not hasattr(x, "__dlpack_device__"):
        return NUMPY
    namespace = getattr(x, "__array_namespace__", None)
    return Host(library, _from_dlpack, namespace().asarray if namespace else NUMPY.give)


def _from_numpy(_: str, x: Any) -> Any:
    """Return an np.matrix as a plain array, and anything else unchanged."""
    return np.asarray(x) if isinstance(x, np.matrix) else x


def _as_it_is(x: Any) -> Any:
    return x


NUMPY = Host("numpy", _from_numpy, _as_it_is)
#: For GPU engines, which know their arrays themselves.
ANY = NUMPY._replace(library="")


def take(host: Host, **arrays: Any) -> list[Any]:
    """Convert arrays, all of one library, to NumPy arrays without a copy; None stays None."""
    for name, x in arrays.items():
        if x is not None and host.library not in ("", host_of(x).library):
            for other, y in arrays.items():  # a tensor without numbers raises its own error here
                host_of(y).take(other, y)
            raise DTypeError(
                f"all arrays must come from one library, but {name} is a "
                f"{type(x).__module__}.{type(x).__name__} and another argument comes from "
                f"{host.library}; convert one of them"
            )
    return [None if x is None else host.take(name, x) for name, x in arrays.items()]


def take_anywhere(**arrays: Any) -> tuple[Host, list[np.ndarray]]:
    """Return arrays as NumPy arrays, also from a GPU, and the `Host` that converts results back."""
    host = host_of(next(iter(arrays.values())))
    taken = take(host, **arrays)
    if all(isinstance(x, np.ndarray) for x in taken):
        return host, taken
    device = getattr(taken[0], "device", None)
    if host.library == "torch":
        there = host._replace(give=lambda x: _to_torch(x).to(device))
        return there, [from_torch(name, x.cpu()) for name, x in arrays.items()]
    if host.library == "cupy":
        from flashsim.backends.cupy_gpu.arrays import download, upload

        return host._replace(give=upload), [download(x) for x in taken]
    require_numpy("simulator", **dict(zip(arrays, taken, strict=True)))
    raise AssertionError


def from_torch(name: str, x: Any) -> Any:
    """Return a NumPy array that shares a CPU tensor's memory; return other tensors unchanged."""
    import torch

    if x.is_nested:
        raise DTypeError(
            f"{name} is a nested tensor; pass {name}.values(), which holds its sequences packed, "
            f"and {name}.offsets() as cu_seqlens_q= and cu_seqlens_k="
        )
    if x.layout is not torch.strided:
        raise DTypeError(f"{name} is a sparse tensor ({x.layout}); pass {name}.to_dense()")
    if x.is_meta:
        raise DTypeError(
            f"{name} is on the meta device, which holds no numbers; move it to a real device, or "
            "call flashsim.count, which needs only shapes"
        )
    if x.requires_grad and torch.is_grad_enabled():
        raise DTypeError(
            f"{name} requires a gradient, which this function does not record for torch; use "
            f"flashsim.torch.attention, or pass {name}.detach()"
        )
    kind = str(x.dtype).removeprefix("torch.")
    if x.device.type != "cpu" or kind not in DTYPES:
        return x  # refused with the other kinds of array, and of elements
    try:
        x = x.detach().resolve_neg()
        if kind in FP8:
            return x.view(torch.uint8).numpy().view(numpy_dtype(kind))
        if kind != "bfloat16":
            return x.numpy()
        return x.view(torch.int16).numpy().view(numpy_dtype(kind))
    except (RuntimeError, TypeError) as error:  # without storage: fake tensors, torch.func's
        raise DTypeError(
            f"the array {name} of type {type(x).__name__} cannot be read from memory ({error}); "
            "pass a NumPy array"
        ) from error


def _to_torch(x: np.ndarray) -> Any:
    import torch

    if x.dtype.isbuiltin == 1:  # NumPy's own
        return torch.from_numpy(x)
    kind = x.dtype.name
    if kind in FP8:
        return torch.from_numpy(x.view(np.uint8)).view(getattr(torch, kind))
    return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)


def _traced(name: str, x: Any) -> Any:
    raise DTypeError(
        f"{name} is a JAX tracer ({type(x).__name__}), which holds no numbers; inside jax.jit, "
        "grad or vmap, call flashsim.jax.attention instead"
    )


def _from_dlpack(name: str, x: Any) -> Any:
    if x.__dlpack_device__()[0] != _DLPACK_CPU:
        return x  # refused with the other kinds of array
    try:
        # NumPy's DLPack knows no bfloat16 nor FP8; a library that does has __array__, which copies
        # nothing.
        foreign = str(getattr(x, "dtype", "")) in ("bfloat16", *FP8)
        return np.asarray(x) if foreign else np.from_dlpack(x)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise DTypeError(
            f"the array {name} of type {type(x).__module__}.{type(x).__name__} cannot be read "
            f"through DLPack ({error}); pass a NumPy array"
        ) from error
