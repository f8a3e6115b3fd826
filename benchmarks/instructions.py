"""Count the instructions of a forward's visit in its machine code, beside the time model's.

    python benchmarks/instructions.py

Compiles forwards of head_dim 64, 128 and 256 for Hopper, disassembles them (`nvdisasm`, pip:
nvidia-cuda-nvdisasm) and counts in the loop over visits. Per score of a thread: *plain* are all
instructions except those of the tensor cores, of the uniform path (per warp, not per thread), and
of the mask, which tiles without a mask skip; *mask* are selections and comparisons; *exponentials*
are those of the special-function unit. *model* is the time model's count, fitted to times:
`Constants.scores` per score, and that times `units.SCALED` per element of O. Needs no GPU.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import machine_code

from flashsim import Device, Problem
from flashsim.backends.launch.kernel import Gpu, Kernel
from flashsim.report import Table
from flashsim.studies.predict import CALIBRATED
from flashsim.studies.predict.units import SCALED

FAMILIES = {"hopper": "bfloat16", "hopper fp8": "float8_e4m3fn"}
PRODUCTS = ("HGMMA", "QGMMA", "WARPGROUP", "WARPSYNC")
MASK = ("FSEL", "ISETP")


def disassembled(kernel: Kernel) -> str:
    """Return a kernel's machine code as text."""
    from cuda import pathfinder

    program = shutil.which("nvdisasm") or pathfinder.find_nvidia_binary_utility("nvdisasm")
    if program is None:
        sys.exit("nvdisasm is missing: pip install nvidia-cuda-nvdisasm")
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        # CuPy cuts off the last byte
        cubin.write_bytes(machine_code._cubin(kernel, "sm_90") + b"\0")
        done = subprocess.run([program, "-c", cubin], capture_output=True, text=True, check=True)
    return done.stdout


def visit_loop(text: str, scores: int) -> Counter[str]:
    """Count instructions by name in the loop over visits."""
    labels: dict[str, int] = {}
    names: list[str] = []
    loops: list[Counter[str]] = []
    for line in text.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(names)
        elif code := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(\w+)(.*);", line):
            names.append(code[1])
            back = re.search(r"`\((\.L_x_\d+)\)", code[2])
            if code[1] == "BRA" and back and back[1] in labels:
                loops.append(Counter(names[labels[back[1]] :]))
    found = [x for x in loops if x["MUFU"] >= scores and any(x[name] for name in PRODUCTS[:2])]
    return min(found, key=Counter.total)


def main() -> None:
    """Compile the kernels, count, and print the table."""
    gpu = Gpu.like(Device.get("H200"))
    fitted = CALIBRATED["hopper"]["forward"].scores
    table = Table(
        "Instructions of a thread for each score, forward, from the machine code",
        ("kernels", "head_dim", "tile", "plain", "mask", "exponentials", "model"),
        note="model: the time model's, fitted to times of the 16-bit kernels",
    )
    for name, dtype in FAMILIES.items():
        for d in (64, 128, 256):
            fp8 = {"scales": (64, 128)} if "fp8" in name else {}
            p = Problem(4096, head_dim=d, heads=16, dtype=dtype, **fp8)
            one, *_ = machine_code.FAMILIES[name].forward_passes(p, None, gpu, "ascending", "")
            tile = one.tables.schedule.tiling
            scores = 64 * tile.block_k // 128  # scores per thread: a warpgroup has 64 rows
            loop = visit_loop(disassembled(one.kernel), scores)
            uniform = sum(n for op, n in loop.items() if op[0] == "U" or op == "R2UR")
            left_out = sum(loop[x] for x in (*PRODUCTS, *MASK)) + uniform
            counts = loop.total() - left_out, sum(loop[x] for x in MASK), loop["MUFU"]
            cells = (f"{x / scores:.2f}" for x in counts)
            model = fitted * (1 + SCALED * d / tile.block_k)
            table.add(name, d, str(tile), *cells, f"{model:.2f}")
    print(table.text(width=110))


if __name__ == "__main__":
    main()
