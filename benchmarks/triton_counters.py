"""Traced bytes of the Triton kernels in examples/triton against a GPU's counters.

    python benchmarks/triton_counters.py --csv triton-counters.csv     # needs a GPU, torch and ncu

Every kernel runs twice: in Triton's interpreter on the CPU, where flashsim.triton counts the bytes
that its loads and stores ask for; and compiled, on the GPU, under Nsight Compute. Its counters are
the bytes between L2 and the SMs' L1 caches. A load that hits in L1 is traced and not counted there.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "triton"))

READ = "l1tex__m_xbar2l1tex_read_bytes.sum"
WRITTEN = "l1tex__m_l1tex2xbar_write_bytes.sum"
HITS = "l1tex__t_sectors_pipe_lsu_mem_global_op_ld_lookup_hit.sum"
#: Heads, tokens, head_dim, type, causal, tile.
ATTENTION = (
    (1, 1024, 64, "float16", False, 64, 64),
    (2, 1024, 64, "float16", True, 64, 64),
    (2, 1000, 64, "float16", True, 64, 64),
    (1, 1024, 128, "bfloat16", True, 64, 32),
    (1, 512, 64, "float32", True, 64, 32),
)
COLUMNS = (
    *("kernel", "shape", "traced_load_bytes", "traced_load_sector_bytes", "read_bytes"),
    *("l1_hit_bytes", "traced_store_bytes", "traced_store_sector_bytes", "written_bytes"),
)


def calls(kind: str) -> Iterator[tuple[str, Any]]:
    """Each shape and a function that launches its kernels; arrays are of `kind`: numpy or torch."""
    import decode
    import flash_attention
    import numpy as np
    import softmax

    rng = np.random.default_rng(0)

    def made(*shape: int, dtype: str = "float16") -> Any:
        x = rng.standard_normal(shape, dtype=np.float32)
        if kind == "torch":
            import torch

            return torch.from_numpy(x).cuda().to(getattr(torch, dtype))
        import ml_dtypes

        return x.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)

    for heads, n, d, dtype, causal, block_q, block_k in ATTENTION:
        q, k, v, do = (made(heads, n, d, dtype=dtype) for _ in range(4))
        shape = f"{heads} heads; {n} x {d}; {dtype}; {'causal; ' * causal}{block_q} x {block_k}"

        def attention(q=q, k=k, v=v, do=do, how=(causal, block_q, block_k)) -> None:
            o, lse = flash_attention.forward(q, k, v, *how)
            flash_attention.backward(q, k, v, o, lse, do, *how)

        yield shape, attention
    x = made(256, 1000, dtype="float32")
    yield "256 x 1000; float32", lambda: softmax.softmax(x)
    q, k, v = made(8, 64), made(8, 2048, 64), made(8, 2048, 64)
    yield "8 heads; 2048 keys x 64; float16", lambda: decode.decode(q, k, v)


def launch() -> None:
    """Run everything once on the GPU; Nsight Compute looks at the second time."""
    import torch

    for _, call in calls("torch"):
        call()
    torch.cuda.synchronize()


def traced() -> list[dict[str, Any]]:
    """What flashsim counts, launch by launch."""
    import numpy as np

    import flashsim.triton

    found = []
    for shape, call in calls("numpy"):
        with flashsim.triton.watch() as seen:
            call()
        record = seen.result().record
        a, asked = record.accesses, record.bytes_asked
        for number, one in enumerate(record.launches):
            row: dict[str, Any] = {"kernel": one.kernel, "shape": shape}
            for op, chosen in (("load", a["op"] == 0), ("store", a["op"] == 1)):
                mine = chosen & (a["launch"] == number)
                row[f"traced_{op}_bytes"] = int(asked[mine].sum())
                row[f"traced_{op}_sector_bytes"] = 32 * int(a["sectors"][mine].sum(dtype=np.int64))
            found.append(row)
    return found


def measured(rows: list[dict[str, Any]]) -> None:
    """Add the counters of the same launches, in the same order."""
    from nsight import profile
    from nsight import rows as table

    options = (
        "--metrics",
        ",".join((READ, WRITTEN, HITS)),
        "-k",
        "regex:^(attention|softmax|decode)_",
    )
    counters: dict[str, dict[str, float]] = {}
    names: dict[str, str] = {}
    for row in table(profile(*options)):
        counters.setdefault(row["ID"], {})[row["Metric Name"]] = float(
            row["Metric Value"].replace(",", "")
        )
        names[row["ID"]] = row["Kernel Name"]
    launched = sorted(counters, key=int)
    seen = [names[one].partition("(")[0] for one in launched]
    if seen != [row["kernel"] for row in rows]:
        sys.exit(f"the GPU ran {seen}, and the trace has {[row['kernel'] for row in rows]}")
    for row, one in zip(rows, launched, strict=True):
        row["read_bytes"] = int(counters[one][READ])
        row["written_bytes"] = int(counters[one][WRITTEN])
        row["l1_hit_bytes"] = 32 * int(counters[one].get(HITS, 0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--csv", default="triton-counters.csv")
    parser.add_argument("--traced", action="store_true", help="only trace: needs no GPU")
    parser.add_argument("--launch", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.launch:
        launch()
        return
    rows = traced()
    if not options.traced:
        measured(rows)
    with open(options.csv, "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    for row in rows:
        ratio = row["read_bytes"] / row["traced_load_bytes"] if "read_bytes" in row else 0
        print(
            f"{row['kernel']:20} {row['shape']:48} load {row['traced_load_bytes']:>12,} B traced, "
            f"{row.get('read_bytes', 0):>12,} read ({ratio:.4f}), store "
            f"{row['traced_store_bytes']:>10,} traced, {row.get('written_bytes', 0):>10,} written"
        )


if __name__ == "__main__":
    main()
