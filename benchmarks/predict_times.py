"""Read the measurements of times.py and random_times.py, for predict.py and predict_fit.py.

A stage's time is the time between its events, minus its share of the excess: all stages' times add
up to more than their pass takes.
"""

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import time_shapes
from gpu_lab import read_table

from flashsim import Device, Problem, Tiling
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
#: The seconds that events add to a pass of one stage: the median of 36 forwards of random shapes.
BY_ITSELF = 1.8e-6
PASSES = {"forward": ("forward", "flash2"), "flash2": ("backward", "flash2")}
PASSES |= {name: ("backward", name) for name in ("flash2-fused", "flash2-once")}
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

    @property
    def where(self) -> str:
        """Return the set of the pass; random shapes belong to the fitted set."""
        if self.seed:
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
    """Return the preset of the GPU that a row's driver names."""
    return next(one for one in PRESETS.values() if one.name in row["gpu"])


#: Times of the Hopper kernels on an H100: on the shapes of `time_shapes`, and on random shapes.
HOPPERS = DATA / "times-h100.csv", DATA / "random-times-h100.csv"


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
    their events count, minus what an event adds to a forward.
    """
    found = []
    for row, stages in rows_of(path):
        p, whole, name = problem_of(row), float(row["us"]) * 1e-6, row["pass"]
        if row["kernels"] != "hopper" or name not in PASSES or row.get("pack_gqa") == "True":
            continue  # times of packed heads are predicted, not fitted
        tiling, device = Tiling(*map(int, row["tile"].split(" x "))), device_of(row)
        if name == "forward":
            stages = {"forward": whole}
        elif name == "flash2":
            stages = {stage: t - BY_ITSELF for stage, t in stages.items()}
        else:
            said = predict(p, direction="backward", algorithm=name, device=device).stages
            rows = sum(s.seconds for s in said if s.name in ("delta", "convert"))
            stages = {"fused": whole - rows}
        found.append(
            Measured(p, "hopper", name, tiling, whole, stages, device, row.get("seed", ""))
        )
    return found


def everything():
    """Return the passes to which the model is compared: Hopper's on an H100, others on an H200."""
    return [one for one in measured() if one.kernels != "hopper"] + of_hopper(HOPPERS[0])


def fitted():
    """Return the passes from which a fit takes those of the fitted set."""
    return everything() + of_hopper(HOPPERS[1]) + unchanged()


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
            Tiling(*map(int, x["tile"].split(" x "))),
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
