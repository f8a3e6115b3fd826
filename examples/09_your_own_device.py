"""Describe your own device, and count how many bytes more on-chip memory would save."""

import flashsim
from flashsim import Device, FlashSimError, Problem, Tiling

problem = Problem(n_q=16384, head_dim=128, heads=16, dtype="bfloat16")

for kib in (48, 96, 227, 512, 1024):
    mine = Device(
        name=f"{kib} KiB",
        sram_bytes=kib * 1024,
        sram_per_sm=kib * 1024,
    )
    traffic = flashsim.count(problem, device=mine)
    print(
        f"{mine.name:>8}: tiles {traffic.tiling!s:>9}, {traffic.bytes() / 1e9:5.2f} GB requested, "
        f"{traffic.intensity():3.0f} FLOP/B"
    )

# If a tile is too large, the error says how many bytes it needs and which tile fits.
try:
    flashsim.count(problem, tiling=Tiling(256, 256), device="T4")
except FlashSimError as error:
    print(f"\n{type(error).__name__}: {error}")
