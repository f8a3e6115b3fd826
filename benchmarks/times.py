"""Measure the times of kernels per pass and stage, for the time model: needs a GPU.

    python benchmarks/times.py --csv docs/data/times-h200.csv [--jobs 14] [--seconds 160]
    python benchmarks/times.py --csv docs/data/times-h200.csv --families hopper

The shapes are `time_shapes.py`'s, in bfloat16. Rows of the file for families that were not
requested stay in it. Kernels are compiled first, in several processes.
At each shape all passes are interleaved, in an order that is shuffled each time, after a spinning
kernel that hides the host's time; a figure is a median. There is one row per pass (`stage` is
empty) and one per stage. A stage is timed between its own events, so takes a little longer; if it
has several launches, no event separates them. A backward's pass has the form that it is named
after, at that form's default tile, whichever form `deterministic=False` would select. `host us` is
the host's time for a call, and `calls` the number of calls between two events. The kernels
"library" are standard attention's: two products and a softmax, through torch. For joules see
power.py.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import gpu_compile
import time_shapes
from gpu_lab import Lab, open_lab, read_table

import flashsim
from flashsim import FlashSimError, Problem
from flashsim.errors import UnsupportedError

SHAPE = (*("n_q", "n_kv", "head_dim", "batch", "heads", "kv_heads", "causal", "window", "packed"),)
COLUMNS = (
    *("kernels", "pass", *SHAPE, "stage", "tile", "us", "lowest us", "host us", "MHz", "gpu"),
    *("pack_gqa", "shares", "calls"),
)
#: Options of `run` by kernel family; "python" uses Hopper's forward where it runs.
FAMILIES: dict[str, dict[str, Any]] = {
    "hopper": {"backend": "cupy", "kernel": "hopper"},
    "portable": {"backend": "cupy", "kernel": "portable"},
    "python": {"backend": "numba_cuda"},
}
#: The Python backward with `mma.sync`: the time model has only this one, so only it is timed.
MMA = "python mma"
#: Passes by the `deterministic` of `Result.backward`; only the Hopper family has "in-order". False
#: leaves the choice to a rule, unless a tile is given (`tile_of`).
BACKWARD: dict[str, bool | None] = {"flash2": None, "flash2-fused": False, "in-order": True}
#: The form with one visit per row tile, which is requested as an algorithm; only Hopper has it.
ONCE = "flash2-once"
LIBRARY = "library"
ROUNDS = 5
#: Seconds of a pass that is called once between two events; seconds that all calls of shorter
#: passes take together; and the most calls.
LONG, ENOUGH, MOST = 5e-3, 600e-6, 40


# -- what is compiled ------------------------------------------------------------------------------


def passes_of(
    family: str, p: Problem, name: str, report: str = "", gpu: Any = None
) -> tuple[Any, ...]:
    """Return the launches of a pass, and thus its kernels, for a described GPU."""
    from flashsim.backends.launch.kernel import Gpu

    kinds = kernel_families(family)
    gpu = gpu or Gpu.like(flashsim.Device.get("H200"))
    direction = "forward" if name == "forward" else "backward"
    chosen = next(one for one in kinds if not one.refusal(p, None, gpu, direction))
    given = p, None, gpu, "ascending", report
    if name == "forward":
        return chosen.forward_passes(*given)
    algorithm = name if name in ("flash2", ONCE, "flash2-fused-first") else "flash2-fused"
    return chosen.backward_passes(*given, algorithm, name == "in-order")


def tile_of(family: str, p: Problem, name: str) -> Any:
    """Return the tile that makes this form run; None if no other form could run."""
    if name != "flash2-fused":
        return None
    timed = MMA if family == "python" else family
    try:
        return passes_of(timed, p, name, gpu=this_gpu())[0].tables.schedule.tiling
    except StopIteration:
        raise UnsupportedError(f"no kernels of {family!r} run this") from None


def this_gpu() -> Any:
    """Return the GPU that is measured."""
    from flashsim.backends.cupy_gpu.engine import gpu_of

    return gpu_of(0)


def kernel_families(family: str) -> tuple[Any, ...]:
    """Return the families of `flashsim.backends`, the preferred one first."""
    if family in ("python", MMA):
        from flashsim.backends.numba_gpu import launch_policy

        return (
            (launch_policy.HOPPER, launch_policy.TENSOR)
            if family == "python"
            else (launch_policy.TENSOR,)
        )
    from flashsim.backends.launch_policy.hopper import HOPPER
    from flashsim.backends.launch_policy.portable import PORTABLE

    return (HOPPER,) if family == "hopper" else (PORTABLE,)


def wanted(p: Problem, families: list[str]) -> list[tuple[str, str]]:
    """Return which passes of which kernels are timed at a shape."""
    found = []
    for family in families:
        if family == "python" and p not in time_shapes.IN_PYTHON:
            continue
        names = ["forward", "flash2", "flash2-fused"]
        if p in time_shapes.FUSED_ALONE:
            names = ["flash2-fused"] if family == "hopper" else []
        if family == "hopper" and visited_once(p):
            names.append(ONCE)
        if family == "hopper" and p.n_q == 4096 and p.head_dim in (64, 128):
            names.append("in-order")
        found += [(family, name) for name in names]
    return found


def visited_once(p: Problem) -> bool:
    """Whether Hopper's kernels run "flash2-once" for a problem."""
    from flashsim.backends.launch.kernel import Gpu
    from flashsim.backends.launch_policy.hopper import HOPPER

    gpu = Gpu.like(flashsim.Device.get("H200"))
    return HOPPER.refusal(p, None, gpu, "backward", ONCE) is None


