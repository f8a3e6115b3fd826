"""Measure the joules of attention's passes, and of each unit of the GPU alone.

    python benchmarks/power.py --csv docs/data/power-h200.csv [--seconds 1.2] [--jobs 14]
    python benchmarks/power.py --read FILE [--fit]   # predicted beside it, constants fitted; no GPU

Needs a Hopper GPU, CuPy, torch and NVML. Each call repeats for `--seconds`, with the host at least
20 milliseconds ahead. NVML updates its energy counter about ten times per second; it is read at
updates, after the first third, in which clock and temperature settle. So watts are the board's,
idle power included, and joules are watts times the time of a call in that period. If the power
limit reduces the clock, this time is longer than that of a single call. Inputs are random, since
tensor cores draw less power for zeros.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gpu_compile
from gpu_lab import read_table
from predict_times import without_shares

import flashsim
from flashsim import Problem, Tiling
from flashsim.report import Table
from flashsim.studies.energy import Energy, Sustained, energy_of
from flashsim.studies.predict import predict

SHAPE = ("n_q", "n_kv", "head_dim", "batch", "heads", "kv_heads", "causal")
MEASURED = ("us", "joules", "watts", "MHz", "celsius", "capped", "renewals")
COLUMNS = ("kind", "name", *SHAPE, "amount", "of", *MEASURED, "gpu")
TOKENS, WIDTH = 16_384, 2048
MIB = 1 << 20
#: The fraction of the seconds that is left out, while the GPU settles.
SETTLING = 1 / 3


class Load(NamedTuple):
    """One load: `call`, None for an idle GPU; the `amount` of work per call, and its unit `of`."""

    kind: str
    name: str
    call: Callable[[], Any] | None
    columns: dict[str, Any]


# -- measuring -------------------------------------------------------------------------------------


class Watch(threading.Thread):
    """A thread that reads the meter continuously, beside the calling thread."""

    def __init__(self, meter: Any) -> None:
        super().__init__()
        self.meter, self.over = meter, threading.Event()
        self.begin = time.perf_counter()
        # (seconds, joules) at each update of the counter
        self.looks: list[tuple[float, float]] = []
        self.clocks: list[tuple[int, bool]] = []

    def run(self) -> None:
        """Read the meter until `over` is set."""
        while not self.over.is_set():
            now, joules = time.perf_counter() - self.begin, self.meter.joules()
            if not self.looks or joules != self.looks[-1][1]:
                self.looks.append((now, joules))
                self.clocks.append((self.meter.megahertz(), self.meter.capped()))
            time.sleep(1e-3)


def sustained(lab: Any, meter: Any, call: Callable[[], Any] | None, seconds: float) -> dict:
    """Return watts, joules and µs of a call that is repeated for so many seconds."""
    per = 1
    if call is not None:
        call()
        start = lab.event()
        call()
        per = max(1, round(5.0 / lab.milliseconds(start, lab.event())))
    first, done, waiting, calls = lab.event(), [], [], 0
    watch = Watch(meter)
    watch.start()
    try:
        while time.perf_counter() - watch.begin < seconds:
            if call is None:
                time.sleep(1e-2)
                continue
            for _ in range(per):
                call()
            calls += per
            waiting.append((lab.event(), calls))
            if len(waiting) > 4:  # the host is this far ahead of the GPU
                event, count = waiting.pop(0)
                done.append((lab.milliseconds(first, event), count))
    finally:
        watch.over.set()
        watch.join()
    for event, _ in waiting:
        lab.milliseconds(first, event)
    settled = [n for n, x in enumerate(watch.looks) if n and x[0] > SETTLING * seconds]
    if len(settled) < 3:
        return {"renewals": len(settled)}
    (t0, e0), (t1, e1) = watch.looks[settled[0]], watch.looks[settled[-1]]
    found = {"watts": (e1 - e0) / (t1 - t0), "celsius": meter.celsius(), "renewals": len(settled)}
    found["MHz"] = statistics.median(watch.clocks[n][0] for n in settled)
    found["capped"] = sum(watch.clocks[n][1] for n in settled) / len(settled)
    if call is not None:
        late = [x for x in done if x[0] > SETTLING * done[-1][0]]
        each = (late[-1][0] - late[0][0]) / (late[-1][1] - late[0][1]) / 1e3
        found |= {"us": 1e6 * each, "joules": found["watts"] * each}
    return found


# -- what is measured ------------------------------------------------------------------------------


def units(lab: Any) -> Iterator[Load]:
    """Yield an idle GPU, then each unit alone, with calls of a few milliseconds."""
    import cupy

    from flashsim.backends.cupy_gpu.units import _Bench

    torch, bench = lab.torch, _Bench(0)
    sms, out, cycles = bench.sms, bench.out, bench.cycles

    def load(name: str, call: Callable[[], Any] | None, amount: float = 0, of: str = "") -> Load:
        return Load("unit", name, call, {"amount": amount, "of": of})

    def cycling(name: str, threads: int, rounds: int, keep: Any, shared: int = 0) -> Any:
        given = cupy.int32(rounds), keep, out, cycles
        function = bench.kernel("portable", name, shared)
        return partial(function, (sms,), (threads,), given, shared_mem=shared)

    whole, real = cupy.uint32(123), cupy.float32(123.5)
    yield load("idle", None)
    yield load("one warp an SM waits", cycling("barriers", 32, 200_000, whole))
    for name, of in (("exponentials", "exponential"), ("multiply_adds", "instruction")):
        rounds = 500 if name == "exponentials" else 4000
        call = cycling(name, 1024, rounds, real)
        yield load(name.replace("_", "-"), call, sms * 1024 * rounds * 64, of)
    call = cycling("shared_reads", 512, 40_000, whole, 8 * 16 * 512)
    yield load("ldmatrix", call, sms * 16 * 512 * 8 * 40_000, "B of shared memory")
    n = 8192
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    to = torch.empty_like(a)
    yield load("product", partial(torch.mm, a, b, out=to), 2 * n**3, "FLOP")
    zeros = torch.zeros_like(a)
    yield load("product of zeros", partial(torch.mm, zeros, zeros, out=to), 2 * n**3, "FLOP")
    del a, b, to, zeros
    reads = bench.kernel("portable", "reads")

    def reading(size: int, rounds: int) -> Any:
        buffer = cupy.random.randint(0, 1 << 31, size // 4, dtype="uint32")
        given = buffer, cupy.int64(size // 16), cupy.int32(rounds), out
        return partial(reads, (4 * sms,), (512,), given)

    yield load("L2 reads", reading(16 * MIB, 800), 16 * MIB * 800, "B of L2")
    yield load("HBM reads", reading(2048 * MIB, 4), 2048 * MIB * 4, "B of HBM")
    source = torch.randn(512 * MIB, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    yield load("HBM copy", partial(target.copy_, source), 2048 * MIB, "B of HBM")
    del source, target
    sums, rounds = cupy.random.random(8 * MIB // 4, dtype="float32"), 400
    given = sums, cupy.int64(sums.size), cupy.int32(rounds)
    call = partial(bench.kernel("portable", "additions"), (4 * sms,), (512,), given)
    yield load("reductions", call, sums.nbytes * rounds, "B added at L2")
    floats, pieces, piece = cupy.random.random(16 * MIB // 4, dtype="float32"), 3000, 16_384
    for name, words, threads, of in (
        ("bulk_reads", "L2 reads, copy engine", 32, "B of L2"),
        ("bulk_additions", "reductions, copy engine", 128, "B added at L2"),
    ):
        function = bench.kernel("hopper", name, 8 * piece)
        given = floats, cupy.int64(floats.nbytes), cupy.int32(pieces)
        call = partial(function, (sms,), (threads,), given, shared_mem=8 * piece)
        yield load(words, call, sms * pieces * piece, of)


def problem(n: int, d: int, causal: bool = False, **more: int) -> Problem:
    """Return a problem with 16 Ki tokens and 2048 / d heads, as in the papers."""
    sizes = {"batch": TOKENS // n, "heads": WIDTH // d} | more
    return Problem(n, head_dim=d, dtype="bfloat16", causal=causal, **sizes)


def shapes() -> Iterator[tuple[Problem, dict[str, tuple[str, ...]]]]:
    """Yield problems, and the passes of each kernel family that are measured there."""
    whole = ("forward", "flash2", "flash2-fused")
    yield problem(4096, 128), {"hopper": whole, "portable": ("forward", "flash2-fused")}
    yield problem(4096, 128, causal=True), {"hopper": whole}
    yield problem(4096, 64), {"hopper": whole, "portable": ("forward", "flash2-fused")}
    yield problem(4096, 64, causal=True), {"hopper": ("forward", "flash2-fused")}
    yield problem(4096, 256), {"hopper": whole[:2]}  # the fused backward supports up to 192 columns
    yield problem(4096, 256, causal=True), {"hopper": ("forward",)}
    yield problem(16_384, 128, causal=True), {"hopper": ("forward", "flash2-fused")}
    yield problem(1024, 128), {"hopper": ("forward", "flash2-fused")}
    yield problem(1024, 64, causal=True), {"portable": ("forward",)}
    yield problem(4096, 128, causal=True, heads=32, kv_heads=8), {"hopper": ("forward",)}
    yield problem(1, 128, batch=64, heads=32, kv_heads=8, n_kv=8192), {"decode": ("forward",)}
    yield problem(4096, 128), {"library": ("S", "P", "O")}


def columns_of(p: Problem) -> dict[str, Any]:
    """Return a problem's columns."""
    return {name: getattr(p, name) for name in SHAPE}


