"""The fused softmax-product: simulated and counted, or run on the CPU's cores or on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from flashsim import report
from flashsim.api import array_libraries, dispatch
from flashsim.api.arrays import require_numpy
from flashsim.errors import DTypeError, ShapeError, own_errors
from flashsim.problem import checks
from flashsim.problem.hardware import Device
from flashsim.problem.problem import Problem
from flashsim.report import Table
from flashsim.schedule.tiling import Tiling
from flashsim.studies.ladder import fusion
from flashsim.studies.ladder.bench import Bench
from flashsim.studies.ladder.rungs import RUNGS, total

#: Names of the ladder's tensors in this operation.
_NAMES = {"S": "X", "P": "P", "V": "V", "O": "O"}
Moves = Mapping[tuple[str, str], int]


@own_errors
@dataclass(frozen=True, eq=False, repr=False)
class SoftmaxProduct(report.Tabled):
    """The product softmax(X) V, and the bytes that were moved for it; prints as a table.

    Attributes
    ----------
    out : array (batch, d1, d3), or None for a count
    shape : (batch, d1, d2, d3)
    tiling : Tiling
        Rows and columns of X per block.
    moved : dict
        ``{(op, tensor): bytes}`` for all matrices of the batch: simulated, kernel-reported, or for
        a count predicted. A GPU run has them only with ``trace=True``; a "numba" run has none.
    peak_sram : int or None
        The most bytes on chip in one simulated thread block.
    """

    out: Any
    shape: tuple[int, int, int, int]
    tiling: Tiling
    fused: bool
    moved: Moves = field(default_factory=dict)
    peak_sram: int | None = None

    def bytes(self, op: str | None = None, tensor: str | None = None) -> int:
        """Return the bytes moved, in total or for one operation ("load", "store") and tensor."""
        return total(self.moved, op, tensor)

    def compulsory(self) -> int:
        """Return the compulsory bytes: X and V are read once, and O is written once, in float32."""
        batch, d1, d2, d3 = self.shape
        return 4 * batch * (d1 * d2 + d2 * d3 + d1 * d3)

    def table(self) -> Table:
        """Return a table of the bytes moved, with one row per tensor."""
        batch, d1, d2, d3 = self.shape
        result = Table(
            f"softmax(X) V, {'fused' if self.fused else 'two kernels'}: X {batch} x {d1:,} x "
            f"{d2:,}, V {batch} x {d2:,} x {d3:,}, float32, blocks {self.tiling}",
            ("tensor", "load B", "store B"),
            note=f"compulsory {self.compulsory():,} B"
            + (f"; at most {self.peak_sram:,} B on chip per block" if self.peak_sram else ""),
        )
        for name in dict.fromkeys(tensor for _, tensor in self.moved):
            result.add(name, self.bytes("load", name), self.bytes("store", name))
        result.add("all", self.bytes("load"), self.bytes("store"))
        return result


@own_errors
def run(
    x: Any,
    v: Any,
    *,
    block: int = 64,
    block_2: int | None = None,
    backend: str = "simulator",
    device: str | Device = "H100",
    trace: bool = True,
) -> SoftmaxProduct:
    """Compute softmax(X) V in one pass over X, without storing P in HBM.

    The softmax is computed online along d2. A row of X with only -inf gives NaN.

    Parameters
    ----------
    x : array (batch, d1, d2), float32
    v : array (batch, d2, d3), float32; d3 up to 512
    block : int
        Rows of X per block, and also columns unless `block_2` is set; need not divide d1 or d2.
    block_2 : int, optional
        Columns of X per block.
    backend : {"simulator", "numba", "cupy"}
        "simulator" counts bytes. "numba" runs the same loop compiled, on every core, and does not
        count. "cupy" runs one CUDA kernel, on NumPy, CuPy and torch CUDA arrays, with blocks of 16,
        32 or 64. On the CPU, arrays of any library work, and the result is from the same library.
    device : str or Device
        The device to simulate. A block's tiles must fit in its shared memory plus the registers of
        an SM, in which kernels keep O.
    trace : bool
        Whether the threads of a GPU kernel count the bytes that they move.

    Raises
    ------
    ShapeError, DTypeError, OptionError
        If the arrays do not fit each other, or are not float32.
    SramOverflow, TilingError
        If a block does not fit, or the GPU's kernel does not support its size.
    BackendUnavailable
        If there is no GPU.
    """
    backend = dispatch.backend_name(backend, ("simulator", "numba", "cupy"))
    shape, tiling = _shape(x, v), _tiling(block, block_2)
    if backend == "cupy":
        from flashsim.backends.failures import require_cupy

        require_cupy("cupy")
        from flashsim.backends.cupy_gpu import softmax_matmul as gpu

        out, counted = gpu.forward(x, v, tiling.block_q, tiling.block_k, counts=bool(trace))
        moved = {(op, name): n for key, n in counted.items() for op, name in [key.split()]}
        return SoftmaxProduct(out, shape, tiling, True, moved)
    host = array_libraries.host_of(x)
    x, v = array_libraries.take(host, x=x, v=v)
    require_numpy(backend, x=x, v=v)
    if backend == "numba":
        from flashsim.studies.softmax_matmul import compiled

        out = compiled.forward(x, v, tiling.block_q, tiling.block_k)
        return SoftmaxProduct(host.give(out), shape, tiling, True)
    machine = Device.get(device)
    room = replace(machine, sram_bytes=machine.sram_bytes + machine.registers_per_sm)
    bench = Bench(_problem(shape), tiling, room)
    bench.hbm.put("S", x[:, None])
    bench.hbm.put("V", v[:, None])
    out = bench.hbm.new("O", shape[1], shape[3], "float32")
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        fusion.softmax_product(bench)
    moved = _of_all(bench.transfers, shape[0])
    return SoftmaxProduct(host.give(out[:, 0]), shape, tiling, True, moved, bench.peak)


@own_errors
def count(
    batch: int,
    d1: int,
    d2: int,
    d3: int,
    *,
    block: int = 64,
    block_2: int | None = None,
    fused: bool = True,
) -> SoftmaxProduct:
    """Return the bytes that `run` moves, in closed form.

    With ``fused=False``, two separate kernels move the bytes: an online softmax reads X twice and
    writes P, and a product reads P.
    """
    for name, size in (("batch", batch), ("d1", d1), ("d2", d2), ("d3", d3)):
        checks.positive_int(name, size)
    shape = batch, d1, d2, d3
    tiling = _tiling(block, block_2)
    rung = RUNGS["softmax-product" if fused else "softmax-then-product"]
    moved = rung.predict(_problem(shape), tiling, Device.get("H100"))
    return SoftmaxProduct(None, shape, tiling, fused, _of_all(moved, batch))


@own_errors
def plain(x: Any, v: Any) -> Any:
    """Compute softmax(X) V in two steps, with the arrays' own library: NumPy, CuPy or torch."""
    _shape(x, v)
    if type(x).__module__.partition(".")[0] == "torch":
        return x.softmax(dim=-1) @ v
    weights = x - x.max(axis=-1, keepdims=True)
    weights = np.exp(weights, out=weights)  # NumPy calls CuPy's exp for CuPy arrays
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights @ v


