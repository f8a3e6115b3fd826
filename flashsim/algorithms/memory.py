"""The simulated two-level memory: HBM that holds every tensor, SRAM that one thread block owns.

Arithmetic sees only what `Sram.load` returned. A tensor in HBM is a `Tensor` handle that refuses
to be computed with; what `load` returns is a copy, and when its frame ends the copy is overwritten
with NaN. So a load that is left out is an error or a wrong answer, never a byte for free.

All heads run at once: tiles have leading axes (batch * kv_heads, group, ...), where `group` is the
number of query heads that share a key head, or 1. One event is recorded for all of them, since
every head makes the same walk; `Trace` multiplies. Sizes are those of one head's thread block.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NoReturn

import numpy as np

from flashsim.counts.traffic import strip_rows
from flashsim.errors import MemoryModelError, SramOverflow
from flashsim.problem.hardware import Device
from flashsim.problem.precision import (
    NO_ROUNDINGS,
    Precision,
    Roundings,
    round_to,
    tensor_core_sum,
)
from flashsim.problem.problem import Problem, numpy_dtype
from flashsim.schedule import plans
from flashsim.schedule.names import ALLOC, CODES, COMPUTE, FREE, LOAD, REDUCE, STORE
from flashsim.schedule.plans import heads_of
from flashsim.schedule.schedule import KeyOrder, Schedule, Visit
from flashsim.schedule.split import WHOLE, Split
from flashsim.schedule.tensors import TABLE_ITEM
from flashsim.schedule.tiling import Tiling
from flashsim.trace.events import StageTrace

ALL = slice(None)


class Tensor:
    """A tensor in simulated HBM: loaded and stored by tiles, never computed with.

    `data` is (batch * kv_heads, group or 1, n[, width]); `dtype` is its element type in HBM.
    """

    def __init__(self, name: str, data: np.ndarray, dtype: str, code: int | None = None) -> None:
        self.name, self.data, self.dtype = name, data, dtype
        self.code = CODES[name] if code is None else code
        self.itemsize = numpy_dtype(dtype).itemsize
        self.vector = data.ndim == 3  # one value a row: L, m, l, delta
        self.scale: Scale | None = None
        self.n, self.width = data.shape[2], 1 if self.vector else data.shape[3]

    def tile_bytes(self, rows: slice, cols: slice) -> int:
        """Bytes in HBM of one head's part [rows, cols]."""
        return len(range(self.n)[rows]) * len(range(self.width)[cols]) * self.itemsize

    def view(self, rows: slice, cols: slice, member: int | None) -> np.ndarray:
        """The part [rows, cols] of all heads, or of one member of each group."""
        part = self.data[:, _heads(member), rows]
        return part if self.vector else part[..., cols]

    def add(self, rows: slice, cols: slice, member: int | None, tile: np.ndarray) -> None:
        """Add a tile."""
        self.view(rows, cols, member)[...] += tile

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise MemoryModelError(
            f"{self.name} lies in HBM: load a tile of it into SRAM before computing with it"
        )

    __array__ = __getitem__ = __len__ = _refuse
    __add__ = __radd__ = __mul__ = __rmul__ = __matmul__ = __rmatmul__ = __sub__ = _refuse