def passes(lab: Any) -> Iterator[Load]:
    """Yield attention's passes, and each kernel of standard attention alone."""
    from times import BACKWARD, FAMILIES

    for p, wanted in shapes():
        queries, keys = (p.batch, p.heads, p.n_q), (p.batch, p.kv_heads, p.n_kv)
        q, dout = (lab.array((*queries, p.head_dim), p.dtype) for _ in range(2))
        k, v = (lab.array((*keys, p.head_dim), p.dtype) for _ in range(2))
        for family, names in wanted.items():
            columns = columns_of(p)
            if family == "library":
                yield from library(lab, p, q, k, v)
                continue
            if family == "decode":
                run = partial(flashsim.run, algorithm="flash-decode", backend="cupy")
            else:
                run = partial(flashsim.run, **FAMILIES[family], causal=p.causal)
            forward = partial(run, q, k, v, trace=False)
            result = forward()
            for name in names:
                call: Callable[[], Any] = forward
                if name != "forward":
                    call = partial(result.backward, dout, deterministic=BACKWARD[name])
                yield Load(family, name, call, columns)


def library(lab: Any, p: Problem, q: Any, k: Any, v: Any) -> Iterator[Load]:
    """Yield standard attention's three forward kernels one by one, into existing outputs."""
    torch = lab.torch
    scores = (q * p.scale) @ k.mT
    weights, out = torch.softmax(scores, -1), torch.empty_like(q)
    columns = columns_of(p)
    yield Load(
        "library", "S", partial(torch.matmul, q, k.mT, out=torch.empty_like(scores)), columns
    )
    softmax = partial(torch.softmax, scores, -1, out=torch.empty_like(scores))
    yield Load("library", "P", softmax, columns)
    yield Load("library", "O", partial(torch.matmul, weights, v, out=out), columns)


