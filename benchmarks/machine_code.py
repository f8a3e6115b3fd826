"""Compare the machine code of all kernels before and after a change of sources; needs no GPU.

    python benchmarks/machine_code.py --save before.json      # in the tree as it was
    python benchmarks/machine_code.py --against before.json   # in the tree as it is

Compiles variants of every kernel of the GPU backends: C++ with CuPy's NVRTC, Python with numba-cuda
and `ptxas` (pip: nvidia-cuda-nvcc, with -cu12 for CUDA 12), for GPUs of every generation, head
dimensions, masks and reports. It compares the instructions and constants of each cubin, without its
names. ``--only TEXT`` selects the variants whose name begins with it, e.g. "hopper:". The exit
status is 1 if a variant's code changed, was added or was removed. Takes about ten minutes on two
idle cores.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
from cupy.cuda import nvrtc as cupy_nvrtc

from flashsim import Problem
from flashsim.backends.kernels import nvrtc
from flashsim.backends.launch.kernel import Gpu, Kernel
from flashsim.backends.launch_policy import quantize
from flashsim.backends.launch_policy.family import Family
from flashsim.backends.launch_policy.hopper import HOPPER, Hopper
from flashsim.backends.launch_policy.hopper_fp8 import HOPPER_FP8
from flashsim.backends.launch_policy.portable import PORTABLE, TF32
from flashsim.backends.numba_gpu import compiler, launch_policy
from flashsim.problem.masks import BlockMask

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "tools"))

from gpus import GPUS, ODD

_BLOCKS = BlockMask(np.eye(4, dtype=bool), 128, 128)
PROBLEMS = {
    "bf16 64": Problem(512, 512, 64, heads=2, dtype="bfloat16"),
    "bf16 64 causal": Problem(512, 512, 64, heads=2, dtype="bfloat16", causal=True),
    "bf16 128": Problem(4096, 4096, 128, heads=2, dtype="bfloat16"),
    "bf16 128 causal": Problem(512, 512, 128, heads=2, dtype="bfloat16", causal=True),
    "bf16 96 window": Problem(4096, 4096, 96, heads=2, dtype="bfloat16", window=(100, 20)),
    "bf16 128 blocks": Problem(512, 512, 128, dtype="bfloat16", block_mask=_BLOCKS),
    "bf16 192 causal": Problem(512, 512, 192, heads=2, dtype="bfloat16", causal=True),
    "bf16 256 causal": Problem(512, 512, 256, heads=2, dtype="bfloat16", causal=True),
    "fp16 59": Problem(333, 517, 59, 111, heads=2, dtype="float16"),
    "fp16 80 odd": Problem(500, 500, 80, 40, **ODD),
    "fp16 128 odd": Problem(500, 500, 128, 64, **ODD),
    "fp32 64 causal": Problem(512, 512, 64, heads=2, causal=True, softcap=1.0),
    "fp32 256": Problem(512, 512, 256, heads=2),
    "fp8 64 causal": Problem(512, 512, 64, dtype="float8_e4m3fn", scales=(64, 128), causal=True),
    "fp8 128": Problem(512, 512, 128, dtype="float8_e4m3fn", scales=(64, 128)),
    "fp8 128 window": Problem(512, 512, 128, dtype="float8_e5m2", scales="head", window=(99, 20)),
    "fp8 256 causal": Problem(512, 512, 256, dtype="float8_e4m3fn", scales="tensor", causal=True),
}
#: Compiled for every GPU and report; the others only for the main targets.
THOROUGHLY = ("bf16 128 causal", "fp16 80 odd", "fp32 64 causal")
MAIN = ("sm_80", "sm_90")
REPORTS = ("", "counts", "timeline")
#: Problems for the Python kernels, which take seconds each to compile.
PYTHON = ("bf16 64", "bf16 128 causal", "fp16 80 odd", "bf16 256 causal")
FAMILIES: dict[str, Family] = {
    "portable": PORTABLE,
    "tf32": TF32,
    "hopper": HOPPER,
    "hopper fp8": HOPPER_FP8,
    "python tensor": launch_policy.TENSOR,
    "python hopper": launch_policy.HOPPER,
}


class Variant(NamedTuple):
    """One kernel for one architecture."""

    kernel: Kernel
    arch: str
    python: bool


def variants() -> Iterator[tuple[str, Variant]]:
    """Yield names and their variants."""
    for family, name, arch, report in product(FAMILIES, PROBLEMS, GPUS, REPORTS):
        if _wanted(family, name, arch, report):
            for stage, kernel in _kernels(FAMILIES[family], PROBLEMS[name], GPUS[arch], report):
                full = f"{family}: {name}, {report or 'plain'}, {arch}, {stage}"
                yield full, Variant(kernel, arch, "python" in family)
    for d, rotate, granularity in product(quantize.HEAD_DIMS, (False, True), ("head", "block")):
        for kernel in quantize.kernels(d, "bfloat16", granularity, (64, 128), rotate=rotate):
            mode = dict(kernel.constants)["FS_MODE"]
            name = f"quantise: {d}, a scale each {granularity}, rotated {rotate}, mode {mode}"
            yield name, Variant(kernel, "sm_90", python=False)


#: Only Hopper's C++ kernels have this backward; its row-wise kernels are its own.
FIRST = "flash2-fused-first"


def _wanted(family: str, name: str, arch: str, report: str) -> bool:
    if PROBLEMS[name].fp8 != (family == "hopper fp8"):
        return False
    single = PROBLEMS[name].dtype == "float32"
    if ("python" in family and name not in PYTHON) or (
        family != "portable" and single != (family == "tf32")
    ):
        return False
    if "hopper" in family:
        return arch == "sm_90"
    if arch not in MAIN:
        return name in THOROUGHLY and not report and "python" not in family
    return not report or (name in THOROUGHLY and arch == "sm_90")


def _kernels(family: Family, p: Problem, gpu: Gpu, report: str) -> Iterator[tuple[str, Kernel]]:
    """Yield every kernel of the forward and the backwards; for Hopper, with all tilings."""
    own = isinstance(family, Hopper)  # few tilings; the row-wise kernels are the portable ones
    for direction, algorithm in (
        *(("forward", "flash2"), ("backward", "flash2"), ("backward", "flash2-fused")),
        ("backward", FIRST),
    ):
        if algorithm == FIRST and (
            family is not HOPPER or family.refusal(p, None, gpu, direction, FIRST)
        ):
            continue
        if family is HOPPER_FP8 and direction == "backward":
            continue
        if family is launch_policy.HOPPER and family.refusal(p, None, gpu, direction):
            continue  # the Python backward does not support the widest rows
        tilings = [
            None,
            *(
                family.tilings(p, gpu, direction, algorithm)
                if family in (HOPPER, HOPPER_FP8)
                else ()
            ),
        ]
        for tiling in tilings if p.block_mask is None else [None]:
            given = p, tiling, gpu, "ascending", report
            if direction == "forward":
                for one in family.forward_passes(*given):
                    yield f"forward {tiling or ''}", one.kernel
                continue
            turns = algorithm == "flash2-fused" and family.orders_dq(p)
            for ordered in (False, True)[: 1 + turns]:
                for one in family.backward_passes(*given, algorithm, ordered):
                    if one.kernel.boxes or not own or algorithm == FIRST:
                        how = " in turns" if ordered else ""
                        yield f"{algorithm} {one.stage.name} {tiling or ''}{how}", one.kernel


def digest(one: Variant) -> str:
    """Return the digest of a kernel's instructions and constants."""
    cubin = (_python_cubin if one.python else _cubin)(one.kernel, one.arch)
    return hashlib.sha256(b"".join(_code(cubin))).hexdigest()[:32]


