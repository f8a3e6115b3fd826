"""Run random problems on a GPU whose kernels count the bytes that they move.

    python benchmarks/soak_gpu.py --seconds 180 [--jobs 14] [--seed 1] [--kinds teaching,decode]
        [--csv docs/data/soak-counts-h200.csv]

Needs CuPy; the Python kernels need numba-cuda. Kernel-reported bytes must equal `flashsim.count`,
per stage and tensor, as integers. Compilation takes most of the time. So each process cycles
through the kinds of kernels, draws a variant (dtype, head dimensions, masks), compiles it and runs
many lengths, heads and batches of it: forward, three-pass backward, fused backward, and fused in a
fixed order. A case is one pass. A failure is printed as the call that reproduces it; the exit
status is then 1.
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
from pathlib import Path
from typing import Any

import numpy as np

NARROW = ("float16", "bfloat16")
#: Options of `run` and dtypes, by kind of kernel.
KINDS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "hopper": ({"backend": "cupy", "kernel": "hopper"}, NARROW),
    "portable": ({"backend": "cupy", "kernel": "portable"}, (*NARROW, "float32")),
    "tf32": ({"backend": "cupy", "allow_tf32": True}, ("float32",)),
    "decode": ({"backend": "cupy", "algorithm": "flash-decode"}, NARROW),
    "python tensor": ({"backend": "numba_cuda", "kernel": "tensor"}, NARROW),
    "python hopper": ({"backend": "numba_cuda", "kernel": "hopper"}, NARROW),
    "teaching": ({"backend": "numba_cuda", "kernel": "teaching"}, ("float16", "float32")),
}
#: The cycle of kinds: common ones more often, and those that compile for minutes less often.
TURNS = (
    *("hopper", "portable", "python tensor", "hopper", "portable", "tf32"),
    *("hopper", "decode", "python hopper", "portable", "teaching"),
)
PASSES = {None: "flash2", False: "flash2-fused", True: "deterministic"}
LENGTHS = (1, 2, 7, 16, 31, 64, 65, 100, 127, 128, 129, 191, 200, 256, 300, 333, 513)
SIZES = 9  # sizes per variant

#: Outcomes of a pass other than equal counts: the kind has no kernel and says so; the GPU has no
#: memory left beside other processes; or the pass is wrong.
OTHERWISE = ("refused", "no memory", "failed")
#: Number of passes by (kind, dtype, pass).
Tally = Counter[tuple[str, str, str]]


def draw_variant(rng: np.random.Generator, kind: str) -> dict[str, Any]:
    """Return the options that determine which kernels are compiled."""
    options, dtypes = KINDS[kind]
    asked, d = dict(options), int(rng.integers(1, 257))
    values = int(rng.integers(1, 257)) if rng.random() < 0.3 else d
    mask = rng.integers(4)
    if mask == 1:
        asked["causal"] = True
    elif mask == 2:
        asked["window"] = (int(rng.integers(0, 90)), int(rng.integers(0, 90)))
    if rng.random() < 0.15:
        asked["softcap"] = 5.0
    if rng.random() < 0.2 and kind != "decode":
        asked["key_order"] = "descending"
    packed = bool(rng.random() < 0.2) and kind != "decode"
    dtype = dtypes[rng.integers(len(dtypes))]
    return {"kind": kind, "asked": asked, "packed": packed, "dtype": dtype, "d": d, "dv": values}


def draw_sizes(rng: np.random.Generator, variant: dict[str, Any]) -> dict[str, Any]:
    """Return lengths, heads and batch; a few queries for decoding."""
    kv_heads, group = int(rng.integers(1, 4)), int(rng.integers(1, 4))
    pick = lambda: int(LENGTHS[rng.integers(len(LENGTHS))])  # noqa: E731
    sizes = {"heads": kv_heads * group, "kv_heads": kv_heads, "batch": int(rng.integers(1, 4))}
    if variant["kind"] == "decode":
        return {**sizes, "n_q": int(rng.integers(1, 9)), "n_kv": pick() + pick()}
    if not variant["packed"]:
        return {**sizes, "n_q": pick(), "n_kv": pick()}
    parts = int(rng.integers(1, 5))
    cu_q, cu_k = (np.cumsum([0, *(pick() for _ in range(parts))]).tolist() for _ in range(2))
    cu = {"cu_seqlens_q": tuple(cu_q), "cu_seqlens_k": tuple(cu_k)}
    return {**sizes, "batch": 1, "n_q": cu_q[-1], "n_kv": cu_k[-1], "cu": cu}


def check(variant: dict[str, Any], sizes: dict[str, Any], rng: np.random.Generator) -> Tally:
    """Run a problem's passes, and return how many agreed, by name.

    Raises
    ------
    AssertionError
        If a pass's counts differ from the prediction.
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
    of = variant["kind"], variant["dtype"]
    done: Tally = Counter()
    try:
        result = flashsim.run(q, k, v, trace=True, **variant["asked"], **sizes.get("cu", {}))
    except UnsupportedError:
        return Counter({(*of, "refused"): 1})
    agrees("forward", result.trace)
    done[*of, "forward"] += 1
    if variant["kind"] == "decode":
        return done
    for deterministic, name in PASSES.items():
        try:
            gradients = result.backward(dout, deterministic=deterministic)
        except UnsupportedError:
            done[*of, "refused"] += 1
            continue
        agrees(f"backward, deterministic={deterministic}", gradients.trace)
        done[*of, name] += 1
    return done


