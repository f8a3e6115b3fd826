"""Check random score and mask functions against the float64 oracle.

    PYTHONPATH=tests/tools python -m function_fuzz FIRST COUNT [--gpu] [--python] [--jobs N]
                                                   [--seconds S]

checks the cases of the seeds FIRST, FIRST + 1, ... and prints those that fail. On a CPU the
engines must be exact in float64, and their traces must have the counts of the closed form. On a GPU
an error may be twice that of plain attention in the same type, plus a rounding. Gradients of
captured arrays and of sinks, which are sums that cancel, may have twice the error of the simulator
in that type.
Cases on a GPU take turns on the Hopper kernels, the portable kernels and the kernels for decoding,
which have a forward only. With `--python`, they take turns on the Hopper and the tensor-core
kernels in Python.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from typing import Any, NamedTuple

import numpy as np
from helpers import tensors
from random_functions import Random

from flashsim import Tiling, count, run
from flashsim.problem import oracle

#: Kernels of the cases on a GPU, in turn, by backend.
ON_GPU = {
    "cupy": ("hopper", "portable", "hopper", "decode"),
    "numba_cuda": ("hopper", "tensor", "hopper", "tensor"),
}
#: One in this many CPU cases runs the CPU engine, which compiles each function.
COMPILED = 20


class Case(NamedTuple):
    """The case of a seed: sizes, keywords of `run`, and a generator for further choices."""

    sizes: dict[str, int]
    how: dict[str, Any]
    rng: np.random.Generator


def drawn(seed: int, most: int, *, jumps: bool = True) -> Case:
    """Return the case of a seed, with fewer than `most` queries and keys."""
    rng = np.random.default_rng(seed)
    n_q, n_kv = (int(n) for n in rng.integers(1, most, 2))
    batch, kv_heads, group = (int(n) for n in rng.integers(1, 3, 3))
    heads = kv_heads * group
    made = Random(seed, batch, heads, n_q, n_kv, jumps=jumps)
    how = {"score_mod": made.score_mod()} if rng.random() < 0.8 else {}
    how |= {"mask_mod": made.mask_mod()} if rng.random() < 0.8 else {}
    how |= {"sinks": rng.standard_normal(heads)} if rng.random() < 0.3 else {}
    how |= {"causal": True} if rng.random() < 0.2 else {}
    how |= {"softcap": 3.0} if rng.random() < 0.2 else {}
    sizes = {"n_q": n_q, "n_kv": n_kv, "batch": batch, "heads": heads, "kv_heads": kv_heads}
    return Case(sizes, how, rng)


def expected(
    result: Any,
    dout: Any,
    dlse: Any,
    names: Sequence[str] = (),
    *,
    dtype: str = "float64",
    **given: Any,
) -> dict[str, np.ndarray]:
    """Return the oracle's out, LSE and gradients of a result's problem, rounded to `dtype`."""
    job = result._job
    p = replace(job.problem, dlse=True, score_grads=tuple(names))
    held = {"captured": job.score_arrays, **given, "dtype": dtype}
    made = oracle.gradients(job.q, job.k, job.v, dout, p, dlse=dlse, **held)
    return {**forward(result, dtype=dtype, **given), **made}


def forward(result: Any, *, dtype: str, **given: Any) -> dict[str, np.ndarray]:
    """Return the oracle's out and LSE of a result's problem, rounded to `dtype`."""
    job = result._job
    given = {"captured": job.score_arrays, **given, "dtype": dtype}
    out, lse = oracle.attention(job.q, job.k, job.v, job.problem, **given)
    return {"out": out, "lse": lse}


def found(result: Any, gradients: Any) -> dict[str, Any]:
    """Return a result's out, LSE and gradients, by the names in `expected`."""
    got = {"out": result.out, "lse": result.lse}
    got |= {name: getattr(gradients, name) for name in ("dq", "dk", "dv", "dbias", "dsinks")}
    got |= {f"d:{name}": x for name, x in gradients.captured.items()}
    return {name: x for name, x in got.items() if x is not None}


def same_counts(trace: Any, closed: Any) -> None:
    """Raise AssertionError unless a trace has the counts of the closed form."""
    assert trace.by_tensor() == closed.by_tensor()
    assert trace.bytes() == closed.bytes()
    assert trace.peak_sram() == closed.peak_sram()
    kinds = ("function", "matmul", "exp", "add")
    assert {k: trace.flops(k) for k in kinds} == {k: closed.flops(k) for k in kinds}


def check_on_cpu(seed: int, backend: str) -> None:
    """Raise AssertionError unless an engine's results are exact, and its counts right."""
    sizes, how, rng = drawn(seed, 40)
    x = tensors(d=4, dtype="float64", seed=seed, **sizes)
    tiling = Tiling(*(int(n) for n in rng.choice([4, 8, 16, 64], 2)))
    algorithm = str(rng.choice(["flash2", "flash2-fused"]))
    told = {"tiling": tiling, "algorithm": algorithm}
    result = run(x.q, x.k, x.v, **how, **told, backend=backend, trace=True)
    graph = result.problem.score_mod
    names = [] if graph is None else [a.name for a in graph.differentiable]
    dlse = np.where(np.isinf(result.lse), 0, rng.standard_normal(result.lse.shape))
    gradients = result.backward(x.dout, dlse=dlse, captured=True, tiling=tiling)
    exact = expected(result, x.dout, dlse, names, sinks=how.get("sinks"))
    got = found(result, gradients)
    assert exact.keys() == got.keys()
    for name, value in got.items():
        near = 1e-9 if name in ("out", "lse") else 1e-7
        assert np.allclose(value, exact[name], rtol=near, atol=near / 10), name
    same_counts(result.trace, count(result.problem, **told))
    same_counts(gradients.trace, count(gradients.trace.problem, **told, direction="backward"))


