"""Turn Python functions that emit LLVM IR into functions for Numba-CUDA kernels.

A register fragment is a tuple in a kernel, and a list of LLVM values in an emitting function. A
tuple cannot be indexed at run time, so a fragment always stays in registers. Loops over a fragment
run in Python at compile time.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import partial, update_wrapper
from types import SimpleNamespace
from typing import Any, NamedTuple

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

from flashsim.backends.launch import kernel as launch

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F32 = ir.FloatType()
Values = list[ir.Value]


def i32(value: int) -> ir.Constant:
    """Return a 32-bit integer constant."""
    return ir.Constant(I32, value)


def f32(value: float) -> ir.Constant:
    """Return a float32 constant."""
    return ir.Constant(F32, value)


def floats(count: int) -> types.Type:
    """Return the Numba type of a fragment of `count` float32 registers."""
    return types.UniTuple(types.float32, count)


def words(count: int) -> types.Type:
    """Return the Numba type of a fragment of `count` registers of two 16-bit elements each."""
    return types.UniTuple(types.int32, count)


#: In place of a parameter's type: a fragment of any size, or the kernel's arguments.
FRAGMENT = None


class Like(NamedTuple):
    """In place of a result's type: the type of fragment number `parameter`, or `times` its size."""

    parameter: int
    times: int = 1


class Rounded(NamedTuple):
    """In place of a result's type: float32 fragment number `parameter`, rounded to 16 bits."""

    parameter: int


def emitted(returns: Any, *parameters: Any) -> Callable[[Callable[..., Any]], Any]:
    """Turn ``function(builder, *values, **constants)``, which emits LLVM IR, into an intrinsic.

    `returns` is the type of the result, and `parameters` are the types of the values. Emitting
    functions therefore have no annotations. `values` and the result use an LLVM value for a scalar,
    a list for a fragment, and a list of lists for several fragments. Scalars are cast to the type
    of their parameter. A fragment must have exactly the type of its parameter (or `FRAGMENT`).

    Keyword-only parameters are constants of the compiled code. If a function has constants, a call
    with the constants, in their order or by name, returns the intrinsic. Types may then be
    functions of the constants, and a parameter's may return the types of several parameters.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        every = inspect.signature(function).parameters.values()
        constants = inspect.Signature(
            x.replace(kind=x.POSITIONAL_OR_KEYWORD) for x in every if x.kind == x.KEYWORD_ONLY
        )
        if not constants.parameters:
            return _intrinsic(function, function, returns, parameters)

        def specialised(*args: Any, **named: Any) -> Any:
            bound = constants.bind(*args, **named)
            bound.apply_defaults()
            known = SimpleNamespace(**bound.arguments)
            kinds = [x(known) if inspect.isfunction(x) else x for x in parameters]
            types_of = [y for x in kinds for y in (x if isinstance(x, list) else [x])]
            result = returns(known) if inspect.isfunction(returns) else returns
            return _intrinsic(function, partial(function, **bound.arguments), result, types_of)

        return update_wrapper(specialised, function)

    return decorate


def _intrinsic(whole: Any, function: Any, returns: Any, parameters: Sequence[Any]) -> Any:
    """Return the intrinsic of `function`, which is `whole` with its constants."""
    several = isinstance(returns, list)

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        values = []
        for value, actual, wanted in zip(args, signature.args, parameters, strict=True):
            kind = actual if wanted is FRAGMENT else wanted
            values.append(_unpack(builder, context.cast(builder, value, actual, kind), kind))
        found, result = function(builder, *values), signature.return_type
        if returns is None:
            return context.get_dummy_value()
        if not several:
            return _pack(builder, found, result)
        parts = [_pack(builder, *part) for part in zip(found, result.types, strict=True)]
        return context.make_tuple(builder, result, parts)

    def typer(typing_context: Any, *args: Any) -> Any:
        if several:
            result = types.Tuple([_result(kind, args) for kind in returns])
        else:
            result = _result(returns, args)
        return result(*args), generate

    typer.__name__, typer.__doc__ = whole.__name__, whole.__doc__
    names = ["typing_context", *(f"x{n}" for n in range(len(parameters)))]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    typer.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, kind) for name in names]  # Numba matches arguments by it
    )
    device_function = intrinsic(typer)
    device_function.__wrapped__ = function  # lets other code run the emitting function
    return device_function


def _result(kind: Any, args: Any) -> Any:
    if isinstance(kind, Like):
        fragment = args[kind.parameter]
        return types.UniTuple(fragment.dtype, fragment.count * kind.times)
    if isinstance(kind, Rounded):
        return words(args[kind.parameter].count // 2)
    return types.void if kind is None else kind


def _unpack(builder: ir.IRBuilder, value: ir.Value, kind: Any) -> Any:
    if isinstance(kind, types.UniTuple):
        return [builder.extract_value(value, x) for x in range(kind.count)]
    return value


def _pack(builder: ir.IRBuilder, values: Any, kind: Any) -> ir.Value:
    if not isinstance(kind, types.UniTuple):
        return values
    element = F32 if kind.dtype == types.float32 else I32
    packed: ir.Value = ir.Constant(ir.ArrayType(element, kind.count), ir.Undefined)
    for x, value in enumerate(values):
        packed = builder.insert_value(packed, value, x)
    return packed


def asm(
    builder: ir.IRBuilder,
    text: str,
    constraints: str,
    operands: Values,
    returns: ir.Type | None = None,
    *,
    effects: bool = False,
    together: bool = False,
) -> ir.Value:
    """Emit one PTX instruction. ``$n`` in `text` is operand n, counted from the first result.

    With `effects`, the compiler neither moves the instruction across barriers and memory accesses
    nor drops it if unused. With `together`, LLVM keeps the instruction out of branches, so that a
    warp's threads execute it together.
    """
    result = returns or ir.VoidType()
    kind = ir.FunctionType(result, [v.type for v in operands])
    if effects:
        constraints += ",~{memory}" if constraints else "~{memory}"
    code = ir.InlineAsm(kind, text, constraints, side_effect=effects)
    return builder.call(code, operands, attrs=("convergent",) if together else ())


def instruction(
    text: str, constraints: str = "", returns: ir.Type | None = None, **how: bool
) -> Callable[..., Any]:
    """Return ``emit(builder, *operands)``, which emits this PTX instruction (see `asm`).

    By default, the instruction has `effects`.
    """
    how = {"effects": True, **how}

    def emit(builder: ir.IRBuilder, *operands: ir.Value) -> ir.Value:
        return asm(builder, text, constraints, list(operands), returns, **how)

    return emit


def struct_values(builder: ir.IRBuilder, value: ir.Value, count: int) -> Values:
    """Return the fields of an instruction's struct result as separate values."""
    return [builder.extract_value(value, x) for x in range(count)]


