"""Records an algorithm's calls to the machine, as one instruction per call.

While `TAPE` holds a `Tape`, each successful call of a `taped` or `taped_scope` operation is
recorded with its line. Instructions refer to tiles by number, in the order of creation.
"""

from __future__ import annotations

import functools
import json
import operator
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from types import EllipsisType
from typing import Any, ParamSpec, TypeVar

import numpy as np

from flashsim.engines.sandbox.lines import line_at_work
from flashsim.errors import MemoryModelError, shown
from flashsim.schedule.schedule import Visit
from flashsim.schedule.tiling import Tiling

#: The tape of the running algorithm; None if its calls are not recorded.
TAPE: ContextVar[Tape | None] = ContextVar("tape", default=None)
#: The operations of a program and its scopes, by the name in its instructions.
OPERATIONS: dict[str, Callable[..., Any]] = {}
SCOPES: dict[str, Callable[..., AbstractContextManager[Any]]] = {}
#: Characters that one program may have (half a million operations), and one instruction.
MOST, MOST_LINE = 1 << 25, 1 << 21

P = ParamSpec("P")
R = TypeVar("R")


class Tape:
    """An algorithm's instructions, each a line of JSON: [line, name, arguments, keywords]."""

    def __init__(self) -> None:
        self.instructions: list[str] = []
        self._tiles = self._length = 0
        self._inside = False  # an operation may call others, but only the outermost is recorded

    def run(self, name: str, operation: Callable[..., R], args: Any, kwargs: dict[str, Any]) -> R:
        """Perform one operation of the machine, and record it."""
        if self._inside:
            return operation(*args, **kwargs)
        self._inside = True
        try:
            result = operation(*args, **kwargs)
        finally:
            self._inside = False
        self.write(name, args, kwargs)
        if getattr(result, "_number", None) == -1:  # a new tile; a result may also be `out`
            tile: Any = result
            tile._number, tile._lease.tape = self._tiles, self
            tile._lease.numbers.append(self._tiles)
            self._tiles += 1
        return result

    def write(self, name: str, args: Any, kwargs: dict[str, Any]) -> None:
        """Add an instruction."""
        text = json.dumps([line_at_work(), name, _plain(args), _plain(kwargs)])
        self._length += len(text)
        if self._length > MOST:
            raise MemoryModelError(
                f"the recorded program has more than {MOST:,} characters; use larger tiles"
            )
        self.instructions.append(text)

    def dropped(self, numbers: list[int]) -> None:
        """Record that the algorithm no longer refers to these tiles."""
        self.instructions.append(json.dumps([line_at_work(), "drop", numbers, {}]))


def taped(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate an operation of the machine, which a tape records under this name."""

    def mark(operation: Callable[P, R]) -> Callable[P, R]:
        OPERATIONS[name] = operation

        @functools.wraps(operation)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            tape = TAPE.get()
            if tape is None:
                return operation(*args, **kwargs)
            return tape.run(name, operation, args, kwargs)

        return call

    return mark


def taped_scope(
    name: str,
) -> Callable[[Callable[P, AbstractContextManager[R]]], Callable[P, AbstractContextManager[R]]]:
    """Decorate a context manager of the machine, whose start and end a tape records."""

    def mark(
        scope: Callable[P, AbstractContextManager[R]],
    ) -> Callable[P, AbstractContextManager[R]]:
        SCOPES[name] = scope

        @functools.wraps(scope)
        @contextmanager
        def call(*args: P.args, **kwargs: P.kwargs) -> Iterator[R]:
            tape, opened = TAPE.get(), False
            try:
                with scope(*args, **kwargs) as held:
                    if tape is not None:
                        tape.write(name, args, kwargs)
                        opened = True
                    yield held
            finally:
                if tape is not None and opened:
                    tape.write("end", (), {})

        return call

    return mark


def _plain(value: Any) -> Any:
    """Return an operation's argument as a JSON value."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return value.item()
    if isinstance(value, (tuple, list)):
        return [_plain(element) for element in value]
    if isinstance(value, dict):
        return {key: _plain(element) for key, element in value.items()}
    if hasattr(type(value), "_taped"):  # a tile, a tensor in HBM, the machine and its memories
        return value._taped()
    if isinstance(value, slice):
        ends = (value.start, value.stop, value.step)
        return {"slice": [end if end is None else operator.index(end) for end in ends]}
    if isinstance(value, EllipsisType):
        return {"dots": 0}
    if isinstance(value, np.ndarray) and value.dtype == bool:
        bits = np.packbits(np.asarray(value)).tobytes()
        return {"mask": [list(value.shape), bits.hex()]}
    if isinstance(value, np.ufunc):
        return {"ufunc": value.__name__}
    if isinstance(value, Visit):
        return {"visit": [value.i, value.j]}
    if isinstance(value, Tiling):
        return {"tiling": [value.block_q, value.block_k]}
    if isinstance(value, (np.dtype, type)):
        return {"type": np.dtype(value).name}
    raise MemoryModelError(
        f"the machine's operations do not support the argument {shown(value)}; pass tiles, "
        "tensors of machine.hbm, numbers or slices"
    )