def check_on_gpu(seed: int, backend: str = "cupy") -> None:
    """Raise AssertionError unless the errors of all results are within the budget of their type."""
    sizes, how, rng = drawn(seed, 300, jumps=False)
    kernel = ON_GPU[backend][seed % 4]
    types = ["float16", "bfloat16", "float32"]
    dtype = str(rng.choice(types if kernel == "portable" else types[:2]))
    x = tensors(d=int(rng.choice([32, 64, 128])), dtype=dtype, seed=seed, **sizes)
    if kernel == "decode":
        chosen = {"algorithm": "flash-decode", "splits": int(rng.integers(1, 5))}
    else:
        chosen = {"kernel": kernel}
    result = run(x.q, x.k, x.v, **how, **chosen, backend=backend)
    assert kernel in (result.kernel, "decode"), f"ran kernel={result.kernel!r}, not {kernel!r}"
    given = {"sinks": how.get("sinks")}
    if kernel == "decode":
        exact, rough = (forward(result, dtype=kind, **given) for kind in ("float64", dtype))
        within_budget({"out": result.out, "lse": result.lse}, exact, rough, {}, dtype)
        return
    simulated = run(x.q, x.k, x.v, **how, backend="simulator")
    graph = result.problem.score_mod
    names = [] if graph is None else [a.name for a in graph.differentiable]
    dlse = np.where(np.isinf(result.lse), 0, rng.standard_normal(result.lse.shape))
    dlse = dlse.astype(np.float32)
    form = (None, True, False)[rng.integers(3)]
    gradients = result.backward(x.dout, dlse=dlse, captured=True, deterministic=form)
    exact, rough = (
        expected(result, x.dout, dlse, names, dtype=kind, **given) for kind in ("float64", dtype)
    )
    got = found(result, gradients)
    assert exact.keys() == got.keys()
    again = found(simulated, simulated.backward(x.dout, dlse=dlse, captured=True))
    sums = {name: value for name, value in again.items() if name.startswith(("d:", "dsinks"))}
    within_budget(got, exact, rough, sums, dtype)


def within_budget(
    got: dict[str, Any],
    exact: dict[str, np.ndarray],
    rough: dict[str, np.ndarray],
    again: dict[str, Any],
    dtype: str,
) -> None:
    """Raise AssertionError unless errors are at most twice those of `rough` and of `again`."""
    eps = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-23}[dtype]
    problems = []
    for name, value in got.items():
        value, right = value.astype(np.float64), exact[name]
        kept = ~np.isinf(right)
        if not (np.isinf(value) == ~kept).all():
            problems.append(f"{name}: other infinities, or NaN")
            continue
        others = (rough[name], again[name]) if name in again else (rough[name],)
        error, *errors = (
            np.abs(y[kept].astype(np.float64) - right[kept]).max(initial=0)
            for y in (value, *others)
        )
        largest = np.abs(right[kept]).max(initial=0)
        budget = 2 * max(errors) + (2 * eps + 2e-6) * largest + 2e-5
        if not error <= budget:
            problems.append(f"{name}: {error:.3g} > {budget:.3g}")
    assert not problems, f"{dtype}: {problems}"


def outcome(seed: int, backend: str) -> str:
    """Return why a seed's case failed; "" if it did not. Without a backend, it runs on the CPU."""
    try:
        if backend:
            check_on_gpu(seed, backend)
        else:
            check_on_cpu(seed, "simulator" if seed % COMPILED else "numba")
    except Exception as error:
        return f"seed {seed}: {type(error).__name__}: {error}"
    return ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 1 if a case failed, or if time ran out."""
    parser = argparse.ArgumentParser(prog="function_fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("first", type=int)
    parser.add_argument("count", type=int)
    parser.add_argument("--gpu", action="store_true", help="on backend='cupy'")
    parser.add_argument("--python", action="store_true", help="on backend='numba_cuda'")
    parser.add_argument("--jobs", type=int, default=1, help="processes, default 1")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so many")
    options = parser.parse_args(arguments)
    backend = "numba_cuda" if options.python else "cupy" if options.gpu else ""
    end, done, failures = time.monotonic() + options.seconds, 0, 0
    seeds = range(options.first, options.first + options.count)
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        for failure in pool.map(partial(outcome, backend=backend), seeds):
            done += 1
            if failure:
                failures += 1
                print(failure, flush=True)
            if done % 50 == 0:
                print(f"{done:,} cases so far, {failures} failed", flush=True)
            if time.monotonic() > end:
                break  # which cancels the cases that have not begun
    print(f"{done:,} of {options.count:,} cases, {failures} failed", flush=True)
    return int(failures > 0 or done < options.count)


if __name__ == "__main__":
    sys.exit(main())