# -- the kernels' arguments -----------------------------------------------------------------------


class MapType(types.Type):
    """The Numba type of kernel parameter n if it is a tensor map (`cupy_gpu.tensor_maps`).

    TMA needs the address of a tensor map, but Numba passes parameters by value.
    `hopper.wgmma_tiles.map_address` finds the address by the PTX name, KERNEL_param_n for parameter
    n.
    """

    def __init__(self, kernel: str, number: int) -> None:
        super().__init__(f"flashsim.Map({kernel}, {number})")
        self.parameter = f"{kernel}_param_{number}"


class ArgsType(types.Type):
    """The Numba type of `launch.ARGS`, an argument struct of `nbytes` bytes, passed by value.

    Kernels read the struct's fields as attributes; the tensor q has ``q_data`` and ``q_row``, for
    example. If a kernel has mask or score functions, 64-bit numbers follow `launch.ARGS`, with
    attributes ``word_0``, ``word_1`` and so on.
    """

    def __init__(self, nbytes: int = launch.ARGS.itemsize) -> None:
        super().__init__(f"flashsim.Args[{nbytes}]")
        self.words = nbytes // 8


def _fields() -> dict[str, tuple[int, Any]]:
    """Return the byte offset and the Numba type of each field of `launch.ARGS`."""
    kinds = {"u8": types.int64, "i8": types.int64, "i4": types.int32, "f4": types.float32}
    fields = {}
    for name in launch.ARGS.names or ():
        dtype, offset = launch.ARGS.fields[name][:2]  # type: ignore[index]
        if dtype.names is None:
            fields[name] = (offset, kinds[dtype.str[1:]])
            continue
        for part in dtype.names:
            inner, start = dtype.fields[part][:2]
            fields[f"{name}_{part}"] = (offset + start, kinds[inner.str[1:]])
    return fields


FIELDS = _fields()
_WORD = "word_"


def argument(builder: ir.IRBuilder, value: ir.Value, name: str) -> ir.Value:
    """Return an attribute of the argument struct `value`; see `ArgsType`."""
    if name.startswith(_WORD):
        place = launch.ARGS.itemsize // 8 + int(name.removeprefix(_WORD))
        return builder.extract_value(value, place)
    offset, wanted = FIELDS[name]
    word = builder.extract_value(value, offset // 8)
    if wanted == types.int64:
        return word
    half = builder.trunc(builder.lshr(word, ir.Constant(I64, offset % 8 * 8)), I32)
    return builder.bitcast(half, F32) if wanted == types.float32 else half


def _register() -> None:
    """Tell numba-cuda how the argument struct and tensor maps are passed and read."""
    from numba.cuda import models
    from numba.cuda.cudadecl import registry as typing_registry
    from numba.cuda.cudaimpl import registry as lowering_registry
    from numba.cuda.extending import register_model
    from numba.cuda.typing.templates import AttributeTemplate

    @register_model(ArgsType)
    class _Model(models.PrimitiveModel):
        def __init__(self, manager: Any, kind: Any) -> None:
            super().__init__(manager, kind, ir.ArrayType(I64, kind.words))

    @register_model(MapType)
    class _MapModel(models.PrimitiveModel):
        def __init__(self, manager: Any, kind: Any) -> None:
            super().__init__(manager, kind, ir.ArrayType(I64, 128 // 8))

    @typing_registry.register_attr
    class _Attributes(AttributeTemplate):
        key = ArgsType

        def generic_resolve(self, kind: Any, name: str) -> Any:
            return types.int64 if name.startswith(_WORD) else FIELDS.get(name, (0, None))[1]

    @lowering_registry.lower_getattr_generic(ArgsType)
    def _read(context: Any, builder: ir.IRBuilder, kind: Any, value: ir.Value, name: str) -> Any:
        return argument(builder, value, name)


_register()
