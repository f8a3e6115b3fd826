"""Pallas kernels, traced: seconds and memory; and traced bytes against a GPU's counters.

    python benchmarks/pallas_kernels.py                      # seconds and memory, on the CPU
    python benchmarks/pallas_kernels.py --counters out.csv   # needs a GPU, jax[cuda12] and ncu

The first traces the forward kernel of examples/pallas and JAX's own. The second runs them, and
JAX's own backward kernels, on a GPU under Nsight Compute. Its counters are the bytes between L2 and
the SMs' L1 caches; a load that hits in L1 is traced and is not counted there.
"""

from __future__ import annotations

import argparse
import csv
import os
import resource
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "pallas"))

READ = "l1tex__m_xbar2l1tex_read_bytes.sum"
WRITTEN = "l1tex__m_l1tex2xbar_write_bytes.sum"
HITS = "l1tex__t_sectors_pipe_lsu_mem_global_op_ld_lookup_hit.sum"
COLUMNS = (
    *("kernel", "shape", "traced_load_bytes", "traced_load_sector_bytes", "read_bytes"),
    *("l1_hit_bytes", "traced_store_bytes", "traced_store_sector_bytes", "written_bytes"),
)
#: Heads, tokens, head_dim, type, causal, tile.
SHAPES = (
    (1, 1024, 64, "float16", False, 64, 64),
    (2, 1024, 64, "float16", True, 64, 64),
    (2, 1000, 64, "float16", True, 64, 64),
    (1, 1024, 128, "bfloat16", True, 64, 32),
)