def compile_all(shapes: list[Problem], families: list[str], jobs: int) -> None:
    """Compile every kernel of these shapes."""
    kernels: list[tuple[str, Any]] = []
    for p in shapes:
        for family, name in wanted(p, families):
            timed = MMA if family == "python" and name != "forward" else family
            try:
                passes = passes_of(timed, p, name)
                kernels += [(family, x.kernel) for one in passes for x in (*one.before, one)]
            except (FlashSimError, StopIteration) as error:
                print(f"{family} {name} {p}: {error}"[:200])
    gpu_compile.compile_all(kernels, jobs)


# -- what is timed ---------------------------------------------------------------------------------


@dataclass
class Timed:
    """A pass at a shape, with its times."""

    kernels: str
    name: str
    call: Callable[[], Any]
    tile: str = ""
    packs: bool = False
    calls: int = 0
    times: list[float] = field(default_factory=list)  # seconds
    stages: dict[str, list[float]] = field(default_factory=dict)
    hertz: list[int] = field(default_factory=list)
    host: list[float] = field(default_factory=list)

    def warm_up(self) -> None:
        """Call the pass once, and note the decisions that its result states."""
        ran = self.call()
        if self.kernels != LIBRARY:
            self.tile = str(ran.tiling)
            self.packs = self.name == "forward" and ran.split.pack_gqa


def by_stage(passes: tuple[Any, ...], launches: Iterable[Any]) -> Iterator[list[Any]]:
    """Yield the launches of each stage of a call; a stage may have several."""
    each = iter(launches)
    for one in passes:
        yield list(islice(each, len(one.before) + 1))


class Split:
    """Records events between the launches of a call, while requested.

    No launch is then repeated from the cache of an earlier call, because such launches have no
    stages.
    """

    def __init__(self, lab: Lab) -> None:
        from flashsim.backends.cupy_gpu.calls import Plan, Repeated

        self.lab, self.events, self.names, self.at_work = lab, [], [], False
        whole, again = Plan.run, Repeated.launch

        def repeat(repeated: Any, key: Any, stream: int) -> bool:
            return not self.at_work and again(repeated, key, stream)

        def run(plan: Any, call: Any, trace: Any) -> Any:
            if not self.at_work:
                return whole(plan, call, trace)
            self.names = [one.stage.name for one in plan.passes]
            self.events = [lab.event()]
            for launches in by_stage(plan.passes, plan.launches):
                for launch in launches:
                    launch(call, {})
                self.events.append(lab.event())
            return None, None

        Plan.run, Repeated.launch = run, repeat  # type: ignore[method-assign]

    def stages(self, call: Callable[[], Any]) -> dict[str, float]:
        """Return the seconds of each stage of a call."""
        self.at_work, self.names, self.events = True, [], []
        try:
            self.lab.spin()
            call()
        finally:
            self.at_work = False
        pairs = zip(self.names, self.events, self.events[1:], strict=False)
        return {name: self.lab.milliseconds(a, b) / 1e3 for name, a, b in pairs}


