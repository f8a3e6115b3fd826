"""Compile and cache the Python tensor-core kernels. Only the function `load` needs a GPU.

numba-cuda compiles a kernel to PTX, and nvJitLink compiles the PTX to a cubin. For kernels with
Hopper's own instructions, the driver compiles the PTX as a whole program instead. nvJitLink's code
may later be linked with other code. For linkable code, the compiler ignores `setmaxnreg`, and waits
for each `wgmma` immediately (C7504 and C7509 of ptxas).
"""

import hashlib
import os
import re
import secrets
import sys
import time
from collections.abc import Callable
from functools import cache, partial
from importlib import resources
from pathlib import Path
from typing import Any

import llvmlite
import numba
import numba_cuda
from numba.cuda import compile as numba_compile
from numba.cuda import types

from flashsim.backends.launch.kernel import Kernel
from flashsim.backends.numba_gpu.emit import ArgsType, MapType
from flashsim.backends.numba_gpu.hopper.backward import hopper_backward_kernel
from flashsim.backends.numba_gpu.hopper.backward_roles import hopper_backward_roles_kernel
from flashsim.backends.numba_gpu.hopper.backward_wide import hopper_backward_wide_kernel
from flashsim.backends.numba_gpu.hopper.dq import hopper_dq_kernel
from flashsim.backends.numba_gpu.hopper.forward import hopper_forward_kernel
from flashsim.backends.numba_gpu.tensor.backward_dkdv import flash_dkdv_kernel
from flashsim.backends.numba_gpu.tensor.backward_dq import flash_dq_kernel
from flashsim.backends.numba_gpu.tensor.backward_rows import (
    flash_convert_kernel,
    flash_delta_kernel,
)
from flashsim.backends.numba_gpu.tensor.forward import flash_forward_kernel

#: The first PTX version with Hopper's instructions, and the first that adds vectors to HBM.
_HOPPER_PTX, _VECTORS_ADDED, _VECTOR_PTX = "8.0", "red.global.add.v2", "8.1"
_VERSION = re.compile(r"^\.version .*$", re.MULTILINE)
#: Bytes of the checksum at the start of a cached file.
_DIGEST = 32
_BOUNDS = re.compile(r"^\.maxntid ", re.MULTILINE)  # the first directive of an entry
_ENTRY = re.compile(r"\.entry\s+([\w$]+)")


def python_kernel(kernel: Kernel, capability: tuple[int, int]) -> Callable[[Any], None]:
    """Return the Python kernel for a `Kernel` description, specialised for its constants."""
    writers: dict[str, Callable[[Kernel], Any]] = {
        "flash_forward": flash_forward_kernel,
        "hopper_forward": hopper_forward_kernel,
        "hopper_backward": hopper_backward_kernel,
        "hopper_backward_wide": hopper_backward_wide_kernel,
        "hopper_backward_roles": hopper_backward_roles_kernel,
        "hopper_dq": hopper_dq_kernel,
        "flash_dkdv": partial(flash_dkdv_kernel, wide=capability >= (9, 0)),
        "flash_dq": flash_dq_kernel,
        "flash_delta": flash_delta_kernel,
        "flash_convert": flash_convert_kernel,
    }
    return writers[kernel.name](kernel)


def ptx(kernel: Kernel, capability: tuple[int, int]) -> str:
    """Return a kernel's PTX for a compute capability, with the kernel's name as entry point."""
    maps = [MapType(kernel.name, n) for n in range(len(kernel.boxes))]
    args = ArgsType(kernel.args.itemsize)
    arguments = [*maps, args, types.int64] if maps else [args]
    text, _ = numba_compile(
        python_kernel(kernel, capability),
        types.void(*arguments),
        device=False,
        abi="numba",
        cc=(*capability, "a") if capability[0] == 9 else capability,
        output="ptx",
        opt=True,  # also where NUMBA_OPT=0 asks for CPU code that is easy to debug
        # `setmaxnreg` needs the guarantee that one block has the whole SM.
        launch_bounds=(kernel.threads, 1) if maps else kernel.threads,
    )
    (entry,) = set(_ENTRY.findall(text))
    text = text.replace(entry, kernel.name)
    if kernel.cluster > 1:
        cluster = f".explicitcluster\n.reqnctapercluster {kernel.cluster}, 1, 1\n"
        text, count = _BOUNDS.subn(cluster + r"\g<0>", text, count=1)
        assert count == 1, "a cluster's size stands in front of an entry's bounds"
    if maps:  # lower the version, since any assembler with these instructions will do
        version = _VECTOR_PTX if _VECTORS_ADDED in text else _HOPPER_PTX
        text = _VERSION.sub(f".version {version}", text, count=1)
    for tensor_map in maps:  # TMA needs a tensor map's address to be a multiple of 64
        text = text.replace(
            f".align 8 .b8 {tensor_map.parameter}[", f".align 64 .b8 {tensor_map.parameter}["
        )
    return text


