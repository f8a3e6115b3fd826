"""Export the byte and FLOP formulas, the dataflow and the devices as data for the tile-lab page.

Each forward or backward pass is counted with named sizes (`Polynomial`) instead of integers. So the
page evaluates the same formulas as `counts.forms`, `counts.work` and `schedule.plans`. Some names
in the polynomials stand for sums over visits (tile pairs), which `model.js` computes.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from flashsim.counts.forms import Forms
from flashsim.counts.traffic import Traffic, compulsory, saved
from flashsim.problem.checks import DTYPES
from flashsim.problem.hardware import PRESETS as DEVICES
from flashsim.problem.hardware import Device
from flashsim.problem.problem import Problem, Segment
from flashsim.schedule import plans
from flashsim.schedule.dataflow import ALGORITHMS
from flashsim.schedule.plans import Buffer, Stage
from flashsim.schedule.presets import PRESETS as TILES
from flashsim.schedule.schedule import PartSums, Schedule, Sums
from flashsim.schedule.split import Split
from flashsim.schedule.split_kv import MOST_BLOCKS, RESERVED
from flashsim.schedule.tensors import AXES, STATISTICS, whole_bytes
from flashsim.schedule.tiling import SIDES
from flashsim.viz.laboratory.polynomial import Polynomial, names

#: The named sizes in a formula, and their words on the page.
SIZES = {
    "batch": "batch",
    "kv_heads": "KV heads",
    "group": "query heads per KV head",
    "n_q": "N_q",
    "n_kv": "N_kv",
    "row_cols": "Σ keys",
    "col_rows": "Σ queries",
    "area": "Σ scores",
    "whole_rows": "rows in one split",
    "part_rows": "Σ rows × splits",
    "longest": "longest sequence",
    "pairs": "scores",
    "d": "d",
}


class Symbols(Problem):
    """A problem whose sizes are names (polynomials), without options such as a bias.

    The problem has one sequence; `sequence` is (number of query rows, number of keys).
    """

    # Two such problems can have equal fields but different sequences, so caches compare identity.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __init__(self, dtype: str, sequence: tuple[Any, Any]) -> None:
        size = {name: Polynomial.named(name) for name in SIZES}
        fixed = {name: field.default for name, field in Problem.__dataclass_fields__.items()}
        mine: dict[str, Any] = {name: size[name] for name in ("n_q", "n_kv", "batch", "kv_heads")}
        mine |= dict.fromkeys(("head_dim", "head_dim_v"), size["d"])
        mine |= {"heads": size["kv_heads"] * size["group"], "dtype": dtype}
        for name, value in {**fixed, **mine}.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "one", Segment(0, sequence[0], 0, sequence[1]))

    @property
    def sequences(self) -> tuple[Segment, ...]:
        """The problem's only sequence, in a tuple."""
        return (self.one,)  # type: ignore[attr-defined]


class NamedTraffic(Traffic):
    """A forward or backward pass whose counts, by the methods of `Traffic`, are polynomials."""

    def __init__(self, problem: Problem, algorithm: str, direction: str, split: Split) -> None:
        size = {name: Polynomial.named(name) for name in SIZES}
        self.problem, self.algorithm, self.direction = problem, algorithm, direction
        self.split = split
        self.stages = plans.stages(problem, algorithm, direction, split)
        members: Any = problem.group if split.pack_gqa else 1
        summed = size["row_cols"], size["col_rows"], size["area"]
        self.walk: Any = SimpleNamespace(
            sums=Sums(0, *summed),  # type: ignore[arg-type]
            part_sums=PartSums(size["whole_rows"], size["part_rows"]),  # type: ignore[arg-type]
            members=members,
            n_rows=problem.n_q * members,
            page_reads=0,
        )

    def schedule(self, stage: Stage) -> Schedule:
        """Return the schedule of all stages; sums over visits (tile pairs) are named sizes."""
        walk: Schedule = self.walk
        return walk


def payload() -> dict[str, Any]:
    """Return all data of the page for JSON. A polynomial is stored as its index in a list."""
    polynomials: dict[Polynomial, int] = {}
    types: dict[str, dict[str, Any]] = {}
    kinds: dict[str, str] = {}
    for dtype in DTYPES:
        sizes = Problem(1, dtype=dtype)
        kind = f"{sizes.itemsize}.{sizes.result_itemsize}.{sizes.compute_itemsize}"
        kinds[dtype] = kind
        if kind not in types:
            types[kind] = _passes(dtype, polynomials)
    known = names(polynomials)
    position = {name: n for n, name in enumerate(known)}
    return {
        "dtypes": kinds,
        "passes": types,
        "sizes": known,
        "words": {name: word for name, word in SIZES.items() if name in known},
        "polynomials": [
            [[str(n), *(position[name] for name in term)] for term, n in p.terms.items()]
            for p in polynomials
        ],
        "algorithms": {
            name: {
                "title": dataflow.title,
                "directions": [x for x in plans.DIRECTIONS if getattr(dataflow, x)],
                "splits": plans.splits_keys(name),
            }
            for name, dataflow in ALGORITHMS.items()
        },
        "devices": {name: _device(device) for name, device in DEVICES.items()},
        "axes": {name: ("row", "col", "tile")[axis] for name, axis in sorted(AXES.items())},
        "statistics": sorted(STATISTICS),
        "tiles": TILES,
        "sides": SIDES,
        "reserved": RESERVED,
        "most_blocks": MOST_BLOCKS,
    }


