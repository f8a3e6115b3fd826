"""The operations of `plain.py` as Numba sees their vector code: intrinsics that pass addresses."""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.extending import intrinsic

from flashsim.engines.cpu.micro_kernels.along import build_dots, build_softmax_along, build_weigh
from flashsim.engines.cpu.micro_kernels.along_pairs import build_side_by_side
from flashsim.engines.cpu.micro_kernels.codegen import (
    build_grad_scores,
    build_online_softmax,
    build_product,
    build_soft_cap,
    build_transpose,
)
from flashsim.engines.cpu.micro_kernels.halves import (
    BFLOAT16,
    FLOAT16,
    build_convert,
    build_round,
)
from flashsim.engines.cpu.micro_kernels.registers import BLOCKING


def vector_intrinsic(layout: str, build: Callable, **options) -> Callable:
    """An intrinsic with the signature of the definition in `panels`.

    `layout` says what each argument after `cpu` is: ``a`` an array, ``o`` the offset that belongs
    to an earlier array, as its number in ``a``s; ``i`` an integer that is passed on. Elements of
    all arrays are as wide as the first one's, or 16 bits.
    """
    slots = layout.split()

    def typing(context, cpu, args):
        del context
        arrays = [a for a, slot in zip(args, slots, strict=True) if slot == "a"]
        widths = {a.dtype.bitwidth for a in arrays if isinstance(a, types.Array)}
        if len(widths - {16}) != 1 or not all(isinstance(a, types.Array) for a in arrays):
            raise TypingError(f"expected arrays of equally wide elements, got {arrays}")
        kinds = [a if slot == "a" else types.int64 for a, slot in zip(args, slots, strict=True)]
        block, itemsize = BLOCKING[cpu.instance_class], arrays[0].dtype.bitwidth // 8

        def codegen(context, builder, signature, values):
            function = build(builder.module, block, itemsize, **options)
            parts = cgutils.unpack_tuple(builder, values[1])
            kinds = signature.args[1].types
            addresses: list = []
            passed: list = []
            for slot, value, kind in zip(slots, parts, kinds, strict=True):
                if slot == "a":
                    addresses.append(
                        (len(passed), context.make_array(kind)(context, builder, value).data)
                    )
                    passed.append(addresses[-1][1])
                elif slot == "i":
                    passed.append(value)
                else:
                    for number in slot[1:].split(","):
                        place, base = addresses[int(number)]
                        passed[place] = builder.gep(base, [value])
            wanted = [a.type for a in function.args]
            passed = [
                builder.bitcast(p, w) if isinstance(w, ir.PointerType) else p
                for p, w in zip(passed, wanted, strict=True)
            ]
            builder.call(function, passed)
            return context.get_dummy_value()

        return types.void(cpu, types.Tuple(kinds)), codegen

    return intrinsic(typing)


_PRODUCT = "a o0 i a o1 i i a o2 i i i"
_set = vector_intrinsic(_PRODUCT, build_product, mode="set")
_add = vector_intrinsic(_PRODUCT, build_product, mode="add")
_rescale = vector_intrinsic(f"{_PRODUCT} a o3", build_product, mode="rescale")
_softmax = vector_intrinsic("a o0 i a a a o1,2,3", build_online_softmax)
_by_row = vector_intrinsic("a o0 a o1 i i a a o2,3", build_grad_scores, by_row=True)
_cap = vector_intrinsic("a o0 i i a", build_soft_cap, gated=False)
_cap_gated = vector_intrinsic("a o0 i i a a o2", build_soft_cap, gated=True)
_dots, _dots_bfloat16, _dots_float16 = (
    vector_intrinsic("a i a i i a o2 i i i a", build_dots, kind=kind)
    for kind in (None, BFLOAT16, FLOAT16)
)
_side_by_side = vector_intrinsic("a i i", build_side_by_side, kind=BFLOAT16)
_weigh, _weigh_bfloat16, _weigh_float16 = (
    vector_intrinsic("a o0 i a i a i i i i", build_weigh, kind=kind)
    for kind in (None, BFLOAT16, FLOAT16)
)
_along, _along_bfloat16, _along_float16 = (
    vector_intrinsic("a i i i a a a o1,2,3", build_softmax_along, kind=kind)
    for kind in (None, BFLOAT16, FLOAT16)
)
_in = vector_intrinsic("a a o1 i i i a", build_transpose, out=False)
_out = vector_intrinsic("a a o1 i i i a", build_transpose, out=True)
_bfloat16 = vector_intrinsic("a o0 i i", build_round, bfloat16=True)
_float16 = vector_intrinsic("a o0 i i", build_round, bfloat16=False)
_widen_bfloat16, _widen_float16, _narrow_bfloat16, _narrow_float16 = (
    vector_intrinsic("a o0 a i i", build_convert, bfloat16=bfloat16, narrow=narrow)
    for narrow in (False, True)
    for bfloat16 in (True, False)
)
_by_lane = vector_intrinsic("a o0 a o1 i i a a o2,3", build_grad_scores, by_row=False)


