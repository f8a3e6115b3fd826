"""How far the time model is from measured kernels; fits its constants again. Needs no GPU.

    python benchmarks/predict.py                    # errors of the constants that ship
    python benchmarks/predict.py --worst 10         # and the passes that are worst
    python benchmarks/predict.py --fit              # fit them again and print them; ten minutes
    python benchmarks/predict.py --plot FILE.png
    python benchmarks/predict.py --decode [--fit]   # the same of the decode kernel

Measured: docs/data/times-h200.csv (benchmarks/times.py). The fit sees the stages of the shapes in
`time_shapes.CALIBRATION` and nothing else; a stage's time is what its events say, less its part of
what all stages' events say more than their pass takes. Judged are whole passes.
"""

import argparse
import ast
import csv
import sys
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np
import time_shapes

from flashsim import Device, Problem, Tiling
from flashsim.report import Table
from flashsim.studies.predict import Constants, chip, decode, model, predict
from flashsim.studies.predict.calibration import (
    CALIBRATED,
    DECODING,
    POWER_AFTER,
    STREAMED,
    DecodeConstants,
)
from flashsim.studies.predict.units import once_bytes

DATA = Path(__file__).parent.parent / "docs" / "data"
H200 = Device.get("H200")
#: The most that an event before and after a stage adds to its time: launches overlap without them.
EVENT = 10e-6
#: What they add to a stage, a third of what they add to Hopper's fused passes in the middle, s.
MIDDLE = 5.5e-6
PASSES = {"forward": ("forward", "flash2"), "flash2": ("backward", "flash2")}
PASSES |= {name: ("backward", name) for name in ("flash2-fused", "flash2-once")}
SETS = {"fitted": frozenset(time_shapes.CALIBRATION), "held out": frozenset(time_shapes.HELD_OUT)}
#: Which constants a stage's times decide on; the others stay 0.
LASTING = ("masked", "own", "item", "launch", "throttle")
COMMON = (*LASTING, "changeover")
SHORT = tuple(name for name in COMMON if name != "throttle")
WARPS = ("tensor", "waits", "shared", "pieces", "visit")
FREE = {
    ("python", "forward"): ("tensor", "scores", "waits", "visit", *COMMON),
    ("hopper", "forward"): ("scores", "waits", "visit", *LASTING),
    **{("hopper", s): ("tensor", "scores", "visit", *COMMON) for s in ("dkdv", "dq")},
    # Up to 1,024 rows a walk, which lasts too short a time for a throttle; longer ones; one visit.
    ("hopper", "fused"): ("tensor", "scores", "reduced", "visit", *SHORT),
    ("hopper", "fused, deferred"): ("tensor", "scores", "reduced", "visit", *COMMON),
    ("hopper", "fused, once"): ("scores", "masked", "visit", "item", "launch"),
    # Six times each: as few constants as there can be.
    ("hopper", "dkdv, wide"): ("tensor", "masked", "visit", "item", "throttle"),
    ("hopper", "dq, wide"): ("tensor", "visit", "item", "throttle"),
    ("hopper", "fused, wide"): ("tensor", "visit", "item", "throttle"),
    ("hopper", "fused, roles"): ("tensor", "item"),  # two times
    ("portable", "forward"): ("scores", *WARPS, *COMMON),
    **{(k, s): (*WARPS, *COMMON) for k in ("portable", "python") for s in ("dkdv", "dq")},
    **{(k, "fused"): ("reduced", *WARPS, *COMMON) for k in ("portable", "python")},
}
SECONDS = ("visit", "item", "launch", "changeover")
BEGIN = {
    "own": 2.0,
    "pieces": 3.0,
    "tensor": 1.3,
    "scores": 2.0,
    "shared": 0.5,
    "visit": 0.4,
    "item": 0.5,
    "launch": 2.5,
    "changeover": 3.0,
}
MOST = {"throttle": 0.25, "launch": 6.0}


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
    with path.open(newline="") as stream:
        for row in csv.DictReader(stream):
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


