"""Runs a user's algorithm on a machine: sets up tensors, explains errors, checks the results."""

import inspect
import linecache
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from flashsim.engines.sandbox.lines import deepest
from flashsim.engines.sandbox.machine import OpenMachine
from flashsim.errors import DTypeError, FlashSimError, MemoryModelError
from flashsim.problem.problem import Problem, numpy_dtype
from flashsim.schedule.tensors import COL, ROW, TILE, shape
from flashsim.schedule.tensors import dtype as dtype_of


def size(p: Problem, name: str) -> tuple[int, ...]:
    """Return the shape (batch, heads, n[, width]) of the tensor with this name in the papers."""
    its = shape(p, name)
    heads = p.kv_heads if its.axis == COL else p.heads
    sides = {ROW: (p.n_q, its.elements), COL: (p.n_kv, its.elements), TILE: (p.n_q, p.n_kv)}
    n, width = sides[its.axis]
    return (p.batch, heads, n) if its.vector else (p.batch, heads, n, width)


def put(
    machine: OpenMachine, arrays: Mapping[str, np.ndarray], outputs: Iterable[str]
) -> list[str]:
    """Put inputs and empty outputs in HBM; return the names of optional outputs (L or none)."""
    p, hbm = machine.problem, machine.hbm
    for name, array in arrays.items():
        hbm._put(name, array, dtype_of(p, name), written=True)
    asked = list(outputs)
    optional = ["L"] if "O" in asked and "L" not in (*asked, *arrays) else []
    for name in (*asked, *optional):
        dtype = dtype_of(p, name)
        batch, *sides = size(p, name)
        array = np.full((batch * hbm._samples, *sides), np.nan, numpy_dtype(dtype))
        hbm._put(name, array, dtype, written=False)
    return optional


def one_argument(algorithm: Callable[..., None], name: str) -> None:
    """Raise `DTypeError` unless the function can be called with the machine as only argument."""
    try:
        inspect.signature(algorithm).bind("machine")
    except TypeError as error:
        raise DTypeError(
            f"{name} must accept a call with one argument, the machine ({error}); pass its other "
            "arguments with functools.partial or as defaults"
        ) from None
    except ValueError:  # a function written in C without a signature
        pass


def run(algorithm: Callable[[OpenMachine], None], name: str, machine: OpenMachine) -> None:
    """Run the algorithm on the machine; errors name the line that raised them."""
    try:
        with np.errstate(over="ignore", under="ignore", invalid="ignore", divide="ignore"):
            algorithm(machine)
    except FlashSimError as error:
        at = deepest(error.__traceback__)
        if at is None:
            raise
        raise located(error, name, at[1], linecache.getline(*at[:2])) from None
    except Exception as error:
        at = deepest(error.__traceback__)
        if at is not None:
            error.add_note(f"in {name}, line {at[1]}: {linecache.getline(*at[:2]).strip()}")
        raise


def located(error: FlashSimError, name: str, line: int, text: str) -> FlashSimError:
    """Return a copy of an error that begins with the user's function, line number and line."""
    quoted = f", `{text.strip()}`" if text.strip() else ""  # unknown for code typed at a prompt
    told = type(error)(f"{name}, line {line}{quoted}: {error}")
    vars(told).update({key: value for key, value in vars(error).items() if key != "__notes__"})
    return told


def require_stored(name: str, machine: OpenMachine, asked: Iterable[str]) -> None:
    """Raise `MemoryModelError` unless the algorithm stored all of its results."""
    if not machine.stages:
        raise MemoryModelError(
            f"{name} ran no stage; open a stage by `with machine.stage(name) as sram:`", "unstored"
        )
    for output in asked:
        state = machine.hbm._stored(output)
        if state != "all":
            what = "nothing of it was stored" if state == "none" else f"{state} were never stored"
            raise MemoryModelError(
                f"{name} ended without storing all of {output}: {what}; store these rows by "
                f"sram.store(hbm.{output}, rows, tile)",
                "unstored",
            )
    if not any((stage.events["bytes"] > 0).any() for stage in machine.stages):
        raise MemoryModelError(
            f"{name} loaded and stored nothing; move data with sram.load and sram.store"
        )
