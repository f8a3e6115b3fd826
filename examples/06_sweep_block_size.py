"""Count many tile sizes and on-chip memory sizes into a CSV file, and resume if interrupted."""

from pathlib import Path

import flashsim
from flashsim import Tiling

path = Path("out") / "block_size.csv"
path.parent.mkdir(exist_ok=True)

result = flashsim.sweep(
    n_q=[1024, 4096],
    head_dim=64,
    dtype="float16",
    algorithm=["flash1", "flash2"],
    tiling=[Tiling(block, 64) for block in (32, 64, 128, 256)],
    device="A100",
    sram_bytes=[48 * 1024, 163 * 1024],
    path=path,  # a sweep that was stopped continues from this file
)
print(result)

# FlashAttention-2's outer loop is over queries, so doubling block_q halves the loads of K and V.
ok = [row for row in result if row["status"] == "ok" and row["algorithm"] == "flash2"]
best = min(ok, key=lambda row: row["requested_bytes"] / row["n_q"] ** 2)
print(f"fewest bytes relative to n_q^2: block_q={best['block_q']} in {best['sram_bytes']:,} B")
print(f"{len(result)} rows in {path}")
