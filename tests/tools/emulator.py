"""Runs the portable kernels' CUDA C++ on a CPU.

g++ compiles the kernels' own source after cuda_on_cpu.h, and cuda_on_cpu.cpp launches it as on a
GPU. It is slow, so problems must be small. It cannot show times, or errors that need threads that
run truly in parallel.
"""

import ctypes
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from flashsim.backends.kernels import nvrtc
from flashsim.backends.launch import kernel as launch
from flashsim.backends.launch.functions import arrays_of_mask, sources_of, tile_of
from flashsim.backends.launch.kernel import Kernel
from flashsim.backends.launch.passes import KernelPass
from flashsim.backends.reports import counts
from flashsim.problem.problem import Problem, numpy_dtype
from flashsim.trace.events import StageTrace

#: g++, unless FLASHSIM_GXX names another.
COMPILER = shutil.which(os.environ.get("FLASHSIM_GXX", "g++")) if sys.platform == "linux" else None
HEADER = Path(__file__).with_name("cuda_on_cpu.h")
HOPPER_HEADER = HEADER.with_name("hopper_on_cpu.h")
#: The tensor map of cuda_on_cpu.cpp (strides in bytes), in the 128 bytes of the driver's map.
_MAP = np.dtype(
    [
        *(("data", "u8"), ("shape", "i8", 4), ("step", "i8", 4)),
        *(("columns", "i4"), ("rows", "i4"), ("bytes", "i4"), ("heads", "i4")),
        *(("interleaved", "i4"), ("", "V36")),
    ]
)
_FLAGS = (
    "-std=c++17",
    "-w",
    "-fPIC",
    "-U_FORTIFY_SOURCE",
    "-fno-exceptions",
    "-fno-asynchronous-unwind-tables",
)
#: Linking takes a third of a kernel's build time; gold links in half of it.
_LINK = ("-shared", *(["-fuse-ld=gold"] if shutil.which("ld.gold") else []))
#: A PTX statement: the text, then operands, whose parentheses are nested at most once.
_ASM = re.compile(
    r'\basm\s*(?:volatile\s*)?\(((?:"[^"]*"|[^()"]|\((?:[^()]|\([^()]*\))*\))*)\)\s*;'
)
_OPERAND = re.compile(r'"[=+]?[rlfnh]"\s*\(((?:[^()]|\([^()]*\))*)\)')
#: What may precede the main instruction; and wgmma, whose operands give its size.
_BEFORE = re.compile(r"\\n|\{|\.reg \.\w+ \w+;|setp\.[^;]*;|\"\s*\"")
_SHAPE = re.compile(r"\.m64n\d+k16")
_OPCODE = re.compile(r"(?<!\.)\b[a-z]\w*\.[\w.:]+")


def function_calls(source: str) -> str:
    """Return preprocessed CUDA C++ with every ``asm`` replaced by a call named after its opcode."""

    def call(found: re.Match[str]) -> str:
        opcode = _OPCODE.search(_BEFORE.sub("", found[1]))
        if not opcode:  # it is only for the compiler
            return ";"
        name = re.sub(r"[.:]+", "_", _SHAPE.sub("", opcode[0]))
        return f"ptx_{name}({', '.join(_OPERAND.findall(found[1]))});"

    return _ASM.sub(call, source)


#: Definitions that the header expects from a kernel.
_OWN = """
#ifndef FS_CLUSTER
#define FS_CLUSTER 1
#endif
alignas(128) char shared[FS_SMEM_BYTES + 128];
extern const unsigned shared_size = sizeof shared, cluster_size = FS_CLUSTER;
"""