def agrees(name: str, trace: Any) -> None:
    """Raise unless a trace equals its prediction."""
    expected = trace.predicted().transfers
    counted = {key: n for key, n in trace.transfers.items() if n}
    apart = {
        key: (counted.get(key), expected.get(key))
        for key in counted.keys() | expected.keys()
        if counted.get(key) != expected.get(key)
    }
    assert not apart, f"{name}, tiles {trace.tiling}: counted and predicted {apart}"


def worker(given: tuple[int, int, float, tuple[str, ...]]) -> tuple[Tally, set[int], list[str]]:
    """Run variants until time is over; return agreeing passes, their head_dims, and failures."""
    seed, number, seconds, kinds = given
    counts: Tally = Counter()
    widths: set[int] = set()
    failed: list[str] = []
    end = time.monotonic() + seconds
    turn = 0
    while time.monotonic() < end and len(failed) < 5:
        rng = np.random.default_rng([seed, number, turn])
        variant = draw_variant(rng, kinds[(number + turn) % len(kinds)])
        turn += 1
        for _ in range(SIZES):
            sizes = draw_sizes(rng, variant)
            try:
                # hides the messages about compilation
                with contextlib.redirect_stderr(io.StringIO()):
                    done = check(variant, sizes, rng)
            except Exception as error:
                if "out of memory" in str(error) and time.monotonic() < end:
                    # other processes use it
                    counts[variant["kind"], variant["dtype"], "no memory"] += 1
                    time.sleep(2)
                    break
                last = traceback.extract_tb(error.__traceback__)[-1]
                where = f"{os.path.basename(last.filename)}:{last.lineno}"
                failed.append(f"{variant} {sizes}\n  {type(error).__name__} ({where}): {error}")
                counts[variant["kind"], variant["dtype"], "failed"] += 1
                break
            counts.update(done)
            widths |= {variant["d"], variant["dv"]} if cases(done) else set()
            if not cases(done) or time.monotonic() > end:
                break
    return counts, widths, failed


def cases(counts: Tally) -> int:
    """Return the number of passes that agreed."""
    return sum(n for (_, _, name), n in counts.items() if name not in OTHERWISE)


def table(counts: Tally) -> Any:
    """Return a table with a row per kind of kernel and dtype."""
    from flashsim.report import Table

    columns = ("forward", *PASSES.values(), *OTHERWISE)
    result = Table("Passes whose counts equal the predicted ones", ("kernels", "dtype", *columns))
    for kind, dtype in sorted({key[:2] for key in counts}):
        result.add(kind, dtype, *(counts[kind, dtype, name] for name in columns))
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--seconds", type=float, default=180, help="start no variant after so many seconds"
    )
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--csv", type=Path, help="file for the table")
    parser.add_argument("--kinds", default=",".join(TURNS), help=f"of {', '.join(KINDS)}")
    chosen = parser.parse_args()
    kinds = tuple(chosen.kinds.split(","))
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"unknown kinds: {', '.join(sorted(unknown))}; possible: {', '.join(KINDS)}")
    begin, counts, failed = time.monotonic(), Counter[tuple[str, str, str]](), list[str]()
    widths: set[int] = set()
    jobs = [(chosen.seed, number, chosen.seconds, kinds) for number in range(chosen.jobs)]
    with ProcessPoolExecutor(chosen.jobs, mp_context=get_context("spawn")) as pool:
        for made, wide, wrong in pool.map(worker, jobs):
            counts.update(made)
            widths |= wide
            failed += wrong
    print(*failed, table(counts).text(width=120), sep="\n")
    if chosen.csv:
        chosen.csv.write_text(table(counts).csv())
    print(
        f"{time.monotonic() - begin:.0f} s, {chosen.jobs} processes: {cases(counts):,} passes "
        f"agree, {len(widths)} head_dims of {min(widths, default=0)} to {max(widths, default=0)}; "
        f"{len(failed)} failed"
    )
    return 1 if failed or not cases(counts) else 0


if __name__ == "__main__":
    sys.exit(main())
