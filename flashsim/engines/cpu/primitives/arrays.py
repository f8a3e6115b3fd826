"""Allocates and slices arrays in compiled kernels, with less LLVM IR than Numba's functions."""

from numba import types
from numba.core import cgutils
from numba.core.imputils import impl_ret_borrowed

from flashsim.engines.cpu.micro_kernels.writer import LINE
from flashsim.engines.cpu.primitives.borrowed_args import intrinsic


@intrinsic
def panel_array(context, n, dtype):
    """Allocate n elements aligned to a cache line, the size of an AVX-512 register."""
    array = types.Array(dtype.dtype, 1, "C")

    def codegen(context, builder, signature, args):
        size = context.get_constant(types.intp, context.get_abi_sizeof(_element(context, array)))
        count = context.cast(builder, args[0], signature.args[0], types.intp)
        owner = context.nrt.meminfo_alloc_aligned(builder, builder.mul(count, size), LINE)
        data = context.nrt.meminfo_data(builder, owner)
        return _array(context, builder, array, data, count, size, owner)

    return array(n, dtype), codegen


@intrinsic
def rest(context, X, start):
    """Return X[start:] of a contiguous array, with 0 <= start <= its size."""

    def codegen(context, builder, signature, args):
        array = context.make_array(X)(context, builder, args[0])
        count = context.cast(builder, args[1], signature.args[1], types.intp)
        left = builder.sub(builder.extract_value(array.shape, 0), count)
        data = builder.gep(array.data, [count])
        tail = _array(context, builder, X, data, left, array.itemsize, array.meminfo)
        return impl_ret_borrowed(context, builder, X, tail)

    return X(X, start), codegen


def _element(context, array):
    return context.get_data_type(array.dtype)


def _array(context, builder, kind, data, count, size, owner):
    array = context.make_array(kind)(context, builder)
    array.data = builder.bitcast(data, _element(context, kind).as_pointer())
    array.shape = cgutils.pack_array(builder, [count])
    array.strides = cgutils.pack_array(builder, [size])
    array.nitems, array.itemsize, array.meminfo = count, size, owner
    array.parent = cgutils.get_null_value(array.parent.type)
    return array._getvalue()