def predicted(one, constants=None, device=H200):
    """Seconds that the model says of a measured pass."""
    direction, algorithm = PASSES[one.name]
    return predict(
        one.problem,
        direction=direction,
        algorithm=algorithm,
        kernels=one.kernels,
        tiling=one.tiling,
        constants=constants,
        device=device,
    ).seconds


def errors(everything):
    """Predicted over measured, minus 1: {(kernels, pass, set): [(error, measured pass)]}."""
    found = {}
    for one in everything:
        wrong = predicted(one) / one.seconds - 1
        found.setdefault((one.kernels, one.name, one.where), []).append((wrong, one))
    return found


def errors_table(found):
    """One row a pass: mean absolute error and the worst, of what was fitted and what was not."""
    table = Table(
        "Predicted time of a pass on an H200: predicted / measured - 1, %",
        ("kernels", "pass", *(f"{s}, {x}" for s in SETS for x in ("passes", "mean", "worst"))),
        note="mean: of absolute values",
    )
    for kernels in CALIBRATED:
        for name in PASSES:
            cells = [kernels, name]
            for where in SETS:
                known = [100 * wrong for wrong, _ in found.get((kernels, name, where), ())]
                cells += [len(known), _mean(known), _worst(known)] if known else [0, None, None]
            if any(cells[2:]):
                table.rows.append(cells)
    return table


def chip_table(name="H100"):
    """Passes on a chip on which nothing was fitted, by its data sheet and by its units."""
    sheet, file = Device.get(name), f"units-{name.lower()}.csv"
    with (DATA / file).open(newline="") as stream:
        units = {row["name"]: float(row["value"]) for row in csv.DictReader(stream)}
    chips = {"sheet": sheet, "units": chip.calibrated(sheet, units)}
    table = Table(
        f"Predicted time of a pass on an {name}: predicted / measured - 1, %",
        ("kernels", "pass", "passes", *(f"by {c}, {x}" for c in chips for x in ("mean", "worst"))),
        note="mean: of absolute values; sheet: the data sheet's figures; units: flashsim calibrate",
    )
    found = {}
    for one in measured(DATA / f"times-{name.lower()}.csv"):
        wrong = [100 * (predicted(one, device=c) / one.seconds - 1) for c in chips.values()]
        found.setdefault((one.kernels, one.name), []).append(wrong)
    for key, wrong in sorted(found.items(), key=lambda x: [*CALIBRATED].index(x[0][0])):
        cells = (f(x) for x in zip(*wrong, strict=True) for f in (_mean, _worst))
        table.rows.append((*key, len(wrong), *cells))
    return table


def _mean(wrong):
    return f"{np.mean(np.abs(wrong)):.1f}"


def _worst(wrong):
    return f"{max(wrong, key=abs):+.1f}"


def fp8_table():
    """FP8's forward by the 16-bit one's constants, and its quantiser as a kernel that streams."""
    table = Table(
        "FP8 on an H200: predicted / measured - 1, %",
        ("kernel", "head_dim", "shapes", "mean", "worst"),
        note="nothing is fitted to these; mean: of absolute values",
    )
    found = {}
    with (DATA / "fp8-h200.csv").open(newline="") as stream:
        for row in csv.DictReader(stream):
            d, us = int(row["head_dim"]), float(row["us"] or 0)
            if row["what"] == "forward" and row["way"] == "fp8":
                p = Problem(
                    int(row["n"]), head_dim=d, batch=int(row["batch"]), heads=int(row["heads"]),
                    dtype="float8_e4m3fn", scales=(64, 128), causal=row["causal"] == "True",
                )  # fmt: skip
                found.setdefault(("forward", d), []).append(1e8 * predict(p).seconds / us - 100)
            elif row["way"] == "rotated":
                begun, share = STREAMED[False]
                least = int(row["bytes"]) / (share * H200.hbm_bandwidth)
                found.setdefault(("quantiser", d), []).append(1e8 * (begun + least) / us - 100)
    for key, wrong in sorted(found.items()):
        table.rows.append((*key, len(wrong), _mean(wrong), _worst(wrong)))
    return table


