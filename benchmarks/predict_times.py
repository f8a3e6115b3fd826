"""Read the measurements of times.py and random_times.py, for predict.py and predict_fit.py.

A stage's time is the time between its events, minus its share of the excess: all stages' times add
up to more than their pass takes.
"""

import ast
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import backward_forms
import time_shapes
import times
from gpu_lab import read_table

from flashsim import Device, Problem, Tiling, UnsupportedError
from flashsim.problem.hardware import PRESETS
from flashsim.studies.predict import model, predict
from flashsim.studies.predict.calibration import CALIBRATED, POWER_AFTER

DATA = Path(__file__).parent.parent / "docs" / "data"
H200 = Device.get("H200")
#: The largest time that an event before and after a stage adds to it: it keeps launches from
#: overlapping.
EVENT = 10e-6
#: The seconds that events add to a stage: a third of the median that they add to Hopper's
#: fused passes.
MIDDLE = 5.5e-6
#: The seconds that two events add to the calls between them, and the files that were measured on a
#: host where they add more. Between events, three calls of a pass are timed, or one if it takes
#: `times.LONG`; newer files say in the column "calls" how many, and these are so many that the
#: events do not count.
EVENTS, OTHER_HOST = 2.6e-6, 4.4e-6
ON_OTHER_HOST = (
    "grouped-times-h100.csv",
    "random-passes-h200.csv",
    "random-passes-later-h100.csv",
    "random-passes-today-h100.csv",
    "random-times-many-calls-h100.csv",
    "random-times-rejudged-h100.csv",
    "short-backwards-h100.csv",
)
PASSES = {"forward": ("forward", "flash2"), "flash2": ("backward", "flash2")}
FUSED = "flash2-fused", "flash2-fused-first", "flash2-once"
PASSES |= {name: ("backward", name) for name in FUSED}
SETS = {"fitted": frozenset(time_shapes.CALIBRATION), "held out": frozenset(time_shapes.HELD_OUT)}


@contextmanager
def without_shares() -> Iterator[None]:
    """Predict times of the Hopper forward whose warpgroups compute all visits of a row tile.

    The passes of files without a column "shares", and those of power.py, ran this forward.
    """
    today = model.FAMILIES["hopper"]
    model.FAMILIES["hopper"] = replace(today, shares=False)
    model._prepare.cache_clear()
    try:
        yield
    finally:
        model.FAMILIES["hopper"] = today
        model._prepare.cache_clear()


def as_it_ran(one):
    """Return a context in which a measured pass is predicted with the launch that was measured."""
    return without_shares() if one.name == "forward" and not one.shares else nullcontext()


class Measured(NamedTuple):
    """A pass of the table: the seconds of the whole, and of its stages."""

    problem: Problem
    kernels: str
    name: str
    tiling: Tiling
    seconds: float
    stages: dict[str, float]
    device: Device = H200
    seed: str = ""
    shares: bool = False
    packs: bool = False

    @property
    def where(self) -> str:
        """Return the set of the pass.

        Random shapes belong to the fitted set, and so do all single-KV-tile backwards: there are
        few of them.
        """
        if self.seed or self.name == "flash2-once":
            return "fitted"
        return next(name for name, shapes in SETS.items() if self.problem in shapes)


