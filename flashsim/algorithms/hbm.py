"""Simulated HBM, which contains every tensor; code cannot compute with tensors in HBM.

`Sram.load` copies one tile of a tensor on chip. All heads run at once: tiles have leading axes
(batch * kv_heads, group, ...), with `group` query heads per key head, or 1 if a stage processes
these heads one by one.
"""

from collections.abc import Mapping
from typing import NoReturn

import numpy as np

from flashsim.errors import MemoryModelError
from flashsim.functions.graph import Graph
from flashsim.problem.problem import Problem, numpy_dtype
from flashsim.schedule.names import CODES
from flashsim.schedule.tensors import TABLE_ITEM, captured

ALL = slice(None)


class Tensor:
    """A tensor in simulated HBM, which supports only loads and stores of tiles.

    `data` has the shape (batch * kv_heads, group or 1, n[, width]); `dtype` is its type in HBM.
    """

    def __init__(self, name: str, data: np.ndarray, dtype: str, code: int | None = None) -> None:
        self.name, self.data, self.dtype = name, data, dtype
        self.code = CODES[name] if code is None else code
        self.itemsize = numpy_dtype(dtype).itemsize
        self.vector = data.ndim == 3  # one value per row: L, m, l, delta
        self.scale: Scale | None = None
        self.n, self.width = data.shape[2], 1 if self.vector else data.shape[3]

    def tile_bytes(self, rows: slice, cols: slice) -> int:
        """Return how many bytes the tile [rows, cols] of one head takes in HBM."""
        return len(range(self.n)[rows]) * len(range(self.width)[cols]) * self.itemsize

    def view(self, rows: slice, cols: slice, member: int | None) -> np.ndarray:
        """Return the tile [rows, cols] of all heads, or of one query head (`member`) per group."""
        part = self.data[:, _heads(member), rows]
        return part if self.vector else part[..., cols]

    def add(self, rows: slice, cols: slice, member: int | None, tile: np.ndarray) -> None:
        """Add a tile to the tensor's values, in place."""
        self.view(rows, cols, member)[...] += tile

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise MemoryModelError(
            f"{self.name} lies in HBM: load a tile of it into SRAM, and compute with that tile"
        )

    __array__ = __getitem__ = __len__ = _refuse
    __add__ = __radd__ = __mul__ = __rmul__ = __matmul__ = __rmatmul__ = __sub__ = _refuse