def library_table(path=DATA / "times-h200.csv"):
    """Standard attention as torch's kernels run it, over what it could be: a row a pass."""
    table = Table(
        "Standard attention, measured (torch) / predicted",
        ("pass", "lengths", "shapes", "least", "median", "most"),
        note="predicted is what each kernel's busiest unit needs; nothing is fitted",
    )
    found = {}
    with path.open(newline="") as stream:
        for row in csv.DictReader(stream):
            if row["kernels"] == "library":
                p = problem_of(row)
                least = predict(p, direction=row["pass"], algorithm="standard").seconds
                even = p.n_q % 128 == p.n_kv % 128 == 0
                words = "multiples of 128" if even else "others"
                found.setdefault((row["pass"], words), []).append(float(row["us"]) * 1e-6 / least)
    for key, ratios in sorted(found.items(), reverse=True):
        three = min(ratios), np.median(ratios), max(ratios)
        table.rows.append((*key, len(ratios), *(f"{x:.1f}" for x in three)))
    return table


#: Other people's kernels: which of ours are built like them, and what they are called here.
OTHERS = {
    "flash-attn cute": ("hopper", "FlashAttention's CuTe kernel"),
    "torch cudnn": ("hopper", "cuDNN"),
    "torch flash2": ("portable", "FlashAttention-2"),
}


def others_table(names=("gpu-papers-h200.csv", "gpu-short-h200.csv")):
    """Others' kernels, measured, beside what ours of the same design are predicted to take."""
    table = Table(
        "Other kernels on an H200: ours of the same design, predicted / theirs, measured - 1, %",
        ("kernels", "predicted as", "pass", "head_dim", "shapes", "mean", "worst"),
        note="mean: of absolute values; nothing is fitted to them; backward: fused",
    )
    found = {}
    for name in names:
        with (DATA / name).open(newline="") as stream:
            for row in csv.DictReader(stream):
                ours, theirs = OTHERS.get(row["implementation"], (None, None))
                if ours is None or row["status"] != "ok" or int(row["window"]):
                    continue
                given = {x: int(row[x]) for x in ("head_dim", "batch", "heads", "kv_heads")}
                p = Problem(
                    int(row["seq_len"]), **given, dtype="bfloat16", causal=row["causal"] == "True"
                )
                for name in ("forward", "backward"):
                    options = {"direction": name, "algorithm": "flash2-fused", "kernels": ours}
                    wrong = 1e3 * predict(p, **options).seconds / float(row[f"{name}_ms"]) - 1
                    key = theirs, ours, name, p.head_dim
                    found.setdefault(key, []).append(100 * wrong)
    for key, wrong in sorted(found.items(), key=lambda x: (x[0][0], x[0][2] != "forward", x[0][3])):
        mean, worst = np.mean(np.abs(wrong)), max(wrong, key=abs)
        table.rows.append((*key, len(wrong), f"{mean:.1f}", f"{worst:+.1f}"))
    return table


def worst_table(found, count):
    """The held-out passes that are furthest off."""
    every = [x for key, those in found.items() if key[2] == "held out" for x in those]
    table = Table("Worst of those held out", ("error, %", "kernels", "pass", "us", "problem"))
    for wrong, one in sorted(every, key=lambda x: -abs(x[0]))[:count]:
        p = one.problem
        words = f"{p.batch} x {p.heads}/{p.kv_heads}, {p.n_q} x {p.n_kv}, d={p.head_dim}"
        words += f"{' causal' * p.causal} {p.window or ''}{' packed' * bool(p.cu_seqlens_q)}"
        table.rows.append(
            (f"{100 * wrong:+.1f}", one.kernels, one.name, f"{1e6 * one.seconds:.1f}", words)
        )
    return table


def pairs(found):
    """{series: [(predicted, measured)]} of the passes held out, ms."""
    return {
        f"{kernels} {name}": [(1e3 * (1 + x) * one.seconds, 1e3 * one.seconds) for x, one in those]
        for (kernels, name, where), those in found.items()
        if where == "held out"
    }


# -- fitting ---------------------------------------------------------------------------------------


