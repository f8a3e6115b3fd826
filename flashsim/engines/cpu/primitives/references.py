"""Arrays that nobody counts: a walk's arguments outlive it, so it need not say it uses them."""

from __future__ import annotations

from typing import Any

import numba.extending
from numba import types
from numba.core import cgutils

#: Its stub counts the compiler's context as an argument of the caller's.
intrinsic: Any = numba.extending.intrinsic


@intrinsic
def borrow(context, value):
    """`value` (an array, a number, or a tuple of such, nested) with arrays that have no owner.

    Numba counts references to an array around every call that takes it, atomically; the threads of
    a walk would fight over these counters at every tile. The caller must hold `value` meanwhile.
    """
    del context

    def codegen(context, builder, signature, args):
        return _disowned(context, builder, signature.args[0], args[0])

    return value(value), codegen


def _disowned(context, builder, kind, value):
    if isinstance(kind, types.Array):
        array = context.make_array(kind)(context, builder, value)
        for owner in ("meminfo", "parent"):
            setattr(array, owner, cgutils.get_null_value(getattr(array, owner).type))
        return array._getvalue()
    if isinstance(kind, types.BaseTuple):
        elements: Any = kind
        pairs = zip(elements.types, cgutils.unpack_tuple(builder, value), strict=True)
        parts = [_disowned(context, builder, *pair) for pair in pairs]
        return context.make_tuple(builder, kind, parts)
    return value