# -- predicted beside measured ---------------------------------------------------------------------

#: The SM clock at which the constants hold, in MHz.
HIGHEST = 1980
PASSES = {"forward": ("forward", "flash2"), "flash2": ("backward", "flash2")}
PASSES["flash2-fused"] = ("backward", "flash2-fused")


class Measured(NamedTuple):
    """A pass of the table, and its prediction."""

    row: dict[str, str]
    problem: Problem
    prediction: Any

    @property
    def fitted(self) -> bool:
        """Whether the fit uses the pass: no mask, N = 4096, head_dim 64 or 128."""
        p = self.problem
        return p.n_q == 4096 and not p.causal and p.head_dim < 256

    def figure(self, name: str) -> float:
        """Return a measured figure."""
        return float(self.row[name])


@without_shares()
def read(path: Path) -> tuple[dict[str, dict[str, str]], list[Measured]]:
    """Return the units by name, and the passes of flashsim's kernels except decoding."""
    units, found = {}, []
    for row in read_table(path):
        if row["kind"] == "unit":
            units[row["name"]] = row
        elif row["kind"] in ("hopper", "portable"):
            given = {name: int(row[name]) for name in SHAPE if name != "causal"}
            direction, algorithm = PASSES[row["name"]]
            # The backward's kernels of then loaded the log-sum-exp and delta, as today's do in
            # float16.
            dtype = "bfloat16" if direction == "forward" else "float16"
            p = Problem(**given, causal=row["causal"] == "True", dtype=dtype)
            asked = {"direction": direction, "algorithm": algorithm, "kernels": row["kind"]}
            asked["pack_gqa"] = False
            if (row["kind"], row["name"]) == ("hopper", "flash2") and 64 < p.head_dim <= 128:
                asked["tiling"] = Tiling(64, 128)  # of then, in all passes
            found.append(Measured(row, p, predict(p, **asked)))
    return units, found