@cache  # compiling takes far longer than running
def built(source: str, defines: tuple[str, ...]) -> ctypes.CDLL:
    """Return CUDA C++ compiled as a library for the CPU."""
    text = _gcc(source, *defines, "-E", "-P", "-o", "-")  # an asm may depend on an #if
    folder = _folder().name
    with tempfile.NamedTemporaryFile(suffix=".so") as made:  # once loaded, the file is not needed
        flags = "-include", f"{folder}/{HEADER.name}", *defines, *_FLAGS, "-O0"
        text = function_calls(text) + _OWN
        _gcc(text, *flags, *_LINK, "-o", made.name, "-x", "none", f"{folder}/run.o")
        return ctypes.CDLL(made.name)


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Return a folder with `HEADER` and the compiled launcher, which takes long to compile."""
    folder = tempfile.TemporaryDirectory()
    header, runner = f"{folder.name}/{HEADER.name}", HEADER.with_suffix(".cpp")
    shutil.copy(HEADER, header)
    _gcc("", *_FLAGS, "-O0", "-x", "c++-header", header, "-o", f"{header}.gch")
    _gcc(
        "",
        *_FLAGS,
        "-O2",
        "-fno-semantic-interposition",
        "-c",
        str(runner),
        "-o",
        f"{folder.name}/run.o",
    )
    return folder


def _gcc(source: str, *options: str) -> str:
    """Run g++ on `source`, or on the files that `options` name; skip the test if it is missing."""
    if COMPILER is None:
        pytest.skip("needs Linux and g++")
    source_from = ("-x", "c++", "-") if source else ()
    command = [COMPILER, *source_from, *options]
    done = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout


class Emulator:
    """Compiles kernels and runs them on the CPU.

    Parameters
    ----------
    arch : int
        The value of ``__CUDA_ARCH__``: 800, 900 ...
    """

    def __init__(self, arch: int) -> None:
        self.arch = arch
        self._overwritten: list[tuple[np.ndarray, np.ndarray]] = []

    def source(self, file: str) -> str:
        """Return the source of a kernel's file."""
        return nvrtc.source(file)

    def load(self, kernel: Kernel) -> ctypes.CDLL:
        """Return the kernel as a library with one function, ``run(args, grid_x, grid_y, threads)``.

        It returns whether the kernel finished.
        """
        defines = [f"-D{name}={value}" for name, value in kernel.constants]
        defines.append(f"-D__CUDA_ARCH__={self.arch}")
        args = "DecodeArgs" if kernel.name.startswith("flash_decode") else "Args"
        source, passed = self.source(kernel.file), "x.a"
        if kernel.functions is not None:
            source = kernel.functions.text + source
        if kernel.boxes:
            maps, source = len(kernel.boxes), f'#include "{HOPPER_HEADER}"\n{source}'
            passed = ", ".join([*(f"x.maps[{n}]" for n in range(maps)), "x.a", "x.counter"])
            passed_in = f"TensorMap maps[{maps}]; {args} a; u32* counter;"
        else:
            passed_in = f"{args} a;"
        source += f"""struct Passed {{ {passed_in} }};
            void kernel() {{
                const Passed& x = *static_cast<const Passed*>(arguments);
                {kernel.name}({passed});
            }}\n"""
        return built(source, tuple(defines))

    def run(
        self,
        kernel: Kernel,
        record: np.ndarray,
        grid: tuple[int, int],
        arrays: Iterable[np.ndarray] = (),
    ) -> None:
        """Launch a kernel with an argument of its struct's type, and the arrays that it may write.

        If the kernel may begin before the previous one ends, what that one wrote to these arrays
        becomes visible when the kernel waits for it, as late as possible. This holds for the first
        block or cluster; the others run later, and see it. A launch with FS_AFTER sees all earlier
        writes. Writes to memory that the previous launch still reads are not found.
        """
        library, each = self.load(kernel), {id(x): x for x in map(_whole, arrays)}
        constants, hidden = dict(kernel.constants), []
        # With FS_AFTER, the launch runs beside the previous one, and the next one waits for both.
        beside = {id(x): old for x, old in self._overwritten if constants.get("FS_AFTER")}
        copies = [(x, beside.get(n, x.copy())) for n, x in each.items()]
        if constants.get("FS_OVERLAP") and not constants.get("FS_AFTER"):
            for array, before in self._overwritten:
                if id(array) in each:
                    written = array.copy()
                    array[...] = before
                    hidden.append(written)  # lives until it is shown
                    places = (ctypes.c_void_p(x.ctypes.data) for x in (array, written))
                    library.hide(*places, ctypes.c_size_t(array.nbytes))
        library.run.restype = ctypes.c_bool
        ended = library.run(ctypes.c_void_p(record.ctypes.data), *grid, kernel.threads)
        library.show()
        self._overwritten = [(x, old) for x, old in copies if x.tobytes() != old.tobytes()]
        assert ended, f"{kernel.name}: threads wait for each other in vain"

    def launch(self, one: KernelPass, arrays: dict[str, np.ndarray]) -> StageTrace | None:
        """Run one pass on arrays by their names in ``struct Args``; return its report, if any."""
        for first in one.before:
            self.launch(first, arrays)
        p, tables = one.tables.schedule.problem, one.tables
        record = np.zeros((), one.kernel.args)
        reports = {
            "visit_counts": np.zeros((*one.visit_records, launch.SLOTS), "u4"),
            "tile_counts": np.zeros((one.walks, tables.tiles, launch.SLOTS), "u4"),
        }
        held = {name: tables.table(name) for name in launch.TABLES}
        fill_in(record, one.kernel, p, arrays)
        if "starts" in record.dtype.names:
            starts = tables.starts
            record["starts"] = starts.ctypes.data
        for name, array in {**arrays, **held, **reports}.items():
            if of_functions(name):
                continue
            if name in launch.TENSORS:
                strides = (s // array.itemsize for s in array.strides[:3])
                record[name] = (array.ctypes.data, *strides)
            elif array is not None:
                record[name] = array.ctypes.data
        values = {"walks": one.walks, "tiles": tables.tiles, "clump": one.clump}
        values |= {"n_visits": tables.n_visits, "first": one.items.start, "stop": one.items.stop}
        for name in (*launch.INTEGERS, "scale", "softcap"):
            record[name] = values[name] if name in values else getattr(p, name)
        if one.kernel.boxes:
            record = _with_maps(one, arrays, record)
        written = (x for name, x in arrays.items() if x is not None and not of_functions(name))
        self.run(one.kernel, record, (*one.grid, 1)[:2], written)
        if not dict(one.kernel.constants)["FS_TRACE"]:
            return None
        return counts.stage_trace(one.stage, tables.schedule, *reversed(reports.values()))


def _whole(array: np.ndarray) -> np.ndarray:
    """Return the array that owns a view's memory."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def fill_in(
    record: np.ndarray, kernel: Kernel, problem: Problem, arrays: dict[str, np.ndarray]
) -> None:
    """Fill in the argument's fields of `read_by_functions`."""
    if kernel.functions is not None:
        source = sources_of(problem)[kernel.functions.sums]
        data = [arrays[f"captured{n}"].ctypes.data for n in range(len(source.arrays))]
        to = [arrays[f"d:{n}"].ctypes.data for n in source.gradients]
        packed = source.pack(data, to).tobytes()
        record["captured"] = packed.ljust(kernel.functions.captured_bytes, b"\0")
    if kernel.sinks:
        record["sinks"] = arrays["sinks"].ctypes.data


def _with_maps(one: KernelPass, arrays: dict[str, np.ndarray], args: np.ndarray) -> np.ndarray:
    """Return the parameters of a kernel with tensor maps: maps, its struct, a work counter of 0."""
    boxes = one.kernel.boxes
    passed = np.dtype(
        [("maps", _MAP, len(boxes)), ("a", args.dtype), ("counter", "u8"), ("work", "u4")]
    )
    size = -(-passed.itemsize // 64) * 64
    room = np.zeros(size + 64, "u1")
    room = room[-room.ctypes.data % 64 :][:size]  # the alignment of a tensor map
    record = room[: passed.itemsize].view(passed)[0]
    for to, box in zip(record["maps"], boxes, strict=True):
        array = arrays[box.tensor] if box.tensor != launch.TILE else _planes(one, arrays)
        to["data"], to["shape"] = array.ctypes.data, array.shape[::-1]
        to["step"] = array.strides[::-1]
        to["columns"], to["rows"], to["bytes"] = box.columns, box.rows, array.itemsize
        to["heads"], to["interleaved"] = box.heads, box.interleaved
    record["a"] = args
    if one.kernel.cluster == 1 and one.grid[0] < len(one.items):
        record["counter"] = room.ctypes.data + passed.fields["work"][1]
    return room


def _planes(one: KernelPass, arrays: dict[str, np.ndarray]) -> np.ndarray:
    """Return the captured array that is loaded tile by tile, with its planes on the heads' axis."""
    tile = tile_of(one.tables.schedule.problem)
    return arrays[f"captured{tile.array}"].reshape(1, *tile.shape)


class Faulty(Emulator):
    """An emulator with one of several faults, or none; each kernel is compiled once.

    Parameters
    ----------
    faults : dict
        {name: (a piece of source, its replacement)}. In the replacement FAULT is 1 if `seeded` has
        this name, else 0, and then the replacement must be equivalent to the original.
    file : str
        The only kernel file with faults; "" for all.
    """

    def __init__(self, arch: int, faults: dict[str, tuple[str, str]], file: str = "") -> None:
        super().__init__(arch)
        self.faults, self.file, self.seeded = faults, file, ""

    def source(self, file: str) -> str:
        """Return the source with every fault, each guarded by its number."""
        sound = text = super().source(file)
        for number, (piece, faulty) in enumerate(self.faults.values()):
            if file == (self.file or file):
                text = text.replace(piece, faulty.replace("FAULT", f"(seeded == {number})"))
        return sound if text == sound else 'extern "C" { int seeded; }\n' + text

    def load(self, kernel: Kernel) -> ctypes.CDLL:
        """Load the kernel with the requested fault."""
        library = super().load(kernel)
        if self.source(kernel.file) != super().source(kernel.file):
            number = [*self.faults].index(self.seeded) if self.seeded else -1
            ctypes.c_int.in_dll(library, "seeded").value = number
        return library


def padded(array: np.ndarray) -> np.ndarray:
    """Return a copy whose rows are padded with zeros, as the kernels require."""
    more = launch.row_elements(array.shape[-1]) - array.shape[-1]
    return np.ascontiguousarray(np.pad(array, [(0, 0)] * 3 + [(0, more)]))


def unwritten(problem: Problem, heads: int, n: int, width: int, dtype: str = "") -> np.ndarray:
    """Return (batch, heads, n, width) of NaN; a width of 0 means a float32 vector."""
    shape = (problem.batch, heads, n, *([launch.row_elements(width)] if width else []))
    made = np.empty(shape, numpy_dtype(dtype or problem.dtype) if width else np.float32)
    made.view(np.uint8)[...] = 0xFF
    return made


def run_forward(
    emulator: Emulator, passes: Iterable[KernelPass], problem: Problem, x: dict[str, np.ndarray]
) -> tuple[dict[str, np.ndarray], list[StageTrace | None]]:
    """Run the forward pass of q, k, v; return all arrays, padded, and each stage's events."""
    p = problem
    arrays = {name: padded(x[name]) for name in ("q", "k", "v")}
    arrays |= read_by_functions(p, x)
    arrays["o"] = unwritten(p, p.heads, p.n_q, p.head_dim_v)
    arrays["lse"] = unwritten(p, p.heads, p.n_q, 0)
    return arrays, [emulator.launch(one, arrays) for one in passes]


def of_functions(name: str) -> bool:
    """Whether an array is one of `read_by_functions`."""
    return name.startswith(("captured", "d:")) or name == "sinks"


def read_by_functions(problem: Problem, x: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the captured arrays of score function and mask, and sinks, by name."""
    of_mask = () if problem.mask_mod is None else arrays_of_mask(problem.mask_mod)[1]
    held = {f"captured{n}": array for n, array in enumerate((*x.get("captured", ()), *of_mask))}
    shapes = (
        {} if problem.score_mod is None else {a.name: a.shape for a in problem.score_mod.arrays}
    )
    held |= {f"d:{name}": np.zeros(shapes[name], np.float32) for name in problem.score_grads}
    return held | ({"sinks": x["sinks"]} if problem.sinks else {})


def run_backward(
    emulator: Emulator,
    passes: Iterable[KernelPass],
    problem: Problem,
    forward: dict[str, np.ndarray],
    x: dict[str, np.ndarray],
    *,
    fused: bool,
) -> tuple[dict[str, np.ndarray], list[StageTrace | None]]:
    """Run the backward pass after `run_forward`, with dout and, if given, dlse; return the same."""
    p = problem
    arrays = {**forward, "dout": padded(x["dout"]), "delta": unwritten(p, p.heads, p.n_q, 0)}
    arrays["dlse"] = x.get("dlse")
    arrays["dq"] = unwritten(p, p.heads, p.n_q, p.head_dim)
    arrays["dk"] = unwritten(p, p.kv_heads, p.n_kv, p.head_dim)
    arrays["dv"] = unwritten(p, p.kv_heads, p.n_kv, p.head_dim_v)
    if fused:  # in float32 the accumulator is dQ itself
        narrow = p.dtype != "float32"
        acc = unwritten(p, p.heads, p.n_q, p.head_dim, "float32") if narrow else arrays["dq"]
        arrays["dq_acc"] = acc
        # flags of "flash2-fused-first", which the delta kernel sets to 0
        arrays["turns"] = np.full((p.batch * p.heads, p.n_q, 2), 1, np.uint32)
    return arrays, [emulator.launch(one, arrays) for one in passes]
