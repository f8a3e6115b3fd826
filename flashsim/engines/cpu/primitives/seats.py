"""How a walk's threads begin: natively, all at once, none of them waiting for Python's lock.

A thread that waits for work sits on a seat, eight numbers and the CPUs of its caller, behind a door
(a lock of C Python's, which any thread may release). `together` writes the walk and where its
arguments lie on each seat it was given, opens their doors, walks itself, and waits for those that
began. A thread that comes when nothing is left to do finds its errand withdrawn, and sits down
again. Arguments are taken out of Python's objects once, by the caller.
"""

from __future__ import annotations

import ctypes
import os
from functools import lru_cache
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils

from flashsim.engines.cpu.primitives.atomics import INT, intrinsic
from flashsim.engines.cpu.primitives.references import lend, lent

#: Places of a seat. STATE is FREE, GIVEN (an errand, which its caller may withdraw) or BEGUN;
#: FAILED what the walk returned, 0 if it is whole. The thread waits at DOOR, its caller at LEFT.
STATE, WALK, ARGS, FAILED, DOOR, LEFT, ACQUIRE, RELEASE, ALLOW, CPUS = range(10)
FREE, GIVEN, BEGUN = range(3)
#: Numbers of 64 bits for a set of CPUs, as many as Linux may ask for by default; of a seat.
CPU_WORDS = 16
SEAT = CPUS + CPU_WORDS

_BYTES = ir.IntType(8).as_pointer()
_CODE = ir.IntType(32)
_WALK = ir.FunctionType(_CODE, [_BYTES])
_LOCK = ir.FunctionType(_CODE, [_BYTES, _CODE])
_ALLOW = ir.FunctionType(_CODE, [_CODE, INT, _BYTES])


def new_seat() -> np.ndarray:
    """A seat with its doors closed; it is never given back, for its thread lives for ever."""
    api = ctypes.pythonapi
    allocate, acquire = api.PyThread_allocate_lock, api.PyThread_acquire_lock
    allocate.restype, acquire.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_int]
    seat = np.zeros(SEAT, np.int64)
    for place in (DOOR, LEFT):
        seat[place] = allocate()
        acquire(int(seat[place]), 1)
    seat[ACQUIRE], seat[RELEASE] = _address(acquire), _address(api.PyThread_release_lock)
    allow = getattr(ctypes.CDLL(None), "sched_setaffinity", None) if os.name == "posix" else None
    seat[ALLOW] = _address(allow) if allow else 0
    return seat


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def sit(seat: np.ndarray) -> None:
    """Wait for errands and do them, for ever, without Python's lock."""
    serve = _serve()
    serve(seat.ctypes.data)


@lru_cache(maxsize=1)
def _serve() -> Any:
    """What a thread does on its seat, as machine code, which lives as long as what is returned."""
    module = ir.Module("flashsim_seats")
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [INT]), "serve")
    builder = ir.IRBuilder(function.append_basic_block())
    seat = builder.inttoptr(function.args[0], INT.as_pointer())
    again = builder.append_basic_block()
    builder.branch(again)
    builder.position_at_end(again)
    _call(builder, _LOCK, seat, ACQUIRE, _pointer(builder, seat, DOOR), _CODE(1))
    with builder.if_then(_exchange(builder, seat, GIVEN, BEGUN)):
        with builder.if_then(builder.icmp_signed("!=", _at(builder, seat, ALLOW), INT(0))):
            cpus = builder.bitcast(builder.gep(seat, [INT(CPUS)]), _BYTES)
            _call(builder, _ALLOW, seat, ALLOW, _CODE(0), INT(8 * CPU_WORDS), cpus)
        code = _call(builder, _WALK, seat, WALK, _pointer(builder, seat, ARGS))
        _put(builder, seat, FAILED, builder.sext(code, INT))
        builder.store_atomic(INT(FREE), builder.gep(seat, [INT(STATE)]), "release", 8)
        _call(builder, _LOCK, seat, RELEASE, _pointer(builder, seat, LEFT), _CODE(0))
    builder.branch(again)
    machine = binding.Target.from_default_triple().create_target_machine(opt=1)
    engine = binding.create_mcjit_compiler(binding.parse_assembly(str(module)), machine)
    engine.finalize_object()
    serve: Any = ctypes.CFUNCTYPE(None, ctypes.c_int64)(engine.get_function_address("serve"))
    serve.code = engine
    return serve


