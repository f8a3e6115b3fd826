"""Traced bytes of the Numba-CUDA kernel in examples/numba_cuda against a GPU's counters.

    python benchmarks/numba_counters.py --csv numba-counters.csv   # needs a GPU, numba-cuda and ncu

The kernel runs twice: in Numba's CUDA simulator, in a process of its own, where flashsim.cuda
counts what its loads and stores ask for; and compiled, on the GPU, under Nsight Compute. A load
comes from L2 once per thread block and line; L1 has it for the warps that follow. A store passes to
L2 request by request.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np

EXAMPLE = Path(__file__).parents[1] / "examples" / "numba_cuda" / "forward.py"
READ = "l1tex__m_xbar2l1tex_read_bytes.sum"
WRITTEN = "l1tex__m_l1tex2xbar_write_bytes.sum"
#: Tokens, causal; two heads.
SHAPES = ((128, True), (120, False))
COLUMNS = (
    *("shape", "traced_load_bytes", "traced_load_sector_bytes", "read_bytes"),
    *("traced_store_bytes", "traced_store_sector_bytes", "written_bytes"),
)


def launches() -> Any:
    """Shapes, configured kernels and their arguments."""
    spec = importlib.util.spec_from_file_location("numba_forward", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for n, causal in SHAPES:
        q, k, v = np.random.default_rng(0).standard_normal((3, 2, n, module.D)).astype(np.float32)
        o, lse = np.zeros_like(q), np.zeros((2, n), np.float32)
        kernel = module.forward[(-(-n // module.BLOCK_Q), 2), module.BLOCK_Q]
        shape = f"2 heads; {n} x {module.D}; float32; {'causal; ' * causal}16 x 8"
        yield shape, kernel, (q, k, v, o, lse, module.D**-0.5, causal)


def traced() -> None:
    """Print what flashsim counts, as JSON: runs under the simulator."""
    import flashsim.cuda

    rows = []
    for shape, kernel, args in launches():
        seen = flashsim.cuda.trace(kernel, *args)
        row: dict[str, Any] = {"shape": shape}
        for op in ("load", "store"):
            row[f"traced_{op}_bytes"] = seen.bytes(op)
            row[f"traced_{op}_sector_bytes"] = seen.sectors(op)
        rows.append(row)
    print(json.dumps(rows))


def launch() -> None:
    """Run the kernels on the GPU."""
    from numba import cuda

    warnings.simplefilter("ignore")  # the grids are small
    for _, kernel, args in launches():
        kernel(*(cuda.to_device(x) if isinstance(x, np.ndarray) else x for x in args))
    cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--csv", default="numba-counters.csv")
    parser.add_argument("--traced", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--launch", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.traced:
        traced()
        return
    if options.launch:
        launch()
        return
    simulated = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1"}
    done = subprocess.run(
        [sys.executable, __file__, "--traced"],
        env=simulated,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(done.stderr)
    rows = json.loads(done.stdout)
    from nsight import profile
    from nsight import rows as table

    counters: dict[str, dict[str, int]] = {}
    for row in table(profile("--metrics", f"{READ},{WRITTEN}", "-k", "regex:forward")):
        value = int(float(row["Metric Value"].replace(",", "")))
        counters.setdefault(row["ID"], {})[row["Metric Name"]] = value
    for row, one in zip(rows, sorted(counters, key=int), strict=True):
        row["read_bytes"], row["written_bytes"] = counters[one][READ], counters[one][WRITTEN]
    with open(options.csv, "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    for row in rows:
        print(", ".join(f"{name} {row[name]}" for name in COLUMNS))


if __name__ == "__main__":
    main()
