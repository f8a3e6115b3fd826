"""Emulate AMX tiles and VDPBF16PS in NumPy and in portable code, by Intel's manual.

`TileMachine` executes the instructions of `bf16_dot.amx_tiles.program`, the same that
`bf16_dot.amx_tiles.lower` emits for a CPU with AMX. It refuses what such a CPU refuses (a tile that
no LDTILECFG configured) and what is surely a bug (a tile read before it was written). `emulate`
adds two kinds of CPU to the engine, which then runs as on those CPUs, with emulated instructions.

Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2: LDTILECFG, TDPBF16PS,
VDPBF16PS. Both products treat denormals as zero, on the way in and out, and round to nearest even.
"""

import ctypes
import itertools
import threading
from functools import partial
from typing import NamedTuple

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba.core import config

from flashsim.engines.cpu.bf16_dot import amx_tiles, codegen
from flashsim.engines.cpu.micro_kernels import kv_stream, pair_writer, registers
from flashsim.engines.cpu.micro_kernels.registers import Blocking
from flashsim.engines.cpu.micro_kernels.writer import INT, VOID
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

    def run(
        self, program: amx_tiles.Program, addresses: dict[str, int], strides: dict[str, int], n
    ):
        """Run a program on memory at addresses; strides count 32-bit elements."""
        for instruction in program.before:
            self.step(instruction, addresses, strides, 0)
        for x in range(0, n - amx_tiles.SIDE + 1, amx_tiles.SIDE):
            for instruction in program.each:
                self.step(instruction, addresses, strides, x)
        for instruction in program.after:
            self.step(instruction, addresses, strides, 0)

    def step(self, instruction: amx_tiles.Instruction, addresses, strides, x: int) -> None:
        """Execute one instruction, in the iteration of pair x."""
        self.counts[type(instruction).__name__] += 1
        if isinstance(instruction, amx_tiles.Zero):
            rows, width = self.shape(instruction.tile)
            self.tiles[instruction.tile] = np.zeros((rows, width // 4), np.uint32)
        elif isinstance(instruction, amx_tiles.Dot):
            self.dot(instruction)
        else:
            name, stride = instruction.operand, strides[instruction.operand]
            at = instruction.row * amx_tiles.SIDE * stride + instruction.column * amx_tiles.SIDE
            at += {"A": x, "B": x * stride, "C": 0}[name]
            memory = self.memory(addresses[name] + 4 * at, stride, *self.shape(instruction.tile))
            if isinstance(instruction, amx_tiles.Load):
                self.tiles[instruction.tile] = memory.copy()
            else:
                memory[:] = self.read(instruction.tile)

    def dot(self, instruction: amx_tiles.Dot) -> None:
        """Execute TDPBF16PS: sums of even and of odd pairs from zero, then both added to C."""
        c, a, b = (self.read(tile) for tile in instruction)
        if len({*instruction}) < 3 or a.shape != (len(c), len(b)) or b.shape[1] != c.shape[1]:
            raise Refused(f"tiles of C {c.shape}, A {a.shape} and B {b.shape}")
        sums = np.zeros((2, *c.shape), np.float32)
        with np.errstate(over="ignore", invalid="ignore"):  # also of rows that nobody reads
            pairs_a, pairs_b = np.stack(numbers(a)), np.stack(numbers(b))
            products = pairs_a[:, :, :, None].astype(np.float64) * pairs_b[:, None]
            for k in range(len(b)):  # float64 holds a product exactly, with digits to spare
                sums = flushed((sums + products[:, :, k]).astype(np.float32))
            total = flushed(c.view(np.float32)) + flushed(sums[0] + sums[1])
            self.tiles[instruction.c] = flushed(total).view(np.uint32)

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
        """Return rows of a tile in memory, `stride` elements apart."""
        words = ctypes.c_uint32 * (stride * (rows - 1) + width // 4)
        flat = np.frombuffer(words.from_address(address), np.uint32)
        return np.lib.stride_tricks.as_strided(flat, (rows, width // 4), (4 * stride, 4))


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

_STEP = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p, ctypes.c_int64] * 3, ctypes.c_int64)
_ONCE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def _callback(kind, function):
    def guarded(*args):
        try:
            function(*args)
        except Exception as error:
            ERRORS.append(error)

    return kind(guarded)


def _step(program, C, ldc, A, lda, B, ldb, n):
    strides = {"C": ldc, "A": lda, "B": ldb}
    _machines.own.run(program, {"C": C, "A": A, "B": B}, strides, n)


_CALLBACKS = {
    "flashsim_machine_configure": _callback(
        _ONCE, lambda _: _machines.own.configure(amx_tiles.CONFIG)
    ),
    "flashsim_machine_release": _callback(_ONCE, lambda _: _machines.own.release()),
    **{
        f"flashsim_machine_{mode}_{rows}x{columns}": _callback(
            _STEP, partial(_step, amx_tiles.program(mode, rows, columns))
        )
        for mode, rows, columns in itertools.product(("set", "add"), (1, 2), (1, 2))
    },
}


def _external(module: ir.Module, name: str, kinds: list) -> ir.Function:
    found = module.globals.get(name)
    return found or ir.Function(module, ir.FunctionType(VOID, kinds), name)


def _lower(module, block: Blocking, itemsize: int, mode: str, rows: int, columns: int):
    address = ir.FloatType().as_pointer()
    kinds = [address, INT, address, INT, address, INT, INT]
    return _external(module, f"flashsim_machine_{mode}_{rows}x{columns}", kinds)


def _once(name: str):
    def build(module, block: Blocking, itemsize: int):
        del block, itemsize
        return _external(module, f"flashsim_machine_{name}", [ir.FloatType().as_pointer()])

    return build


class TwoFmas(pair_writer.PairCode):
    """VDPBF16PS in portable code."""

    def step(self, left, right, total):
        """Add the upper numbers first."""
        for upper in (True, False):
            x, y = (self.number(pair, upper) for pair in (left, right))
            total = self.flush(self.fma(x, y, total))
        return total

    def number(self, pair, upper: bool):
        """Return one bfloat16 of each pair, as a float."""
        bits = self.b.bitcast(pair, self.ints(0).type)
        mask, shift = self.ints(0xFFFF0000), self.ints(16)
        bits = self.b.and_(bits, mask) if upper else self.b.shl(bits, shift)
        return self.flush(self.b.bitcast(bits, self.vector))

    def flush(self, x):
        """Return x without denormals."""
        bits = self.b.bitcast(x, self.ints(0).type)
        exponent = self.b.and_(bits, self.ints(0x7F800000))
        sign = self.b.bitcast(self.b.and_(bits, self.ints(1 << 31)), self.vector)
        return self.b.select(self.b.icmp_unsigned("==", exponent, self.ints(0)), sign, x)


def emulate(monkeypatch) -> None:
    """Let the engine compile for the two emulated kinds during a test, and cache nothing.

    Otherwise a process without this module would find a cache index that names unknown kinds.
    LLVM does not optimise their code: it runs nowhere else, and too seldom to repay that.
    """
    monkeypatch.setattr(compiled._Disk, "save_overload", lambda *_: None)
    monkeypatch.setattr(config, "OPT", type(config.OPT)(0))
    for name, callback in _CALLBACKS.items():
        llvm.add_symbol(name, ctypes.cast(callback, ctypes.c_void_p).value)
    for kind, pairs in ((EmulatedAmx, "machine"), (EmulatedBf16, "fmas")):
        monkeypatch.setitem(registers.BLOCKING, kind, Blocking(64, 4, pairs=pairs))
        monkeypatch.setitem(registers.NARROW, kind, registers.NARROW[registers.Amx])
        monkeypatch.setitem(pair_writer.NATIVE, pairs, False)
    products = {
        "machine": partial(codegen.build_tile_product, lower=_lower),
        "fmas": partial(codegen.build_vector_product, writer=TwoFmas),
    }
    monkeypatch.setitem(pair_writer.WRITERS, "fmas", TwoFmas)
    monkeypatch.setitem(pair_writer.WRITERS, "machine", pair_writer.PairCode)
    monkeypatch.setitem(kv_stream.TILED, "machine", _lower)
    for pairs, build in products.items():
        monkeypatch.setitem(codegen.PRODUCTS, pairs, build)
    monkeypatch.setitem(codegen.TILES, "machine", (_once("configure"), _once("release")))
    ERRORS.clear()