class Scale(Tensor):
    """What the rows of an FP8 tensor are multiplied by: one number for `every` so many of them.

    `data` is (batch * kv_heads, group or 1, ceil(n / every)), float32.
    """

    def __init__(self, name: str, data: np.ndarray, every: int) -> None:
        super().__init__(name, data, "float32")
        self.every = every

    def _entries(self, rows: slice) -> slice:
        return slice(rows.start // self.every, -(-rows.stop // self.every))

    def tile_bytes(self, rows: slice, cols: slice) -> int:
        """Bytes of the entries for these rows."""
        return super().tile_bytes(self._entries(rows), cols)

    def view(self, rows: slice, cols: slice, member: int | None) -> np.ndarray:
        """The entries for these rows, one a block."""
        return super().view(self._entries(rows), cols, member)

    def spread(self, entries: np.ndarray, rows: slice) -> np.ndarray:
        """Loaded `entries`, one a row, (.., rows, 1)."""
        first = rows.start // self.every
        return entries[..., np.arange(rows.start, rows.stop) // self.every - first, None]


class SharedTensor(Tensor):
    """A bias, or its gradient: (1 or batch, 1 or heads, n_q, n_kv), shared where an axis is 1."""

    def __init__(self, name: str, data: np.ndarray, dtype: str, problem: Problem) -> None:
        super().__init__(name, data, dtype)
        self.problem = problem

    def _select(self, member: int | None) -> slice:
        """The heads that are `member` of their group."""
        if member is None or self.data.shape[1] == 1:
            return ALL
        return slice(member, None, self.problem.group)

    def view(self, rows: slice, cols: slice, member: int | None) -> np.ndarray:
        """The part [rows, cols] as every head sees it: (batch * kv_heads, group or 1, ..)."""
        p, part = self.problem, self.data[:, self._select(member), rows, cols]
        heads = p.heads if member is None else p.kv_heads
        full = np.broadcast_to(part, (p.batch, heads, *part.shape[2:]))
        return full.reshape(p.batch * p.kv_heads, heads // p.kv_heads, *part.shape[2:])

    def add(self, rows: slice, cols: slice, member: int | None, tile: np.ndarray) -> None:
        """Add every head's tile, summed over the heads that share a matrix."""
        batch = self.problem.batch
        full = tile.reshape(batch, tile.shape[0] // batch * tile.shape[1], *tile.shape[2:])
        shared = tuple(axis for axis in (0, 1) if self.data.shape[axis] == 1)
        self.data[:, self._select(member), rows, cols] += full.sum(axis=shared, keepdims=True)


class BlockTable(Tensor):
    """Which pages hold the keys of each sequence: loading keys [rows] loads their pages' numbers.

    `data` is (1, 1, problem.pages), sequence after sequence.
    """

    def __init__(self, numbers: np.ndarray, problem: Problem) -> None:
        super().__init__("table", numbers[None, None], "float32")
        self.problem = problem
        lengths = [s.k_stop - s.k_start for s in problem.sequences]
        self.starts = np.array([s.k_start for s in problem.sequences])
        pages = [-(-n // self._size) for n in lengths]
        self.first = np.cumsum(pages) - pages

    @property
    def _size(self) -> int:
        assert self.problem.page_size is not None
        return self.problem.page_size

    def local(self, rows: slice) -> tuple[int, int, int]:
        """The sequence of these keys, and where they begin and end in it."""
        s = int(np.searchsorted(self.starts, rows.start, "right")) - 1
        start = int(self.starts[s])
        return s, rows.start - start, rows.stop - start

    def _entries(self, rows: slice) -> slice:
        s, start, stop = self.local(rows)
        first = int(self.first[s])
        return slice(first + start // self._size, first - (-stop // self._size))

    def tile_bytes(self, rows: slice, cols: slice) -> int:
        """Bytes of the entries of the pages that hold these keys."""
        entries = self._entries(rows)
        return (entries.stop - entries.start) * TABLE_ITEM

    def view(self, rows: slice, cols: slice, member: int | None) -> np.ndarray:
        """The numbers of the pages that hold these keys."""
        return self.data[..., self._entries(rows)]


class PagedTensor(Tensor):
    """K or V in pages, (pages, kv_heads, page_size, width): read through numbers that were loaded.

    Rows are keys of the packed sequences; `Hbm.through` gives the page numbers.
    """

    def __init__(
        self,
        name: str,
        pool: np.ndarray,
        dtype: str,
        table: BlockTable,
        pages: np.ndarray | None = None,
    ) -> None:
        super().__init__(name, pool, dtype)
        self.table, self.pages = table, pages
        self.n = table.problem.n_kv

    def view(self, rows: slice, cols: slice, member: int | None) -> np.ndarray:
        """Keys [rows] of all key heads, (kv_heads, 1, rows, width)."""
        if self.pages is None or np.isnan(self.pages).any():
            self._refuse()
        _, start, stop = self.table.local(rows)
        at, size = np.arange(start, stop), self.data.shape[2]
        page = self.pages.ravel().astype(np.int64)[at // size - start // size]
        return self.data[page, :, at % size, cols].swapaxes(0, 1)[:, None]


class Hbm:
    """The tensors of one run, as attributes by the papers' names: ``hbm.Q``, ``hbm.dK``, ...

    Outputs start as NaN (in the input's type), so a tile that is never stored shows.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.tensors: dict[str, Tensor] = {}

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self.__dict__["tensors"][name]
        except KeyError:
            raise MemoryModelError(
                f"HBM holds no tensor {name!r}; it holds {', '.join(self.__dict__['tensors'])}"
            ) from None

    def put(self, name: str, array: np.ndarray, dtype: str | None = None) -> Tensor:
        """Place an array (batch, heads, n[, width]) in HBM; a view where possible."""
        p = self.problem
        lead = p.batch * p.kv_heads
        data = array.reshape(lead, array.shape[0] * array.shape[1] // lead, *array.shape[2:])
        self.tensors[name] = Tensor(name, data, dtype or p.dtype)
        return self.tensors[name]

    def put_scale(self, name: str, array: np.ndarray, every: int) -> None:
        """Place the scale of a tensor that is there, (batch, heads, blocks of `every` rows)."""
        scale = f"{name}_scale"
        self.tensors[name].scale = Scale(scale, self.put(scale, array, "float32").data, every)

    def put_shared(self, name: str, array: np.ndarray, dtype: str) -> Tensor:
        """Place a bias (1 or batch, 1 or heads, n_q, n_kv) in HBM."""
        self.tensors[name] = SharedTensor(name, array, dtype, self.problem)
        return self.tensors[name]

    def put_paged(self, pages: np.ndarray, **pools: np.ndarray) -> None:
        """Place K and V in pages, and the numbers of the pages of each sequence."""
        table = BlockTable(pages, self.problem)
        self.tensors["table"] = table
        for name, pool in pools.items():
            self.tensors[name] = PagedTensor(name, pool, self.problem.dtype, table)

    def through(self, pages: np.ndarray, name: str) -> Tensor:
        """K or V as it is read with these page numbers, a tile of the block table."""
        tensor = getattr(self, name)
        assert isinstance(tensor, PagedTensor)
        return PagedTensor(name, tensor.data, tensor.dtype, tensor.table, pages)

    def new(
        self, name: str, n: int, width: int | None, dtype: str, *, kv: bool = False
    ) -> np.ndarray:
        """Make room for a result, NaN all over; returns the array (batch, heads, n[, width])."""
        p = self.problem
        heads = p.kv_heads if kv else p.heads
        shape = (p.batch, heads, n) if width is None else (p.batch, heads, n, width)
        array = np.full(shape, np.nan, numpy_dtype(dtype))
        self.put(name, array, dtype)
        return array


class Sram:
    """On-chip memory of one thread block while one stage runs: capacity, lifetimes, events.

    Parameters
    ----------
    schedule : Schedule
        The stage's walk.
    stage : plans.Stage
    device : Device
        `device.sram_bytes` is the capacity.
    record : bool
        Whether to keep events.
    roundings : Roundings
        What is rounded, and to which types.
    """

    def __init__(
        self,
        schedule: Schedule,
        stage: plans.Stage,
        device: Device,
        *,
        record: bool,
        roundings: Roundings = NO_ROUNDINGS,
    ) -> None:
        p = schedule.problem
        self.schedule, self.stage, self.device, self.record = schedule, stage, device, record
        self.compute = np.dtype(p.compute_dtype)
        self._lead = (p.batch * p.kv_heads, 1 if stage.per == "group" else p.group)
        self._roundings = roundings
        self._small: dict[int, tuple[np.ndarray, int]] = {}  # sums that are not flushed yet
        self._live: list[tuple[str, int, np.ndarray]] = []
        self._events: list[tuple[int, int, int, int, int, int, int]] = []
        self._where = (0, -1, -1, -1)  # member of the group, i, j, visit
        self.used = self.peak = 0

    # -- scopes ---------------------------------------------------------------------------------

    @contextmanager
    def step(self, outer: int, member: int = 0) -> Iterator[None]:
        """One step of the outer loop: row tile i, or with keys outside column tile j."""
        i, j = (outer, -1) if self.stage.outer == "queries" else (-1, outer)
        with self._frame((member, i, j, -1)):
            yield
            self._log(COMPUTE, 0, 0)

    def strip(self) -> AbstractContextManager[None]:
        """Some rows of an outer step: what is loaded inside is freed with them."""
        return self._frame(self._where)

    @contextmanager
    def visit(self, visit: Visit, member: int = 0) -> Iterator[None]:
        """One visit of a score tile, for query head `member` of the group."""
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
        """Make room for one tile; returns (batch * kv_heads, group or 1, *shape).

        Raises
        ------
        SramOverflow
            Naming what is held and what the device gives.
        """
        nbytes = int(np.prod(shape)) * self.compute.itemsize
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
                f"stage {self.stage.name!r} holds {self.used:,} B on chip, but "
                f"{self.device.name} gives a block {self.device.sram_bytes:,} B; it holds:{held}"
            )

    # -- transfers ------------------------------------------------------------------------------

    def load(
        self, tensor: Tensor, rows: slice, cols: slice = ALL, *, member: int | None = None
    ) -> np.ndarray:
        """Copy a tile HBM -> SRAM, converted to the accumulator type (exact).

        With it comes its scale, by which an FP8 tile is multiplied. In a stage whose walk serves a
        whole group, `member` picks the query head.
        """
        tile = self._part(tensor, rows, cols, member).astype(self.compute)
        nbytes = tensor.tile_bytes(rows, cols)
        self._log(LOAD, tensor.code, nbytes)
        self._hold(tensor.name.removesuffix("_acc"), nbytes, tile)
        if tensor.scale is not None:
            tile *= tensor.scale.spread(self.load(tensor.scale, rows, member=member), rows)
        return tile

    def rounded(self, name: str, tile: np.ndarray) -> np.ndarray:
        """P or dS in the type in which it enters a product; S and m if `Precision` says so."""
        kind = self._roundings.operands.get(name)
        return tile if kind is None else round_to(tile, *kind)

    def multiply(self, a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
        """``out = a @ b``."""
        if not self._roundings.tensor_cores:
            np.matmul(a, b, out=out)
            return
        out.fill(0)
        tensor_core_sum(out, a, b)

    def accumulate(
        self, into: np.ndarray, a: np.ndarray, b: np.ndarray, rescale: np.ndarray
    ) -> None:
        """``into = diag(rescale) into + a @ b``."""
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
        into -= small  # what is flushed; in float32, as the additions there
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
        """Copy a tile SRAM -> HBM, rounded once to the tensor's type. A number fills the tile."""
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
        """Add a tile into HBM (on a GPU: an atomic or bulk reduction in the L2 cache)."""
        tensor.add(rows, cols, member, tile)
        kind = self._roundings.stored.get(tensor.name)
        if kind is not None:
            there = tensor.view(rows, cols, member)
            there[...] = round_to(there, kind)
        self._log(REDUCE, tensor.code, tensor.tile_bytes(rows, cols))

    def _part(self, tensor: Tensor, rows: slice, cols: slice, member: int | None) -> np.ndarray:
        if self.stage.per == "bias":  # the matrices themselves, however many heads share them
            return tensor.data[:, :, rows, cols]
        return tensor.view(rows, cols, member)

    def done(self) -> StageTrace:
        """The stage's events, once its walk has ended."""
        repeat, stride = heads_of(self.stage, self.schedule.problem)
        return StageTrace.build(self.stage, self.schedule, repeat, stride, self._events)


class Machine:
    """One run of one algorithm: its HBM, and the stages as they are executed.

    Parameters
    ----------
    problem, tiling, device
        What runs, and on what.
    algorithm, direction : str
        Which of `plans`' stages there are.
    key_order : {"ascending", "descending"}
    split : Split
    record : bool
        Whether to keep events.
    precision : Precision
    """

    def __init__(
        self,
        problem: Problem,
        tiling: Tiling,
        device: Device,
        algorithm: str,
        direction: str,
        *,
        key_order: KeyOrder = "ascending",
        split: Split = WHOLE,
        record: bool = False,
        precision: Precision = Precision(),  # noqa: B008  # frozen
    ) -> None:
        tiling.check(problem, device, algorithm, direction, split)
        self.problem, self.tiling, self.device = problem, tiling, device
        self.key_order, self.split, self.record = key_order, split, record
        self.algorithm, self.direction, self.precision = algorithm, direction, precision
        self.hbm = Hbm(problem)
        self.stages: list[StageTrace] = []
        planned = plans.stages(problem, algorithm, direction, split)
        self._plan = {stage.name: stage for stage in planned}

        #: Log-sum-exp of each row for the caller, from algorithms that do not store it in HBM.
        self.noted_lse = np.full(
            (problem.batch * problem.kv_heads, problem.group, problem.n_q), np.nan
        )

    def note_lse(self, rows: slice, lse: np.ndarray) -> None:
        """Remember an LSE that the algorithm computes but does not store; no traffic."""
        self.noted_lse[..., rows] = lse

    @property
    def parts(self) -> int:
        """Into how many parts the keys of a query are divided at most."""
        if self.split == WHOLE and not self.problem.shared_prefix:
            return 1
        how = self.key_order, False, self.split
        return int(Schedule(self.problem, self.tiling, "queries", *how).slots[:, 1].max())

    def has(self, name: str) -> bool:
        """Whether the algorithm has this stage for this problem."""
        return name in self._plan

    @contextmanager
    def stage(self, name: str) -> Iterator[Sram]:
        """Run one stage: an empty SRAM, the stage's walk in `sram.schedule`."""
        stage = self._plan[name]
        how = stage.outer, self.key_order, stage.dense, self.split
        schedule = Schedule(self.problem, self.tiling, *how)
        roundings = Roundings.of(self.problem, self.algorithm, self.direction, name, self.precision)
        sram = Sram(schedule, stage, self.device, record=self.record, roundings=roundings)
        yield sram
        self.stages.append(sram.done())

    @staticmethod
    def part_slice(schedule: Schedule, rows: slice, part: int) -> slice:
        """Where rows of one part of the keys lie in `O_part` and `L_part`: part after part."""
        before = part * schedule.n_rows
        return slice(before + rows.start, before + rows.stop)

    def strips(self, sram: Sram, i: int) -> Iterator[slice]:
        """Row tile i in strips of as many whole score rows as fit on chip."""
        rows = sram.schedule.row_slice(i)
        height = strip_rows(sram.stage, sram.schedule, self.device)
        for start in range(rows.start, rows.stop, height):
            yield slice(start, min(start + height, rows.stop))


def _heads(member: int | None) -> slice:
    return ALL if member is None else slice(member, member + 1)