def fit(units: dict[str, dict[str, str]], passes: list[Measured]) -> Energy:
    """Fit constants of units alone, then of products, scores and sums, to the passes with `fitted`.

    The energy of SMs is proportional to the clock, which was measured too.
    """
    import numpy as np
    from scipy.optimize import nnls

    waiting = float(units["one warp an SM waits"]["watts"])

    def each(name: str) -> float:
        row = {key: float(units[name][key]) for key in ("joules", "us", "amount", "MHz")}
        inside = row["joules"] - waiting * row["us"] * 1e-6
        return inside / row["amount"] / (row["MHz"] / HIGHEST)

    moved = each("L2 reads, copy engine"), each("L2 reads")
    # the bytes also pass through L2 to the SMs
    hbm = (each("HBM reads") + each("HBM copy")) / 2 - moved[1]
    those = [one for one in passes if one.fitted]
    capped = [one.figure("watts") for one in those if one.figure("capped") == 1]
    known = Energy(
        waiting, statistics.median(capped), (0.0, 0.0), 0.0, each("ldmatrix"), moved, 0.0, hbm
    )
    asked, left = [], []
    for one in those:
        clock, threads = one.figure("MHz") / HIGHEST, one.row["kind"] == "portable"
        uses = [stage.use for stage in one.prediction.stages]
        hbm_joules = sum(known.hbm * use.hbm for use in uses)
        rest = clock * (sum(known.joules(use, 0.0) for use in uses) - hbm_joules) + hbm_joules
        weight = 1 / one.figure("joules")
        flops, scores, added = (
            clock * sum(getattr(use, name) for use in uses) for name in ("flops", "scores", "added")
        )
        sums = flops * (not threads), flops * threads, scores, added
        asked.append([weight * x for x in sums])
        took = one.figure("us") * 1e-6
        left.append(weight * (one.figure("joules") - rest - waiting * took))
    wgmma, mma, score, added = nnls(np.array(asked), np.array(left))[0].tolist()
    return replace(known, flop=(wgmma, mma), score=score, added=added)


def held(one: Measured, energy: Energy) -> Sustained:
    """Return the prediction of a pass that is repeated."""
    uses = [stage.use for stage in one.prediction.stages]
    return energy.sustained(uses, one.prediction.seconds)


def wrong(one: Measured, energy: Energy, name: str) -> float:
    """Return predicted over measured minus 1, in %: of "joules" or of "us"."""
    found = held(one, energy)
    predicted = found.joules if name == "joules" else 1e6 * found.seconds
    return 100 * (predicted / one.figure(name) - 1)


