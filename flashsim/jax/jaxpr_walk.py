"""Evaluate a function that calls Pallas kernels, one primitive at a time, and report accesses.

Pallas's interpreters compile a kernel to XLA, and accesses inside XLA cannot be observed. So
`Walker` evaluates the jaxpr, JAX's expression form of the traced function; JAX computes arithmetic
on the CPU, in the kernel's types. Loads, stores and atomics of refs (Pallas's array references) are
reported to `pallas.PallasNotes`.

JAX's primitives are recognized by their names, and indexers by their fields, so no private module
of JAX is imported.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Literal

from flashsim.errors import FlashSimError, UnsupportedError
from flashsim.jax.loop_names import carried_names
from flashsim.jax.refs import Lanes, Ref, locate, uninitialized

PallasNotes = Any  # `pallas.PallasNotes`, whose module imports this one

#: Primitives that only call one jaxpr, and the parameters that may hold it.
CALLS = {
    *("jit", "pjit", "closed_call", "core_call", "core_closed_call"),
    *("remat", "remat2", "checkpoint"),
    *("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "custom_lin", "jaxpr_call"),
}
BODIES = ("jaxpr", "call_jaxpr", "fun_jaxpr")
#: Hints and barriers, which change no value and move no bytes.
IGNORED = {"debug_barrier_p", "delay", "semaphore_wait", "semaphore_signal", "dma_wait"}
#: Primitives that cannot be evaluated, and what to write instead.
REFUSED = {
    "elementwise_inline_asm_p": "inline assembly runs only on a GPU: write jax.numpy instead "
    "(jnp.tanh for plgpu.approx_tanh) while you trace",
    "core_map": "call the kernel by pl.pallas_call",
    "mpmd_map": "call the kernel by pl.pallas_call instead of pl.kernel",
    "emit_pipeline": "pass the blocks of the inner loop to pl.pallas_call as BlockSpecs, with one "
    "more grid axis",
    "get_global": "use scratch_shapes of pl.pallas_call",
    "run_state": "call the kernel by pl.pallas_call, not by pl.run_state",
    "prng_seed": "draw random numbers before the kernel and pass them in",
    "prng_random_bits": "draw random numbers before the kernel and pass them in",
    "stochastic_round": "round to the nearest while you trace",
    "shard_map": "trace the function of one device, on that device's shard",
}


class SourceLine(NamedTuple):
    """A source line: the file, the number, and the enclosing function."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"line {self.line} of {self.file}" if self.line else "an unknown line"


@dataclass(eq=False)
class Equation:
    """One equation of a jaxpr, prepared for quick evaluation."""

    run: Callable[[Equation, list[Any]], Any]
    equation: Any
    inputs: tuple[tuple[bool, Any], ...]
    many: bool
    params: dict[str, Any]
    used: bool
    where: SourceLine | None = None


