"""Emulate AMX tiles and VDPBF16PS in NumPy and in portable code, by Intel's manual.

`TileMachine` executes tile instructions: code that `bf16_dot.amx_tiles` emits calls it where it
would call LLVM's intrinsics. It refuses what a CPU with AMX refuses (a tile that no LDTILECFG
configured) and what is surely a bug (a tile read before it was written). `emulate` adds two kinds
of CPU to the engine, which then runs as on those CPUs, with emulated instructions.

Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2: LDTILECFG, TDPBF16PS,
VDPBF16PS. Both products treat denormals as zero, on the way in and out, and round to nearest even.
"""

import ctypes
import threading
from typing import NamedTuple

import llvmlite.binding as llvm
import numpy as np
from numba.core import config

from flashsim.engines.cpu.bf16_dot import amx_tiles
from flashsim.engines.cpu.micro_kernels import pair_writer, registers
from flashsim.engines.cpu.micro_kernels.registers import Blocking
from flashsim.l2 import compiled

SMALLEST = np.finfo(np.float32).tiny


@np.errstate(invalid="ignore")
def flushed(x):
    """Return float32 without denormals."""
    x = np.asarray(x, np.float32)
    return x * (np.abs(x) >= SMALLEST)  # keeps the sign of a zero, infinity and NaN


def numbers(words):
    """Return the lower and the upper bfloat16 of 32-bit words, as float32 without denormals."""
    low, high = words << np.uint32(16), words & np.uint32(0xFFFF0000)
    return flushed(low.view(np.float32)), flushed(high.view(np.float32))


def fma(total, x, y):
    """Return total + x y, rounded once: float64 holds the product exactly, with digits to spare."""
    with np.errstate(over="ignore", invalid="ignore"):
        exact = flushed(total).astype(np.float64) + x.astype(np.float64) * y
        return flushed(exact.astype(np.float32))


def vdpbf16ps(total, a, b):
    """Return VDPBF16PS of arrays of float32, and of 32-bit pairs."""
    (a_low, a_high), (b_low, b_high) = numbers(a), numbers(b)
    return fma(fma(total, a_high, b_high), a_low, b_low)


class Refused(Exception):
    """Raised where a CPU with AMX raises #UD, and for a program that cannot be intended."""


class TileMachine:
    """One thread's eight tiles; `counts` says how often each instruction ran."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, int]] = []  # rows, and bytes per row, of each tile
        self.tiles: dict[int, np.ndarray] = {}
        self.counts = {"Configure": 0, "Release": 0, "Zero": 0, "Load": 0, "Store": 0, "Dot": 0}

    def configure(self, config: bytes) -> None:
        """LDTILECFG."""
        self.counts["Configure"] += 1
        width = np.frombuffer(config[16:48], np.uint16)
        if len(config) != 64 or config[0] != 1 or any(config[1:16]) or any(config[56:]):
            raise Refused("no palette 1, or something where zeros belong")
        if width[8:].any() or max(config[48:56]) > 16 or width.max() > 64:
            raise Refused("tiles of palette 1 are eight of up to 16 rows of 64 B")
        self.shapes, self.tiles = list(zip(config[48:56], width.tolist(), strict=False)), {}

    def release(self) -> None:
        """TILERELEASE."""
        self.counts["Release"] += 1
        self.shapes, self.tiles = [], {}

    def zero(self, tile: int) -> None:
        """TILEZERO."""
        self.counts["Zero"] += 1
        rows, width = self.shape(tile)
        self.tiles[tile] = np.zeros((rows, width // 4), np.uint32)

    def load(self, tile: int, address: int, stride: int) -> None:
        """TILELOADD of rows that are `stride` bytes apart."""
        self.counts["Load"] += 1
        self.tiles[tile] = self.memory(address, stride, *self.shape(tile)).copy()

    def store(self, tile: int, address: int, stride: int) -> None:
        """TILESTORED."""
        self.counts["Store"] += 1
        self.memory(address, stride, *self.shape(tile))[:] = self.read(tile)

    def dot(self, *registers: int) -> None:
        """TDPBF16PS: sums of even and of odd pairs from zero, then both added to C."""
        self.counts["Dot"] += 1
        c, a, b = map(self.read, registers)
        if len({*registers}) < 3 or a.shape != (len(c), len(b)) or b.shape[1] != c.shape[1]:
            raise Refused(f"tiles of C {c.shape}, A {a.shape} and B {b.shape}")
        sums = np.zeros((2, *c.shape), np.float32)
        with np.errstate(over="ignore", invalid="ignore"):  # also of rows that nobody reads
            pairs_a, pairs_b = np.stack(numbers(a)), np.stack(numbers(b))
            products = pairs_a[:, :, :, None].astype(np.float64) * pairs_b[:, None]
            for k in range(len(b)):  # float64 holds a product exactly, with digits to spare
                sums = flushed((sums + products[:, :, k]).astype(np.float32))
            total = flushed(c.view(np.float32)) + flushed(sums[0] + sums[1])
            self.tiles[registers[0]] = flushed(total).view(np.uint32)

    def read(self, tile: int) -> np.ndarray:
        """Return a tile that was written."""
        self.shape(tile)
        if tile not in self.tiles:
            raise Refused(f"tmm{tile} is read before it is written")
        return self.tiles[tile]

    def shape(self, tile: int) -> tuple[int, int]:
        """Return the rows, and bytes per row, of a configured tile."""
        if not self.shapes or 0 in self.shapes[tile]:
            raise Refused(f"tmm{tile} is used, but no LDTILECFG described it")
        return self.shapes[tile]

    @staticmethod
    def memory(address: int, stride: int, rows: int, width: int) -> np.ndarray:
        """Return rows of a tile in memory, `stride` bytes apart."""
        words = ctypes.c_uint32 * ((stride * (rows - 1) + width) // 4)
        flat = np.frombuffer(words.from_address(address), np.uint32)
        return np.lib.stride_tricks.as_strided(flat, (rows, width // 4), (stride, 4))


# -- kinds of CPU for the engine -------------------------------------------------------------------


class EmulatedAmx(NamedTuple):
    """A CPU whose tiles are `TileMachine`s, one per thread."""

    width: int


class EmulatedBf16(NamedTuple):
    """A CPU whose VDPBF16PS is two fused multiply-adds, without denormals."""

    width: int


class Machines(threading.local):
    """The machine of each thread."""

    def __init__(self) -> None:
        self.own = TileMachine()
        ALL.append(self.own)


#: The machines of all threads, and the errors in them: a callback cannot raise.
ALL: list[TileMachine] = []
ERRORS: list[Exception] = []
_machines = Machines()


def _callback(run, *kinds):
    """Return a C function that runs an instruction on this thread's machine."""

    def guarded(*args):
        try:
            run(_machines.own, *args)
        except Exception as error:
            ERRORS.append(error)

    return ctypes.CFUNCTYPE(None, *kinds)(guarded)


