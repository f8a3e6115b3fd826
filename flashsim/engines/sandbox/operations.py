"""The operations on tiles in simulated SRAM: elementwise, products, reductions, `np.where`."""

import math
from collections.abc import Callable
from types import EllipsisType
from typing import Any

import numpy as np

from flashsim.engines.sandbox.arithmetic import COSTS, REDUCTIONS, priced
from flashsim.engines.sandbox.room import Lease, Room
from flashsim.engines.sandbox.tape import taped
from flashsim.errors import MemoryModelError, ShapeError


class TileBase:
    """A tile in simulated SRAM, or a view of a tile.

    The array `_view` has two leading axes for heads, which `shape` and `ndim` leave out.
    """

    __slots__ = ("_lease", "_number", "_view")

    def __init__(self, lease: Lease, view: np.ndarray) -> None:
        self._lease, self._view = lease, view
        self._number = -1  # the tile's number on a tape

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the tile for one head."""
        return self._view.shape[2:]

    @property
    def ndim(self) -> int:
        """Return the number of axes of the tile for one head."""
        return self._view.ndim - 2

    @property
    def size(self) -> int:
        """Return the number of elements of the tile for one head."""
        return math.prod(self.shape)

    @property
    def dtype(self) -> np.dtype:
        """Return the type of the tile's numbers: the accumulator type, or bool."""
        return self._view.dtype

    @property
    def nbytes(self) -> int:
        """Return the bytes of the tile or view per head, in the accumulator type."""
        return self.size * self._view.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def _taped(self) -> dict[str, int]:
        return {"tile": self._number}

    def _rounded(self) -> None:
        """After a write, round the tile to the narrower type from which it was loaded, if any."""
        narrow = self._lease.room.narrow
        if narrow is not None:
            self._view[...] = self._view.astype(narrow).astype(self._view.dtype)

    def _alive(self) -> Room:
        room = self._lease.room
        if room.gone:
            raise MemoryModelError(
                f"the tile {room.name!r} made at {room.made} is used after its memory was freed "
                f"({room.gone}); to keep numbers for later iterations, write them into a tile "
                "allocated before the loop, such as O[:] = ...",
                "freed",
            )
        return room


@taped("elementwise")
def elementwise(ufunc: Any, inputs: Any, out: TileBase | None, where: Any) -> Any:
    """Apply an elementwise operation, and store the result in a new tile or in `out`."""
    tiles = [x for x in (*inputs, out, where) if isinstance(x, TileBase)]
    room = tiles[0]._alive()
    ndim = max(*(x.ndim for x in tiles), *(x.ndim for x in inputs if isinstance(x, np.ndarray)), 0)
    operands = [_operand(ufunc.__name__, x, room, ndim) for x in inputs]
    how: dict[str, Any] = {}
    if where is not True:
        if out is None:
            raise MemoryModelError(
                "where= without out= leaves some numbers of the result undefined; use "
                "np.where(condition, a, b)"
            )
        how["where"] = _operand("where=", where, room, ndim)
    if out is not None:
        held(out, room)
        how["out"] = out._view
    if out is None:
        _require_room(room, *operands)
    try:
        view = ufunc(*operands, **how)
    except ValueError:
        shapes = ", ".join(str(x.shape) for x in tiles)
        column = "; one number a row becomes a column by l[:, None]"
        raise ShapeError(
            f"np.{ufunc.__name__}: tiles of {shapes} do not broadcast"
            + (column if any(x.ndim == 1 for x in tiles) else "")
        ) from None
    size = math.prod(view.shape[2:])
    if out is not None:
        out._rounded()
    result = out if out is not None else room.sram._made(view)
    read = sum(x.nbytes for x in inputs if isinstance(x, TileBase))
    room.sram._note(priced(COSTS[ufunc], size, read, result.nbytes))
    return result