class Point(NamedTuple):
    """A stage that the fit sees."""

    one: object
    works: object
    traffic: object
    seconds: float


def points(everything, kernels, name):
    """The calibration set's stages that have these constants."""
    found = []
    for one in everything:
        if one.kernels != kernels or one.where != "fitted":
            continue
        direction, algorithm = PASSES[one.name]
        passes, traffic = model._prepare(
            one.problem, direction, algorithm, kernels, one.tiling, H200
        )
        for each in passes:
            if each.kernel.shared_bytes and model.constants_name(each, one.problem) == name:
                seconds = one.stages[each.stage.name]
                found.append(Point(each, model.works_of(each, traffic), traffic, seconds))
    return found


def stage_seconds(point, constants):
    """What the model says of a point."""
    return model.stage_seconds(point.one, point.works, point.traffic, constants)[0]


def fit(those, free, ships=None):
    """Constants that make the errors of the stages' times small, large ones counting less.

    There are several such minima: the search begins at rough values, and at those that ship.
    """
    from scipy.optimize import least_squares

    def constants(x):
        scaled = {n: v * 1e-6 if n in SECONDS else v for n, v in zip(free, x, strict=True)}
        return Constants(**scaled)

    def wrong(x):
        c = constants(x)
        return np.array([np.log(stage_seconds(p, c) / p.seconds) for p in those])

    limits = 0.0, [MOST.get(n, np.inf) for n in free]
    options = {
        "loss": "soft_l1",
        "f_scale": 0.05,
        "diff_step": 1e-3,
        "max_nfev": 80,
        "x_scale": "jac",
    }
    starts = [[BEGIN.get(n, 0.1) for n in free], [BEGIN.get(n, 0.1) / 3 for n in free]]
    if ships is not None:
        units = [1e6 if n in SECONDS else 1.0 for n in free]
        found = [getattr(ships, n) * unit for n, unit in zip(free, units, strict=True)]
        starts.append(
            [min(max(x, 1e-3), MOST.get(n, np.inf)) for n, x in zip(free, found, strict=True)]
        )
    found = [least_squares(wrong, x, bounds=limits, **options) for x in starts]
    return constants(min(found, key=lambda x: x.cost).x)


def fit_streams(everything):
    """Seconds of a launch and share of HBM's bandwidth of kernels that only stream, by overlap."""
    from scipy.optimize import least_squares

    found = {False: [], True: []}
    for one in everything:
        if one.where != "fitted" or one.name == "forward":
            continue
        passes, traffic = model._prepare(
            one.problem, *PASSES[one.name], one.kernels, one.tiling, H200
        )
        for each in passes:
            if not each.kernel.shared_bytes and one.kernels != "python":
                name = each.stage.name
                least = once_bytes(traffic, name) / H200.hbm_bandwidth
                found[each.kernel.overlaps].append((least, one.stages[name]))

    def best(those):
        least, took = np.array(those).T
        wrong = lambda x: np.log((x[0] * 1e-6 + least / x[1]) / took)  # noqa: E731
        seconds, share = least_squares(wrong, (3.0, 0.8), loss="soft_l1", f_scale=0.05).x
        return f"({seconds:.2f}e-6, {share:.3f})"

    return {overlaps: best(those) for overlaps, those in found.items()}


def as_code(name, c):
    """A line of calibration.py."""
    parts = []
    for field, value in c._asdict().items():
        if abs(value) > 1e-9 or field == "launch":
            text = f"{value * 1e6:.2f}e-6" if field in SECONDS else f"{value:.3f}"
            parts.append(f"{field}={text}")
    return f'        "{name}": Constants({", ".join(parts)}),'


def decode_cases():
    """(row, launch, whether it was fitted) of each call in docs/data/decode-h200.csv."""
    with (DATA / "decode-h200.csv").open(newline="") as stream:
        rows = [r for r in csv.DictReader(stream) if r["implementation"].startswith("flashsim")]
    found = []
    for row in rows:
        batch, keys = int(row["batch"]), int(row["keys"])
        p = Problem(
            *(int(row["n_q"]), keys, int(row["head_dim"])),
            batch=batch, heads=32, kv_heads=8, dtype="bfloat16", page_size=page_of(row) or None,
        )  # fmt: skip
        made = decode.launch(p, int(row["splits"]), H200)  # measured; "auto" may choose others now
        swept = (batch, keys) in ((8, 4096), (1, 131072))
        chosen = swept if "splits=" in row["implementation"] else batch in (1, 32)
        found.append((row, made, chosen))
    return found