def assemble(text: str, capability: tuple[int, int]) -> tuple[bytes, str]:
    """Compile PTX to a cubin; return the cubin and the report of ptxas on registers and spills."""
    from cuda.core import Linker, LinkerOptions, ObjectCode

    arch = f"sm_{capability[0]}{capability[1]}{'a' if capability[0] == 9 else ''}"
    linker = Linker(
        ObjectCode.from_ptx(text.encode()), options=LinkerOptions(arch=arch, ptxas_options=["-v"])
    )
    return bytes(linker.link("cubin").code), linker.get_info_log()


def cache_folder() -> Path:
    """Return the cache folder: ``FLASHSIM_CACHE_DIR``, or ``~/.cache/flashsim`` by default."""
    return Path(os.environ.get("FLASHSIM_CACHE_DIR") or Path.home() / ".cache" / "flashsim")


@cache
def _sources() -> bytes:
    """Return a digest of everything that affects compilation, except a kernel's constants."""
    versions = (numba.__version__, numba_cuda.__version__, llvmlite.__version__)
    digest = hashlib.sha256(" ".join(versions).encode())
    rooms = [
        Path(str(resources.files(f"flashsim.backends.{room}"))) for room in ("numba_gpu", "launch")
    ]
    for file in sorted(file for room in rooms for file in room.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.digest()


def image(kernel: Kernel, capability: tuple[int, int]) -> bytes:
    """Return a compiled kernel (cubin or PTX) from the cache, or compile it first.

    Each compilation prints a message. A cache file holds a checksum and the compiled kernel; a
    damaged file is replaced. An unwritable cache is not an error.
    """
    key = hashlib.sha256(_sources() + repr((kernel, capability)).encode()).hexdigest()
    suffix = "ptx" if kernel.boxes else "cubin"
    path = cache_folder() / f"{kernel.name}-{key[:32]}.{suffix}"
    if (code := _kept(path)) is not None:
        return code
    # The message comes before the compilation, and its duration is added to the same line.
    print(f"flashsim: compiling {kernel.name} (Python) ...", end="", file=sys.stderr, flush=True)
    start = time.perf_counter()
    try:
        text = ptx(kernel, capability)
        code = text.encode() if kernel.boxes else assemble(text, capability)[0]
    except BaseException:
        print(" failed", file=sys.stderr)
        raise
    took = time.perf_counter() - start
    try:
        _keep(path, code)
        where = f"cached in {path.parent}"
    except OSError as error:
        where = f"not cached: {path.parent} cannot be written ({error.strerror or error})"
    print(f" compiled in {took:.1f} s; {where}", file=sys.stderr)
    return code


def _kept(path: Path) -> bytes | None:
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, code = content[:_DIGEST], content[_DIGEST:]
    return code if hashlib.sha256(code).digest() == digest else None


def _keep(path: Path, code: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Another process may write the same file: write a temporary file, then rename it.
    aside = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        aside.write_bytes(hashlib.sha256(code).digest() + code)
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


@cache
def load(kernel: Kernel, device: int) -> Any:
    """Return the compiled kernel, loaded on CuPy's current device."""
    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties(device)
    module = cupy.cuda.Module()
    module.load(image(kernel, (properties["major"], properties["minor"])))
    function = module.get_function(kernel.name)
    if kernel.shared_bytes > 48 * 1024:
        attribute = cupy.cuda.driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        cupy.cuda.driver.funcSetAttribute(function.ptr, attribute, kernel.shared_bytes)
    return function
