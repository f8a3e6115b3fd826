"""Asks Triton's front end whether a kernel that the interpreter runs also compiles for a GPU.

The interpreter runs a kernel as Python, so it accepts `break`, lists, NumPy calls, tiles that are
too small for `tl.dot`, and variables that change their type in a loop. The front end refuses these.
It needs no GPU, and takes some milliseconds per kernel.
"""

from __future__ import annotations

import inspect
import io
import linecache
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from typing import Any

from flashsim.own_kernels.record import NO_GPU
from flashsim.triton.arguments import Descriptor, Pointer
from flashsim.triton.installed import installed

#: The GPU to compile for: FP8 operations need at least Hopper's compute capability.
_TARGET = "cuda", 90, 32
#: Words of errors about block pointers, which flashsim simulates for Triton 3.9 with its own note.
_SIMULATED = ("make_block_ptr", "lock pointers")


class FrontEnd:
    """The kernels to compile: `add` each launch, and take the `notes` at the end.

    The interpreter replaces parts of Triton's language until the end, so `notes` compiles then.
    """

    def __init__(self) -> None:
        self._waiting: dict[Any, Callable[[], str | None]] = {}

    def add(self, kernel: Any, arguments: Mapping[str, Any]) -> None:
        """Remember a launched `JITFunction` and its arguments by parameter, arrays as `Pointer`."""
        try:
            key, compiled = _prepared(kernel, arguments)
        except Exception:  # an argument that the front end is given in another way
            return
        self._waiting.setdefault(key, compiled)

    def notes(self) -> list[str]:
        """Return why kernels cannot be compiled, with the user's lines."""
        found = [compiled() for compiled in self._waiting.values()]
        self._waiting.clear()
        return [text for text in found if text]


def _prepared(kernel: Any, arguments: Mapping[str, Any]) -> tuple[Any, Callable[[], str | None]]:
    """Return a key of the argument types and constants, and the function that compiles."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import ASTSource, make_backend
    from triton.runtime.jit import create_function_from_signature

    target = GPUTarget(*_TARGET)
    backend = make_backend(target)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, types, _ = bind(**{name: _typed(value) for name, value in arguments.items()})
    given = {"enable_fp_fusion": True}  # without it, Triton warns
    options, signature, constants, attributes = kernel._pack_args(backend, given, bound, types, {})
    source = ASTSource(kernel, signature, constants, attributes)
    key = id(kernel), str(types)  # a hash of the kernel refuses some kernels without a line
    return key, lambda: _refusal(kernel, target, backend, source, options)


def _refusal(kernel: Any, target: Any, backend: Any, source: Any, options: Any) -> str | None:
    from triton._C.libtriton import ir
    from triton.compiler.errors import CompilationError

    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions, modules = backend.get_codegen_implementation(options), backend.get_module_map()
    try:
        with redirect_stdout(io.StringIO()):  # tl.static_print, which the interpreter prints too
            source.make_ir(target, options, functions, modules, context)
    except CompilationError as error:
        return _told(kernel, error)
    except RuntimeError as error:  # of the verifier, which writes the line to stderr
        return _sentence(kernel, str(error))
    except Exception:  # a fault of the front end itself
        return None
    return None


def _typed(value: Any) -> Any:
    """Return an object of which Triton reads the argument's type."""
    from triton.runtime.jit import MockTensor

    if isinstance(value, Pointer):
        return MockTensor(value.element)
    if isinstance(value, Descriptor):
        given = value.given
        shapes = given.shape, given.strides, given.block_shape
        return type(given)(_typed(value.base), *shapes, given.padding)
    if isinstance(value, tuple):
        parts = [_typed(one) for one in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def _told(kernel: Any, error: Any) -> str | None:
    """Name the kernel's line, and the reason of the innermost error, which a helper may raise."""
    reason = error
    while hasattr(reason.__cause__, "error_message"):
        reason = reason.__cause__
    text = reason.error_message or str(reason)
    if any(word in text for word in _SIMULATED):
        return None
    lines, first = inspect.getsourcelines(kernel.fn)
    before = next(n for n, line in enumerate(lines) if line.lstrip().startswith("def "))
    number = first + before + getattr(error.node, "lineno", 1) - 1
    line = linecache.getline(kernel.fn.__code__.co_filename, number).strip()
    return f"line {number}, `{line}`: {_sentence(kernel, text)}"


def _sentence(kernel: Any, text: str) -> str:
    return f"Triton {installed().version} cannot compile {kernel.__name__} {NO_GPU}: " + " ".join(
        text.split()
    )
