"""Count the bytes and FLOPs of a million tokens in closed form, without a GPU or data."""

import flashsim
from flashsim import Device, Problem, Tiling
from flashsim.counts.traffic import saved

million = Problem(n_q=2**20, head_dim=128, heads=16, dtype="bfloat16", causal=True)

# Print three lower bounds on the time. The first divides the requested bytes, which move between L2
# and the SMs, by L2's bandwidth. HBM moves only bytes that miss L2: at least each input and output
# once. The third divides the FLOPs by the peak of the tensor cores.
for name in ("A100", "H100"):
    device = Device.get(name)
    for tiling in (Tiling(64, 64), Tiling(128, 64), Tiling.fit(million, device)):
        traffic = flashsim.count(million, tiling=tiling, device=device)
        print(
            f"{name}, {tiling!s:>8}: {traffic.bytes() / 1e12:5.2f} TB requested, "
            f"L2 {traffic.bytes() / device.l2_bandwidth:5.2f} s, "
            f"HBM {traffic.compulsory() / device.hbm_bandwidth:.4f} s, "
            f"tensor cores {traffic.flops('matmul') / device.peak('bfloat16'):5.2f} s"
        )

for algorithm in ("standard", "flash1", "flash2"):
    kept = saved(million, algorithm)
    print(f"{algorithm:<8} keeps {kept / 1e9:,.1f} GB for the backward pass")
