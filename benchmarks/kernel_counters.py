"""Compare traced bytes of readers' kernels with a GPU's hardware counters.

    python benchmarks/kernel_counters.py triton --csv FILE   # torch and Triton
    python benchmarks/kernel_counters.py pallas --csv FILE   # jax[cuda12]; also JAX's own backward
    python benchmarks/kernel_counters.py numba --csv FILE    # numba-cuda
    python benchmarks/kernel_counters.py pallas --right      # results on the GPU and traced ones
Needs a GPU and Nsight Compute, except with `--traced`. Every kernel of examples/ runs twice: on the
CPU, where flashsim counts the bytes that its loads and stores request; and compiled, on the GPU.
The hardware counters measure the bytes between L2 and the SMs' L1 caches. A load that hits in L1 is
traced, but the counters do not include it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gpu_lab import csv_file

EXAMPLES = Path(__file__).parents[1] / "examples"
READ = "l1tex__m_xbar2l1tex_read_bytes.sum"
WRITTEN = "l1tex__m_l1tex2xbar_write_bytes.sum"
HITS = "l1tex__t_sectors_pipe_lsu_mem_global_op_ld_lookup_hit.sum"
#: Heads, tokens, head_dim, type, causal, tile.
ATTENTION = (
    (1, 1024, 64, "float16", False, 64, 64),
    (2, 1024, 64, "float16", True, 64, 64),
    (2, 1000, 64, "float16", True, 64, 64),
    (1, 1024, 128, "bfloat16", True, 64, 32),
)
COLUMNS = (
    *("kernel", "shape", "traced_load_bytes", "traced_load_sector_bytes", "read_bytes"),
    *("l1_hit_bytes", "traced_store_bytes", "traced_store_sector_bytes", "written_bytes"),
)


class Call(NamedTuple):
    """Kernels on arrays of one shape: `trace` returns a record, `launch` runs on the GPU."""

    shape: str
    trace: Callable[[], Any]
    launch: Callable[[], Any]


def attention_shape(heads: int, n: int, d: int, dtype: str, causal: bool, *tile: int) -> str:
    """Return the sizes as the tables show them."""
    return f"{heads} heads; {n} x {d}; {dtype}; {'causal; ' * causal}{tile[0]} x {tile[1]}"


def triton() -> Iterator[Call]:
    """Yield Triton's kernels: attention forward and backward, a softmax, decoding."""
    sys.path.insert(0, str(EXAMPLES / "triton"))  # before this folder, which also has a decode.py
    import decode
    import flash_attention
    import softmax

    from flashsim.problem.problem import numpy_dtype

    rng = np.random.default_rng(0)

    def call(shape: str, dtype: str, work: Callable[..., Any], *sizes: tuple[int, ...]) -> Call:
        arrays = [rng.standard_normal(size, dtype=np.float32) for size in sizes]

        def trace() -> Any:
            import flashsim.triton

            narrow = [x.astype(numpy_dtype(dtype)) for x in arrays]
            with flashsim.triton.watch() as seen:
                work(*narrow)
            return seen.result().record

        def launch() -> None:
            import torch

            work(*(torch.from_numpy(x).cuda().to(getattr(torch, dtype)) for x in arrays))
            torch.cuda.synchronize()

        return Call(shape, trace, launch)

    for heads, n, d, dtype, *how in (*ATTENTION, (1, 512, 64, "float32", True, 64, 32)):

        def attention(q: Any, k: Any, v: Any, do: Any, how: Any = how) -> None:
            o, lse = flash_attention.forward(q, k, v, *how)
            flash_attention.backward(q, k, v, o, lse, do, *how)

        yield call(
            attention_shape(heads, n, d, dtype, *how), dtype, attention, *[(heads, n, d)] * 4
        )
    yield call("256 x 1000; float32", "float32", softmax.softmax, (256, 1000))
    cache = (8, 2048, 64)
    shape = "8 heads; 2048 keys x 64; float16"
    yield call(shape, "float16", decode.decode, (8, 64), cache, cache)


def pallas_calls() -> Iterator[tuple[str, Callable[..., Any], list[Any]]]:
    """Yield shapes, functions that call Pallas kernels, and their arguments."""
    sys.path.insert(0, str(EXAMPLES / "pallas"))
    # JAX would reserve most of the GPU's memory, and the trace also needs the CPU.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import gpu_forward
    import jax
    import jax.numpy as jnp

    with warnings.catch_warnings():  # JAX 0.11 warns that the kernel moves to another package
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu import attention

    rng = np.random.default_rng(0)
    for heads, n, d, dtype, causal, block_q, block_k in ATTENTION:
        shape = attention_shape(heads, n, d, dtype, causal, block_q, block_k)
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


def pallas() -> Iterator[Call]:
    """Yield Pallas's kernels: a forward pass of examples/, and JAX's own backward pass."""
    for shape, function, arrays in pallas_calls():

        def trace(function: Any = function, arrays: Any = arrays) -> Any:
            from flashsim.jax import trace_kernel

            return trace_kernel(function, *arrays).record

        def launch(function: Any = function, arrays: Any = arrays) -> None:
            import jax

            jax.block_until_ready(jax.jit(function)(*arrays))

        yield Call(shape, trace, launch)