def _cubin(kernel: Kernel, arch: str) -> bytes:
    options = kernel.options if kernel.boxes else (*kernel.options, f"-arch={arch}")
    program = cupy_nvrtc.createProgram(nvrtc.source(kernel.file), kernel.file, [], [])
    cupy_nvrtc.compileProgram(program, options)
    cubin = cupy_nvrtc.getCUBIN(program)
    cupy_nvrtc.destroyProgram(program)
    return bytes(cubin)


def _python_cubin(kernel: Kernel, arch: str) -> bytes:
    from cuda import pathfinder

    text = compiler.ptx(kernel, GPUS[arch].compute_capability)
    program = pathfinder.find_nvidia_binary_utility("ptxas") or shutil.which("ptxas")
    if program is None:
        raise SystemExit("ptxas is missing: pip install nvidia-cuda-nvcc (cu12: ...-nvcc-cu12)")
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(text)
        target = arch + "a" * (arch == "sm_90")
        subprocess.run([program, f"-arch={target}", source, "-o", made], check=True)
        return made.read_bytes()


def _code(cubin: bytes) -> list[bytes]:
    """Return kind and content of a cubin's sections that a GPU executes or reads."""
    start, size, count, names = struct.unpack_from("<Q10xHHH", cubin, 0x28)
    headers = [struct.unpack_from("<IIQQQQ", cubin, start + size * x) for x in range(count)]
    found = []
    for name, _, _, _, offset, length in headers:
        at = headers[names][4] + name
        section = cubin[at : cubin.index(0, at)].decode()
        kind = section.split(".")[1] if section.startswith(".") else ""
        if kind == "text" or (kind == "nv" and section.startswith(".nv.constant")):
            found.append(section[:13].encode() + cubin[offset : offset + length])
    return sorted(found)


def main() -> None:
    """Compile the variants, then save or compare their digests."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--save", type=Path)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--only", default="", help="prefix of the variants' names")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    if not (args.save or args.against):
        parser.error("nothing to do: pass --save FILE or --against FILE")
    named = {name: one for name, one in variants() if name.startswith(args.only)}
    kernels = list(dict.fromkeys(named.values()))
    with ProcessPoolExecutor(args.jobs) as pool:
        digests = dict(zip(kernels, pool.map(digest, kernels), strict=True))
    found = {name: digests[one] for name, one in named.items()}
    print(f"{len(found)} variants, {len(kernels)} kernels compiled")
    if args.save:
        args.save.write_text(json.dumps(found, indent=0))
        return
    before = {
        k: v for k, v in json.loads(args.against.read_text()).items() if k.startswith(args.only)
    }
    changed = [name for name in sorted(found | before) if found.get(name) != before.get(name)]
    for name in changed:
        print("changed:" if name in found and name in before else "came or went:", name)
    print(f"{len(changed)} differ")
    sys.exit(bool(changed))


if __name__ == "__main__":
    main()