def product_set(cpu, C, c0, ldc, A, a0, row, step, B, b0, ldb, rows, n):
    """`plain.product_set`."""
    _set(cpu, (C, c0, ldc, A, a0, row, step, B, b0, ldb, rows, n))


def product_add(cpu, C, c0, ldc, A, a0, row, step, B, b0, ldb, rows, n):
    """`plain.product_add`."""
    _add(cpu, (C, c0, ldc, A, a0, row, step, B, b0, ldb, rows, n))


def product_rescale(cpu, C, c0, ldc, A, a0, row, step, B, b0, ldb, rows, n, alpha, alpha0):
    """`plain.product_rescale`."""
    _rescale(cpu, (C, c0, ldc, A, a0, row, step, B, b0, ldb, rows, n, alpha, alpha0))


def online_softmax(cpu, S, s0, rows, m, l, alpha, at):
    """`plain.online_softmax`."""
    _softmax(cpu, (S, s0, rows, m, l, alpha, at))


def grad_scores_by_row(cpu, S, s0, dP, d0, ld, rows, L, delta, l0):
    """`plain.grad_scores_by_row`."""
    _by_row(cpu, (S, s0, dP, d0, ld, rows, L, delta, l0))


def grad_scores_by_lane(cpu, S, s0, dP, d0, ld, rows, L, delta, l0):
    """`plain.grad_scores_by_lane`."""
    _by_lane(cpu, (S, s0, dP, d0, ld, rows, L, delta, l0))


def soft_cap(cpu, S, s0, ld, rows, c):
    """`plain.soft_cap`."""
    _cap(cpu, (S, s0, ld, rows, c))


def soft_cap_gated(cpu, S, s0, ld, rows, c, gate, g0):
    """`plain.soft_cap_gated`."""
    _cap_gated(cpu, (S, s0, ld, rows, c, gate, g0))


def side_by_side(cpu, Q, ld, rows, kind):
    """`plain.side_by_side`."""
    if kind == BFLOAT16:
        _side_by_side(cpu, (Q, ld, rows))


def dots(cpu, S, ld, K, k0, d, Q, q0, ldq, rows, heads, factor, kind):
    """`plain.dots`."""
    if kind is None:
        _dots(cpu, (S, ld, K, k0, d, Q, q0, ldq, rows, heads, factor))
    elif kind == BFLOAT16:
        _dots_bfloat16(cpu, (S, ld, K, k0, d, Q, q0, ldq, rows, heads, factor))
    else:
        _dots_float16(cpu, (S, ld, K, k0, d, Q, q0, ldq, rows, heads, factor))


def softmax_along(cpu, S, ld, heads, n, m, l, alpha, at, kind):
    """`plain.softmax_along`."""
    if kind is None:
        _along(cpu, (S, ld, heads, n, m, l, alpha, at))
    elif kind == BFLOAT16:
        _along_bfloat16(cpu, (S, ld, heads, n, m, l, alpha, at))
    else:
        _along_float16(cpu, (S, ld, heads, n, m, l, alpha, at))


def weigh(cpu, O, o0, ldo, P, ldp, V, v0, dv, keys, heads, kind):
    """`plain.weigh`."""
    if kind is None:
        _weigh(cpu, (O, o0, ldo, P, ldp, V, v0, dv, keys, heads))
    elif kind == BFLOAT16:
        _weigh_bfloat16(cpu, (O, o0, ldo, P, ldp, V, v0, dv, keys, heads))
    else:
        _weigh_float16(cpu, (O, o0, ldo, P, ldp, V, v0, dv, keys, heads))


def transpose_in(cpu, panels, X, x0, rows, cols, d, factors):
    """`plain.transpose_in`."""
    _in(cpu, (panels, X, x0, rows, cols, d, factors))


def transpose_out(cpu, panels, X, x0, rows, cols, d, factors):
    """`plain.transpose_out`."""
    _out(cpu, (panels, X, x0, rows, cols, d, factors))


def round_to_bfloat16(cpu, X, x0, ld, rows):
    """`plain.round_to_bfloat16`."""
    _bfloat16(cpu, (X, x0, ld, rows))


def round_to_float16(cpu, X, x0, ld, rows):
    """`plain.round_to_float16`."""
    _float16(cpu, (X, x0, ld, rows))


def widen(cpu, floats, f0, halves, h0, n, kind):
    """`plain.widen`."""
    if kind == BFLOAT16:
        _widen_bfloat16(cpu, (floats, f0, halves, h0, n))
    else:
        _widen_float16(cpu, (floats, f0, halves, h0, n))


def narrow(cpu, floats, f0, halves, h0, n, kind):
    """`plain.narrow`."""
    if kind == BFLOAT16:
        _narrow_bfloat16(cpu, (floats, f0, halves, h0, n))
    else:
        _narrow_float16(cpu, (floats, f0, halves, h0, n))
