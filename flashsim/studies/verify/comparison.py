"""Builds a table of predicted, kernel-reported and hardware-measured values, with ratios."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from flashsim import report
from flashsim.backends.launch.device_tables import lower
from flashsim.backends.launch.kernel import Gpu, row_elements
from flashsim.backends.launch_policy.hopper import HOPPER
from flashsim.counts.traffic import Traffic
from flashsim.errors import DTypeError, TraceError, own_errors, shown
from flashsim.l2 import L2Model, dram
from flashsim.problem import checks
from flashsim.report import Cell, Table
from flashsim.schedule import plans
from flashsim.studies.verify.cases import MeasuredPass, predict
from flashsim.studies.verify.crossing import WALKS, StageKernel
from flashsim.studies.verify.ncu import MeasuredLaunch
from flashsim.studies.verify.sectors import sectors_written


@dataclass(frozen=True)
class Row:
    """A row of the comparison: one quantity of one stage's kernel, such as its requested bytes.

    A predicted or kernel-reported value that does not exist is None.
    """

    stage: str
    quantity: str
    predicted: int | None
    counted: int | None
    measured: float

    @property
    def ratio(self) -> float | None:
        """The measured value divided by the predicted one; None if this is missing or zero."""
        return self.measured / self.predicted if self.predicted else None


@own_errors
@dataclass(frozen=True, repr=False)
class Verification(report.Tabled):
    """All rows of the comparison for one run; prints as a table."""

    title: str
    rows: tuple[Row, ...]
    launches: int

    def worst(self, quantity: str) -> float:
        """Return a quantity's largest relative difference between measured and predicted value.

        Raises
        ------
        TraceError
            If no kernel has both values of the quantity.
        """
        ratios = [row.ratio for row in self.rows if row.quantity == quantity]
        known = [abs(ratio - 1) for ratio in ratios if ratio is not None]
        if not known:
            raise TraceError(
                f"no kernel has both a predicted and a measured value of {quantity!r}; choose "
                "another quantity"
            )
        return max(known)

    def table(self) -> Table:
        """Return a table with one row for each quantity of each kernel."""
        table = Table(
            self.title,
            ("kernel", "quantity", "predicted", "counted", "measured", "measured / predicted"),
            note=f"means of {self.launches} launches, in bytes, FLOPs or counts; the prediction of "
            "DRAM writes counts evictions while the kernel runs, and not the bytes still dirty in "
            "L2 at its end; docs/guides/truth.md explains each counter and the L2 model's errors",
        )
        for row in self.rows:
            measured: Cell = int(row.measured) if row.measured.is_integer() else row.measured
            cells = (row.stage, row.quantity, row.predicted, row.counted, measured, row.ratio)
            table.rows.append(cells)
        return table


@own_errors
def verify(
    passes: Sequence[MeasuredPass], title: str, *, l2: L2Model | None = None
) -> Verification:
    """Return a table that compares the hardware counters of passes with their predictions.

    Parameters
    ----------
    passes : sequence of MeasuredPass
        From `measure.passes_of` or `measure.assign`.
    title : str
    l2 : L2Model, optional
        Default: head groups as large as in the kernels of `flashsim.backends`. Without
        `blocks_per_sm`, Nsight Compute's value for the launch is used. If a pass adds to dQ in a
        fixed order, its blocks wait for each other.
    """
    if not isinstance(passes, (list, tuple)):
        raise DTypeError(f"passes= must be a list of MeasuredPass, got {shown(passes)}")
    if not isinstance(title, str):
        raise DTypeError(f"title= must be a string, got {shown(title)}")
    if l2 is not None:
        checks.instance("l2", l2, L2Model, "flashsim.l2.L2Model")
    rows = [row for one in passes for row in _rows(one, l2 or L2Model("grouped"))]
    launches = {id(x) for one in passes for those in one.launches.values() for x in those}
    return Verification(title, tuple(rows), len(launches))


def _rows(one: MeasuredPass, l2: L2Model) -> Iterator[Row]:
    if one.in_turns and l2.launch == "grouped":
        l2 = replace(l2, launch="in-turns")
    left = _Dram(one.traffic, l2)
    for stage in one.traffic.stages:
        launches = one.launches.get(stage.name, ())
        if not launches:
            continue
        known = "reads from L1" in launches[0].counters
        with_l1 = known and stage.name in WALKS and not one.python
        measured = _means(launches, with_l1=with_l1)
        predicted = _predicted(one, stage, launches[0], with_l1=with_l1)
        if measured.keys() & {"DRAM read", "DRAM write"}:
            predicted |= left.predicted(stage, launches[0])
        for quantity, value in measured.items():
            counted = None
            if quantity in _OPS and one.counted is not None:
                key = stage.name, _OPS[quantity]
                counted = sum(n for (s, o, _), n in one.counted.items() if (s, o) == key)
            yield Row(stage.name, quantity, predicted.get(quantity), counted, value)


_SECTORS = "sectors written"  # an upper bound, in bytes
_OPS = {"requested read": "load", "requested write": "store", "requested reduce": "reduce"}


def _means(launches: Sequence[MeasuredLaunch], *, with_l1: bool) -> dict[str, float]:
    """Return the measured quantities of a stage (kernel), averaged over its launches.

    The quantity "requested read" has the bytes that arrive at the SMs, without reloads of spilled
    registers. If `with_l1` is true, "requested read" includes the bytes that hit in L1. Two kinds
    of kernels have no L1 prediction: kernels that work row by row (which request each sector
    twice), and kernels written in Python.
    """
    names = launches[0].counters.keys()
    mean = {n: fmean(x.counters[n] for x in launches if n in x.counters) for n in names}
    found = {}
    if "bytes into SMs" in mean:
        found["requested read"] = mean["bytes into SMs"] - mean.get("local memory reads", 0.0)
        found["requested read"] += mean["reads from L1"] if with_l1 else 0.0
    if "writes at L2" in mean:  # stores of spilled registers also reach L2
        found["requested write"] = mean["writes at L2"] - mean.get("local memory writes", 0.0)
        found[_SECTORS] = found["requested write"]
    if "reductions at L2" in mean:
        found["requested reduce"] = mean["reductions at L2"]
    flops = [mean[name] for name in mean if name.startswith("tensor FLOPs")]
    if flops:
        found["tensor FLOPs"] = sum(flops)
    local = ("local memory reads", "local memory writes")
    same = ("reads at L2", *local, "DRAM read", "DRAM write")
    conflicts = ("shared-memory wavefronts", "shared bank conflicts")
    return found | {name: mean[name] for name in (*same, *conflicts, "seconds") if name in mean}


def _predicted(
    one: MeasuredPass, stage: plans.Stage, launch: MeasuredLaunch, *, with_l1: bool
) -> dict[str, int | None]:
    """Return the predicted quantities of a stage (kernel), except its DRAM bytes."""
    kernel = StageKernel(one.traffic, stage, "hopper_" in launch.kernel, one.python)
    kernel = kernel.shared(in_turns=one.in_turns)
    requested = {name: kernel.crossing(op, with_l1=with_l1) for name, op in _OPS.items()}
    # On Hopper one thread reads.
    warps = launch.threads // 32 if with_l1 and not kernel.hopper else 1
    requested["requested read"] += kernel.table_reads(warps=warps) + kernel.flag_reads()
    return requested | {
        _SECTORS: sectors_written(kernel),
        "reads at L2": StageKernel(one.traffic, stage).crossing("load"),
        **dict.fromkeys(("local memory reads", "local memory writes", "shared bank conflicts"), 0),
        "tensor FLOPs": kernel.tensor_flops(),
    }


class _Dram:
    """Predicts the DRAM bytes of a pass's stages; equal launches run through the L2 model once."""

    def __init__(self, traffic: Traffic, l2: L2Model) -> None:
        self.traffic, self.l2 = _filled(traffic), l2
        self.replayed: dict[L2Model, dict[str, dict[str, int]]] = {}

    def predicted(self, stage: plans.Stage, launch: MeasuredLaunch) -> dict[str, int]:
        blocks = self.l2.blocks_per_sm or launch.blocks_per_sm
        heads, walk, cluster = self.l2.heads_in_group, self.l2.walk, self.l2.cluster
        if self.l2.launch == "grouped" and heads is None and "hopper_" in launch.kernel:
            # The prediction for the C++ kernels is also used for those in Python.
            side = "row" if stage.outer == "queries" else "col"
            tables = lower(self.traffic.schedule(stage), side)
            gpu = Gpu.like(self.traffic.device)
            how = HOPPER.hand_out(stage, tables, gpu, self.traffic.tiling)
            heads, walk = how.clump, "in-step" if how.in_step else walk
            cluster = how.launches[0].cluster if len(how.launches) == 1 else 1
        model = replace(self.l2, blocks_per_sm=blocks, heads_in_group=heads)
        model = replace(model, walk=walk, cluster=cluster)
        if model not in self.replayed:
            self.replayed[model] = {
                part.name: {
                    "DRAM read": sum(part.read.values()),
                    "DRAM write": sum(part.write.values()),
                }
                for part in dram(self.traffic, model).stages
            }
        return self.replayed[model][stage.name]


def _filled(traffic: Traffic) -> Traffic:
    """Return a pass's traffic with rows padded to 16 bytes, as HBM stores rows."""
    p = traffic.problem
    d, dv = row_elements(p.head_dim), row_elements(p.head_dim_v)
    if (d, dv) == (p.head_dim, p.head_dim_v):
        return traffic
    filled = replace(p, head_dim=d, head_dim_v=dv)
    how = traffic.algorithm, traffic.direction, traffic.tiling, traffic.device
    return predict(filled, *how, traffic.split.pack_gqa)