def table(passes: list[Measured], energy: Energy) -> Table:
    """Return a table with one row per pass."""
    found = Table(
        "A pass called again and again on an H200: measured, and predicted / measured - 1",
        (
            *("kernels", "pass", "problem", "W", "MHz", "predicted MHz", "ms", "off, %"),
            *("J", "off, %", "set"),
        ),
        note="set: which passes the constants of products, scores and sums are fitted to",
    )
    for one in passes:
        p = one.problem
        heads = f"{p.heads}/{p.kv_heads}" if p.group > 1 else f"{p.heads}"
        words = f"{p.batch} x {heads}, N={p.n_q}, d={p.head_dim}" + ", causal" * p.causal
        found.add(
            *(one.row["kind"], one.row["name"], words, round(one.figure("watts"))),
            *(round(one.figure("MHz")), round(HIGHEST * held(one, energy).clock)),
            *(f"{one.figure('us') / 1e3:.3f}", f"{wrong(one, energy, 'us'):+.1f}"),
            *(f"{one.figure('joules'):.3f}", f"{wrong(one, energy, 'joules'):+.1f}"),
            "fitted" if one.fitted else "held out",
        )
    return found


def errors(passes: list[Measured], energy: Energy) -> Table:
    """Return the table of mean and largest errors, for passes fitted and held out."""
    found = Table("", ("set", "passes", "joules, mean", "worst", "ms, mean", "worst"))
    for name, which in (("fitted", True), ("held out", False)):
        those = [one for one in passes if one.fitted is which]
        cells: list[str] = []
        for quantity in ("joules", "us"):
            off = [wrong(one, energy, quantity) for one in those]
            cells += [f"{statistics.fmean(map(abs, off)):.1f}", f"{max(off, key=abs):+.1f}"]
        found.add(name, len(those), *cells)
    return found


# -- the table -------------------------------------------------------------------------------------


def compile_first(jobs: int) -> None:
    """Compile the passes' kernels in several processes."""
    from times import passes_of

    kernels = [
        (family, one.kernel)
        for p, wanted in shapes()
        for family, names in wanted.items()
        if family in ("hopper", "portable")
        for name in names
        for one in passes_of(family, p, name)
    ]
    gpu_compile.compile_all(kernels, jobs)


def measure(path: Path, seconds: float) -> None:
    """Measure every load and write the table, row by row."""
    import torch
    from gpu_lab import TorchLab
    from nvml import Meter

    lab, meter = TorchLab(), Meter()
    print(f"{lab.name}, limit {meter.limit():.0f} W, torch {torch.__version__}", flush=True)
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for loads in (units(lab), passes(lab)):
            for one in loads:
                found = sustained(lab, meter, one.call, seconds)
                row = {"kind": one.kind, "name": one.name, **one.columns, **found}
                writer.writerow(row | {"gpu": lab.name})
                stream.flush()
                figures = " ".join(f"{name} {value:.5g}" for name, value in found.items())
                print(f"{one.kind} {one.name}: {figures}", flush=True)
            lab.release()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--csv", type=Path, help="measure, and write the results to this file")
    parser.add_argument("--read", type=Path, help="only compare predictions with such a file")
    parser.add_argument("--fit", action="store_true", help="with --read: fit the constants")
    parser.add_argument("--seconds", type=float, default=1.2, help="of calls per row")
    parser.add_argument("--jobs", type=int, default=14, help="number of processes that compile")
    chosen = parser.parse_args()
    if chosen.read:
        units, passes = read(chosen.read)
        energy = fit(units, passes) if chosen.fit else energy_of("H200")
        assert energy is not None
        if chosen.fit:
            print(energy)
        print(table(passes, energy).text(width=120))
        print(errors(passes, energy).text(width=120))
        return
    if not chosen.csv:
        parser.error("nothing to do: pass --csv FILE or --read FILE")
    begin = time.monotonic()
    compile_first(chosen.jobs)
    measure(chosen.csv, chosen.seconds)
    print(f"{time.monotonic() - begin:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
