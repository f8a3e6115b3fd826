"""Compare the predictions of `flashsim study banks` with a GPU's hardware counters.

    python benchmarks/banks.py [--csv banks.csv]

Needs CuPy and Nsight Compute (`ncu`; root, if the system reserves counters for root). Each pattern
in each layout is one warp's load, repeated at the addresses that `flashsim.banks` returns. Measured
are wavefronts and conflicts of shared memory, and sectors of global memory. A launch without loads
is subtracted. The exit status is 1 if a counter differs from its prediction.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import nsight

from flashsim import banks
from flashsim.report import Table

#: Hardware counters by the name of the predicted figure.
METRICS = {
    "wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
    "conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
    "sectors": "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
}
TIMES = 1000
SOURCE = r"""
#define PROBE(name, load)                                                                    \
    extern "C" __global__ void name(                                                         \
        const int* at, int times, int zero, const char* buffer, unsigned* out)               \
    {                                                                                        \
        __shared__ __align__(128) unsigned char room[8192];                                  \
        const unsigned first = (unsigned)__cvta_generic_to_shared(room) + at[threadIdx.x];   \
        const char* begin = buffer + at[threadIdx.x];                                        \
        unsigned sum = first + (unsigned)(size_t)begin, a = 0, b = 0, c = 0, d = 0;          \
        for (int n = 0; n < times; ++n) {                                                    \
            load;                                                                            \
            sum ^= a ^ b ^ c ^ d;                                                            \
        }                                                                                    \
        if (sum == 1u << 31) *out = sum; /* never */                                         \
    }
// The same place each time, but the compiler, which would load once, cannot know it.
#define NEAR "r"(first + (n & zero))
#define FAR "l"(begin + (n & zero))
#define ONE "=r"(a)
#define FOUR "=r"(a), "=r"(b), "=r"(c), "=r"(d)
#define HALF(space) "{.reg .u16 h; ld.volatile." space ".u16 h, [%1]; cvt.u32.u16 %0, h;}"
#define WORD(space) "ld.volatile." space ".u32 %0, [%1];"
#define PIECE(space) "ld.volatile." space ".v4.u32 {%0, %1, %2, %3}, [%4];"
#define MATRIX "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
PROBE(probe_shared_2, asm volatile(HALF("shared") : ONE : NEAR))
PROBE(probe_shared_4, asm volatile(WORD("shared") : ONE : NEAR))
PROBE(probe_shared_16, asm volatile(PIECE("shared") : FOUR : NEAR))
PROBE(probe_ldmatrix, asm volatile(MATRIX : FOUR : NEAR))
PROBE(probe_global_2, asm volatile(HALF("global") : ONE : FAR))
PROBE(probe_global_4, asm volatile(WORD("global") : ONE : FAR))
PROBE(probe_global_16, asm volatile(PIECE("global") : FOUR : FAR))
"""


def requests() -> Iterator[banks.Access]:
    """Return every pattern in every layout that allows it, in float32 and bfloat16."""
    for dtype in ("float32", "bfloat16"):
        for row in banks.table(dtype=dtype).records():
            if row["pattern"] != "ldmatrix" or dtype == "bfloat16":
                yield banks.access(row["pattern"], row["layout"], dtype=dtype)


def kernels(request: banks.Access) -> tuple[str, str]:
    """Return the names of a request's two kernels, for shared and for global memory."""
    matrix = request.pattern == "ldmatrix"
    shared = "probe_ldmatrix" if matrix else f"probe_shared_{request.width}"
    return shared, f"probe_global_{request.width}"


def launch() -> None:
    """Launch every request's two kernels, each without a load and with `TIMES` loads."""
    import cupy

    module = cupy.RawModule(code=SOURCE, options=("-std=c++17",))
    buffer, out = cupy.zeros(1 << 16, cupy.uint8), cupy.zeros(1, cupy.uint32)
    for request in requests():
        places = request.addresses, request.global_addresses
        for name, at in zip(kernels(request), places, strict=True):
            for times in (0, TIMES):
                counts = cupy.int32(times), cupy.int32(0)
                given = cupy.asarray(at, cupy.int32), *counts, buffer, out
                module.get_function(name)((1,), (32,), given)
    cupy.cuda.Device().synchronize()


def counters(text: str) -> list[dict[str, float]]:
    """Return `METRICS` of each launch of a probe, in order, from the output of ``ncu --csv``."""
    found: dict[int, dict[str, float]] = defaultdict(dict)
    names = {counter: name for name, counter in METRICS.items()}
    for row in nsight.rows(text):
        value = float(row["Metric Value"].replace(",", ""))
        found[int(row["ID"])][names[row["Metric Name"]]] = value
    return [found[number] for number in sorted(found)]


def compared(measured: list[dict[str, float]]) -> Table:
    """Return a table of predicted and measured figures per load."""
    table = Table(
        "A warp's load: predicted, and an NVIDIA GPU's counters",
        (
            "pattern",
            "layout",
            "B a lane",
            *(f"{name}{x}" for name in METRICS for x in ("", " seen")),
        ),
    )
    for n, request in enumerate(requests()):
        idle, busy, far_idle, far_busy = measured[4 * n : 4 * n + 4]
        cells: list[float] = []
        for name in METRICS:
            far = name == "sectors"
            before, after = (far_idle, far_busy) if far else (idle, busy)
            cells += [getattr(request, name), (after[name] - before[name]) / TIMES]
        table.add(request.pattern, request.layout, request.width, *cells)
    return table


def main() -> None:
    """Run the probes under Nsight Compute and print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--csv", type=Path, help="file for the table")
    parser.add_argument("--launch", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.launch:
        launch()
        return
    metrics = ",".join(METRICS.values())
    printed = nsight.profile("--kernel-name", "regex:probe_", "--metrics", metrics)
    table = compared(counters(printed))
    print(table.text(120))
    if options.csv:
        options.csv.write_text(table.csv())
    pairs = [row[at : at + 2] for row in table.rows for at in (3, 5, 7)]
    differing = sum(predicted != seen for predicted, seen in pairs)
    print(f"{len(pairs) - differing} of {len(pairs)} figures are as predicted")
    sys.exit(differing > 0)


if __name__ == "__main__":
    main()
