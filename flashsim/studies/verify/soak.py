"""Compares predictions for random shapes with hardware counters, and lists the largest errors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flashsim.counts.traffic import live
from flashsim.errors import OptionError, own_errors, shown
from flashsim.problem import checks
from flashsim.problem.hardware import Device
from flashsim.problem.problem import Problem
from flashsim.report import Table
from flashsim.studies.verify import agreement
from flashsim.studies.verify.cases import HERE, Case, MeasuredPass
from flashsim.studies.verify.comparison import verify

#: The largest accepted error of each quantity, as a share of the prediction.
TARGETS = {
    "counted by the kernels": 0.0,
    "tensor FLOPs": 0.0,
    "requested read": agreement.REQUESTED,
    "requested reduce": agreement.REQUESTED,
    "DRAM read": agreement.DRAM,
}
#: DRAM reads of tensors that fit in L2.
FITTING = {"DRAM read": agreement.DRAM_WITHIN}

_LENGTHS = (256, 1000, 1024, 2048, 2500, 4096, 6000, 8192)
_WIDTHS = (32, 40, 64, 72, 80, 96, 112, 128, 160, 200, 256)
_MOST = 4e12  # the most FLOPs per pass, because each launch is repeated per group of counters
MOST_CASES = 10_000


@own_errors
def draw(count: int, *, seed: int = 0, device: str = HERE, kernels: Sequence[str]) -> list[Case]:
    """Return cases with random lengths, head dims, heads, groups and masks.

    Each case has a forward, a three-pass backward and a fused backward pass.

    Parameters
    ----------
    count, seed : int
    device : str
        Default: the GPU on which the cases are measured.
    kernels : sequence of str
        The kernel families of backend "cupy" to choose from.
    """
    rng = np.random.default_rng(checks.seed(seed))
    pick = lambda values: values[rng.integers(len(values))]  # noqa: E731
    cases: list[Case] = []
    kernels = [checks.one_of("kernels", name, ("hopper", "portable")) for name in kernels]
    if checks.positive_int("count", count) > MOST_CASES or not kernels:
        raise OptionError(
            f"count= must be at most {MOST_CASES:,}, and kernels= must not be empty, got "
            f"count={shown(count)} and kernels={shown(kernels)}"
        )
    while len(cases) < count:
        shape: dict[str, Any] = {"n_q": pick(_LENGTHS), "head_dim": pick(_WIDTHS)}
        kv_heads, group = int(rng.integers(1, 9)), pick((1, 1, 1, 2, 4, 8))
        shape |= {"heads": kv_heads * group, "kv_heads": kv_heads, "batch": int(rng.integers(1, 5))}
        mask = rng.integers(4)
        if mask == 1:
            shape["window"] = (int(rng.integers(1, 2048)), int(rng.integers(0, 256)))
        elif mask > 1:
            shape["causal"] = True
        else:
            shape["n_kv"] = pick(_LENGTHS)
        p = Problem(dtype=pick(("bfloat16", "float16")), **shape)
        if 4 * p.batch * p.heads * p.n_q * p.n_kv * p.head_dim < _MOST:
            cases.append(Case(p, device=device, kernel=pick(kernels), backward=(None, False)))
    return cases


@dataclass(frozen=True)
class Apart:
    """The predicted value, measured value and largest allowed error of one quantity of a kernel."""

    case: Case
    stage: str
    quantity: str
    predicted: int
    measured: float
    target: float

    @property
    def difference(self) -> float:
        """The relative error, (measured - predicted) / predicted."""
        return self.measured / self.predicted - 1

    @property
    def misses(self) -> bool:
        """Whether the prediction's error exceeds its target."""
        return abs(self.difference) > self.target


@own_errors
def compare(cases: Sequence[Case], passes: Iterable[Sequence[MeasuredPass]]) -> list[Apart]:
    """Return each prediction that has an error target, sorted by |error| / target, largest first.

    `passes` has the measured passes of each case, from `passes_of`.
    """
    found = []
    for case, those in zip(cases, passes, strict=True):
        fits = live(case.problem, "flash2-fused") <= Device.get(case.device).l2_bytes
        limits = TARGETS | (FITTING if fits else {})
        for one in those:
            for row in verify([one], str(case)).rows:
                if row.quantity in limits and row.predicted:
                    values = row.stage, row.quantity, row.predicted, row.measured
                    found.append(Apart(case, *values, limits[row.quantity]))
            found += _counts(case, one)
    return sorted(found, key=lambda x: -abs(x.difference) / (x.target or agreement.REQUESTED))


def _counts(case: Case, one: MeasuredPass) -> list[Apart]:
    """Compare the bytes that kernels reported with the predicted bytes, by stage and tensor."""
    if one.counted is None:
        return []
    found = []
    for key in one.traffic.transfers.keys() | one.counted.keys():
        predicted, counted = one.traffic.transfers.get(key, 0), one.counted.get(key, 0)
        name = "counted by the kernels"
        found.append(Apart(case, " ".join(key), name, max(1, predicted), max(1, counted), 0.0))
    return found


@own_errors
def table(found: Sequence[Apart], most: int = 20) -> Table:
    """Return a table of the `most` predictions with the largest errors."""
    parts = []
    for quantity in TARGETS:
        those = [x for x in found if x.quantity == quantity]
        if those:
            inside = sum(not x.misses for x in those)
            parts.append(f"{quantity}: {inside:,} of {len(those):,}")
    result = Table(
        f"{len({x.case for x in found})} random cases: the largest errors",
        ("case", "kernels", "kernel", "quantity", "predicted", "measured", "off, %", "target, %"),
        note="within their targets: " + "; ".join(parts),
    )
    for x in found[:most]:
        numbers = f"{100 * x.difference:+.3f}", f"{100 * x.target:g}"
        where = str(x.case), x.case.kernel or x.case.backend, x.stage, x.quantity
        result.add(*where, x.predicted, x.measured, *numbers)
    return result
