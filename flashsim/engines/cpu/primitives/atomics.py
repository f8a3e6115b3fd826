"""Atomic operations, as Numba intrinsics, with which a kernel's threads share work."""

import sys

from llvmlite import ir
from numba import types

from flashsim.engines.cpu.primitives.borrowed_args import intrinsic

INT = ir.IntType(64)


def _address(context, builder, kind, array, index):
    data = context.make_array(kind)(context, builder, array).data
    return builder.gep(data, [index])


@intrinsic
def fetch_add(context, counter):
    """Add 1 to ``counter[0]`` atomically, and return the old value."""

    def codegen(context, builder, signature, args):
        zero = ir.Constant(INT, 0)
        address = _address(context, builder, signature.args[0], args[0], zero)
        return builder.atomic_rmw("add", address, ir.Constant(INT, 1), "monotonic")

    return types.int64(counter), codegen


@intrinsic
def arrive(context, array, index):
    """Add 1 to ``array[index]`` atomically, and return the old value.

    A call makes visible all data that other threads wrote before their earlier calls of `arrive`.
    """

    def codegen(context, builder, signature, args):
        address = _address(context, builder, signature.args[0], *args)
        return builder.atomic_rmw("add", address, ir.Constant(INT, 1), "acq_rel")

    return types.int64(array, types.int64), codegen


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
