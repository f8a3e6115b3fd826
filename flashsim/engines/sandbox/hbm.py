"""The simulated HBM of a user's algorithm: tensor handles, and a record of stored parts."""

import math
from typing import Any, NoReturn

import numpy as np

from flashsim.algorithms.hbm import Tensor
from flashsim.engines.sandbox.spans import span
from flashsim.engines.sandbox.tape import taped
from flashsim.errors import MemoryModelError, OptionError, ShapeError, choices, shown
from flashsim.problem import checks
from flashsim.problem.problem import Problem, numpy_dtype
from flashsim.schedule.names import CODES, TENSORS
from flashsim.schedule.tensors import COL, ROW, TILE
from flashsim.trace.validate import MOST_NAMES, own_name

#: The axes along which a workspace can be divided into tiles.
SIDES = {"queries": ROW, "keys": COL, "scores": TILE}


class Remote:
    """A handle of a tensor in HBM: the tensor's name, shape and type, but not its numbers."""

    __slots__ = ("dtype", "name", "shape")

    def __init__(self, name: str, shape: tuple[int, ...], dtype: str) -> None:
        self.name, self.shape, self.dtype = name, shape, dtype

    @property
    def width(self) -> int:
        """Return the number of elements per row of the tensor (1 for a vector)."""
        return self.shape[1] if len(self.shape) > 1 else 1

    def __repr__(self) -> str:
        return f"<{self.name} {self.shape} in HBM, {self.dtype}>"

    def _taped(self) -> dict[str, str]:
        return {"hbm": self.name}

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise MemoryModelError(
            f"{self.name} lies in HBM: load a tile of it into SRAM by sram.load(hbm.{self.name}, "
            "rows), and compute with that tile",
            "unloaded",
        )

    __array__ = __array_ufunc__ = __array_function__ = __getitem__ = __len__ = __iter__ = _refuse
    __add__ = __radd__ = __mul__ = __rmul__ = __matmul__ = __rmatmul__ = __sub__ = _refuse
    __rsub__ = __truediv__ = __rtruediv__ = __neg__ = __float__ = __bool__ = _refuse
    __reduce_ex__ = __copy__ = __deepcopy__ = _refuse

    def __setitem__(self, *_: object) -> NoReturn:
        raise MemoryModelError(
            f"{self.name} lies in HBM and cannot be assigned to: write to it by "
            f"sram.store(hbm.{self.name}, rows, tile)"
        )

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and hasattr(np.ndarray, name):
            self._refuse()
        raise AttributeError(
            f"a tensor in HBM has no attribute {name!r}; choose from name, shape, dtype, width"
        )


