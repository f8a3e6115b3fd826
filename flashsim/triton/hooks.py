"""Replacements for operations of the Triton interpreter's builder, used while kernels are traced.

Each function takes the `machine.Interpreter`, the original operation and the arguments. Loads,
stores and atomic operations record their accesses. Arithmetic of bfloat16 and FP8 is computed in
float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from flashsim.errors import MemoryModelError, UnsupportedError
from flashsim.own_kernels import ATOMIC, LOAD, STORE
from flashsim.triton import narrow_floats as floats
from flashsim.triton.libdevice import computed

Interpreter = Any  # `machine.Interpreter`, whose module imports this one


def _load(
    m: Interpreter, plain: Any, ptrs: Any, mask: Any, other: Any, *rest: Any, **more: Any
) -> Any:
    element = ptrs.get_element_ty()
    kind = m.at.interpreter._get_np_dtype(element)
    reached = m.reach(LOAD, ptrs, mask)
    fill = np.broadcast_to(0 if other is None else other.data, reached.addresses.shape).astype(kind)
    if reached.lost.any():  # outside of every allocation: NaN, so that its use is visible
        fill[reached.lost] = _junk(element, kind)
    found = m.at.interpreter._interpreter.load(reached.addresses, reached.real, fill, kind)
    return m.loaded(floats.handle(found, element))


def _store(
    m: Interpreter, plain: Any, ptrs: Any, value: Any, mask: Any, *rest: Any, **more: Any
) -> Any:
    reached = m.reach(STORE, ptrs, mask)
    kind = m.at.interpreter._get_np_dtype(ptrs.get_element_ty())
    data = np.broadcast_to(value.data, reached.addresses.shape).astype(kind, copy=False)
    m.at.interpreter._interpreter.store(reached.addresses, np.ascontiguousarray(data), reached.real)


def _junk(element: Any, kind: np.dtype) -> Any:
    if kind.kind == "f":
        return np.nan
    if element.is_floating() and floats.is_narrow(element):
        return floats.narrow(np.float32(np.nan).reshape(1), element)[0]
    return 0


def _spread(handle: Any, shape: tuple[int, ...]) -> Any:
    return floats.handle(np.ascontiguousarray(np.broadcast_to(handle.data, shape)), handle.dtype)


def _rmw(m: Interpreter, plain: Any, op: Any, ptr: Any, val: Any, mask: Any, *rest: Any) -> Any:
    if floats.is_narrow(val.dtype):
        raise floats.refuse(what="an atomic operation")
    reached = m.reach(ATOMIC, ptr, mask)
    where = floats.handle(reached.addresses, ptr.dtype)
    real = floats.handle(reached.real, m.at.tl.int1)
    return plain(op, where, _spread(val, reached.addresses.shape), real, *rest)


def _cas(m: Interpreter, plain: Any, ptr: Any, cmp: Any, val: Any, *rest: Any) -> Any:
    reached = m.reach(ATOMIC, ptr, None)
    if reached.lost.any():
        raise MemoryModelError(
            "an atomic compare-and-swap accesses memory outside of its tensor; check the "
            "index, and compare it with the tensor's shape",
            "outside",
        )
    m.recorder.lock()
    m.recorder.note(
        f"line {m.line()[1]}: flashsim assumes that this atomic compare-and-swap takes a lock, so "
        "it does not look for races in what a program accesses afterwards"
    )
    wide = [_spread(x, reached.addresses.shape) for x in (cmp, val)]
    return plain(floats.handle(reached.addresses, ptr.dtype), *wide, *rest)


def descriptor_reduce(m: Interpreter, kind: Any, block: Any, value: Any, indices: Any) -> Any:
    """Add a value to a tensor descriptor's block atomically; Triton's interpreter cannot."""
    ir = m.at.interpreter._ir
    if kind != ir.DESCRIPTOR_REDUCE_KIND.ADD:
        name = kind.name.lower()
        raise UnsupportedError(
            f"a tensor descriptor's atomic_{name} is not supported; compute pointers, and use "
            f"tl.atomic_{name}"
        )
    ptrs, mask = block.materialize_pointers(indices)
    op = ir.ATOMIC_OP.FADD if ptrs.get_element_ty().is_floating() else ir.ATOMIC_OP.ADD
    order = ir.MEM_SEMANTIC.RELAXED, ir.MEM_SYNC_SCOPE.GPU
    rmw = m.at.interpreter.interpreter_builder.create_atomic_rmw
    return rmw(op, ptrs, value, mask, *order)


def _as_atomic(m: Interpreter, plain: Any, *args: Any) -> Any:
    m.atomic = True
    try:
        return plain(*args)
    finally:
        m.atomic = False


def _poll(m: Interpreter, plain: Any, ptr: Any, expected: Any, *rest: Any) -> Any:
    load = m.at.interpreter.interpreter_builder.create_masked_load
    mask = floats.handle(np.ones(ptr.data.shape, bool), m.at.tl.int1)
    now = _as_atomic(m, load, ptr, mask, None, None, True).data == expected.data
    if not now.all():
        raise UnsupportedError(
            "this program waits for a value that another program writes. The simulation "
            "runs programs one after another, in the order of the grid, so it would wait "
            "forever; split the kernel into two launches"
        )
    return floats.handle(now, m.at.tl.int1)


def _dot(m: Interpreter, plain: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
    m.dot(a, b)
    if not any(floats.is_narrow(x.dtype) or x.data.dtype == np.float16 for x in (a, b)):
        return plain(a, b, d, *rest)
    # float16 is widened too: this is exact, and NumPy's float32 product is many times as fast.
    sums = np.matmul(floats.widen(a), floats.widen(b), dtype=np.float32) + floats.widen(d)
    if floats.is_narrow(d.dtype):
        sums = floats.narrow(sums, d.dtype)
    return floats.handle(sums.astype(d.data.dtype, copy=False), d.dtype.scalar)


def _binary(m: Interpreter, plain: Any, lhs: Any, rhs: Any, op: Any) -> Any:
    if floats.is_narrow(lhs.dtype) or floats.is_narrow(rhs.dtype):
        return floats.arithmetic(op, lhs, rhs)
    return plain(lhs, rhs, op)


def _unary(m: Interpreter, plain: Any, arg: Any, op: Any) -> Any:
    if op in _EXPONENTIALS:
        m.work("exp", arg.data.size)
    if op in (np.exp, np.exp2):
        m.exponent(arg)
    return floats.arithmetic(op, arg) if floats.is_narrow(arg.dtype) else plain(arg, op)


def _ternary(m: Interpreter, plain: Any, lhs: Any, rhs: Any, other: Any, op: Any) -> Any:
    if op is not np.where and floats.is_narrow(lhs.dtype):
        return floats.arithmetic(op, lhs, rhs, other)
    return plain(lhs, rhs, other, op)


def _fma(m: Interpreter, plain: Any, x: Any, y: Any, z: Any) -> Any:
    if not floats.is_narrow(z.dtype):
        return plain(x, y, z)
    wide = [floats.widen(one).astype(np.float64) for one in (x, y, z)]
    return floats.handle(floats.narrow(wide[0] * wide[1] + wide[2], z.dtype), z.dtype.scalar)


def _cast(m: Interpreter, plain: Any, src: Any, dst: Any) -> Any:
    if floats.is_narrow(src.dtype) or floats.is_narrow(dst):
        return floats.cast(src, dst)
    return plain(src, dst)


def _convert_float(m: Interpreter, plain: Any, src: Any, dst: Any, rounding: Any) -> Any:
    if not (floats.is_narrow(src.dtype) or floats.is_narrow(dst)):
        return plain(src, dst, rounding)
    modes = m.at.interpreter._ir.ROUNDING_MODE
    narrower = dst.scalar.primitive_bitwidth < src.dtype.scalar.primitive_bitwidth
    if rounding is not None and rounding != modes.RTNE and narrower:
        raise UnsupportedError(
            f"a conversion to {dst.scalar} that rounds to zero is not supported; leave out "
            "fp_downcast_rounding=, so that it rounds to nearest even"
        )
    return floats.cast(src, dst)


def _extern(
    m: Interpreter,
    plain: Any,
    library: str,
    path: str,
    symbol: str,
    operands: Any,
    kind: Any,
    *_: Any,
) -> Any:
    found = computed(symbol, [one.data for one in operands])
    m.work("exp", found.size)
    return floats.handle(found.astype(m.at.interpreter._get_np_dtype(kind)), kind.scalar)


def _refused(what: str) -> Callable[..., Any]:
    def checked(m: Interpreter, plain: Any, arg: Any, *rest: Any) -> Any:
        if floats.is_narrow(arg.dtype):
            raise floats.refuse(what)
        return plain(arg, *rest)

    return checked


def checking(plain: Any) -> Any:
    """Return a stricter `plain` (a check of reductions), which also refuses bfloat16 and FP8."""

    def check(ops: Any, given: Any) -> None:
        plain(ops, given)
        for one in given:
            if floats.is_narrow(one.dtype):
                raise floats.refuse(what="a reduction or a scan")

    return check


def remembering(plain: Any) -> Any:
    """Return a cached version of `_get_np_dtype`, because the original builds a table per call."""
    known: dict[Any, np.dtype] = {}

    def dtype_of(kind: Any) -> np.dtype:
        element = kind.scalar
        if element.is_ptr():
            return plain(kind)
        if element not in known:
            known[element] = plain(element)
        return known[element]

    return dtype_of


_EXPONENTIALS = (np.exp, np.exp2, np.log, np.log2, np.sqrt, np.sin, np.cos)
HOOKED: dict[str, Callable[..., Any]] = {
    "create_masked_load": _load,
    "create_masked_store": _store,
    "create_atomic_rmw": _rmw,
    "create_atomic_cas": _cas,
    "create_atomic_load": _as_atomic,
    "create_atomic_store": _as_atomic,
    "create_atomic_poll": _poll,
    "create_dot": _dot,
    "binary_op": _binary,
    "unary_op": _unary,
    "ternary_op": _ternary,
    "create_fma": _fma,
    "cast_impl": _cast,
    "create_fp_to_fp": _convert_float,
    "create_extern_elementwise": _extern,
    "create_rsqrt": _refused("a square root"),
    "create_erf": _refused("erf"),
    "create_idiv": _refused("an integer division"),
}