def _passes(dtype: str, polynomials: dict[Polynomial, int]) -> dict[str, Any]:
    """Return a dict from names such as "flash2 forward" to the data of a pass.

    A name ends in "packed" if query heads that share a KV head are packed into one tile.
    """
    passes = {}
    for algorithm in plans.ALGORITHMS:
        for direction in plans.DIRECTIONS:
            if direction == "backward" and algorithm not in plans.TRAINING:
                continue
            for packed in (False, True) if plans.splits_keys(algorithm) else (False,):
                name, split = f"{algorithm} {direction}{' packed' * packed}", Split(pack_gqa=packed)
                passes[name] = _pass(dtype, algorithm, direction, split, polynomials)
    return passes


def _pass(
    dtype: str, algorithm: str, direction: str, split: Split, polynomials: dict[Polynomial, int]
) -> dict[str, Any]:
    longest, pairs = Polynomial.named("longest"), Polynomial.named("pairs")
    problem = Symbols(dtype, (Polynomial.named("n_q"), longest))
    counted = NamedTraffic(problem, algorithm, direction, split)
    # Sizes of whole tensors; S and P have one element per score of the sequences.
    whole = Symbols(dtype, (pairs, 1))
    moved = dict.fromkeys(m.tensor for stage in counted.stages for m in stage.moves if m.transfers)
    (dense,) = {stage.dense for stage in counted.stages}  # one schedule: one set of sums
    flops, chip = counted._work

    def put(value: Any) -> int:
        return polynomials.setdefault(Polynomial.of(value), len(polynomials))

    return {
        "dense": dense,
        "stages": [_stage(counted, stage, put) for stage in counted.stages],
        "flops": {kind: put(value) for kind, value in flops.items()},
        "chip": {kind: put(value) for kind, value in chip.items()},
        "compulsory": put(compulsory(problem, direction)),
        "saved": put(saved(whole, algorithm)),
        "whole": {name: put(whole_bytes(whole, name)) for name in moved},
    }


def _stage(counted: NamedTraffic, stage: Stage, put: Any) -> dict[str, Any]:
    forms, walk = Forms(counted.problem), counted.walk
    table = forms.forward if counted.direction == "forward" else forms.backward
    moved = {key: size for key, size in table(counted.algorithm, stage.name, walk).items() if size}
    # Whether an iteration of the outer loop reads what an earlier iteration stored.
    visited = {(move.op, move.tensor) for move in stage.visit}
    serial = any(op == "store" and ("load", tensor) in visited for op, tensor in visited)

    def buffer(b: Buffer) -> dict[str, Any]:
        sizes = {"row": b.per_row, "col": b.per_col, "score": b.per_score}
        return {"name": b.name, "visit": b.visit, **{k: put(v) for k, v in sizes.items()}}

    return {
        "name": stage.name,
        "outer": stage.outer,
        "rows": stage.whole_rows,
        "once": stage.once,
        "parts": stage.parts,
        "walks": put(plans.heads_of(stage, counted.problem)[0]),
        "serial": serial,
        "buffers": [buffer(b) for b in stage.buffers],
        "strip": [buffer(move.tile) for move in stage.visit if move.holds],
        **{
            when: [[move.op, move.tensor] for move in getattr(stage, when)]
            for when in ("before", "visit", "after")
        },
        "moves": [[op, tensor, put(size)] for (op, tensor), size in moved.items()],
        "bytes": put(sum(moved.values(), Polynomial({}))),
    }


def _device(device: Device) -> dict[str, Any]:
    values = device.to_dict()
    kept = (
        *("name", "source", "sram_bytes", "sram_per_sm", "sm_count", "l2_bytes", "hbm_bytes"),
        *("hbm_bandwidth", "l2_bandwidth"),
    )
    peaks = {
        dtype: device.peak(dtype)
        for dtype in DTYPES
        if dtype in device.tensor_flops or dtype in device.cuda_flops
    }
    return {**{name: values[name] for name in kept}, "peaks": peaks}