class Scale(Tensor):
    """FP8 scales, one per `every` rows: float32 (batch * kv_heads, group or 1, ceil(n / every))."""

    def __init__(self, name: str, data: np.ndarray, every: int) -> None:
        super().__init__(name, data, "float32")
        self.every = every

    def _entries(self, rows: slice) -> slice:
        return slice(rows.start // self.every, -(-rows.stop // self.every))

    def tile_bytes(self, rows: slice, cols: slice) -> int:
        """Return how many bytes the FP8 scales for these rows take in HBM."""
        return super().tile_bytes(self._entries(rows), cols)

    def view(self, rows: slice, cols: slice, member: int | None) -> np.ndarray:
        """Return the FP8 scales for these rows, one per block of rows."""
        return super().view(self._entries(rows), cols, member)

    def spread(self, entries: np.ndarray, rows: slice) -> np.ndarray:
        """Return the loaded scales, `entries`, repeated to one scale per row: (.., rows, 1)."""
        first = rows.start // self.every
        return entries[..., np.arange(rows.start, rows.stop) // self.every - first, None]


class SharedTensor(Tensor):
    """A bias or its gradient, (1 or batch, 1 or heads, n_q, n_kv); axes of length 1 are shared."""

    def __init__(self, name: str, data: np.ndarray, dtype: str, problem: Problem) -> None:
        super().__init__(name, data, dtype)
        self.problem = problem

    def _select(self, member: int | None) -> slice:
        """Return the indices of the query heads with number `member` in each group."""
        if member is None or self.data.shape[1] == 1:
            return ALL
        return slice(member, None, self.problem.group)

    def view(self, rows: slice, cols: slice, member: int | None) -> np.ndarray:
        """Return the tile [rows, cols] of all heads, shaped (batch * kv_heads, group or 1, ..)."""
        p, part = self.problem, self.data[:, self._select(member), rows, cols]
        heads = p.heads if member is None else p.kv_heads
        full = np.broadcast_to(part, (p.batch, heads, *part.shape[2:]))
        return full.reshape(p.batch * p.kv_heads, heads // p.kv_heads, *part.shape[2:])

    def add(self, rows: slice, cols: slice, member: int | None, tile: np.ndarray) -> None:
        """Add every head's tile to the tensor; tiles of heads that share a matrix are summed."""
        batch = self.problem.batch
        full = tile.reshape(batch, tile.shape[0] // batch * tile.shape[1], *tile.shape[2:])
        shared = tuple(axis for axis in (0, 1) if self.data.shape[axis] == 1)
        self.data[:, self._select(member), rows, cols] += full.sum(axis=shared, keepdims=True)


class BlockTable(Tensor):
    """The block table of a paged KV cache: the sequences' page numbers, (1, 1, problem.pages)."""

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
        """Return the number of the sequence that contains the keys, and the keys' start and end."""
        s = int(np.searchsorted(self.starts, rows.start, "right")) - 1
        start = int(self.starts[s])
        return s, rows.start - start, rows.stop - start

    def _entries(self, rows: slice) -> slice:
        s, start, stop = self.local(rows)
        first = int(self.first[s])
        return slice(first + start // self._size, first - (-stop // self._size))

    def tile_bytes(self, rows: slice, cols: slice) -> int:
        """Return how many bytes the block table's entries for these keys take."""
        entries = self._entries(rows)
        return (entries.stop - entries.start) * TABLE_ITEM

    def view(self, rows: slice, cols: slice, member: int | None) -> np.ndarray:
        """Return the numbers of the pages that hold the keys `rows`."""
        return self.data[..., self._entries(rows)]


class PagedTensor(Tensor):
    """K or V in pages, (pages, kv_heads, page_size, width), read through loaded page numbers.

    Rows number the keys of all sequences consecutively; `Hbm.through` supplies the loaded page
    numbers.
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
        """Return the keys at positions `rows` in all key heads, (kv_heads, 1, rows, width)."""
        if self.pages is None or np.isnan(self.pages).any():
            self._refuse()
        _, start, stop = self.table.local(rows)
        at, size = np.arange(start, stop), self.data.shape[2]
        page = self.pages.ravel().astype(np.int64)[at // size - start // size]
        return self.data[page, :, at % size, cols].swapaxes(0, 1)[:, None]


class CapturedTensor(Tensor):
    """The elements of captured arrays that a score or mask function reads, in simulated HBM.

    The function's floats, from which it may compute indices, have type `real`.
    """

    def __init__(
        self, name: str, graph: Graph, arrays: tuple[np.ndarray, ...], problem: Problem, real: str
    ) -> None:
        super().__init__(name, np.zeros((1, 1, 1, 1)), "float64")
        self.graph, self.arrays, self.problem, self.real = graph, arrays, problem, real

    def read(self, positions: Mapping[str, np.ndarray], outer: str) -> dict[int, np.ndarray]:
        """Return a dict from load node to the captured elements that a kernel reads.

        The type, longdouble, holds every int64 on x86 (elsewhere: integers up to 2^53).
        """
        sides = captured(self.problem, self.name, outer)
        values = self.graph.values({"score": np.zeros(()), **positions}, self.arrays, self.real)
        nodes = (n for n in self.graph.loads if self.graph.side(n) in sides)
        return {n: np.asarray(values[n], np.longdouble) for n in nodes}


class Hbm:
    """The tensors of one simulated run, as attributes: ``hbm.Q``, ``hbm.dK``, ...

    Outputs start as NaN (in the input's type), so that a tile that is never stored shows as NaN.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.tensors: dict[str, Tensor] = {}
        #: Sums of the gradients of captured arrays, by the arrays' names.
        self.captured_gradients: dict[str, np.ndarray] = {}

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self.__dict__["tensors"][name]
        except KeyError:
            raise MemoryModelError(
                f"HBM holds no tensor {name!r}; choose from {', '.join(self.__dict__['tensors'])}"
            ) from None

    def put(self, name: str, array: np.ndarray, dtype: str | None = None) -> Tensor:
        """Put an array (batch, heads, n[, width]) into simulated HBM, as a view if possible."""
        p = self.problem
        lead = p.batch * p.kv_heads
        data = array.reshape(lead, array.shape[0] * array.shape[1] // lead, *array.shape[2:])
        self.tensors[name] = Tensor(name, data, dtype or p.dtype)
        return self.tensors[name]

    def put_scale(self, name: str, array: np.ndarray, every: int) -> None:
        """Put the scales of an FP8 tensor, (batch, heads, blocks of `every` rows), into HBM."""
        scale = f"{name}_scale"
        self.tensors[name].scale = Scale(scale, self.put(scale, array, "float32").data, every)

    def put_shared(self, name: str, array: np.ndarray, dtype: str) -> Tensor:
        """Put a bias (1 or batch, 1 or heads, n_q, n_kv) into HBM."""
        self.tensors[name] = SharedTensor(name, array, dtype, self.problem)
        return self.tensors[name]

    def put_captured(
        self, letter: str, graph: Graph, arrays: tuple[np.ndarray, ...], real: str
    ) -> None:
        """Allocate the captured arrays of a score function ("F") or mask function ("M") in HBM."""
        for name in (letter, f"{letter}_own"):
            self.tensors[name] = CapturedTensor(name, graph, arrays, self.problem, real)

    def put_paged(self, pages: np.ndarray, **pools: np.ndarray) -> None:
        """Put paged K and V, and the page numbers of each sequence, into HBM."""
        table = BlockTable(pages, self.problem)
        self.tensors["table"] = table
        for name, pool in pools.items():
            self.tensors[name] = PagedTensor(name, pool, self.problem.dtype, table)

    def through(self, pages: np.ndarray, name: str) -> Tensor:
        """Return K or V as a tensor that is read through `pages`, a loaded tile of page numbers."""
        tensor = getattr(self, name)
        assert isinstance(tensor, PagedTensor)
        return PagedTensor(name, tensor.data, tensor.dtype, tensor.table, pages)

    def new(
        self, name: str, n: int, width: int | None, dtype: str, *, kv: bool = False
    ) -> np.ndarray:
        """Allocate a result filled with NaN, and return the array (batch, heads, n[, width])."""
        p = self.problem
        heads = p.kv_heads if kv else p.heads
        shape = (p.batch, heads, n) if width is None else (p.batch, heads, n, width)
        array = np.full(shape, np.nan, numpy_dtype(dtype))
        self.put(name, array, dtype)
        return array


def _heads(member: int | None) -> slice:
    return ALL if member is None else slice(member, member + 1)
