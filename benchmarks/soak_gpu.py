"""Random problems on a GPU whose kernels count what they move; needs CuPy, for Python numba-cuda.

    python benchmarks/soak_gpu.py --seconds 180 [--jobs 14] [--seed 1] [--backend numba_cuda]

What a kernel counted must equal `flashsim.count`, stage by stage and tensor by tensor, as integers.
What takes time is compiling, so each process draws a variant (backend, kernel family, dtype, head
dimensions, masks), compiles it and runs many lengths, heads and batches of it: forward, the three
passes, the fused backward and, where there is one, the fused in a fixed order. A case is one pass.
What fails is printed as the call that shows it; the exit status is then 1.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import time
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import numpy as np

KINDS = (
    *(("cupy", "hopper"),) * 3,
    *(("cupy", "portable"),) * 3,
    ("numba_cuda", "tensor"),
    ("numba_cuda", "hopper"),
)
LENGTHS = (1, 2, 7, 16, 31, 64, 65, 100, 127, 128, 129, 191, 200, 256, 300, 333, 513)
SIZES = 9  # of each variant


def draw_variant(rng: np.random.Generator, backends: tuple[str, ...]) -> dict[str, Any]:
    """What decides which kernels are compiled."""
    backend, kernel = KINDS[rng.integers(len(KINDS))]
    while backend not in backends:
        backend, kernel = KINDS[rng.integers(len(KINDS))]
    narrow = ("float16", "bfloat16")
    wide = (backend, kernel) == ("cupy", "portable")
    dtypes = (*narrow, "float32") if wide else narrow
    d = int(rng.integers(1, 257))
    values = int(rng.integers(1, 257)) if rng.random() < 0.3 else d
    asked: dict[str, Any] = {"backend": backend, "kernel": kernel}
    mask = rng.integers(4)
    if mask == 1:
        asked["causal"] = True
    elif mask == 2:
        asked["window"] = (int(rng.integers(0, 90)), int(rng.integers(0, 90)))
    if rng.random() < 0.15:
        asked["softcap"] = 5.0
    if rng.random() < 0.2:
        asked["key_order"] = "descending"
    drawn = {"dtype": dtypes[rng.integers(len(dtypes))], "d": d, "dv": values}
    return {"asked": asked, "packed": bool(rng.random() < 0.2), **drawn}


def draw_sizes(rng: np.random.Generator, packed: bool) -> dict[str, Any]:
    """Lengths, heads and batch."""
    kv_heads, group = int(rng.integers(1, 4)), int(rng.integers(1, 4))
    pick = lambda: int(LENGTHS[rng.integers(len(LENGTHS))])  # noqa: E731
    sizes = {"heads": kv_heads * group, "kv_heads": kv_heads, "batch": int(rng.integers(1, 4))}
    if not packed:
        return {**sizes, "n_q": pick(), "n_kv": pick()}
    parts = int(rng.integers(1, 5))
    cu_q, cu_k = (np.cumsum([0, *(pick() for _ in range(parts))]).tolist() for _ in range(2))
    cu = {"cu_seqlens_q": tuple(cu_q), "cu_seqlens_k": tuple(cu_k)}
    return {**sizes, "batch": 1, "n_q": cu_q[-1], "n_kv": cu_k[-1], "cu": cu}


def check(variant: dict[str, Any], sizes: dict[str, Any], rng: np.random.Generator) -> Counter[str]:
    """Run a problem's passes; how many agreed, by name.

    Raises
    ------
    AssertionError
        If a pass counted anything but what is predicted.
    """
    import flashsim
    from flashsim.errors import UnsupportedError
    from flashsim.problem.problem import numpy_dtype

    dtype = numpy_dtype(variant["dtype"])
    shapes = (
        (sizes["heads"], sizes["n_q"], variant["d"]),
        (sizes["kv_heads"], sizes["n_kv"], variant["d"]),
        (sizes["kv_heads"], sizes["n_kv"], variant["dv"]),
        (sizes["heads"], sizes["n_q"], variant["dv"]),
    )
    q, k, v, dout = (
        rng.standard_normal((sizes["batch"], *shape), dtype=np.float32).astype(dtype)
        for shape in shapes
    )
    asked = variant["asked"] | sizes.get("cu", {})
    done: Counter[str] = Counter()
    try:
        result = flashsim.run(q, k, v, trace=True, **asked)
    except UnsupportedError:  # the family has no kernel for it, and says so
        return Counter({"refused": 1})
    agrees("forward", result.trace, done)
    for deterministic in (None, True, False):
        try:
            gradients = result.backward(dout, deterministic=deterministic)
        except UnsupportedError:
            done["refused"] += 1
            continue
        agrees(f"backward, deterministic={deterministic}", gradients.trace, done)
    return done


def agrees(name: str, trace: Any, done: Counter[str]) -> None:
    """Compare a trace with its prediction."""
    expected = trace.predicted().transfers
    counted = {key: n for key, n in trace.transfers.items() if n}
    apart = {
        key: (counted.get(key), expected.get(key))
        for key in counted.keys() | expected.keys()
        if counted.get(key) != expected.get(key)
    }
    assert not apart, f"{name}, tiles {trace.tiling}: counted and predicted {apart}"
    done["cases"] += 1


def worker(given: tuple[int, int, float, tuple[str, ...]]) -> tuple[Counter[str], list[str]]:
    """Variants until the time is over."""
    seed, number, seconds, backends = given
    counts: Counter[str] = Counter()
    failed: list[str] = []
    end = time.monotonic() + seconds
    turn = 0
    while time.monotonic() < end and len(failed) < 5:
        rng = np.random.default_rng([seed, number, turn])
        turn += 1
        variant = draw_variant(rng, backends)
        for _ in range(SIZES):
            sizes = draw_sizes(rng, variant["packed"])
            try:
                with contextlib.redirect_stderr(io.StringIO()):  # what was compiled
                    done = check(variant, sizes, rng)
            except Exception as error:
                last = traceback.extract_tb(error.__traceback__)[-1]
                where = f"{os.path.basename(last.filename)}:{last.lineno}"
                failed.append(f"{variant} {sizes}\n  {type(error).__name__} ({where}): {error}")
                break
            asked = variant["asked"]
            counts.update({f"{asked['backend']} {asked['kernel']}": done["cases"], **done})
            if not done["cases"] or time.monotonic() > end:
                break
        counts["variants"] += 1
    return counts, failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", choices=("cupy", "numba_cuda"), help="default: both")
    chosen = parser.parse_args()
    backends = (chosen.backend,) if chosen.backend else ("cupy", "numba_cuda")
    begin, counts, failed = time.monotonic(), Counter[str](), list[str]()
    jobs = [(chosen.seed, number, chosen.seconds, backends) for number in range(chosen.jobs)]
    with ProcessPoolExecutor(chosen.jobs, mp_context=get_context("spawn")) as pool:
        for made, wrong in pool.map(worker, jobs):
            counts.update(made)
            failed += wrong
    for one in failed:
        print(one)
    parts = ", ".join(f"{n:,} {what}" for what, n in sorted(counts.items()))
    print(f"{time.monotonic() - begin:.0f} s: {parts}; {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
