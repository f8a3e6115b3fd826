"""Simulated SRAM: one thread block's memory during one stage (kernel), and the only access to HBM.

Code can compute only with copies from `Sram.load`, which become NaN at the end of the step or visit
(tile pair). So a missing load causes an error or a wrong result, and every byte used is counted.
All heads run the same loop, so each event is recorded once, with the sizes of one head's thread
block.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import numpy as np

from flashsim.algorithms.hbm import ALL, CapturedTensor, Hbm, Tensor
from flashsim.errors import SramOverflow
from flashsim.problem.hardware import Device
from flashsim.problem.precision import NO_ROUNDINGS, Roundings, round_to, tensor_core_sum
from flashsim.schedule import plans
from flashsim.schedule.names import ALLOC, CODES, COMPUTE, FREE, LOAD, REDUCE, STORE
from flashsim.schedule.plans import heads_of
from flashsim.schedule.schedule import Schedule, Visit
from flashsim.trace.events import StageTrace


class Sram:
    """One thread block's simulated on-chip memory of `device.sram_bytes`: tiles and events.

    `hbm` has the tensors that `load`, `store` and `reduce` access.
    """

    def __init__(
        self,
        hbm: Hbm,
        schedule: Schedule,
        stage: plans.Stage,
        device: Device,
        *,
        record: bool,
        roundings: Roundings = NO_ROUNDINGS,
    ) -> None:
        p = schedule.problem
        self.hbm, self.problem = hbm, p
        self.schedule, self.stage, self.device, self.record = schedule, stage, device, record
        self.compute = np.dtype(p.compute_dtype)
        self._lead = (p.batch * p.kv_heads, 1 if stage.per == "group" else p.group)
        self._roundings = roundings
        self._small: dict[int, tuple[np.ndarray, int]] = {}  # tiles since the last flush
        self._live: list[tuple[str, int, np.ndarray]] = []
        self._events: list[tuple[int, int, int, int, int, int, int]] = []
        self._where = (0, -1, -1, -1)  # member of the group, i, j, visit
        self.used = self.peak = 0

    # -- scopes ---------------------------------------------------------------------------------

    @contextmanager
    def step(self, outer: int, member: int = 0) -> Iterator[None]:
        """Open a scope for one step of the outer loop: row tile i, or (KV-outer) column tile j."""
        i, j = (outer, -1) if self.stage.outer == "queries" else (-1, outer)
        with self._frame((member, i, j, -1)):
            yield
            self._log(COMPUTE, 0, 0)

    def steps(self) -> Iterator[tuple[int, slice]]:
        """Yield each row tile's number and rows inside its step: a Q-outer loop."""
        for i in range(self.schedule.t_r):
            with self.step(i):
                yield i, self.schedule.row_slice(i)

    def strip(self) -> AbstractContextManager[None]:
        """Open a scope for a range of rows in an outer step; the scope's end frees its tiles."""
        return self._frame(self._where)

    @contextmanager
    def visit(self, visit: Visit, member: int = 0) -> Iterator[None]:
        """Open a scope for one visit (query tile x key tile) of query head `member` of a group."""
        held = self._roundings.held
        with self._frame((member, visit.i, visit.j, visit.index)):
            yield
            self._log(COMPUTE, 0, 0)
        for name, _, tile in self._live if held else ():
            if name in held:
                tile[...] = round_to(tile, held[name])

    @contextmanager
    def _frame(self, where: tuple[int, int, int, int]) -> Iterator[None]:
        mark, before = len(self._live), self._where
        self._where = where
        try:
            yield
        finally:
            for name, nbytes, tile in self._live[mark:]:
                tile.fill(np.nan)
                self.used -= nbytes
                self._log(FREE, CODES[name], nbytes)
            del self._live[mark:]
            self._where = before

    def _log(self, op: int, tensor: int, nbytes: int) -> None:
        if self.record:
            self._events.append((op, tensor, *self._where, nbytes))

    # -- on chip --------------------------------------------------------------------------------

    def alloc(self, name: str, shape: tuple[int, ...], fill: float | None = None) -> np.ndarray:
        """Allocate a tile (batch * kv_heads, group or 1, *shape), or raise `SramOverflow`."""
        nbytes = math.prod(shape) * self.compute.itemsize
        tile = np.empty((*self._lead, *shape), self.compute)
        if fill is not None:
            tile.fill(fill)
        self._hold(name, nbytes, tile)
        self._log(ALLOC, CODES[name], nbytes)
        return tile

    def _hold(self, name: str, nbytes: int, tile: np.ndarray) -> None:
        self._live.append((name, nbytes, tile))
        self.used += nbytes
        self.peak = max(self.peak, self.used)
        if self.used > self.device.sram_bytes:
            held = "".join(f"\n  {n:<6}{size:>14,} B" for n, size, _ in self._live)
            raise SramOverflow(
                f"stage {self.stage.name!r} holds {self.used:,} B on chip, but a thread block of "
                f"{self.device.name} has {self.device.sram_bytes:,} B; use smaller tiles. The "
                f"tiles on chip are:{held}"
            )

    # -- transfers ------------------------------------------------------------------------------

    def load(
        self, tensor: Tensor, rows: slice, cols: slice = ALL, *, member: int | None = None
    ) -> np.ndarray:
        """Copy a tile from HBM to SRAM, with an exact conversion to the accumulator type.

        An FP8 tile is loaded together with FP8 scales, and multiplied by the scales. In a stage
        (kernel) that loops over a group of query heads, `member` selects the head.
        """
        # The copy has the same memory layout whatever the layout of the caller's array, because
        # BLAS sums in an order that depends on the layout.
        tile = self._part(tensor, rows, cols, member).astype(self.compute, order="C")
        nbytes = tensor.tile_bytes(rows, cols)
        self._log(LOAD, tensor.code, nbytes)
        self._hold(tensor.name.removesuffix("_acc"), nbytes, tile)
        if tensor.scale is not None:
            tile *= tensor.scale.spread(self.load(tensor.scale, rows, member=member), rows)
        return tile

    def has(self, name: str) -> bool:
        """Return True if this stage (kernel) has an on-chip buffer of this name."""
        return any(buffer.name == name for buffer in self.stage.buffers)

    def _tile_of(self, name: str, rows: slice, cols: slice) -> int:
        """Return the bytes that an on-chip buffer of this stage (kernel) needs for a tile."""
        buffer = next(b for b in self.stage.buffers if b.name == name)
        return buffer.nbytes(rows.stop - rows.start, cols.stop - cols.start)

    def load_captured(
        self, tensor: CapturedTensor, positions: Mapping[str, np.ndarray], rows: slice, cols: slice
    ) -> dict[int, np.ndarray]:
        """Load a function's captured elements for a tile; return a dict from load node to array."""
        elements = tensor.read(positions, self.stage.outer)
        tile = np.concatenate([x.ravel() for x in elements.values()])
        nbytes = self._tile_of(tensor.name, rows, cols)
        self._log(LOAD, tensor.code, nbytes)
        self._hold(tensor.name, nbytes, tile)
        ends = np.cumsum([x.size for x in elements.values()])
        return {
            n: tile[end - x.size : end].reshape(x.shape)
            for (n, x), end in zip(elements.items(), ends.tolist(), strict=True)
        }

    def reserve(self, name: str, rows: slice, cols: slice) -> None:
        """Count the bytes of a buffer that stays allocated but that a tile does not use."""
        nbytes = self._tile_of(name, rows, cols)
        self._hold(name, nbytes, np.empty(0))
        self._log(ALLOC, CODES[name], nbytes)

    def note_reduce(self, name: str, shape: tuple[int, ...]) -> None:
        """Record that a visit (tile pair) added to the gradients of captured arrays."""
        move = next(m for m in self.stage.visit if m.tensor == name)
        self._log(REDUCE, CODES[name], move.tile.nbytes(*shape))

    def rounded(self, name: str, tile: np.ndarray) -> np.ndarray:
        """Round P or dS to the type for products, or S or m to the type that `Precision` sets."""
        kind = self._roundings.operands.get(name)
        return tile if kind is None else round_to(tile, *kind)

    def multiply(self, a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
        """Compute ``out = a @ b``."""
        if not self._roundings.tensor_cores:
            np.matmul(a, b, out=out)
            return
        out.fill(0)
        tensor_core_sum(out, a, b)

    def accumulate(
        self, into: np.ndarray, a: np.ndarray, b: np.ndarray, rescale: np.ndarray
    ) -> None:
        """Compute ``into = diag(rescale) into + a @ b``."""
        into *= rescale[..., None]
        if not self._roundings.tensor_cores:
            into += a @ b
            return
        flush = self._roundings.flush
        if flush is None:
            tensor_core_sum(into, a, b)
            return
        small, tiles = self._small.pop(id(into), (np.zeros_like(into), 0))
        small *= rescale[..., None]
        into -= small  # O then has only flushed sums; below, `small` is added again, in float32
        tensor_core_sum(small, a, b)
        into += small
        if tiles + 1 < flush:
            self._small[id(into)] = small, tiles + 1

    def store(
        self,
        tensor: Tensor,
        rows: slice,
        tile: np.ndarray | float,
        cols: slice = ALL,
        *,
        member: int | None = None,
    ) -> None:
        """Store a tile, or one number for all elements, rounded once to the type in HBM."""
        kind = self._roundings.stored.get(tensor.name)
        if kind is not None:
            tile = round_to(np.asarray(tile, self.compute), kind)
        self._part(tensor, rows, cols, member)[...] = tile
        self._log(STORE, tensor.code, tensor.tile_bytes(rows, cols))

    def reduce(
        self,
        tensor: Tensor,
        rows: slice,
        tile: np.ndarray,
        cols: slice = ALL,
        *,
        member: int | None = None,
    ) -> None:
        """Add a tile to a tensor in HBM (on a GPU: an atomic or bulk reduction in the L2 cache)."""
        tensor.add(rows, cols, member, tile)
        kind = self._roundings.stored.get(tensor.name)
        if kind is not None:
            sums = tensor.view(rows, cols, member)
            sums[...] = round_to(sums, kind)
        self._log(REDUCE, tensor.code, tensor.tile_bytes(rows, cols))

    def _part(self, tensor: Tensor, rows: slice, cols: slice, member: int | None) -> np.ndarray:
        if self.stage.per == "bias":  # all matrices of the bias, independently of the heads
            return tensor.data[:, :, rows, cols]
        return tensor.view(rows, cols, member)

    def done(self) -> StageTrace:
        """Return the recorded events of the completed stage."""
        repeat, stride = heads_of(self.stage, self.schedule.problem)
        return StageTrace.build(self.stage, self.schedule, repeat, stride, self._events)