_TILE, _ADDRESS, _STRIDE = ctypes.c_uint8, ctypes.c_void_p, ctypes.c_int64
#: What LLVM's intrinsics do here.
_CALLBACKS = {
    "ldtilecfg": _callback(lambda own, at: own.configure(ctypes.string_at(at, 64)), _ADDRESS),
    "tilerelease": _callback(TileMachine.release),
    "tilezero": _callback(TileMachine.zero, _TILE),
    "tileloadd64": _callback(TileMachine.load, _TILE, _ADDRESS, _STRIDE),
    "tilestored64": _callback(TileMachine.store, _TILE, _ADDRESS, _STRIDE),
    "tdpbf16ps": _callback(TileMachine.dot, _TILE, _TILE, _TILE),
}
_PREFIX = "flashsim_machine_"


def two_fmas(code: pair_writer.PairCode, left, right, total):
    """Return the code of VDPBF16PS for any CPU, which adds the upper numbers first."""
    b, bits = code.b, code.ints(0).type

    def flush(x):
        """Return x without denormals."""
        exponent = b.and_(b.bitcast(x, bits), code.ints(0x7F800000))
        sign = b.bitcast(b.and_(b.bitcast(x, bits), code.ints(1 << 31)), code.vector)
        return b.select(b.icmp_unsigned("==", exponent, code.ints(0)), sign, x)

    def number(pair, upper: bool):
        """Return one bfloat16 of each pair, as a float."""
        words = b.bitcast(pair, bits)
        half = b.and_(words, code.ints(0xFFFF0000)) if upper else b.shl(words, code.ints(16))
        return flush(b.bitcast(half, code.vector))

    for upper in (True, False):
        total = flush(code.fma(number(left, upper), number(right, upper), total))
    return total


def emulate(monkeypatch) -> None:
    """Let the engine compile for the two emulated kinds during a test, and cache nothing.

    Otherwise a process without this module would find a cache index that names unknown kinds.
    LLVM does not optimise their code: it runs nowhere else, and too seldom to repay that.
    """
    monkeypatch.setattr(compiled._Disk, "save_overload", lambda *_: None)
    monkeypatch.setattr(config, "OPT", type(config.OPT)(0))
    for name, callback in _CALLBACKS.items():
        llvm.add_symbol(f"{_PREFIX}{name}", ctypes.cast(callback, ctypes.c_void_p).value)
    for kind, pairs in ((EmulatedAmx, "amx"), (EmulatedBf16, "vdpbf16ps")):
        monkeypatch.setitem(registers.BLOCKING, kind, Blocking(64, 4, pairs=pairs, native=False))
    monkeypatch.setattr(amx_tiles, "INTRINSICS", _PREFIX)
    real = pair_writer.PairCode.step
    step = lambda code, *args: (real if code.native else two_fmas)(code, *args)  # noqa: E731
    monkeypatch.setattr(pair_writer.PairCode, "step", step)
    ERRORS.clear()