def contenders(lab: Lab, p: Problem, families: list[str], standard: bool) -> Iterator[Timed]:
    """Yield the passes that run at a shape; print those that do not."""
    queries, keys = (p.batch, p.heads, p.n_q), (p.batch, p.kv_heads, p.n_kv)
    shapes = (*queries, p.head_dim), (*keys, p.head_dim), (*keys, p.head_dim_v)
    q, k, v, dout = (lab.array(s, p.dtype) for s in (*shapes, (*queries, p.head_dim_v)))
    asked = {
        name: getattr(p, name)
        for name in ("causal", "window", "cu_seqlens_q", "cu_seqlens_k")
        if getattr(p, name) is not None
    }
    results: dict[str, Any] = {}
    for family, name in wanted(p, families):
        options = FAMILIES[family] | asked | {"trace": False}
        try:
            if name == "forward":
                call = partial(flashsim.run, q, k, v, **options)
                results[family] = call()
            else:
                way = {"kernel": "tensor"} if family == "python" else {}
                way |= {"algorithm": ONCE} if name == ONCE else {}
                result = None if way else results.get(family)
                if result is None:
                    result = flashsim.run(q, k, v, **options, **way)
                form = {"deterministic": BACKWARD.get(name), "tiling": tile_of(family, p, name)}
                call = partial(result.backward, dout, **form)
                call()
        except FlashSimError as error:
            print(f"{family} {name} {p.head_dim} {p.n_q}: {error}"[:200])
            continue
        yield Timed(family, name, call)
    if standard and p.cu_seqlens_q is None and p.group == 1 and p.window is None and not p.causal:
        yield from _standard(lab, p, q, k, v, dout)


def _standard(lab: Lab, p: Problem, q: Any, k: Any, v: Any, dout: Any) -> Iterator[Timed]:
    """Yield standard attention: two products and a softmax forward, and their backward."""
    torch = getattr(lab, "torch", None)
    if torch is None or p.batch * p.heads * p.n_q * p.n_kv * 2 * 4 > 60e9:
        return
    scaled = q * p.scale

    def forward() -> Any:
        return torch.softmax(scaled @ k.mT, -1) @ v

    kept = torch.softmax(scaled @ k.mT, -1)

    def backward() -> Any:
        dv = kept.mT @ dout
        dp = dout @ v.mT
        ds = torch.ops.aten._softmax_backward_data(dp, kept, -1, kept.dtype)
        return dv, ds @ k, ds.mT @ scaled

    yield Timed(LIBRARY, "forward", forward)
    yield Timed(LIBRARY, "backward", backward)


def calls_at_once(seconds: float) -> int:
    """Return how many calls of a pass are timed between two events.

    Two events add a few µs to what is between them, on one host 2 µs more than on another. Short
    passes are called often, so that this adds at most a hundredth to their time, or 0.2 µs.
    """
    return 1 if seconds >= LONG else min(MOST, max(3, math.ceil(ENOUGH / seconds)))


def measure(lab: Lab, split: Split, clock: Callable[[], int] | None, everyone: list[Timed]) -> None:
    """Measure the times of a shape's passes, interleaved."""
    order, shuffled = list(everyone), random.Random(0)
    slowest = 0.0
    for one in everyone:  # warm up, and find how many calls to time at once
        one.warm_up()
        lab.spin()
        start = lab.event()
        one.call()
        took = lab.milliseconds(start, lab.event()) / 1e3
        one.calls = calls_at_once(took)
        slowest = max(slowest, took)
    for _ in range(ROUNDS if slowest < 30e-3 else 3):
        shuffled.shuffle(order)
        for one in order:
            n = one.calls
            for _ in range(n + 1):  # 500 µs each, longer than the host's time
                lab.spin()
            if n > 1:
                one.call()  # leaves the chip in this pass's state, not the previous one's
            start, began = lab.event(), time.perf_counter()
            for _ in range(n):
                one.call()
            one.host.append((time.perf_counter() - began) / n)
            end = lab.event()
            if clock is not None:
                one.hertz.append(clock())
            one.times.append(lab.milliseconds(start, end) / n / 1e3)
            if one.kernels != LIBRARY and len(one.stages.get("delta", ())) < 3:
                for name, seconds in split.stages(one.call).items():
                    one.stages.setdefault(name, []).append(seconds)


