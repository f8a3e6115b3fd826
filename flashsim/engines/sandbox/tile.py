"""`SramTile`: a tile of numbers in simulated SRAM.

Each arithmetic operation on tiles creates a new tile, which takes memory. Numbers never leave the
simulated chip: copying them out (`np.asarray`, `float`, `list`, `tolist`, pickling ...) is an
error, and so is the use of outside arrays. The use of a tile after the end of its scope is an
error. Users do not see the axes for heads: a tile of 64 rows of 32 elements has the shape (64, 32),
however many heads are simulated at once.
"""

from __future__ import annotations

from types import EllipsisType
from typing import Any, NoReturn

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from flashsim.engines.sandbox import operations
from flashsim.engines.sandbox.arithmetic import COSTS, REDUCTIONS, priced
from flashsim.engines.sandbox.tape import taped
from flashsim.errors import MemoryModelError, ShapeError

_LEAD = (slice(None), slice(None))


class SramTile(operations.TileBase, NDArrayOperatorsMixin):
    """A tile of numbers on chip, which `load`, `alloc` or arithmetic created."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        room = self._lease.room
        state = f"given back, {room.gone}" if room.gone else f"{room.nbytes:,} B on chip"
        return f"<tile {room.name} {self.shape}: {state}, made at {room.made}>"

    # -- views, which take no memory and cost no work -------------------------------------------

    @property
    @taped("T")
    def T(self) -> SramTile:
        """Return a view of the tile with its axes reversed."""
        return self._seen(self._view.transpose(0, 1, *range(self._view.ndim - 1, 1, -1)))

    @property
    @taped("mT")
    def mT(self) -> SramTile:
        """Return a view of the tile with its last two axes exchanged."""
        return self._seen(self._view.mT)

    @taped("part")
    def __getitem__(self, key: Any) -> SramTile:
        self._alive()
        parts = key if isinstance(key, tuple) else (key,)
        for part in parts:
            basic = part is None or isinstance(part, (int, np.integer, slice, EllipsisType))
            if not basic or isinstance(part, bool):
                raise MemoryModelError(
                    "a tile is indexed by slices, integers, None and ..., got "
                    f"{type(part).__name__}; to choose by a condition use np.where(condition, "
                    "one, other)",
                    "operation",
                )
        return self._seen(self._view[(*_LEAD, *parts)])

    def _seen(self, view: np.ndarray) -> SramTile:
        self._alive()
        return SramTile(self._lease, view)

    # -- writing --------------------------------------------------------------------------------

    @taped("set")
    def __setitem__(self, key: Any, value: Any) -> None:
        room = self._alive()
        parts = tuple(operations.flags(x) for x in (key if isinstance(key, tuple) else (key,)))
        if isinstance(value, SramTile) and value._lease is self._lease:
            target = self._view[(*_LEAD, *parts)]
            if target.shape == value._view.shape and np.shares_memory(target, value._view):
                return  # S[:, j] += x has worked in place already
        if isinstance(value, SramTile):
            target = self._view[(*_LEAD, *parts)]
            source = operations.aligned(operations.held(value, room), target.ndim - 2)
        else:
            source = operations.outsider("=", value)
        if parts and isinstance(parts[-1], SramTile):  # S[keep] = 0 with a tile of booleans
            if parts[:-1] not in ((), (Ellipsis,)):
                raise MemoryModelError(
                    "a boolean index must be the only index, as in tile[condition] = number"
                )
            where = operations.aligned(operations.held(parts[-1], room), self.ndim)
            np.copyto(self._view, source, where=where)
        else:
            try:
                self._view[(*_LEAD, *parts)] = source
            except (ValueError, IndexError) as error:
                shapes = [self.shape, *([value.shape] if isinstance(value, SramTile) else [])]
                raise ShapeError(
                    f"in tile[...] = value, the shapes {shapes} do not broadcast ({error}); "
                    "assign a number, or a tile of the same shape"
                ) from None
        self._rounded()
        read = value.nbytes if isinstance(value, SramTile) else 0
        room.sram._note(priced("", 0, read, self.nbytes))

    # -- arithmetic -----------------------------------------------------------------------------

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **how: Any) -> Any:
        outs = how.pop("out", ())
        where = how.pop("where", True)
        if method == "reduce" and ufunc in (pair[0] for pair in REDUCTIONS.values()):
            name = next(n for n, pair in REDUCTIONS.items() if pair[0] is ufunc)
            axis, keepdims = how.pop("axis", 0), bool(how.pop("keepdims", False))
            if not how and where is True:
                return operations.reduced(inputs[0], name, axis, keepdims, outs)
        if method != "__call__" or (ufunc is not np.matmul and ufunc not in COSTS) or how:
            raise MemoryModelError(operations.unknown(ufunc.__name__, method, how), "operation")
        for out in outs:
            if not isinstance(out, SramTile):
                raise MemoryModelError(
                    f"np.{ufunc.__name__}(..., out=...) would write a tile to an array outside "
                    "the chip; pass a tile from sram.alloc(name, shape) as out=",
                    "off chip",
                )
        out = outs[0] if outs else None
        if ufunc is np.matmul:
            return operations.product(*inputs, out=out)
        return operations.elementwise(ufunc, inputs, out, where)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if function not in operations.FUNCTIONS:
            raise MemoryModelError(
                operations.unknown(function.__name__, "__call__", {}), "operation"
            )
        return operations.FUNCTIONS[function](*args, **kwargs)

    def sum(self, axis: Any = None, *, keepdims: bool = False) -> SramTile:
        """Return a tile with the sum along an axis, or of all elements."""
        return operations.reduced(self, "sum", axis, keepdims)

    def max(self, axis: Any = None, *, keepdims: bool = False, initial: Any = None) -> SramTile:
        """Return a tile with the maximum along an axis, or of all elements."""
        if initial not in (None, -np.inf):
            raise MemoryModelError(operations.unknown("max", "__call__", ["initial"]), "operation")
        return operations.reduced(self, "max", axis, keepdims)

    def min(self, axis: Any = None, *, keepdims: bool = False) -> SramTile:
        """Return a tile with the minimum along an axis, or of all elements."""
        return operations.reduced(self, "min", axis, keepdims)

    def any(self, axis: Any = None, *, keepdims: bool = False) -> SramTile:
        """Return a tile of booleans: whether any element, along an axis or of all, is true."""
        return operations.reduced(self, "any", axis, keepdims)

    def all(self, axis: Any = None, *, keepdims: bool = False) -> SramTile:
        """Return a tile of booleans: whether every element, along an axis or of all, is true."""
        return operations.reduced(self, "all", axis, keepdims)

    def mean(self, axis: Any = None, *, keepdims: bool = False) -> SramTile:
        """Return a tile with the mean along an axis, or of all elements."""
        total = self.sum(axis, keepdims=keepdims)
        total /= self.size // max(total.size, 1)
        return total

    @taped("copy")
    def copy(self) -> SramTile:
        """Return a copy of the tile, allocated like any other tile."""
        room = self._alive()
        room.sram._note(priced("", 0, self.nbytes, self.nbytes))
        return room.sram._made(self._view.copy())

    __copy__ = copy

    @taped("astype")
    def astype(self, dtype: Any) -> SramTile:
        """Return a tile of the accumulator type, whose numbers are rounded to `dtype`."""
        room = self._alive()
        rounded = self._view.astype(dtype).astype(room.sram._compute)
        room.sram._note(priced("", 0, self.nbytes, self.nbytes))
        return room.sram._made(rounded)

    # -- operations that would copy numbers out of the chip --------------------------------------

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise MemoryModelError(
            f"the numbers of the tile {self._lease.room.name!r} stay on chip: they cannot become "
            "a Python number, a list or a NumPy array; compute with tiles, write results with "
            "sram.store, and print numbers with sram.show(tile)",
            "off chip",
        )

    __float__ = __int__ = __index__ = __complex__ = __iter__ = __contains__ = _refuse
    __array__ = __reduce__ = __reduce_ex__ = __deepcopy__ = __getstate__ = _refuse

    def __bool__(self) -> NoReturn:
        raise MemoryModelError(
            f"a Python branch cannot depend on the numbers of the tile {self._lease.room.name!r}, "
            "because every head runs the same steps; use np.where(condition, one, other)",
            "off chip",
        )

    def __getattr__(self, name: str) -> Any:
        if name in _LEAKS:
            self._refuse()
        raise AttributeError(f"a tile has no attribute {name!r}; choose from {', '.join(_PUBLIC)}")


#: The methods by which an array copies its numbers out.
_LEAKS = {
    *("base", "ctypes", "data", "dump", "dumps", "flat", "flatten", "item", "itemset", "ravel"),
    *("tobytes", "tofile", "tolist", "view"),
}
_PUBLIC = [name for name in dir(SramTile) if not name.startswith("_")]