def numba() -> Iterator[Call]:
    """Yield the Numba-CUDA forward kernel; its trace needs NUMBA_ENABLE_CUDASIM=1."""
    from flashsim.own_kernels.files import imported

    module = imported(EXAMPLES / "numba_cuda" / "forward.py")
    for n, causal in ((128, True), (120, False)):
        q, k, v = np.random.default_rng(0).standard_normal((3, 2, n, module.D)).astype(np.float32)
        o, lse = np.zeros_like(q), np.zeros((2, n), np.float32)
        kernel = module.forward[(-(-n // module.BLOCK_Q), 2), module.BLOCK_Q]
        arguments = q, k, v, o, lse, module.D**-0.5, causal

        def trace(kernel: Any = kernel, arguments: Any = arguments) -> Any:
            import flashsim.cuda

            return flashsim.cuda.trace(kernel, *arguments).record

        def launch(kernel: Any = kernel, arguments: Any = arguments) -> None:
            from numba import cuda

            warnings.simplefilter("ignore")  # the grids are small
            on_gpu = (cuda.to_device(x) if isinstance(x, np.ndarray) else x for x in arguments)
            kernel(*on_gpu)
            cuda.synchronize()

        yield Call(attention_shape(2, n, module.D, "float32", causal, 16, 8), trace, launch)


FRAMEWORKS = {"triton": triton, "pallas": pallas, "numba": numba}


def traced(framework: str) -> list[dict[str, Any]]:
    """Return the bytes that flashsim counts, one row per launch, in the order of the launches."""
    rows = []
    for call in FRAMEWORKS[framework]():
        record = call.trace()
        accesses, asked = record.accesses, record.bytes_asked
        for number, started in enumerate(record.launches):
            row: dict[str, Any] = {"kernel": started.kernel, "shape": call.shape}
            for op, chosen in (("load", accesses["op"] == 0), ("store", accesses["op"] == 1)):
                mine = chosen & (accesses["launch"] == number)
                sectors = accesses["sectors"][mine].sum(dtype=np.int64)
                row[f"traced_{op}_bytes"] = int(asked[mine].sum())
                row[f"traced_{op}_sector_bytes"] = 32 * int(sectors)
            rows.append(row)
    return rows


def traced_apart(framework: str) -> list[dict[str, Any]]:
    """Return `traced` of a separate process, where Numba's CUDA simulator is on."""
    done = subprocess.run(
        [sys.executable, __file__, framework, "--traced", "--json"],
        env={**os.environ, "NUMBA_ENABLE_CUDASIM": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(done.stderr)
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


def measure(framework: str, rows: list[dict[str, Any]]) -> None:
    """Add the hardware counters of the same launches, in the same order."""
    import nsight

    start = "" if framework == "numba" else "^"  # Numba's names begin with a mangled module
    kernels = "|".join(sorted({row["kernel"] for row in rows}))
    options = ("--metrics", ",".join((READ, WRITTEN, HITS)), "-k", f"regex:{start}({kernels})")
    counters: dict[int, dict[str, float]] = {}
    names: dict[int, str] = {}
    for line in nsight.rows(nsight.profile(*options)):
        number, value = int(line["ID"]), float(line["Metric Value"].replace(",", ""))
        counters.setdefault(number, {})[line["Metric Name"]] = value
        names[number] = line["Kernel Name"].partition("(")[0]
    launched = sorted(counters)
    ran, known = [names[n] for n in launched], [row["kernel"] for row in rows]
    if len(ran) != len(known) or not all(
        a in b if framework == "numba" else b.startswith(a) for a, b in zip(known, ran, strict=True)
    ):
        sys.exit(f"the GPU and the trace must have the same kernels, got {ran} and {known}")
    for row, number in zip(rows, launched, strict=True):
        row["read_bytes"] = int(counters[number][READ])
        row["written_bytes"] = int(counters[number][WRITTEN])
        row["l1_hit_bytes"] = 32 * int(counters[number].get(HITS, 0))


def right() -> None:
    """Print the largest difference between the GPU's results and those of the traced run."""
    for shape, function, arrays in pallas_calls():
        import jax

        from flashsim.jax.pallas import record_kernels

        on_gpu = jax.tree.leaves(jax.jit(function)(*arrays))
        on_cpu = jax.tree.leaves(record_kernels(function, arrays, None)[2])
        worst = max(
            float(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)).max())
            for a, b in zip(on_gpu, on_cpu, strict=True)
        )
        print(f"{shape:48} {len(on_gpu)} results; GPU - traced run: at most {worst:.1e}")


def main() -> None:
    """Trace, measure, print and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("framework", choices=FRAMEWORKS)
    parser.add_argument("--csv", help="file for the table")
    parser.add_argument("--traced", action="store_true", help="only trace, without a GPU")
    parser.add_argument("--right", action="store_true", help="pallas: only compare results")
    parser.add_argument("--json", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--launch", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.launch:
        for call in FRAMEWORKS[options.framework]():
            call.launch()
        return
    if options.right:
        if options.framework != "pallas":
            parser.error("--right works only for pallas")
        right()
        return
    apart = options.framework == "numba" and not options.json
    rows = (traced_apart if apart else traced)(options.framework)
    if options.json:
        print(json.dumps(rows))
        return
    if not options.traced:
        measure(options.framework, rows)
    if options.csv:
        with csv_file(options.csv, COLUMNS) as write:
            write(*rows)
    for row in rows:
        print(", ".join(f"{name} {row[name]}" for name in COLUMNS if name in row))


if __name__ == "__main__":
    main()