@intrinsic
def together(context, seats, walk, cpu, arguments):
    """Do `walk(cpu, *arguments)` here and on each of `seats` (their addresses); how many failed.

    A failure is that memory gave out: nothing else in a walk raises. The caller holds `arguments`
    meanwhile.
    """
    signature = walk.get_call_type(context, (cpu, *map(lent, arguments)), {})

    def codegen(context, builder, own, args):
        given = types.Tuple((cpu, arguments))
        body = _body(context, builder, walk, signature, given)
        values = cgutils.alloca_once_value(builder, context.make_tuple(builder, given, args[2:]))
        place = builder.ptrtoint(values, INT)
        array = context.make_array(own.args[0])(context, builder, args[0])
        count = cgutils.unpack_tuple(builder, array.shape)[0]
        failed = cgutils.alloca_once_value(builder, INT(0))

        def seat_of(loop):
            address = builder.load(builder.gep(array.data, [loop.index]))
            return builder.inttoptr(address, INT.as_pointer())

        with cgutils.for_range(builder, count) as loop:
            seat = seat_of(loop)
            _put(builder, seat, WALK, builder.ptrtoint(body, INT))
            _put(builder, seat, ARGS, place)
            _put(builder, seat, FAILED, INT(0))
            builder.store_atomic(INT(GIVEN), builder.gep(seat, [INT(STATE)]), "release", 8)
            _call(builder, _LOCK, seat, RELEASE, _pointer(builder, seat, DOOR), _CODE(0))
        code = builder.call(body, [builder.bitcast(values, _BYTES)])
        _count(builder, failed, builder.sext(code, INT))
        with cgutils.for_range(builder, count) as loop:
            seat = seat_of(loop)
            with builder.if_then(builder.not_(_exchange(builder, seat, GIVEN, FREE))):
                _call(builder, _LOCK, seat, ACQUIRE, _pointer(builder, seat, LEFT), _CODE(1))
                _count(builder, failed, _at(builder, seat, FAILED))
        return builder.load(failed)

    return types.int64(seats, walk, cpu, arguments), codegen


def _body(context, builder, walk, signature, given):
    """The walk as a function of where its arguments lie; returns 0, or Numba's code of an error."""
    module = builder.module
    kind = context.get_value_type(given)
    # Numba's convention: places of the result and of an error come first; an error ends it.
    error = builder.function.args[1].type
    inner = ir.FunctionType(_CODE, [_BYTES, error, kind.as_pointer()])
    walked = ir.Function(module, inner, f"{builder.function.name}.walked")
    walked.linkage = "internal"
    walked.args[2].add_attribute("noalias")  # a walk writes to what its tables say, not to them
    inside = ir.IRBuilder(walked.append_basic_block())
    values = [inside.load(cgutils.gep_inbounds(inside, walked.args[2], 0, 0))]
    for i, one in enumerate(given[1]):
        at = cgutils.gep_inbounds(inside, walked.args[2], 0, 1, i)
        values.append(lend(context, inside, one, at))
    context.get_function(walk, signature)(inside, values)
    inside.ret(_CODE(0))
    body = ir.Function(module, _WALK, f"{builder.function.name}.body")
    body.linkage = "internal"
    outside = ir.IRBuilder(body.append_basic_block())
    nowhere = cgutils.alloca_once(outside, error.pointee)
    at = outside.bitcast(body.args[0], kind.as_pointer())
    outside.ret(outside.call(walked, [outside.bitcast(nowhere, _BYTES), nowhere, at]))
    return body


def _count(builder, total, code):
    wrong = builder.zext(builder.icmp_signed("!=", code, INT(0)), INT)
    builder.store(builder.add(builder.load(total), wrong), total)


def _at(builder, seat, place):
    return builder.load(builder.gep(seat, [INT(place)]))


def _put(builder, seat, place, value):
    builder.store(value, builder.gep(seat, [INT(place)]))


def _pointer(builder, seat, place):
    return builder.inttoptr(_at(builder, seat, place), _BYTES)


def _exchange(builder, seat, old, new):
    """Whether its state was `old`, which is `new` then."""
    state = builder.gep(seat, [INT(STATE)])
    return builder.extract_value(
        builder.cmpxchg(state, INT(old), INT(new), "acq_rel", "acquire"), 1
    )


def _call(builder, kind, seat, place, *args):
    """Call the function of that kind whose address is on the seat."""
    function = builder.inttoptr(_at(builder, seat, place), kind.as_pointer())
    return builder.call(function, args)
