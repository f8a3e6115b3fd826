"""Score functions on the CPU engine: Numba compiles them separately from the kernels.

A kernel calls the score function through a pointer, so a new function needs no new kernel.
"""

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import cfunc, types
from numba.core import cgutils

from flashsim.engines.cpu.primitives.borrowed_args import intrinsic
from flashsim.functions.emit_numba import PANEL, numba_source
from flashsim.functions.graph import Graph
from flashsim.problem.problem import Problem

#: Indices into `Rules.calls`: the function, its derivative, and the derivative that also adds to
#: the gradients of captured arrays.
SCORE, DERIVATIVE, SUMMING = range(3)


class Panels(NamedTuple):
    """A problem's compiled score functions, and the arrays they use.

    `calls` holds the functions' addresses, or 0 for a missing function. `table` holds the addresses
    of captured arrays and their gradients. `held` keeps functions and arrays in memory.
    """

    calls: np.ndarray
    table: np.ndarray
    held: tuple[Any, ...]


def panels(
    problem: Problem, arrays: tuple[np.ndarray, ...], gradients: dict[str, np.ndarray]
) -> Panels:
    """Return the compiled score functions, which add captured arrays' gradients to `gradients`."""
    graph, calls = problem.score_mod, np.zeros(3, np.int64)
    if graph is None:
        return Panels(calls, np.zeros(1, np.int64), ())
    real = problem.compute_dtype
    compiled = _compiled(graph, real, ()), _compiled(graph, real, tuple(gradients))
    calls[SCORE], calls[DERIVATIVE] = (x.address for x in compiled[0])
    calls[SUMMING] = compiled[1][1].address
    data = [_in_memory(x) for x in arrays]
    sums = [gradients.get(spec.name) for spec in graph.arrays]
    table = [x.ctypes.data for x in data] + [0 if x is None else x.ctypes.data for x in sums]
    return Panels(calls, np.array([*table, 0], np.int64), (compiled, data, sums))


def _in_memory(array: np.ndarray) -> np.ndarray:
    """Return a captured array in the layout and type that the compiled function reads."""
    kind = array.dtype.name
    if kind in ("float16", "bfloat16"):
        array = array.astype(np.float32)
    return (
        np.ascontiguousarray(array).view(np.uint8)
        if kind == "bool"
        else np.ascontiguousarray(array)
    )


@lru_cache(maxsize=128)
def _compiled(graph: Graph, real: str, gradients: tuple[str, ...]) -> tuple[Any, Any]:
    """Return a score function and the derivative of this function, compiled as C callbacks."""
    kind = getattr(types, real)
    signature = types.void(
        *(types.CPointer(kind), types.CPointer(kind)),
        *(types.int64 for _ in PANEL),
        types.CPointer(types.int64),
    )
    names = {"np": np, "math": math, "F": np.dtype(real).type, "as_pointer": as_pointer}
    functions = []
    for text in numba_source(graph, gradients):
        scope = dict(names)
        exec(compile(text, f"<{graph.name} for Numba>", "exec"), scope)
        functions.append(cfunc(signature, error_model="numpy")(scope["panel"]))
    return functions[0], functions[1]


@intrinsic
def as_pointer(context, address, kind):
    """Convert an integer address to a pointer to numbers of a type."""

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(kind.dtype)(types.int64, kind), codegen


@intrinsic
def call_panel(context, address, S, s0, raw, raw0, numbers, table):
    """Call the function at `address` on S; the inputs are in `raw`, from element `raw0` on.

    `numbers` are the arguments that `emit_numba.PANEL` names.
    """

    def codegen(context, builder, signature, args):
        at, of_s, start, of_raw, raw_start, sizes, of_table = args
        data = [
            builder.gep(context.make_array(kind)(context, builder, array).data, [first])
            for kind, array, first in (
                (signature.args[1], of_s, start),
                (signature.args[3], of_raw, raw_start),
            )
        ]
        addresses = context.make_array(signature.args[-1])(context, builder, of_table).data
        values = [*data, *cgutils.unpack_tuple(builder, sizes), addresses]
        function = ir.FunctionType(ir.VoidType(), [x.type for x in values])
        builder.call(builder.inttoptr(at, function.as_pointer()), values)
        return context.get_dummy_value()

    whole = types.int64
    sizes = types.UniTuple(whole, len(PANEL))
    return types.void(whole, S, whole, raw, whole, sizes, table), codegen