@taped("product")
def product(a: Any, b: Any, *, out: TileBase | None = None, add: bool = False) -> Any:
    """Store a matrix product in a new tile or in `out`, or add it to `out` with `add`."""
    for x in (a, b):
        if not isinstance(x, TileBase):
            outsider("@", x)
            raise ShapeError(
                "@ multiplies two tiles, but one operand is a number; use * to scale a tile by "
                "a number"
            )
    room = a._alive()
    left, right = held(a, room)._view, held(b, room)._view
    row, col = a.ndim == 1, b.ndim == 1
    left = left[..., None, :] if row else left
    right = right[..., :, None] if col else right
    if left.shape[-1] != right.shape[-2]:
        raise ShapeError(
            f"tiles of shapes {a.shape} and {b.shape} cannot be multiplied with @, because their "
            "inner dimensions differ; transpose or slice one of them"
        )
    if left.shape[-2] * right.shape[-1] > room.sram._most // 4:
        room.sram._require_room("temp", 4 * left.shape[-2] * right.shape[-1])
    view = np.matmul(left, right)
    flops = 2 * math.prod(view.shape[2:]) * left.shape[-1]
    view = view[..., 0, :] if row else view
    view = view[..., 0] if col else view
    if out is None:
        result = room.sram._made(view)
    else:
        result = held(out, room)
        if result.shape != view.shape[2:]:
            raise ShapeError(
                f"the product of tiles of shapes {a.shape} and {b.shape} has shape "
                f"{view.shape[2:]}, but out= has shape {result.shape}; pass a tile of the "
                "product's shape as out="
            )
        if add:
            result._view[...] += view
        else:
            result._view[...] = view
        result._rounded()
    read = a.nbytes + b.nbytes + (result.nbytes if add else 0)
    room.sram._note(priced("matmul", flops, read, result.nbytes))
    return result


@taped("reduced")
def reduced(tile: TileBase, name: str, axis: Any, keepdims: bool, outs: Any = ()) -> Any:
    """Return a reduction (sum, max, ...) along an axis, or over all elements, as a tile."""
    room = tile._alive()
    ufunc, kind = REDUCTIONS[name]
    axes = range(tile.ndim) if axis is None else axis if isinstance(axis, tuple) else (axis,)
    try:
        lead = tuple(2 + range(tile.ndim)[int(axis_number)] for axis_number in axes)
    except IndexError:
        raise ShapeError(
            f"{name} got axis {axis}, but a tile of shape {tile.shape} has no such axis; pass one "
            "of the tile's axes"
        ) from None
    view = ufunc.reduce(tile._view, axis=lead, keepdims=keepdims) if lead else tile._view.copy()
    if outs:
        result = outs[0]
        if not isinstance(result, TileBase):
            raise MemoryModelError(
                f"out= of {name} must be a tile; allocate a tile by sram.alloc(name, shape)"
            )
        result[...] = room.sram._made(view)  # type: ignore[index]
    else:
        result = room.sram._made(view)
    room.sram._note(priced(kind, tile.size, tile.nbytes, result.nbytes))
    return result


@taped("where")
def chosen(condition: Any, value: Any, other: Any) -> Any:
    """Return the result of `np.where` on tiles, numbers and boolean masks, as a tile."""
    inputs = condition, value, other
    tiles = [x for x in inputs if isinstance(x, TileBase)]
    room = tiles[0]._alive()
    ndim = max(x.ndim for x in inputs if isinstance(x, (TileBase, np.ndarray)))
    operands = [_operand("where", x, room, ndim) for x in inputs]
    _require_room(room, *operands)
    try:
        view = np.where(*operands)
    except ValueError:
        shapes = ", ".join(str(x.shape) for x in inputs if hasattr(x, "shape"))
        raise ShapeError(
            f"the arguments of np.where have shapes {shapes}, which do not broadcast; use equal "
            "shapes, or sides of length 1"
        ) from None
    result = room.sram._made(view)
    room.sram._note(priced("", 0, sum(x.nbytes for x in tiles), result.nbytes))
    return result


def aligned(tile: TileBase, ndim: int) -> np.ndarray:
    """Return a tile's numbers with `ndim` axes, plus the axes for heads, for broadcasting."""
    view = tile._view
    lead, own = view.shape[:2], view.shape[2:]
    if len(own) >= ndim:
        return view
    return view.reshape(*lead, *(1,) * (ndim - len(own)), *own)


