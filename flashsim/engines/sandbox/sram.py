"""The simulated SRAM of a user's algorithm: scopes, memory, transfers, and operation costs."""

import math
from typing import Any

import numpy as np

from flashsim.engines.sandbox.hbm import OpenHbm, Remote, part_of
from flashsim.engines.sandbox.lines import at_work
from flashsim.engines.sandbox.operations import product
from flashsim.engines.sandbox.room import Lease, Room
from flashsim.engines.sandbox.scopes import Scopes
from flashsim.engines.sandbox.spans import span
from flashsim.engines.sandbox.tape import TAPE, taped
from flashsim.engines.sandbox.tile import SramTile
from flashsim.errors import DTypeError, MemoryModelError, ShapeError, SramOverflow, shown
from flashsim.problem.hardware import Device
from flashsim.problem.problem import numpy_dtype
from flashsim.schedule import plans
from flashsim.schedule.names import ALLOC, FREE, LOAD, REDUCE, STORE
from flashsim.schedule.schedule import Schedule
from flashsim.trace.events import StageTrace
from flashsim.trace.validate import MOST_EVENTS

ALL = slice(None)
#: The name of memory that results of arithmetic take, until `OpenSram.name` renames it.
TEMPORARY = "temp"
_IN_PLACE = (
    "\nresults of arithmetic take memory (temp); operations in place do not: S *= 2, "
    "S -= m[:, None], np.exp(S, out=S), sram.accumulate(O, P, V)"
)