# -- the table -------------------------------------------------------------------------------------


def rows(p: Problem, one: Timed, gpu: str) -> Iterator[dict[str, Any]]:
    """Yield the pass's row and its stages'."""
    shape = {name: getattr(p, name) for name in SHAPE if hasattr(p, name)}
    shape |= {"window": p.window or "", "packed": _packed(p)}
    common = {"kernels": one.kernels, "pass": one.name, **shape, "gpu": gpu}
    common |= {"tile": one.tile, "pack_gqa": one.packs, "shares": True, "calls": one.calls}
    middle = statistics.median(one.times)
    whole = {"us": 1e6 * middle, "lowest us": 1e6 * min(one.times)}
    whole["host us"] = 1e6 * statistics.median(one.host)
    whole["MHz"] = statistics.median(one.hertz) if one.hertz else ""
    yield common | {"stage": ""} | whole
    for name, times in one.stages.items():
        best = {"us": 1e6 * statistics.median(times), "lowest us": 1e6 * min(times)}
        yield common | {"stage": name} | best


def _packed(p: Problem) -> str:
    if p.cu_seqlens_q is None:
        return ""
    return " ".join(str(s.q_stop - s.q_start) for s in p.sequences)


def kept(path: Path, families: list[str]) -> list[dict[str, str]]:
    """Return the rows of a file, if it exists, that are not of these families."""
    if not path.exists():
        return []
    return [row for row in read_table(path) if row["kernels"] not in families]


def sm_clock() -> Callable[[], int] | None:
    """Return a function that reads the SM clock in MHz; None, with a message, without NVML."""
    try:
        from nvml import Meter

        return Meter().megahertz
    except OSError as error:
        print(f"cannot read the SM clock: {error}")
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=14)
    parser.add_argument(
        "--seconds", type=float, default=160, help="start no shape after so many seconds"
    )
    parser.add_argument("--families", default=f"hopper,portable,python,{LIBRARY}")
    parser.add_argument("--few", type=int, help="maximum number of shapes per set")
    chosen = parser.parse_args()
    begin, families = time.monotonic(), chosen.families.split(",")
    if "python" in families:
        try:
            importlib.import_module("flashsim.backends.numba_gpu.engine")
        except Exception as error:
            print(f"skipping the kernels in Python: {error}")
            families.remove("python")
    others, standard = kept(chosen.csv, families), LIBRARY in families
    families = [name for name in families if name != LIBRARY]
    scores = lambda p: p.batch * p.heads * p.n_q * p.n_kv * p.head_dim  # noqa: E731
    cost = lambda p: (p.cu_seqlens_q is not None, scores(p))  # noqa: E731
    shapes = [
        p
        for every in (time_shapes.CALIBRATION, time_shapes.HELD_OUT)
        for p in sorted(every, key=cost)[: chosen.few]  # the long ones last
    ]
    compile_all(shapes, families, chosen.jobs)
    lab, _ = open_lab()
    split, clock = Split(lab), sm_clock()
    with chosen.csv.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(others)
        for number, p in enumerate(shapes):
            if time.monotonic() - begin > chosen.seconds:
                print(f"out of time: {len(shapes) - number} shapes were not measured")
                break
            everyone = list(contenders(lab, p, families, standard=standard))
            if everyone:
                measure(lab, split, clock, everyone)
            for one in everyone:
                writer.writerows(rows(p, one, lab.name))
            stream.flush()
            everyone.clear()
            lab.release()
    print(f"{time.monotonic() - begin:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