class Walker:
    """Evaluates jaxprs. `launch` runs a `pallas_call`; `program` is the grid's current program."""

    def __init__(
        self, notes: PallasNotes, launch: Callable[[Walker, Any, list[Any]], list[Any]]
    ) -> None:
        self.notes = notes
        self.launch = launch
        self.program: tuple[int, ...] | None = None  # without the axes that vmap added
        self.sizes: tuple[int, ...] = ()
        #: Current carries of the running program's loops, by name, and its scratch buffers.
        self.carried: dict[int, dict[str, Any]] = {}
        self.buffers: dict[str, Ref] = {}
        self._plans: dict[int, tuple[Any, list[Equation]]] = {}

    def run(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """Evaluate a jaxpr and return the outputs; stores change inputs that are refs."""
        values: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
        values.update(zip(jaxpr.invars, args, strict=True))
        for step in self._plan(jaxpr):
            inputs = [atom if constant else values[atom] for constant, atom in step.inputs]
            try:
                result = step.run(step, inputs)
            except FlashSimError as error:
                raise self._placed(error, step) from None
            outvars = step.equation.outvars
            if step.many:
                values.update(zip(outvars, result, strict=True))
            else:
                values[outvars[0]] = result
        return [v.val if isinstance(v, Literal) else values[v] for v in jaxpr.outvars]

    def _plan(self, jaxpr: Any) -> list[Equation]:
        known = self._plans.get(id(jaxpr))
        if known is not None:
            return known[1]
        read = {id(v) for e in jaxpr.eqns for v in e.invars} | {id(v) for v in jaxpr.outvars}
        handlers = dict.fromkeys(CALLS, self._call) | dict.fromkeys(IGNORED, self._ignored)
        handlers |= dict.fromkeys(REFUSED, self._refused)
        steps = []
        for equation in jaxpr.eqns:
            primitive, params = equation.primitive, equation.params
            handler = handlers.get(primitive.name) or getattr(self, f"_{primitive.name}", None)
            if handler is None:
                handler, params = self._bind, primitive.get_bind_params(params)
            inputs = tuple(
                (True, v.val) if isinstance(v, Literal) else (False, v) for v in equation.invars
            )
            used = any(id(v) in read for v in equation.outvars)
            many = primitive.multiple_results
            steps.append(Equation(handler, equation, inputs, many, params, used))
        self._plans[id(jaxpr)] = (jaxpr, steps)  # keeps the jaxpr alive, so that its id is unique
        return steps

    def where(self, step: Equation) -> SourceLine:
        """Return the line of the user's source that an equation comes from."""
        if step.where is None:
            step.where = source_line(step.equation)
        return step.where

    def _placed(self, error: FlashSimError, step: Equation) -> FlashSimError:
        """Add the source line and the program's grid index to an error's text, unless present."""
        if getattr(error, "placed", False):
            return error
        at = "" if self.program is None else f", in program {self.program}"
        placed = type(error)(f"{self.where(step)}{at}: {error}")
        placed.placed = True  # type: ignore[attr-defined]
        return placed

    # -- calls and control flow ------------------------------------------------------------------

    def _call(self, step: Equation, inputs: list[Any]) -> list[Any]:
        body = next(step.params[name] for name in BODIES if name in step.params)
        return self.run(opened(body), closed_over(body), inputs)

    def _cond(self, step: Equation, inputs: list[Any]) -> list[Any]:
        branches = step.params["branches"]
        body = branches[min(max(int(inputs[0]), 0), len(branches) - 1)]
        return self.run(opened(body), closed_over(body), inputs[1:])

    def _while(self, step: Equation, inputs: list[Any]) -> list[Any]:
        params = step.params
        until, body = params["cond_jaxpr"], params["body_jaxpr"]
        first = params["cond_nconsts"]
        second = first + params["body_nconsts"]
        outer, inner, carry = inputs[:first], inputs[first:second], inputs[second:]
        while bool(self.run(opened(until), closed_over(until), [*outer, *carry])[0]):
            self._carries(body, len(inner), carry)
            carry = self.run(opened(body), closed_over(body), [*inner, *carry])
        self._carries(body, len(inner), carry)
        return carry

    def _carries(self, body: Any, first: int, carry: Sequence[Any]) -> None:
        """Remember the values that a loop carries, by variable name in the user's function."""
        if self.program is not None:
            names = carried_names(opened(body), first, len(carry))
            self.carried[id(opened(body))] = dict(zip(names, carry, strict=True))

    def variables(self) -> dict[str, np.ndarray]:
        """Return the current program's float arrays by name: loop carries and scratch buffers."""
        found: dict[str, Any] = {name: ref.array for name, ref in self.buffers.items()}
        for carry in self.carried.values():
            found |= {name: x for name, x in carry.items() if not isinstance(x, Ref)}
        arrays = {name: np.asarray(x) for name, x in found.items()}
        return {
            name: np.array(x, np.float64)
            for name, x in arrays.items()
            if x.size > 1 and np.issubdtype(x.dtype, np.inexact)
        }

    def _scan(self, step: Equation, inputs: list[Any]) -> list[Any]:
        params = step.params
        body, length = params["jaxpr"], params["length"]
        if "ft_in" in params:  # JAX 0.11
            first, count, _ = map(len, params["ft_in"].unpack())
        else:
            first, count = params["num_consts"], params["num_carry"]
        second = first + count
        consts, carry, rows = inputs[:first], inputs[first:second], inputs[second:]
        outputs = step.equation.outvars[count:]
        results: list[list[Any]] = [[] for _ in outputs]
        for i in range(length)[:: -1 if params["reverse"] else 1]:
            self._carries(body, first, carry)
            inputs = [*consts, *carry, *(row[i] for row in rows)]
            done = self.run(opened(body), closed_over(body), inputs)
            carry = done[:count]
            for result, value in zip(results, done[count:], strict=True):
                result.append(value)
        self._carries(body, first, carry)
        stacked = []
        for result, variable in zip(results, outputs, strict=True):
            empty = np.zeros(variable.aval.shape, variable.aval.dtype)
            ordered = result[:: -1 if params["reverse"] else 1]
            stacked.append(jax.numpy.stack(ordered) if result else jax.numpy.asarray(empty))
        return [*carry, *stacked]

    def _run_scoped(self, step: Equation, inputs: list[Any]) -> list[Any]:
        jaxpr = step.params["jaxpr"]
        return self.run(jaxpr, inputs, [scratch(v.aval, "scoped") for v in jaxpr.invars])

    def _pallas_call(self, step: Equation, inputs: list[Any]) -> list[Any]:
        if self.program is not None:
            raise UnsupportedError(
                "a Pallas kernel that calls another kernel cannot be traced; launch the two "
                "kernels one after another"
            )
        return self.launch(self, step.equation, inputs)

    def _ignored(self, step: Equation, inputs: list[Any]) -> list[Any]:
        return []

    def _refused(self, step: Equation, inputs: list[Any]) -> Any:
        name = step.equation.primitive.name
        raise UnsupportedError(f"flashsim cannot evaluate the primitive {name}: {REFUSED[name]}")

    def _bind(self, step: Equation, inputs: list[Any]) -> Any:
        """Compute one primitive of a jaxpr with JAX itself."""
        primitive = step.equation.primitive
        why = ""
        if any(isinstance(value, Ref) for value in inputs):
            why = "on a ref: read the ref into a value first"
        elif any(has(body, "pallas_call") for body in bodies(step.params)):
            why = f"with a kernel inside it: call the kernel outside of {primitive.name}"
        if why:
            raise UnsupportedError(f"flashsim cannot evaluate the primitive {primitive.name} {why}")
        try:
            with getattr(step.equation.ctx, "manager", None) or contextlib.nullcontext():
                result = computed(primitive, inputs, step.params)
        except NotImplementedError as error:
            raise UnsupportedError(
                f"JAX cannot compute the primitive {primitive.name} on the CPU ({error}): write "
                "it with jax.numpy while you trace"
            ) from None
        if self.program is None:
            self.notes.outside(primitive.name, step.equation.outvars)
        elif primitive.name == "dot_general":
            self.notes.dot(dot_flops(step.equation), self.where(step))
        return result

    # -- Pallas ----------------------------------------------------------------------------------

    def _program_id(self, step: Equation, inputs: list[Any]) -> Any:
        assert self.program is not None
        return np.int32(self.program[step.params["axis"]])

    def _num_programs(self, step: Equation, inputs: list[Any]) -> Any:
        return np.int32(self.sizes[step.params["axis"]])

    def _multiple_of(self, step: Equation, inputs: list[Any]) -> Any:
        return inputs[0]

    _max_contiguous = _multiple_of

    def _get(self, step: Equation, inputs: list[Any]) -> Any:
        ref, *flat = inputs
        return self._load(step, ref, jax.tree.unflatten(step.params["tree"], flat), None, None)

    def _masked_load(self, step: Equation, inputs: list[Any]) -> Any:
        return self._load(step, *step.params["args_tree"].unflatten(inputs))

    def _swap(self, step: Equation, inputs: list[Any]) -> Any:
        ref, value, *flat = inputs
        return self._store(step, ref, jax.tree.unflatten(step.params["tree"], flat), value, None)

    def _masked_swap(self, step: Equation, inputs: list[Any]) -> Any:
        return self._store(step, *step.params["args_tree"].unflatten(inputs))

    def _addupdate(self, step: Equation, inputs: list[Any]) -> list[Any]:
        ref, value, *flat = inputs
        lanes = locate(ref, jax.tree.unflatten(step.params["tree"], flat))
        self._report("load", step, lanes, None)
        self._report("store", step, lanes, None)
        lanes.write(np.asarray(jax.numpy.asarray(lanes.read(None)) + value), None)
        return []

    def _load(self, step: Equation, ref: Ref, transforms: Any, mask: Any, other: Any) -> Any:
        lanes = locate(ref, transforms)
        kept = spread(mask, lanes.shape)
        self._report("load", step, lanes, kept)
        value = lanes.read(kept)
        if kept is not None and other is not None:
            value = np.where(kept, value, np.asarray(other).astype(value.dtype))
        return jax.numpy.asarray(value)

    def _store(self, step: Equation, ref: Ref, transforms: Any, value: Any, mask: Any) -> Any:
        lanes = locate(ref, transforms)
        kept = spread(mask, lanes.shape)
        old = None
        if step.used:
            self._report("load", step, lanes, kept)
            old = jax.numpy.asarray(lanes.read(kept))
        self._report("store", step, lanes, kept)
        lanes.write(np.asarray(value), kept)
        return old

    def _atomic_rmw(self, step: Equation, inputs: list[Any]) -> Any:
        ref, transforms, value, mask = step.params["args_tree"].unflatten(inputs)
        lanes = locate(ref, transforms)
        kept = spread(mask, lanes.shape)
        self._report("reduce", step, lanes, kept)
        old = jax.numpy.asarray(lanes.read(kept)) if step.used else None
        kind = str(step.params["atomic_type"].value)
        operation = ATOMICS.get(kind)
        if operation is None:  # an exchange
            lanes.write(np.asarray(value), kept)
        else:
            lanes.combine(operation, np.broadcast_to(np.asarray(value), lanes.shape), kept)
        return old

    def _atomic_cas(self, step: Equation, inputs: list[Any]) -> Any:
        ref, expected, value = inputs
        lanes = locate(ref, ())
        self._report("reduce", step, lanes, None)
        old = lanes.read(None)
        lanes.write(np.where(old == np.asarray(expected), np.asarray(value), old), None)
        return jax.numpy.asarray(old)

    def _dma_start(self, step: Equation, inputs: list[Any]) -> list[Any]:
        source, target, _, _, device = step.params["tree"].unflatten(inputs)
        origin, goal = (
            locate(getattr(r, "ref", r), getattr(r, "transforms", ())) for r in (source, target)
        )
        if device is not None or step.params.get("add"):
            raise UnsupportedError(
                "a copy to another device, or a copy that adds, cannot be traced; use a plain "
                "copy on one device"
            )
        self._report("load", step, origin, None)
        self._report("store", step, goal, None)
        goal.write(origin.read(None), None)
        return []

    def _report(self, kind: str, step: Equation, lanes: Lanes, kept: np.ndarray | None) -> None:
        self.notes.access(kind, lanes, kept, self.where(step))


ATOMICS: dict[str, np.ufunc | None] = {
    "add": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "xchg": None,
}


def computed(primitive: Any, inputs: list[Any], params: dict[str, Any]) -> Any:
    """Return a primitive's results; compile a primitive that JAX cannot compute eagerly."""
    try:
        return primitive.bind(*inputs, **params)
    except NotImplementedError:
        return jax.jit(functools.partial(primitive.bind, **params))(*inputs)


def opened(body: Any) -> Any:
    """Return the open jaxpr inside a closed jaxpr; return an open jaxpr unchanged."""
    return getattr(body, "jaxpr", body)


def closed_over(body: Any) -> Sequence[Any]:
    """Return the constants of a closed jaxpr; an open jaxpr has none."""
    return getattr(body, "consts", ())


def bodies(params: dict[str, Any]) -> Iterable[Any]:
    """Yield the jaxprs that are parameters of an equation."""
    for value in params.values():
        for one in value if isinstance(value, (tuple, list)) else (value,):
            if hasattr(opened(one), "eqns"):
                yield opened(one)


def has(jaxpr: Any, primitive: str) -> bool:
    """Return True if a jaxpr, or a jaxpr inside it, has a primitive, such as "pallas_call"."""
    return any(
        e.primitive.name == primitive or any(has(b, primitive) for b in bodies(e.params))
        for e in jaxpr.eqns
    )


def spread(mask: Any, shape: tuple[int, ...]) -> np.ndarray | None:
    """Return an access's mask, broadcast to the shape of the access's lanes; None if unmasked."""
    return None if mask is None else np.broadcast_to(np.asarray(mask, bool), shape)


def scratch(aval: Any, name: str) -> Ref | None:
    """Return an on-chip buffer for a kernel's scratch argument, or None for a semaphore."""
    inner = getattr(aval, "inner_aval", aval)
    try:
        dtype = np.dtype(inner.dtype)
    except TypeError:  # semaphores and barriers have types of their own
        return None
    return Ref.whole(uninitialized(inner.shape, dtype), name=name)


def dot_flops(equation: Any) -> int:
    """Return the number of FLOPs of a `dot_general`; each multiply-add counts as two."""
    (contracted, _), _ = equation.params["dimension_numbers"]
    shape = equation.invars[0].aval.shape
    depth = int(np.prod([shape[d] for d in contracted], dtype=np.int64))
    return 2 * depth * int(np.prod(equation.outvars[0].aval.shape, dtype=np.int64))


#: Files whose lines are not the user's: those of JAX and Python, except kernels that JAX contains.
_INNER = re.compile(r"/(jax|jaxlib)/(?!experimental/pallas/ops/)|/functools\.py$|/contextlib\.py$")


def source_line(equation: Any) -> SourceLine:
    """Return an equation's innermost source line in the user's code, or in a kernel of JAX."""
    traceback = getattr(equation.source_info, "traceback", None)
    for frame in traceback.frames if traceback is not None else ():
        if not _INNER.search(frame.file_name.replace("\\", "/")):
            return SourceLine(frame.file_name, frame.line_num, frame.function_name)
    return SourceLine("", 0, "")
