"""Time softmax(X) V, fused and in two steps, over the length of a row.

    python benchmarks/softmax_matmul.py [--csv softmax_matmul.csv] [--d2 64,128] [--passes 100]

Prints a table and writes a CSV. X is (16, 2048, d2) and V (16, d2, 512), float32, with d2 from 64
to 8192. The fused kernel is `flashsim.softmax_matmul` on the GPU, in blocks of 16, 32 and 64. The
other is the array library's own softmax and product (torch's if torch sees the GPU, else CuPy's).
Each is called 10 times to warm up and 100 times between CUDA events. Columns: batch_size, d1, d2,
d3; triton, whether softmax(X) stayed on chip (named after the language of such courses); BLOCK, NA
without blocks; forward_ms_mean, forward_ms_std; forward_peak_MiB, memory in use beyond the inputs.
Every configuration has its row; a failed one has NA for figures, and stderr has the reason.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from gpu_lab import MIB, Lab, csv_file, open_lab

from flashsim import softmax_matmul

COLUMNS = (
    *("batch_size", "d1", "d2", "d3", "triton", "BLOCK"),
    *("forward_ms_mean", "forward_ms_std", "forward_peak_MiB"),
)
BATCH, D1, D3 = 16, 2048, 512
LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
BLOCKS = (16, 32, 64)
NA = "NA"


def rows(lab: Lab, lengths: tuple[int, ...], warm_up: int, passes: int) -> Iterator[dict[str, Any]]:
    """Yield one row per configuration, whatever fails."""
    for d2 in lengths:
        for block in (*BLOCKS, None):
            row: dict[str, Any] = dict.fromkeys(COLUMNS, NA)
            row |= {"batch_size": BATCH, "d1": D1, "d2": d2, "d3": D3, "triton": block is not None}
            row["BLOCK"] = NA if block is None else block
            try:
                row |= measured(lab, d2, block, warm_up, passes)
            except Exception as error:
                what = f"d2={d2}, BLOCK={row['BLOCK']}"
                print(f"{what}: {type(error).__name__}: {error}"[:300], file=sys.stderr)
            lab.release()
            yield row


def measured(lab: Lab, d2: int, block: int | None, warm_up: int, passes: int) -> dict[str, float]:
    """Return the mean and standard deviation of one configuration's time, and its peak memory."""
    x, v = lab.array((BATCH, D1, d2), "float32"), lab.array((BATCH, d2, D3), "float32")
    work = partial(fused, x, v, block) if block else partial(softmax_matmul.plain, x, v)
    for _ in range(warm_up):
        work()
    _, peak, _ = lab.peak(work)
    times = [timed(lab, work) for _ in range(passes)]
    return {
        "forward_ms_mean": statistics.fmean(times),
        "forward_ms_std": statistics.stdev(times) if passes > 1 else 0.0,
        "forward_peak_MiB": peak / MIB,
    }


def fused(x: Any, v: Any, block: int) -> Any:
    """Run the fused kernel."""
    return softmax_matmul.run(x, v, block=block, backend="cupy", trace=False).out


def timed(lab: Lab, work: Callable[[], Any]) -> float:
    """Return the ms of one call on the GPU alone: the host runs ahead of a spinning kernel."""
    lab.spin()
    start = lab.event()
    work()
    return lab.milliseconds(start, lab.event())


def main() -> None:
    """Measure, print and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--d2", default=",".join(map(str, LENGTHS)), help="lengths")
    parser.add_argument("--warm-up", type=int, default=10)
    parser.add_argument("--passes", type=int, default=100)
    parser.add_argument("--csv", default="softmax_matmul.csv", help="file for the table")
    options = parser.parse_args()
    try:
        lab, why = open_lab()
    except RuntimeError as error:
        sys.exit(f"benchmarks/softmax_matmul.py: {error}")
    print(f"{lab.name}{f', arrays are CuPy’s: {why}' if why else ''}")
    lengths = tuple(int(n) for n in options.d2.split(","))
    with csv_file(options.csv, COLUMNS) as write:
        for row in rows(lab, lengths, options.warm_up, options.passes):
            write(row)
            print(line(row), flush=True)


def line(row: dict[str, Any]) -> str:
    """Return a row as a line of text."""
    what = f"d2 {row['d2']:>5}  " + (f"fused, block {row['BLOCK']}" if row["triton"] else "plain")
    if row["forward_ms_mean"] == NA:
        return f"{what:<32}failed"
    mean, std, peak = (row[name] for name in COLUMNS[-3:])
    tera = 2 * BATCH * D1 * row["d2"] * D3 / mean / 1e9
    return f"{what:<32}{mean:9.3f} ms ± {std:.3f}  {tera:5.1f} TFLOP/s  {peak:8.1f} MiB"


if __name__ == "__main__":
    main()
