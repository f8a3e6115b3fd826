"""How long the L2 model takes: batch 4, 16 heads, d = 128, bf16, forward and backward.

    python benchmarks/l2.py            # N = 16,384
    python benchmarks/l2.py 4096 8192

One process. The first call of a fresh installation also compiles (tens of seconds, cached on disk);
a small problem is replayed first so that it is not timed.
"""

import sys
import time
from dataclasses import replace

import flashsim
from flashsim import Device, Problem, Tiling, l2


def main(lengths):
    # Kernels keep accumulators in registers, which a block may use as well as its shared memory.
    device = replace(Device.get("H200"), sram_bytes=(228 + 256) * 1024)
    small = flashsim.count(Problem(64, head_dim=16))
    l2.dram(small)
    l2.curves(small)
    print(
        f"{'N':>7} {'direction':<9} {'requested':>12} {'DRAM read':>12} {'replay':>9} {'curve':>9}"
    )
    for n in lengths:
        problem = Problem(n, head_dim=128, batch=4, heads=16, dtype="bfloat16")
        for direction, tiling in (("forward", Tiling(128, 64)), ("backward", Tiling(64, 128))):
            requested = flashsim.count(
                problem,
                algorithm="flash2-fused",
                direction=direction,
                tiling=tiling,
                device=device,
            )
            start = time.perf_counter()
            dram = l2.dram(requested)
            middle = time.perf_counter()
            l2.curves(requested)
            end = time.perf_counter()
            print(
                f"{n:>7,} {direction:<9} {requested.bytes() / 1e9:>9.1f} GB "
                f"{dram.bytes('read') / 1e9:>9.2f} GB "
                f"{middle - start:>7.2f} s {end - middle:>7.2f} s"
            )


if __name__ == "__main__":
    main([int(x) for x in sys.argv[1:]] or [16_384])
