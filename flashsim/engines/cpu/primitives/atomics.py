"""Atomic operations, as Numba intrinsics, with which a kernel's threads share work."""

import sys

from llvmlite import ir
from numba import types

from flashsim.engines.cpu.primitives.borrowed_args import intrinsic

INT = ir.IntType(64)


def _address(context, builder, kind, array, index):
    data = context.make_array(kind)(context, builder, array).data
    return builder.gep(data, [index])


def _add(ordering):
    """Return an intrinsic that adds 1 to ``array[index]`` atomically, and returns the old value."""

    def typing(context, array, index):
        def codegen(context, builder, signature, args):
            address = _address(context, builder, signature.args[0], *args)
            return builder.atomic_rmw("add", address, ir.Constant(INT, 1), ordering)

        return types.int64(array, types.int64), codegen

    return intrinsic(typing)


#: `arrive` makes visible all data that other threads wrote before their earlier calls of `arrive`.
fetch_add, arrive = _add("monotonic"), _add("acq_rel")


@intrinsic
def load_acquire(context, array, index):
    """Return ``array[index]``, and make visible all data written before its `store_release`."""

    def codegen(context, builder, signature, args):
        address = _address(context, builder, signature.args[0], *args)
        return builder.load_atomic(address, "acquire", 8)

    return types.int64(array, types.int64), codegen


@intrinsic
def store_release(context, array, index, value):
    """Set ``array[index] = value`` after all earlier writes of this thread."""

    def codegen(context, builder, signature, args):
        address = _address(context, builder, signature.args[0], *args[:2])
        builder.store_atomic(args[2], address, "release", 8)
        return context.get_dummy_value()

    return types.void(array, types.int64, types.int64), codegen


@intrinsic
def give_way(context):
    """Yield this CPU to another thread, perhaps the one for which this thread waits."""

    def codegen(context, builder, signature, args):
        name = "SwitchToThread" if sys.platform == "win32" else "sched_yield"
        kind = ir.FunctionType(ir.IntType(32), [])
        module = builder.module
        builder.call(module.globals.get(name) or ir.Function(module, kind, name), [])
        return context.get_dummy_value()

    return types.void(), codegen
