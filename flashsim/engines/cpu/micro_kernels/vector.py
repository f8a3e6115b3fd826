"""Makes compiled kernels use an operation's vector code if the CPU's registers are known."""

from collections.abc import Callable

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.extending import intrinsic

from flashsim.engines.cpu.micro_kernels.float16 import BFLOAT16, FLOAT16
from flashsim.engines.cpu.micro_kernels.registers import BLOCKING, Plain
from flashsim.engines.cpu.primitives.inline_jit import HotPart, using


def operation(layout: str, build: Callable, **options) -> Callable:
    """Decorate a plain function; compiled callers run vector code instead, if there is any."""
    code = vector_intrinsic(layout, build, **options)

    def vectorised(cpu, *args):
        code(cpu, args)

    return lambda definition: _decorated(definition, lambda *_: vectorised)


def operation_by_kind(layout: str, build: Callable, **options) -> Callable:
    """Decorate a plain definition, like `operation`, that may read or write 16-bit numbers.

    The definition's last argument is a 16-bit type (BFLOAT16 or FLOAT16) or None. When Numba
    compiles, only whether the last argument is None is known.
    """
    floats, bfloat16, float16 = (
        vector_intrinsic(layout, build, kind=kind, **options) for kind in (None, BFLOAT16, FLOAT16)
    )

    def of_floats(cpu, *args):
        floats(cpu, args[:-1])

    def of_halves(cpu, *args):
        if args[-1] == BFLOAT16:
            bfloat16(cpu, args[:-1])
        else:
            float16(cpu, args[:-1])

    def choose(*args):
        return of_floats if isinstance(args[-1], types.NoneType) else of_halves

    return lambda definition: _decorated(definition, choose)


def _decorated(definition: Callable, vectorised: Callable) -> Callable:
    def choose(cpu, *args):
        return definition if cpu.instance_class is Plain else vectorised(*args)

    using(HotPart, definition, choose)
    return definition


def vector_intrinsic(layout: str, build: Callable, **options) -> Callable:
    """Return a Numba intrinsic that passes addresses to the LLVM function that `build` writes.

    `layout` has one code per argument after `cpu`: ``a`` is an array, ``o2`` an offset into array
    2, and ``i`` an integer. All arrays' elements are as wide as those of the first array, or 16
    bits wide.
    """
    slots = layout.split()

    def typing(context, cpu, args):
        arrays = [a for a, slot in zip(args, slots, strict=True) if slot == "a"]
        widths = {a.dtype.bitwidth for a in arrays if isinstance(a, types.Array)}
        if len(widths - {16}) != 1 or not all(isinstance(a, types.Array) for a in arrays):
            raise TypingError(
                f"all arrays must have elements with the same number of bytes, got {arrays}"
            )
        kinds = [a if slot == "a" else types.int64 for a, slot in zip(args, slots, strict=True)]
        block, itemsize = BLOCKING[cpu.instance_class], arrays[0].dtype.bitwidth // 8

        def codegen(context, builder, signature, values):
            function = build(builder.module, block, itemsize, **options)
            passed: list = []
            addresses: list[int] = []  # which of `passed` are arrays
            triples = zip(
                slots,
                cgutils.unpack_tuple(builder, values[1]),
                signature.args[1].types,
                strict=True,
            )
            for slot, value, kind in triples:
                if slot == "a":
                    addresses.append(len(passed))
                    passed.append(context.make_array(kind)(context, builder, value).data)
                elif slot == "i":
                    passed.append(value)
                else:
                    for number in slot[1:].split(","):
                        at = addresses[int(number)]
                        passed[at] = builder.gep(passed[at], [value])
            kinds = [a.type for a in function.args]
            passed = [
                builder.bitcast(p, k) if isinstance(k, ir.PointerType) else p
                for p, k in zip(passed, kinds, strict=True)
            ]
            builder.call(function, passed)
            return context.get_dummy_value()

        return types.void(cpu, types.Tuple(kinds)), codegen

    return intrinsic(typing)