class OpenSram(Scopes):
    """The on-chip memory of one thread block, for one stage of a user's own algorithm.

    Attributes
    ----------
    hbm, problem : OpenHbm, Problem
        Those of the machine.
    schedule : Schedule
        The stage's tiles, if the algorithm needs them: `schedule.visits(i)`, `schedule.t_r`.
    used, peak : int
        The bytes in use now, and the most bytes in use so far.
    """

    def __init__(
        self, hbm: OpenHbm, schedule: Schedule, stage: plans.Stage, device: Device, most: int
    ) -> None:
        p = schedule.problem
        super().__init__(schedule, stage)
        self._device, self._most = device, most
        self._compute = np.dtype(p.compute_dtype)
        self._used = self._peak = 0
        self._hbm = hbm
        self._lead = (hbm._samples * p.batch * p.kv_heads, 1 if stage.per == "group" else p.group)
        self._events: list[tuple[int, ...]] = []

    # Read-only properties: `sram.device = larger` is an error.
    hbm = property(lambda self: self._hbm)
    problem = property(lambda self: self._schedule.problem)
    schedule = property(lambda self: self._schedule)
    stage = property(lambda self: self._stage)
    device = property(lambda self: self._device)
    used = property(lambda self: self._used)
    peak = property(lambda self: self._peak)

    def _taped(self) -> dict[str, int]:
        return {"sram": 0}

    # -- memory ---------------------------------------------------------------------------------

    @taped("alloc")
    def alloc(self, name: str, shape: Any, fill: float | None = None) -> SramTile:
        """Allocate a tile of the accumulator type, filled with `fill`, or with NaN until written.

        Raises
        ------
        SramOverflow
            If the tile does not fit. The message lists the tiles on chip, where each was made, and
            the device's capacity.
        """
        self._here()
        sides = tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
        if not all(isinstance(n, (int, np.integer)) and n > 0 for n in sides):
            raise ShapeError(f"the sides of a tile must be at least 1, got {shown(shape)}")
        if fill is not None and not isinstance(fill, (int, float, np.number)):
            raise DTypeError(f"fill must be a number, got {shown(fill)}")
        nbytes = math.prod(map(int, sides)) * self._compute.itemsize
        self._require_room(name, nbytes)
        value = np.nan if fill is None else fill
        data = np.full((*self._lead, *sides), value, self._compute)
        return SramTile(self._lease(name, ALLOC, nbytes, data, temporary=False), data)

    def _made(self, data: np.ndarray) -> SramTile:
        """Return the result of arithmetic as a tile, allocated like any other tile."""
        self._here()
        data = data if data.dtype == bool else np.asarray(data, self._compute)
        nbytes = math.prod(data.shape[2:]) * data.itemsize
        return SramTile(self._lease(TEMPORARY, ALLOC, nbytes, data, temporary=True), data)

    @taped("name")
    def name(self, name: str, tile: SramTile) -> SramTile:
        """Name a temporary tile, so that it stays until its scope ends, and return it."""
        room = tile._alive()
        if room.temporary:
            self._log(FREE, self._hbm._code(room.name), room.nbytes)
            self._log(ALLOC, self._hbm._code(name), room.nbytes)
            room.name, room.temporary = name, False
        return tile

    @taped("free")
    def free(self, tile: SramTile) -> None:
        """Free the memory of a tile before its scope ends."""
        self._give_back(tile._alive(), f"freed at {at_work()}")

    @taped("positions")
    def positions(self, rows: slice) -> SramTile:
        """Return the positions of queries or keys, such as 0 to 63, as a tile.

        With positions as tiles, a mask is, for example, ``S[rows > cols[:, None]] = 0``. The
        positions are computed, not loaded, but the tile uses on-chip memory.
        """
        p = self._schedule.problem
        row = np.array(span(rows, max(p.n_q, p.n_kv), "positions"), self._compute)
        return self._made(np.broadcast_to(row, (*self._lead, len(row))).copy())

    def accumulate(
        self, into: SramTile, a: SramTile, b: SramTile, rescale: SramTile | None = None
    ) -> None:
        """Add ``a @ b`` to the tile ``into`` as tensor cores do, without memory for the product.

        With `rescale` (one factor per row), ``into`` is first multiplied by these factors.
        """
        if rescale is not None:
            into *= rescale[..., None]
        product(a, b, out=into, add=True)

    def multiply(self, a: SramTile, b: SramTile, out: SramTile) -> None:
        """Compute the matrix product ``a @ b`` of two tiles into the tile `out`."""
        product(a, b, out=out)

    def rounded(self, name: str, tile: SramTile) -> SramTile:
        """Round "P" or "dS" to the type that products use; return other tiles unchanged."""
        if name not in ("P", "dS"):
            return tile
        return self._schedule.problem.rounded(tile)  # type: ignore[arg-type, return-value]

    def show(self, tile: SramTile) -> None:
        """Print a tile's numbers for the first head; the algorithm itself does not get them."""
        tile._alive()
        recording = "while an algorithm is recorded, tiles have no numbers; flashsim.simulate has"
        print(f"{tile!r}\n{tile._view[0, 0] if TAPE.get() is None else recording}")

    def _note(self, costs: np.ndarray) -> None:
        """Add an operation's cost to the innermost open scope that counts costs."""
        if self._sums:
            self._sums[-1] += costs

    def _require_room(self, name: str, nbytes: int) -> None:
        """Raise `SramOverflow` if a tile does not fit, before its memory is allocated."""
        if nbytes > self._most:
            self._lease(name, ALLOC, nbytes, np.zeros(0), temporary=False)

    def _lease(
        self, name: str, op: int, nbytes: int, data: np.ndarray, *, temporary: bool
    ) -> Lease:
        code = self._hbm._code(name)
        room = Room(self, name, nbytes, data, len(self._scopes), temporary)
        self._rooms.append(room)
        self._used += nbytes
        self._peak = max(self._peak, self._used)
        self._log(op, code, nbytes)
        if self._used > self._most:
            raise SramOverflow(
                f"stage {self._stage.name!r} holds {self._used:,} B on chip, but a thread block of "
                f"{self._device.name} has {self._device.sram_bytes:,} B; use smaller tiles, or end "
                "steps earlier. The tiles on chip are:"
                + "".join(
                    f"\n  {r.name:<12}{r.nbytes:>12,} B, made at {r.made}" for r in self._rooms
                )
                + (_IN_PLACE if any(room.temporary for room in self._rooms) else "")
            )
        return Lease(room)

    def _give_back(self, room: Room, where: str) -> None:
        """Free the SRAM of a tile and its views, and overwrite its numbers with NaN or False."""
        room.gone = where
        if room.data.flags.writeable:
            room.data.fill(np.nan if room.data.dtype != bool else False)
        if room in self._rooms:
            self._rooms.remove(room)
            self._used -= room.nbytes
            self._log(FREE, self._hbm._code(room.name), room.nbytes)

    def _log(self, op: int, tensor: int, nbytes: int) -> None:
        if not self._over:
            if 2 * len(self._events) >= MOST_EVENTS and op != FREE:  # each alloc needs a free later
                raise MemoryModelError(
                    f"stage {self._stage.name!r} records more than {MOST_EVENTS:,} events; use "
                    "larger tiles or a smaller problem"
                )
            self._events.append((op, tensor, *self._scopes[-1], nbytes))

    # -- transfers ------------------------------------------------------------------------------

    @taped("load")
    def load(
        self, tensor: Remote, rows: slice, cols: slice = ALL, *, member: int | None = None
    ) -> SramTile:
        """Copy a tile from HBM to SRAM, converted to the accumulator type.

        In a stage with ``per="group"``, `member` is the number of the query head in the group.
        """
        self._here()
        rows, cols = part_of(tensor, rows, cols)
        self._hbm._require_written(tensor, rows, cols, member)
        inside = self._hbm._behind(tensor)
        self._check_heads(tensor, member)
        data = inside.view(rows, cols, member).astype(self._compute)
        if data.shape[:2] != self._lead:  # each head needs its own copy, which it may write to
            data = np.broadcast_to(data, (*self._lead, *data.shape[2:])).copy()
        name = tensor.name.removesuffix("_acc")
        code = self._hbm._code(tensor.name)
        nbytes = inside.tile_bytes(rows, cols)
        # A load is one event, which also allocates the memory.
        lease = self._lease(name, LOAD, nbytes, data, temporary=False)
        op, _, *rest = self._events[-1]
        self._events[-1] = (op, code, *rest)
        stored = numpy_dtype(tensor.dtype)
        lease.room.narrow = stored if stored.itemsize < self._compute.itemsize else None
        return SramTile(lease, data)

    @taped("store")
    def store(
        self,
        tensor: Remote,
        rows: slice,
        tile: SramTile | float,
        cols: slice = ALL,
        *,
        member: int | None = None,
    ) -> None:
        """Copy a tile from SRAM to HBM, rounded to the tensor's type; a number fills all of it."""
        rows, cols, value = self._outgoing(tensor, rows, cols, tile, member)
        inside = self._hbm._behind(tensor)
        if inside.data.shape[1] < self._lead[1]:
            raise MemoryModelError(
                f"each query head of a group would store {tensor.name}, but there is only one "
                f"{tensor.name} per KV head; use machine.stage({self._stage.name!r}, per='group')"
            )
        inside.view(rows, cols, member)[...] = value
        self._hbm._written_part(tensor, rows, cols, member)[...] = True
        self._log(STORE, self._hbm._code(tensor.name), inside.tile_bytes(rows, cols))

    @taped("reduce")
    def reduce(
        self,
        tensor: Remote,
        rows: slice,
        tile: SramTile,
        cols: slice = ALL,
        *,
        member: int | None = None,
    ) -> None:
        """Add a tile to a tensor in HBM; a GPU does this atomically in the L2 cache."""
        rows, cols, value = self._outgoing(tensor, rows, cols, tile, member)
        self._hbm._require_written(tensor, rows, cols, member)
        inside = self._hbm._behind(tensor)
        value = np.asarray(value)
        if value.ndim and inside.data.shape[1] < value.shape[1]:
            value = value.sum(axis=1, keepdims=True)  # all heads of a group add to the same tile
        inside.add(rows, cols, member, value)
        self._log(REDUCE, self._hbm._code(tensor.name), inside.tile_bytes(rows, cols))

    def _outgoing(
        self, tensor: Remote, rows: slice, cols: slice, tile: Any, member: int | None
    ) -> tuple[slice, slice, Any]:
        self._here()
        if isinstance(cols, SramTile):
            raise ShapeError(
                "the tile must come before the columns: sram.store(tensor, rows, tile, cols)"
            )
        rows, cols = part_of(tensor, rows, cols)
        self._hbm._require_writable(tensor)
        self._check_heads(tensor, member)
        if isinstance(tile, SramTile):
            if tile._alive().sram is not self:
                raise MemoryModelError(
                    f"{tile!r} lies in another stage's SRAM; store it to HBM in that stage, and "
                    "load it from HBM in this stage",
                    "freed",
                )
            shape = self._hbm._behind(tensor).view(rows, cols, member).shape
            if tile.shape != shape[2:]:
                raise ShapeError(
                    f"rows {rows.start}:{rows.stop} of {tensor.name} have shape {shape[2:]}, but "
                    f"the tile has shape {tile.shape}; store a tile of the same shape as the rows"
                )
            return rows, cols, tile._view
        if isinstance(tile, (int, float, np.integer, np.floating)):
            return rows, cols, float(tile)
        raise MemoryModelError(
            "only a tile that was computed on chip, or a number, can be stored in "
            f"{tensor.name}, got {type(tile).__name__}; compute the values from tiles that "
            "sram.load returned",
            "outside",
        )

    def _check_heads(self, tensor: Remote, member: int | None) -> None:
        """Raise an error unless `member` selects one query head in a stage that works on groups."""
        heads, group = self._hbm._behind(tensor).data.shape[1], self._schedule.problem.group
        if heads > self._lead[1] and member is None:
            raise MemoryModelError(
                f"stage {self._stage.name!r} works for all query heads of a KV head at once; "
                f"choose the query head whose {tensor.name} you mean by member=g, for g in "
                "range(machine.problem.group)"
            )
        if member is not None and not 0 <= member < group:
            raise ShapeError(
                f"member= must be from 0 to {group - 1}, one of the group's query heads, got "
                f"member={member}"
            )

    def _done(self) -> StageTrace:
        """End the stage after the loop, and return the stage's events."""
        self._over = True
        for room in self._rooms:
            room.gone = "its stage ended"
        repeat, stride = plans.heads_of(self._stage, self._schedule.problem)
        costs = np.stack(self._costs) if self._costs else np.zeros((0, 8), np.int64)
        return StageTrace.build(self._stage, self._schedule, repeat, stride, self._events, costs)