def _shape(x: Any, v: Any) -> tuple[int, int, int, int]:
    for name, array in (("x", x), ("v", v)):
        if not hasattr(array, "dtype") or not hasattr(array, "shape"):
            raise DTypeError(f"{name} must be an array, got {type(array).__name__}")
        if str(array.dtype).removeprefix("torch.") != "float32":
            raise DTypeError(f"{name} must be float32, got {array.dtype}")
        if len(array.shape) != 3 or 0 in array.shape:
            raise ShapeError(f"{name} must be (batch, rows, columns), got {tuple(array.shape)}")
    (batch, d1, d2), (also, rows, d3) = (tuple(map(int, a.shape)) for a in (x, v))
    if (batch, d2) != (also, rows):
        raise ShapeError(
            "v must have shape (batch, d2, d3), where x has shape (batch, d1, d2) = "
            f"{(batch, d1, d2)}, got {(also, rows, d3)}"
        )
    return batch, d1, d2, d3


def _tiling(block: int, block_2: int | None) -> Tiling:
    return Tiling(block, block if block_2 is None else block_2)


def _problem(shape: tuple[int, ...]) -> Problem:
    batch, d1, d2, d3 = shape
    if d3 > 512:
        raise ShapeError(
            "v can have at most 512 columns, because a block keeps whole rows of O on chip; got "
            f"{d3}"
        )
    return Problem(d1, d2, head_dim=1, head_dim_v=d3, batch=batch)


def _of_all(moved: Mapping[tuple[str, str], int], batch: int) -> dict[tuple[str, str], int]:
    """Return a batch's bytes, computed from those of one matrix; rename the ladder's S to X."""
    return {(op, _NAMES[tensor]): n * batch for (op, tensor), n in moved.items()}