def problem_of(row):
    """Return the problem of a row of the table."""
    given = {name: int(row[name]) for name in ("n_q", "n_kv", "head_dim", "batch", "heads")}
    if row["packed"]:
        ends = tuple(accumulate(map(int, row["packed"].split()), initial=0))
        given |= {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
    window = ast.literal_eval(row["window"]) if row["window"] else None
    return Problem(
        **given,
        kv_heads=int(row["kv_heads"]),
        dtype=row.get("dtype") or "bfloat16",
        causal=row["causal"] == "True",
        window=window,
    )


def added_by_events(path, row):
    """Return the seconds that events add to each call of a pass, and to each stage of it."""
    added = OTHER_HOST if path.name in ON_OTHER_HOST else EVENTS
    calls = 1 if float(row["us"]) * 1e-6 >= times.LONG else 3
    return 0.0 if row.get("calls") else added / calls, added


def tiling_of(text):
    """Return a tiling from its text: the inverse of `str`."""
    q, k, dq = re.fullmatch(r"(\d+) x (\d+)(?: \(dQ: (\d+) x \d+\))?", text).groups()
    return Tiling(int(q), int(k), dq_rows=int(dq) if dq else None)


def rows_of(path):
    """Return each pass of a file: its row, and its stages' times in seconds."""
    found = []
    for row in read_table(path):
        if row["stage"]:
            found[-1][1][row["stage"]] = float(row["us"]) * 1e-6
        else:
            found.append((row, {}))
    return found


def device_of(row):
    """Return the preset of the GPU that a row's driver names, with the clusters that it reported.

    Older files have no such column.
    """
    device = next(one for one in PRESETS.values() if one.name in row["gpu"])
    pairs = [tuple(map(int, pair.split(":"))) for pair in (row.get("clusters") or "").split()]
    return replace(device, clusters=tuple(pairs)) if pairs else device


#: Times of the Hopper kernels on an H100 on the shapes of `time_shapes`; and on random shapes, on
#: an H100 and an H200. All but the first were measured after packed heads and the visits of each
#: warpgroup.
SHAPES = DATA / "times-h100.csv"
RANDOM = tuple(
    DATA / f"{name}.csv"
    for name in (
        *("random-times-h100", "random-passes-h100", "random-passes-later-h100"),
        *("random-passes-today-h100", "random-passes-h200", "grouped-times-h100"),
        *("random-times-many-calls-h100", "random-times-judged-many-calls-h100"),
        *("random-times-judged-again-h100", "random-times-judged-h200"),
        "random-times-judged-again-h200",
    )
)
#: Times of short backwards by form, tile and clusters.
SHORT = DATA / "short-backwards-h100.csv"
#: Times of every form of a backward on random shapes (backward_forms.py).
FORMS = DATA / "backward-forms-h100.csv", DATA / "dq-tiles-h100.csv"


def unchanged():
    """Return the H200's passes of Hopper kernels that are still as they were when it was measured.

    Since then, products add the log-sum-exp and delta of rows up to head_dim 128, except in a
    single-KV-tile backward.
    """
    passes = of_hopper(DATA / "times-h200.csv")
    same = "forward", "flash2-once"
    return [one for one in passes if one.name in same or one.problem.head_dim > 128]


def of_hopper(path):
    """Return the Hopper kernels' passes in a file; a single loop's stage gets the rest of its pass.

    In three passes, dQ runs beside dK and dV unless events separate them. So the times between
    their events count. What events add to a pass or a stage is subtracted.
    """
    found = []
    for row, stages in rows_of(path):
        p, name = problem_of(row), row["pass"]
        if row["kernels"] != "hopper" or name not in PASSES:
            continue
        tiling, device = tiling_of(row["tile"]), device_of(row)
        of_pass, of_stage = added_by_events(path, row)
        whole = float(row["us"]) * 1e-6 - of_pass
        if name == "forward":
            stages = {"forward": whole}
        elif name == "flash2":
            stages = {stage: t - of_stage for stage, t in stages.items()}
        else:
            said = predict(p, direction="backward", algorithm=name, device=device).stages
            rows = sum(s.seconds for s in said if s.name in ("delta", "convert"))
            stages = {"fused": whole - rows}
        more = device, row.get("seed", ""), row.get("shares") == "True"
        packs = row.get("pack_gqa") == "True"  # older files have no such column
        found.append(Measured(p, "hopper", name, tiling, whole, stages, *more, packs))
    return found


def short_backwards():
    """Return the fused backwards of `SHORT` that ran without clusters, as they run by rule."""
    found, device = [], Device.get("H100")
    for row in read_table(SHORT):
        if row["algorithm"] != "flash2-fused" or row["clusters"] != "1":
            continue
        if row["early_conversion"] == "True":  # launches of an experiment
            continue
        window = (int(row["window"]), 0) if row["window"] else None
        sizes = {name: int(row[name]) for name in ("head_dim", "batch", "heads", "kv_heads")}
        p = Problem(
            int(row["n"]), **sizes, dtype="bfloat16", causal=row["causal"] == "True", window=window
        )
        how = {"direction": "backward", "algorithm": "flash2-fused", "device": device}
        tiling = tiling_of(row["tile"])
        try:
            passes, _ = model._prepare(p, *PASSES["flash2-fused"], "hopper", tiling, device)
        except UnsupportedError:  # a tile of an experiment
            continue
        fused = next(one for one in passes if one.stage.name == "fused")
        if fused.before or fused.kernel.cluster > 1:
            continue
        whole = float(row["us"]) * 1e-6 - added_by_events(SHORT, row)[0]
        rows = sum(s.seconds for s in predict(p, **how).stages if s.name != "fused")
        stages = {"fused": whole - rows}
        found.append(
            Measured(p, "hopper", "flash2-fused", tiling, whole, stages, device, "short backwards")
        )
    return found


def forms():
    """Return the passes of `FORMS`; a form without a tile of its own runs at the rule's tile."""
    found, device = [], Device.get("H100")
    for path in FORMS:
        for shape, took in backward_forms.read(path)[0].items():
            for form, (name, tiling) in backward_forms.FORMS.items():
                if form not in took or form == "64 rows":  # RANDOM has enough of these
                    continue
                how = {"direction": "backward", "algorithm": name, "device": device}
                said = predict(shape.problem, **how, tiling=tiling)
                whole = 1e-6 * took[form] - EVENTS / backward_forms.CALLS
                rows = sum(s.seconds for s in said.stages if s.name != "fused")
                tiling = tiling or said.traffic.tiling
                stages, more = {"fused": whole - rows}, (device, path.stem)
                found.append(Measured(shape.problem, "hopper", name, tiling, whole, stages, *more))
    return found


def everything():
    """Return the passes to which the model is compared: Hopper's on an H100, others on an H200."""
    return [one for one in measured() if one.kernels != "hopper"] + of_hopper(SHAPES)


def fitted():
    """Return the passes from which a fit takes those of the fitted set."""
    random = [one for path in RANDOM for one in of_hopper(path)]
    return everything() + random + short_backwards() + forms() + unchanged()


def measured(path=DATA / "times-h200.csv"):
    """Return every pass that the model can predict."""
    found = {}
    for row in read_table(path):
        if row["pass"] not in PASSES or row["kernels"] not in CALIBRATED:
            continue
        if row.get("pack_gqa") == "True":
            continue
        key = problem_of(row), row["kernels"], row["pass"]
        one = found.setdefault(key, {"tile": row["tile"], "stages": {}})
        if row["stage"]:
            one["stages"][row["stage"]] = float(row["us"]) * 1e-6
        else:
            one["seconds"] = float(row["us"]) * 1e-6
    # Before benchmarks/times.py named the form, a pass requested as fused ran in three passes if
    # the family's own rule said so.
    fused = {key: x for key, x in found.items() if key[2] == "flash2-fused"}
    for key, one in fused.items():
        if "fused" not in one["stages"]:
            del found[key]
    for (_, _, name), one in found.items():
        if name == "forward" and not one["stages"]:  # one kernel, which is the whole pass
            one["stages"]["forward"] = one["seconds"]
    return [
        Measured(
            *key,
            tiling_of(x["tile"]),
            x["seconds"],
            _alone(x["stages"], x, beside="dq" in x["stages"] and key[1] == "hopper"),
        )
        for key, x in found.items()
    ]


def _alone(stages, one, beside):
    """Return stages' times that add up to the pass's, since events between launches add time.

    Passes that run beside each other (a Hopper backward's) add up to more than that, if events
    separate them.
    """
    total, whole = sum(stages.values()), one["seconds"]
    if abs(total - whole) < EVENT * len(stages):
        return {name: t - (total - whole) / len(stages) for name, t in stages.items()}
    if beside and whole <= POWER_AFTER:  # dQ's pass started together with dK's and dV's
        return {name: t - MIDDLE for name, t in stages.items()}
    return {name: t * whole / total for name, t in stages.items()}