class OpenHbm:
    """The tensors of one run, as attributes: ``hbm.Q``, ``hbm.O`` and those that `new` allocates.

    HBM holds `samples` sets of inputs side by side; bytes are counted for one set. `most` is the
    largest number of bytes for workspaces per set.
    """

    def __init__(self, problem: Problem, samples: int = 1, most: int | None = None) -> None:
        self._problem, self._samples, self._most = problem, samples, most
        self._inside: dict[str, Tensor] = {}
        self._remotes: dict[str, Remote] = {}
        self._written: dict[
            str, np.ndarray
        ] = {}  # results and workspaces: which elements were stored
        self._codes: dict[str, int] = {}
        self._own: dict[str, int] = {}  # workspaces, in the order of their codes

    @property
    def tensors(self) -> dict[str, Remote]:
        """Return the handles of all tensors, by name."""
        return dict(self._remotes)

    def __getattr__(self, name: str) -> Remote:
        remotes = self.__dict__.get("_remotes", {})
        if name in remotes:
            return remotes[name]
        raise MemoryModelError(
            f"HBM holds no tensor {name!r}; choose from {choices(name, remotes)}"
        )

    def _taped(self) -> dict[str, int]:
        return {"space": 0}

    @taped("new")
    def new(
        self,
        name: str,
        n: int,
        width: int | None = None,
        dtype: str | None = None,
        *,
        along: str = "queries",
    ) -> Remote:
        """Allocate a workspace in HBM, and return the handle of this workspace.

        Parameters
        ----------
        name : str
            The workspace's name in the trace and in pictures, such as ``"O_split"``.
        n, width : int
            Rows, and elements per row; a width of None means one number per row.
        dtype : str, optional
            Default: the accumulator type.
        along : {"queries", "keys", "scores"}
            The axis along which the workspace is divided into tiles. It determines whether there is
            one matrix per query head or per key head, and where pictures draw the workspace.
        """
        checks.one_of("along", along, SIDES)
        if name in self._remotes:
            raise OptionError(f"HBM already has a tensor {name!r}; give the workspace another name")
        sides = [checks.positive_int("n", n)]
        sides += [] if width is None else [checks.positive_int("width", width)]
        p = self._problem
        heads = p.kv_heads if along == "keys" else p.heads
        kind = checks.dtype_name(dtype or p.compute_dtype)
        nbytes = math.prod((p.batch, heads, *sides)) * numpy_dtype(kind).itemsize
        if self._most is not None and nbytes > self._most:
            raise OptionError(
                f"workspace {name!r} of {nbytes:,} B is too large, because the grader allows only "
                f"{self._most:,} B more; use a smaller workspace"
            )
        self._most = None if self._most is None else self._most - nbytes
        try:
            batch = self._samples * p.batch
            array = np.full((batch, heads, *sides), np.nan, numpy_dtype(kind))
        except (MemoryError, ValueError):  # NumPy raises the latter above 2**63 bytes
            raise OptionError(
                f"this computer has too little memory for a workspace {name!r} of "
                f"{(p.batch, heads, *sides)} elements; use a smaller workspace"
            ) from None
        self._code(name, SIDES[along])
        return self._put(name, array, kind, written=False)

    def _put(self, name: str, array: np.ndarray, dtype: str, *, written: bool) -> Remote:
        """Add a tensor (batch, heads, n[, width]) to HBM; unless `written`, it holds no values."""
        p = self._problem
        batch, heads, *sides = array.shape
        data = array.reshape(batch * p.kv_heads, heads // p.kv_heads, *sides)
        self._inside[name] = Tensor(name, data, dtype, self._code(name))
        self._remotes[name] = Remote(name, array.shape[2:], dtype)
        if not written:
            self._written[name] = np.zeros(data.shape, bool)
        return self._remotes[name]

    def _code(self, name: str, axis: int = ROW) -> int:
        """Return a tensor's or buffer's number in events; an unknown name gets a new number."""
        if name in CODES:
            return CODES[name]
        if name not in self._codes:
            if not own_name(name):
                raise OptionError(
                    "a tensor's name must be an identifier of at most 24 characters, such as "
                    f"O_split, got {shown(name)}"
                )
            if len(self._codes) >= MOST_NAMES:
                raise OptionError(
                    f"an algorithm may use at most {MOST_NAMES} different names for its tiles "
                    "and workspaces; use the same name for several of them"
                )
            self._codes[name] = len(TENSORS) + len(self._codes)
            self._own[name] = axis
        return self._codes[name]

    # -- for the machine ------------------------------------------------------------------------

    def _behind(self, tensor: Remote) -> Tensor:
        """Return the `Tensor` of a handle; raise an error if another HBM created the handle."""
        if self._remotes.get(tensor.name) is not tensor:
            raise MemoryModelError(
                f"{tensor!r} belongs to another machine; use the tensors in machine.hbm of this "
                "machine"
            )
        return self._inside[tensor.name]

    def _require_writable(self, tensor: Remote) -> None:
        """Raise an error if the tensor is an input, since inputs are read-only."""
        self._behind(tensor)
        if tensor.name not in self._written:
            outputs = ", ".join(self._written)
            raise MemoryModelError(
                f"{tensor.name} is an input, which cannot be written; write to {outputs}, or to "
                "a workspace made by machine.hbm.new(name, rows, width)",
                "operation",
            )

    def _require_written(
        self, tensor: Remote, rows: slice, cols: slice, member: int | None
    ) -> None:
        """Raise an error if an algorithm reads a part of a tensor that it never stored."""
        known = tensor.name not in self._written  # an input
        if not (known or self._written_part(tensor, rows, cols, member).all()):
            raise MemoryModelError(
                f"{tensor.name}, rows {rows.start}:{rows.stop}, was never stored, so there are no "
                "numbers to read or to add to; store these rows first, or clear them by "
                f"sram.store(hbm.{tensor.name}, rows, 0.0)",
                "unstored",
            )

    def _written_part(
        self, tensor: Remote, rows: slice, cols: slice, member: int | None
    ) -> np.ndarray:
        """Return a view that says which elements of a part of a tensor were stored."""
        heads = slice(None) if member is None else slice(member, member + 1)
        part = self._written[tensor.name][:, heads, rows]
        return part if self._behind(tensor).vector else part[..., cols]

    def _stored(self, name: str) -> str:
        """Return which rows of a result were stored: "all", "none", or a text about the gaps."""
        written = self._written[name]
        if not written.any():
            return "none"
        rows = written.reshape(*written.shape[:3], -1).all(axis=(0, 1, 3))
        if rows.all():
            return "all"
        missing = np.flatnonzero(~rows)
        return f"rows {missing[0]} to {missing[-1]}" if len(missing) > 1 else f"row {missing[0]}"

    def _array(self, name: str) -> np.ndarray:
        """Return the numbers of a tensor, (samples * batch, heads, n[, width])."""
        data = self._inside[name].data
        return data.reshape(len(data) // self._problem.kv_heads, -1, *data.shape[2:])


def require_shape(name: str, got: tuple[int, ...], want: tuple[int, ...]) -> None:
    """Raise `ShapeError` unless an input has the shape that its name implies."""
    if got != want:
        raise ShapeError(f"inputs[{name!r}] must have the shape {want}, got {got}")


def part_of(tensor: Any, rows: Any, cols: Any) -> tuple[slice, slice]:
    """Return the slices of rows and columns that a user requests, cut to the tensor's size."""
    if not isinstance(tensor, Remote):
        raise MemoryModelError(
            "sram.load, sram.store and sram.reduce take a tensor in HBM, such as machine.hbm.K, "
            f"got {type(tensor).__name__}"
        )
    slices = []
    for which, size, what in ((rows, tensor.shape[0], "rows"), (cols, tensor.width, "columns")):
        part = span(which, size, f"{what} of {tensor.name}")
        if part.step != 1 or not len(part):
            raise ShapeError(
                f"{tensor.name} has {size} {what}; {which.start}:{which.stop} lie outside"
                if not len(part)
                else f"{what} of a tile must be contiguous, got a slice with step {part.step}"
            )
        slices.append(slice(part.start, part.stop))
    return slices[0], slices[1]