def _require_room(room: Room, *operands: Any) -> None:
    """Raise `SramOverflow` before a result is computed that does not fit in SRAM."""
    arrays = [x for x in operands if isinstance(x, np.ndarray)]
    most = room.sram._most
    if math.prod(x.size for x in arrays) > most:  # else no result is larger
        try:
            size = math.prod(np.broadcast_shapes(*(x.shape for x in arrays))[2:])
        except ValueError:  # the operation itself says so
            return
        room.sram._require_room("temp", size * max(x.itemsize for x in arrays))


def _operand(what: str, x: Any, room: Room, ndim: int) -> Any:
    if isinstance(x, TileBase):
        return aligned(held(x, room), ndim)
    return outsider(what, x)


def held(tile: TileBase, room: Room) -> TileBase:
    """Return the tile, or raise if it is not in the SRAM of `room`'s stage."""
    if tile._alive().sram is not room.sram:
        raise MemoryModelError(
            f"the tile {tile._lease.room.name!r} lies in another stage's SRAM; store it to HBM "
            "in that stage, and load it from HBM in this stage",
            "freed",
        )
    return tile


def outsider(what: str, x: Any) -> Any:
    """Return an operand that is not a tile; raise if it is no number or boolean mask."""
    if isinstance(x, (bool, np.bool_)):
        return bool(x)
    if isinstance(x, (int, float, np.integer, np.floating)):
        return float(x)  # a Python number is converted to the tile's type
    if isinstance(x, np.ndarray) and x.dtype == bool:
        return x
    kind = f"an array of {x.dtype}" if isinstance(x, np.ndarray) else f"a {type(x).__name__}"
    raise MemoryModelError(
        f"{what} cannot be combined with {kind} from outside the machine: a tile can be combined "
        "only with tiles, numbers and boolean masks; load tensors with sram.load(hbm.Q, rows), "
        "and get row positions with sram.positions(rows)",
        "outside",
    )


def flags(part: Any) -> Any:
    """Return one part of a tile's index; raise if it is no slice, integer or boolean mask."""
    basic = part is None or isinstance(part, (int, np.integer, slice, EllipsisType, TileBase))
    if basic or (isinstance(part, np.ndarray) and part.dtype == bool):
        return part
    raise MemoryModelError(
        f"a tile is indexed by slices or a boolean mask, got {type(part).__name__}"
    )


def unknown(name: str, method: str, how: Any) -> str:
    """Return an error text that names a missing operation, and the machine's operations."""
    what = name if method == "__call__" else f"{name}.{method}"
    extra = f" with {', '.join(how)}" if how else ""
    known = sorted({getattr(f, "__name__", "") for f in (*COSTS, *FUNCTIONS, np.matmul)})
    return f"np.{what}{extra} is not an operation of the machine; it has {', '.join(known)}"


@taped("full")
def _full(tile: TileBase, value: float, **how: Any) -> Any:
    if how:
        raise MemoryModelError(
            "np.zeros_like, ones_like, empty_like and full_like use the tile's type and shape; "
            "leave out dtype= and shape="
        )
    return tile._alive().sram._made(np.full_like(tile._view, value))


def _method(name: str) -> Callable[..., Any]:
    return lambda tile, axis=None, **how: getattr(tile, name)(axis, **how)


#: NumPy's functions of tiles that are no ufuncs.
FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    np.where: chosen,
    **{getattr(np, name): _method(name) for name in ("sum", "max", "min", "mean", "any", "all")},
    np.copy: lambda t: t.copy(),
    np.dot: lambda a, b: product(a, b),
    np.transpose: lambda t: t.T,
    np.isneginf: lambda t: t == -np.inf,
    np.isposinf: lambda t: t == np.inf,
    np.shape: lambda t: t.shape,
    np.ndim: lambda t: t.ndim,
    np.size: lambda t: t.size,
    np.zeros_like: lambda t, **how: _full(t, 0.0, **how),
    np.ones_like: lambda t, **how: _full(t, 1.0, **how),
    np.empty_like: lambda t, **how: _full(t, np.nan, **how),
    np.full_like: lambda t, fill_value, **how: _full(t, float(fill_value), **how),
}
