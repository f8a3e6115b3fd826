"""Passes arrays to a kernel without reference counting, because the arrays outlive the call."""

from typing import Any

import numba.extending
from numba import types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.core.typing.templates import AttributeTemplate
from numba.extending import infer_getattr, lower_getattr_generic, register_model

#: The type stub declares the compiler's context as an argument, which callers do not pass.
intrinsic: Any = numba.extending.intrinsic

#: The fields of an array's owners, whose references Numba would count.
_OWNERS = "meminfo", "parent"


class ByAddress(types.Type):
    """The Numba type of a named tuple that is passed by address, not field by field.

    Numba would pass an array as seven numbers to every function, and count references at each call.
    """

    def __init__(self, of: types.BaseTuple) -> None:
        self.of: Any = of
        super().__init__(name=f"address({of})")


@register_model(ByAddress)
class _AddressModel(models.PrimitiveModel):
    """The data model of `ByAddress`: a single address."""

    def __init__(self, dmm, fe_type):
        lies = dmm.lookup(fe_type.of).get_value_type()
        super().__init__(dmm, fe_type, lies.as_pointer())


@infer_getattr
class _FieldsByAddress(AttributeTemplate):
    key = ByAddress

    def generic_resolve(self, value, attr):
        """Return the Numba type of a tuple's field; None makes Numba report a missing field."""
        if attr not in value.of.fields:
            return None
        return value.of.types[value.of.fields.index(attr)]


@lower_getattr_generic(ByAddress)
def _field(context, builder, kind, value, attr):
    """Emit code that reads a field of a `ByAddress` tuple; arrays get no owner."""
    index = kind.of.fields.index(attr)
    at = cgutils.gep_inbounds(builder, value, 0, index)
    return _read(context, builder, kind.of.types[index], at)


def _read(context, builder, kind, at):
    """Emit code that reads a value of a Numba type from memory; arrays get no owner."""
    if isinstance(kind, types.Array):
        array = context.make_array(kind)(context, builder)
        for nth, name in enumerate(context.data_model_manager[kind]._fields):
            if name not in _OWNERS:
                setattr(array, name, builder.load(cgutils.gep_inbounds(builder, at, 0, nth)))
        return _without_owners(array)
    if _holds_arrays(kind):
        elements: Any = kind
        places = [cgutils.gep_inbounds(builder, at, 0, i) for i in range(len(elements.types))]
        pairs = zip(elements.types, places, strict=True)
        return context.make_tuple(builder, kind, [_read(context, builder, *pair) for pair in pairs])
    return builder.load(at)


def _without_owners(array):
    for owner in _OWNERS:
        setattr(array, owner, cgutils.get_null_value(getattr(array, owner).type))
    return array._getvalue()


def _lent(kind: Any) -> Any:
    """Return the type of a kernel's argument: `ByAddress` for a named tuple with arrays."""
    named = isinstance(kind, types.BaseNamedTuple)
    return ByAddress(kind) if named and _holds_arrays(kind) else kind


@intrinsic
def call_with_lent(context, kernel, cpu, arguments):
    """Call ``kernel(cpu, *arguments)`` without counting references; pass named tuples by address.

    Numba counts references to arrays with owners at every call, and threads would contend for these
    counters.
    """
    signature = kernel.get_call_type(context, (cpu, *map(_lent, arguments)), {})

    def codegen(context, builder, own, args):
        values = [args[1]]
        address = cgutils.alloca_once_value(builder, args[2])
        for i, kind in enumerate(arguments):
            at = cgutils.gep_inbounds(builder, address, 0, i)
            by_address = isinstance(_lent(kind), ByAddress)
            values.append(at if by_address else _read(context, builder, kind, at))
        context.get_function(kernel, signature)(builder, values)
        return context.get_dummy_value()

    return types.void(kernel, cpu, arguments), codegen


def _holds_arrays(kind: Any) -> bool:
    if isinstance(kind, types.BaseTuple):
        return any(map(_holds_arrays, kind))
    return isinstance(kind, types.Array)


@intrinsic
def borrow(context, value):
    """Return `value` (an array, a number or a nested tuple), in which no array has an owner.

    The caller must keep `value` alive as long as the result is used.
    """

    def codegen(context, builder, signature, args):
        return _disowned(context, builder, signature.args[0], args[0])

    return value(value), codegen


def _disowned(context, builder, kind, value):
    if isinstance(kind, types.Array):
        return _without_owners(context.make_array(kind)(context, builder, value))
    if isinstance(kind, types.BaseTuple):
        elements: Any = kind
        pairs = zip(elements.types, cgutils.unpack_tuple(builder, value), strict=True)
        parts = [_disowned(context, builder, *pair) for pair in pairs]
        return context.make_tuple(builder, kind, parts)
    return value
