"""Compute DRAM bytes from requested bytes, with a model of the L2 cache of any size."""

import flashsim
from flashsim import Problem, Tiling, l2

problem = Problem(n_q=8192, head_dim=128, heads=8, dtype="bfloat16")
requested = flashsim.count(problem, tiling=Tiling(128, 64), device="H100")

# dram holds the bytes that the SMs request, and the bytes that miss L2 in a model of the cache.
dram = flashsim.count(problem, tiling=Tiling(128, 64), device="H100", level="dram")
print(dram)
print(f"\nrequested {requested.bytes():,} B, DRAM {dram.bytes():,} B, hits {dram.hit_rate():.1%}")

# The order in which thread blocks start decides how many heads use the cache at the same time.
for launch in l2.launch.ORDERS:
    model = l2.L2Model(launch=launch)
    print(f"{launch:>13}: {l2.dram(requested, model).bytes('read') / 1e6:8.1f} MB read")

# One pass over the requests gives the DRAM reads of every cache size (stack distances).
curve = l2.curves(requested)["forward"]
for mib in (1, 2, 4, 8, 16, 32):
    print(f"{mib:>3} MiB of L2: {curve.reads(mib * 2**20) / 1e6:8.1f} MB read")
print(
    f"from {curve.enough() / 2**20:.1f} MiB on, each byte is read once: {curve.cold / 1e6:.1f} MB"
)
