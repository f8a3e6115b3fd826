"""Kernels with random delays around every barrier and, on request, without one barrier.

Warps that run at the same pace hide a missing barrier: the values are right by luck. With delays
they are wrong. So a test can show that the kernels have every barrier that they need, and no
others. Only the sources are changed; the kernels themselves contain no test code.
"""

import re
from collections.abc import Iterable
from dataclasses import replace
from importlib import resources

from flashsim.backends.kernels import nvrtc
from flashsim.backends.launch_policy.portable import PORTABLE

#: Matches ``__syncthreads();  // B1: what it protects``, the form of every barrier; some are for a
#: group of warps.
BARRIER = re.compile(r"(?:__syncthreads\(\)|sync_group\([^;]*\));(?=\s*// (B\d):)")

_JITTER = """
// Half of the warps, others each time, sleep for up to 8 us.
__device__ inline void jitter(u32 site) {
    u32 t;
    asm volatile("mov.u32 %0, %%clock;" : "=r"(t) :: "memory");
    u32 h = t ^ (threadIdx.x / 32 + 1) * 0x9E3779B9u;
    h ^= blockIdx.x * 0x85EBCA6Bu ^ site * 0xC2B2AE35u;
    h ^= h >> 15, h *= 0x2C1B3C6Du, h ^= h >> 12, h *= 0x297A2D39u, h ^= h >> 15;
    if (h & 1) __nanosleep(h >> 8 & 0x1FFF);
}
"""


def barriers(file: str) -> list[str]:
    """Return the names of a kernel's barriers: "B0", "B1", ..."""
    return BARRIER.findall(nvrtc.source(file))


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
    # Kernels without a schedule: test_emulated_decode and test_softmax_matmul_kernel try these.
    files = [f for f in files if f not in ("portable/decode.cu", "portable/softmax_matmul.cu")]
    there = {(f, b) for f in files for b in barriers(f)}
    assert len({file for file, _ in there}) >= 6
    return there ^ {(case[0], b) for case in cases for b in case[-1].split()}


def jittered(file: str, without: str = "") -> str:
    """Return a kernel's source with delays, and without one of its barriers if requested."""
    text = nvrtc.source(file)
    calls = re.findall(r"__syncthreads|(?<!void )sync_group", text)
    assert len(calls) == len(barriers(file)), "a barrier has no number"

    def around(match: re.Match[str]) -> str:
        kept = "" if match[1] == without else match[0]
        number = 2 * int(match[1][1:])
        return f"jitter({number}); {kept} jitter({number + 1});"

    text = BARRIER.sub(around, text)
    start = "stamp_block(tile_stamp, false);"  # before a block's first copies
    assert text.count(start) == 1
    text = text.replace(start, f"jitter(99); {start}")
    return text.replace('extern "C" __global__', _JITTER + 'extern "C" __global__', 1)


class Jittered:
    """The family of portable kernels, with delays in one kernel."""

    name = "jittered"

    def __init__(self, file: str, without: str = "", base=PORTABLE) -> None:
        self.file, self.without = file, without
        self.forward_passes, self.backward_passes = base.forward_passes, base.backward_passes

    def load(self, kernel, device):
        """Load a kernel as `nvrtc.load` does."""
        if kernel.file != self.file:
            return nvrtc.load(kernel, device)
        import cupy

        code = jittered(self.file, self.without)
        module = cupy.RawModule(code=code, options=kernel.options, backend="nvrtc")
        function = module.get_function(kernel.name)
        function.max_dynamic_shared_size_bytes = kernel.shared_bytes
        return function.kernel

    def of(self, job, gpu, direction):
        """Return this family, for `cupy_engine.forward_with`."""
        return self


def backward_job(result, tiling, algorithm):
    """Return the job of a result's backward pass."""
    return replace(result._job, tiling=tiling, algorithm=algorithm)
