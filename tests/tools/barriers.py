"""The barriers of kernels in CUDA C++, and what leaves one out.

`test_emulated_barriers` runs kernels without one barrier: so it shows that they have every barrier
that they need, and no others. Only the sources are changed; the kernels themselves contain no test
code.
"""

import re
from collections.abc import Iterable
from importlib import resources

from flashsim.backends.kernels import nvrtc

#: Matches ``__syncthreads();  // B1: what it protects``, the form of every barrier; some are for a
#: group of warps.
BARRIER = re.compile(r"(?:__syncthreads\(\)|sync_group\([^;]*\));(?=\s*// (B\d):)")


def barriers(file: str) -> list[str]:
    """Return the names of a kernel's barriers, all of which have one: "B0", "B1", ..."""
    text = nvrtc.source(file)
    named = BARRIER.findall(text)
    calls = re.findall(r"__syncthreads|(?<!void )sync_group", text)
    assert len(named) == len(calls), f"a barrier of {file} has no number"
    return named


def left_out(file: str) -> dict[str, tuple[str, str]]:
    """Return the removal of each barrier of a kernel, as a fault for `emulator.Faulty`."""
    text = nvrtc.source(file)
    found = {m[1]: text[m.start() : text.index(":", m.end())] for m in BARRIER.finditer(text)}
    return {name: (piece, f"if (!FAULT) {piece}") for name, piece in found.items()}


def untried(cases: Iterable[tuple]) -> set[tuple[str, str]]:
    """Return the portable kernels' barriers that no case names, with their kernels.

    A case is (kernel, ..., "B0 B1 ..."). Names of barriers that do not exist are returned too.
    """
    folder = resources.files("flashsim.backends") / "kernels" / "portable"
    files = [f"portable/{f.name}" for f in folder.iterdir() if f.name.endswith(".cu")]
    # Kernels without a schedule: test_emulated_decode and test_softmax_matmul_kernel try the first
    # two, and the last one measures instructions.
    others = [f"portable/{name}.cu" for name in ("decode", "softmax_matmul", "units")]
    files = [f for f in files if f not in others]
    there = {(f, b) for f in files for b in barriers(f)}
    assert len({file for file, _ in there}) >= 6
    return there ^ {(case[0], b) for case in cases for b in case[-1].split()}