def jax_attention() -> Any:
    """JAX's own attention in Pallas; JAX 0.11 warns that another package will have it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu import attention
    return attention


def calls() -> Iterator[tuple[str, Callable[..., Any], list[Any]]]:
    """Shapes, functions that call kernels, and their arguments."""
    import gpu_forward
    import jax
    import jax.numpy as jnp

    attention = jax_attention()
    rng = np.random.default_rng(0)
    for heads, n, d, dtype, causal, block_q, block_k in SHAPES:
        shape = f"{heads} heads; {n} x {d}; {dtype}; {'causal; ' * causal}{block_q} x {block_k}"
        x = [jnp.asarray(rng.standard_normal((heads, n, d)), dtype) for _ in range(4)]

        def own(q: Any, k: Any, v: Any, how: Any = (causal, block_q, block_k)) -> Any:
            return gpu_forward.forward(q, k, v, *how)

        yield shape, own, x[:3]
        if n % block_q:
            continue
        sizes = attention.BlockSizes(block_q, block_k, *[block_q] * 4)

        def gradients(
            q: Any, k: Any, v: Any, do: Any, how: Any = (None, d**-0.5, causal, sizes)
        ) -> Any:
            return jax.vjp(lambda *qkv: attention.mha(*qkv, *how), q, k, v)[1](do)

        yield shape, gradients, [y.transpose(1, 0, 2)[None] for y in x]


def traced() -> list[dict[str, Any]]:
    """What flashsim counts, launch by launch, in the order in which the GPU runs them."""
    from flashsim.jax import trace_kernel

    found = []
    for shape, function, arrays in calls():
        record = trace_kernel(function, *arrays).record
        a, asked = record.accesses, record.bytes_asked
        for number, one in enumerate(record.launches):
            row: dict[str, Any] = {"kernel": one.kernel, "shape": shape}
            for op, chosen in (("load", a["op"] == 0), ("store", a["op"] == 1)):
                mine = chosen & (a["launch"] == number)
                row[f"traced_{op}_bytes"] = int(asked[mine].sum())
                row[f"traced_{op}_sector_bytes"] = 32 * int(a["sectors"][mine].sum(dtype=np.int64))
            found.append(row)
    return found


def launch() -> None:
    """Run everything once on the GPU, and compare the results with those of the traced run."""
    import jax

    for shape, function, arrays in calls():
        result = jax.jit(function)(*arrays)
        jax.block_until_ready(result)
        finite = all(
            bool(np.isfinite(np.asarray(x, np.float32)).all()) for x in jax.tree.leaves(result)
        )
        print(f"{shape}: {'finite' if finite else 'NOT FINITE'}", file=sys.stderr)


def right() -> None:
    """Say how far results on the GPU are from those of the traced run on the CPU."""
    import jax

    from flashsim.jax.pallas import record_kernels

    for shape, function, arrays in calls():
        on_gpu = jax.tree.leaves(jax.jit(function)(*arrays))
        on_cpu = jax.tree.leaves(record_kernels(function, arrays, None)[2])
        worst = max(
            float(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)).max())
            for a, b in zip(on_gpu, on_cpu, strict=True)
        )
        print(f"{shape:48} {len(on_gpu)} results; GPU - traced run: at most {worst:.1e}")


def measured(rows: list[dict[str, Any]]) -> None:
    """Add the counters of the same launches, in the same order."""
    from nsight import profile
    from nsight import rows as table

    kernels = "|".join(sorted({row["kernel"] for row in rows}))
    options = ("--metrics", ",".join((READ, WRITTEN, HITS)), "-k", f"regex:^({kernels})")
    counters: dict[str, dict[str, float]] = {}
    names: dict[str, str] = {}
    for row in table(profile(*options)):
        counters.setdefault(row["ID"], {})[row["Metric Name"]] = float(
            row["Metric Value"].replace(",", "")
        )
        names[row["ID"]] = row["Kernel Name"].partition("(")[0]
    launched = sorted(counters, key=int)
    seen = [names[one] for one in launched]
    if len(seen) != len(rows) or not all(
        name.startswith(row["kernel"]) for name, row in zip(seen, rows, strict=True)
    ):
        sys.exit(f"the GPU ran {seen}, and the trace has {[row['kernel'] for row in rows]}")
    for row, one in zip(rows, launched, strict=True):
        row["read_bytes"] = int(counters[one][READ])
        row["written_bytes"] = int(counters[one][WRITTEN])
        row["l1_hit_bytes"] = 32 * int(counters[one].get(HITS, 0))


def times(lengths: list[int]) -> None:
    """Print the seconds and the memory of a trace: one head, d = 64, float32, tile 64 x 64."""
    from gpu_forward import forward

    from flashsim.jax import trace_kernel

    attention = jax_attention()
    sizes = attention.BlockSizes(64, 64)
    print("     n  kernel            seconds  accesses  record MB  peak of process MB")
    for n in lengths:
        q = np.random.default_rng(0).standard_normal((1, n, 64)).astype(np.float32)
        for name, function, x in (
            ("examples/pallas", lambda q: forward(q, q, q, False, 64, 64), q),
            ("JAX's mha", lambda q: attention.mha(q, q, q, None, 1.0, False, sizes), q[:, :, None]),
        ):
            start = time.perf_counter()
            seen = trace_kernel(function, x)
            took = time.perf_counter() - start
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            size = seen.record.nbytes / 1e6
            print(f"{n:6}  {name:16} {took:8.2f}  {seen.n_events:8,}  {size:9.2f}  {peak:18.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--counters", metavar="CSV", help="compare with Nsight Compute, on a GPU")
    parser.add_argument("--right", action="store_true", help="compare results, on a GPU")
    parser.add_argument("--launch", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    # JAX would take most of the GPU's memory, and the trace needs the CPU beside it.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if options.launch:
        launch()
    elif options.right:
        right()
    elif options.counters:
        rows = traced()
        measured(rows)
        with open(options.counters, "w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)
        for row in rows:
            ratio = row["read_bytes"] / row["traced_load_bytes"]
            print(
                f"{row['kernel']:24} {row['shape']:40} load {row['traced_load_bytes']:>12,} B "
                f"traced, {row['read_bytes']:>12,} read ({ratio:.3f}), "
                f"{row['l1_hit_bytes']:>10,} hit in L1; "
                f"store {row['traced_store_bytes']:>10,} traced, {row['written_bytes']:>10,} "
                "written"
            )
    else:
        times(options.lengths)


if __name__ == "__main__":
    main()
