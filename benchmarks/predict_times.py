"""What `benchmarks/times.py` measured, as predict.py and predict_fit.py read it.

A stage's time is what its events say, less its part of what all stages' events say more than their
pass takes.
"""

import ast
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import time_shapes
from gpu_lab import read_table

from flashsim import Device, Problem, Tiling
from flashsim.studies.predict.calibration import CALIBRATED, POWER_AFTER

DATA = Path(__file__).parent.parent / "docs" / "data"
H200 = Device.get("H200")
#: The most that an event before and after a stage adds to its time: launches overlap without them.
EVENT = 10e-6
#: What they add to a stage, a third of what they add to Hopper's fused passes in the middle, s.
MIDDLE = 5.5e-6
PASSES = {"forward": ("forward", "flash2"), "flash2": ("backward", "flash2")}
PASSES |= {name: ("backward", name) for name in ("flash2-fused", "flash2-once")}
SETS = {"fitted": frozenset(time_shapes.CALIBRATION), "held out": frozenset(time_shapes.HELD_OUT)}


class Measured(NamedTuple):
    """A pass of the table: seconds of the whole, and of its stages."""

    problem: Problem
    kernels: str
    name: str
    tiling: Tiling
    seconds: float
    stages: dict[str, float]

    @property
    def where(self) -> str:
        """The set it belongs to."""
        return next(name for name, shapes in SETS.items() if self.problem in shapes)


def problem_of(row):
    """The problem of a row of the table."""
    given = {name: int(row[name]) for name in ("n_q", "n_kv", "head_dim", "batch", "heads")}
    if row["packed"]:
        ends = tuple(accumulate(map(int, row["packed"].split()), initial=0))
        given |= {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
    window = ast.literal_eval(row["window"]) if row["window"] else None
    return Problem(
        **given,
        kv_heads=int(row["kv_heads"]),
        dtype="bfloat16",
        causal=row["causal"] == "True",
        window=window,
    )


def measured(path=DATA / "times-h200.csv"):
    """Every pass that the model knows."""
    found = {}
    for row in read_table(path):
        if row["pass"] not in PASSES or row["kernels"] not in CALIBRATED:
            continue
        key = problem_of(row), row["kernels"], row["pass"]
        one = found.setdefault(key, {"tile": row["tile"], "stages": {}})
        if row["stage"]:
            one["stages"][row["stage"]] = float(row["us"]) * 1e-6
        else:
            one["seconds"] = float(row["us"]) * 1e-6
    # What was asked for as fused ran in three passes where a family's own rule said so, until
    # benchmarks/times.py named the form.
    fused = {key: x for key, x in found.items() if key[2] == "flash2-fused"}
    for key, one in fused.items():
        if "fused" not in one["stages"]:
            del found[key]
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
    """Stages' times that add up to the pass's: events between launches take their own.

    Beside each other (a Hopper backward's), passes add up to more than that, if events part them.
    """
    total, whole = sum(stages.values()), one["seconds"]
    if abs(total - whole) < EVENT * len(stages):
        return {name: t - (total - whole) / len(stages) for name, t in stages.items()}
    if beside and whole <= POWER_AFTER:  # dQ's pass has begun with dK's and dV's
        return {name: t - MIDDLE for name, t in stages.items()}
    return {name: t * whole / total for name, t in stages.items()}