def page_of(row):
    """Keys of a page; 0 of a contiguous cache."""
    return int(row["implementation"].partition("pages of ")[2] or 0)


def decode_error(row, made, constants=DECODING):
    """Predicted over measured, minus 1."""
    stages = decode.stages(made, page_of(row), H200, constants)
    return 1e6 * sum(s.seconds for s in stages) / float(row["us"]) - 1


def decode_table(cases):
    """Mean absolute and largest error, of the fitted calls, of the others, of all."""
    kinds = {
        "table, contiguous": lambda r: r["implementation"] == "flashsim",
        "table, pages": lambda r: "pages" in r["implementation"],
        "sweep over splits": lambda r: "splits=" in r["implementation"],
        "all": lambda r: True,
    }
    table = Table(
        "Predicted time of decode calls on an H200: predicted / measured - 1, %",
        ("calls", *(f"{g}, {x}" for g in ("fitted", "held out", "all") for x in ("mean", "worst"))),
        note="mean: of absolute values",
    )
    for kind, chosen in kinds.items():
        errors = [(decode_error(r, made), fitted) for r, made, fitted in cases if chosen(r)]
        cells = [f"{kind}: {len(errors)}"]
        for group in (True, False, None):
            some = [100 * e for e, fitted in errors if group in (None, fitted)]
            worst = max(some, key=abs, default=0.0)
            cells += [f"{np.mean(np.abs(some)):.1f}", f"{worst:+.1f}"] if some else [None, None]
        table.rows.append(cells)
    return table


def fit_decode(cases):
    """Constants that make the squares of the fitted calls' relative errors least."""
    from scipy.optimize import least_squares

    unit = np.array(DECODING)
    fitted = [(row, made) for row, made, chosen in cases if chosen]

    def errors(x):
        return [decode_error(row, made, DecodeConstants(*x * unit)) for row, made in fitted]

    best = least_squares(errors, np.ones(len(unit)), bounds=(0, np.inf)).x
    return DecodeConstants(*(float(f"{x:.3g}") for x in best * unit))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fit", action="store_true", help="fit the constants again, print them")
    parser.add_argument("--kernels", default=",".join(("hopper", "portable", "python")))
    parser.add_argument("--worst", type=int, default=0, help="print so many of the worst")
    parser.add_argument("--decode", action="store_true", help="of the decode kernel")
    parser.add_argument("--plot", type=Path, help="predicted against measured, a picture")
    chosen = parser.parse_args()
    if chosen.decode:
        cases = decode_cases()
        if chosen.fit:
            print(fit_decode(cases))
        print(decode_table(cases).text(width=120))
        return
    everything = measured()
    if chosen.fit:
        print("STREAMED", fit_streams(everything))
        for kernels in chosen.kernels.split(","):
            print(f'    "{kernels}": {{')
            for (family, name), free in FREE.items():
                if family == kernels:
                    best, those = CALIBRATED[kernels][name], points(everything, kernels, name)
                    if those:  # else of no such kernel was a time taken: what ships remains
                        best = fit(those, free, ships=best)
                    print(as_code(name, best), flush=True)
            print("    },")
        return
    found = errors(everything)
    print(errors_table(found).text(width=120))
    print(chip_table().text(width=120))
    print(fp8_table().text(width=120))
    print(library_table().text(width=120))
    print(others_table().text(width=120))
    if chosen.worst:
        print(worst_table(found, chosen.worst).text(width=120))
    if chosen.plot:
        from flashsim import viz

        viz.predicted_against_measured(pairs(found), unit="ms").figure.savefig(chosen.plot)


if __name__ == "__main__":
    sys.exit(main())
