"""Compare the time model with measured kernels, and fit its constants. Needs no GPU.

    python benchmarks/predict.py                    # errors of the constants that ship
    python benchmarks/predict.py --worst 10         # also the passes with the largest errors
    python benchmarks/predict.py --fit              # prints new lines for time_model.csv; 10 min
    python benchmarks/predict.py --leave-one-out    # errors on random shapes, each seed's shapes
                                                    # predicted by a fit without them
    python benchmarks/predict.py --plot FILE.png
    python benchmarks/predict.py --decode [--fit]   # the same of the decode kernel

The measurements of Hopper's kernels are those of an H100 (`predict_times.SHAPES` and `RANDOM`);
those of the other kernels, of an H200 (docs/data/times-h200.csv, benchmarks/times.py). The fit uses
only the stages of the shapes in `time_shapes.CALIBRATION`, and for Hopper's kernels random shapes.
Errors are those of whole passes.
"""

import argparse
import csv
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import predict_decode
import predict_fit
import predict_times
from gpu_lab import read_table
from predict_times import (
    DATA,
    EVENTS,
    H200,
    PASSES,
    SETS,
    as_it_ran,
    everything,
    measured,
    problem_of,
    without_shares,
)

from flashsim import Device, Problem
from flashsim.report import Table
from flashsim.studies.predict import chip, predict
from flashsim.studies.predict.calibration import CALIBRATED, STREAMED


def predicted(one, constants=None, device=H200):
    """Return the model's seconds for a measured pass."""
    direction, algorithm = PASSES[one.name]
    with as_it_ran(one):
        return predict(
            one.problem,
            direction=direction,
            algorithm=algorithm,
            kernels=one.kernels,
            tiling=one.tiling,
            constants=constants,
            device=device,
            pack_gqa=one.packs,
        ).seconds


def errors(everything):
    """Return predicted / measured - 1: {(kernels, pass, set): [(error, measured pass)]}."""
    found = {}
    for one in everything:
        wrong = predicted(one, device=one.device) / one.seconds - 1
        found.setdefault((one.kernels, one.name, one.where), []).append((wrong, one))
    return found


def errors_table(found):
    """Return a table with one row per pass: mean absolute and worst errors, fitted and held out."""
    table = Table(
        "Predicted time of a pass (Hopper's: H100, others: H200), predicted / measured - 1, %",
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


def left_out(everything, jobs):
    """Return the constants of Hopper's kernels by seed, each fitted without that seed's shapes."""
    with ProcessPoolExecutor(jobs) as pool:
        fits = [*pool.map(partial(_left_out, everything), predict_fit.groups("hopper"))]
    found = {one.seed: dict(CALIBRATED["hopper"]) for one in everything if one.seed}
    for fit in fits:
        for seed, constants in fit.items():
            found[seed] |= constants
    return found


def _left_out(everything, names):
    those = predict_fit.points(everything, "hopper", names)
    return predict_fit.Search("hopper", names, those).left_out() if those else {}


def _fitted(used, key):
    kernels, names = key
    best = CALIBRATED[kernels]
    those = predict_fit.points(used, kernels, names)
    if those:  # without measured times, the shipped constants stay
        best = predict_fit.Search(kernels, names, those).fit()
    return [predict_fit.as_line(kernels, name, best[name]) for name in names]


def left_out_table(everything, jobs, worst=0):
    """Yield a table of errors on random shapes by seed, and one of the worst passes."""
    by_seed, found = left_out(everything, jobs), {}
    for one in everything:
        if one.seed:
            wrong = 100 * (predicted(one, by_seed[one.seed], one.device) / one.seconds - 1)
            direction = PASSES[one.name][0]
            for seed in (one.seed, "all"):
                found.setdefault((direction, seed), []).append((wrong, one))
    table = Table(
        "Random shapes, H100, by constants fitted without the seed: predicted / measured - 1, %",
        ("pass", "seed", "passes", "mean", "worst"),
        note="mean: of absolute values",
    )
    for (direction, seed), those in sorted(
        found.items(), key=lambda x: (x[0][0] == "backward", x[0][1] == "all")
    ):
        wrong = [x for x, _ in those]
        table.add(direction, seed, len(wrong), _mean(wrong), _worst(wrong))
    yield table
    if worst:
        both = [x for (_, seed), those in found.items() if seed == "all" for x in those]
        yield _worst_of("The worst", [(x / 100, one) for x, one in both], worst)


def chip_table(name="H100"):
    """Return the table of errors on a GPU without a fit, by data sheet and by measured units."""
    sheet, file = Device.get(name), f"units-{name.lower()}.csv"
    with (DATA / file).open(newline="") as stream:
        units = {name: float(value) for name, value, _ in list(csv.reader(stream))[1:]}
    chips = {"sheet": sheet, "units": chip.calibrated(sheet, units)}
    table = Table(
        f"Predicted time of a pass on an {name}: predicted / measured - 1, %",
        ("kernels", "pass", "passes", *(f"by {c}, {x}" for c in chips for x in ("mean", "worst"))),
        note="mean: of absolute values; sheet: the data sheet's figures; "
        "units: flashsim study calibrate",
    )
    found = {}
    for one in measured(DATA / f"times-{name.lower()}.csv"):
        if one.kernels == "hopper":  # fitted to this file
            continue
        wrong = [100 * (predicted(one, device=c) / one.seconds - 1) for c in chips.values()]
        found.setdefault((one.kernels, one.name), []).append(wrong)
    for key, wrong in sorted(found.items(), key=lambda x: [*CALIBRATED].index(x[0][0])):
        cells = (f(x) for x in zip(*wrong, strict=True) for f in (_mean, _worst))
        table.add(*key, len(wrong), *cells)
    return table


def _mean(wrong):
    return f"{np.mean(np.abs(wrong)):.1f}"


def _worst(wrong):
    return f"{max(wrong, key=abs):+.1f}"


def fp8_table():
    """Return the table for FP8: the forward with 16-bit constants, and the quantiser."""
    table = Table(
        "FP8 on an H200: predicted / measured - 1, %",
        ("kernel", "head_dim", "shapes", "mean", "worst"),
        note="nothing is fitted to these; mean: of absolute values",
    )
    found = {}
    for row in read_table(DATA / "fp8-h200.csv"):
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
        table.add(*key, len(wrong), _mean(wrong), _worst(wrong))
    return table


def library_table(path=DATA / "times-h200.csv"):
    """Return the table of standard attention in torch, measured / predicted, one row per pass."""
    table = Table(
        "Standard attention, measured (torch) / predicted",
        ("pass", "lengths", "shapes", "least", "median", "most"),
        note="predicted is what each kernel's busiest unit needs; nothing is fitted",
    )
    found = {}
    for row in read_table(path):
        if row["kernels"] == "library":
            p = problem_of(row)
            least = predict(p, direction=row["pass"], algorithm="standard").seconds
            even = p.n_q % 128 == p.n_kv % 128 == 0
            words = "multiples of 128" if even else "others"
            found.setdefault((row["pass"], words), []).append(float(row["us"]) * 1e-6 / least)
    for key, ratios in sorted(found.items(), reverse=True):
        three = min(ratios), np.median(ratios), max(ratios)
        table.add(*key, len(ratios), *(f"{x:.1f}" for x in three))
    return table


#: Other projects' kernels: the flashsim family of the same design, and their names in the table.
OTHERS = {
    "flash-attn cute": ("hopper", "FlashAttention's CuTe kernel"),
    "torch cudnn": ("hopper", "cuDNN"),
    "torch flash2": ("portable", "FlashAttention-2"),
}


@without_shares()  # others have none
def others_table(names=("gpu-papers-h200.csv", "gpu-short-h200.csv")):
    """Return the table of other projects' times beside predictions for the same design."""
    table = Table(
        "Other kernels on an H200: ours of the same design, predicted / theirs, measured - 1, %",
        ("kernels", "predicted as", "pass", "head_dim", "shapes", "mean", "worst"),
        note="mean: of absolute values; nothing is fitted to them; backward: fused",
    )
    found = {}
    for name in names:
        for row in read_table(DATA / name):
            ours, other = OTHERS.get(row["implementation"], (None, None))
            if ours is None or row["status"] != "ok" or int(row["window"]):
                continue
            given = {x: int(row[x]) for x in ("head_dim", "batch", "heads", "kv_heads")}
            p = Problem(
                int(row["seq_len"]), **given, dtype="bfloat16", causal=row["causal"] == "True"
            )
            for name in ("forward", "backward"):
                options = {"direction": name, "algorithm": "flash2-fused", "kernels": ours}
                theirs = 1e-3 * float(row[f"{name}_ms"]) - EVENTS / 3  # of three calls
                wrong = predict(p, **options).seconds / theirs - 1
                key = other, ours, name, p.head_dim
                found.setdefault(key, []).append(100 * wrong)
    for key, wrong in sorted(found.items(), key=lambda x: (x[0][0], x[0][2] != "forward", x[0][3])):
        mean, worst = np.mean(np.abs(wrong)), max(wrong, key=abs)
        table.add(*key, len(wrong), f"{mean:.1f}", f"{worst:+.1f}")
    return table


def worst_table(found, count):
    """Return the table of the held-out passes with the largest errors."""
    every = [x for key, those in found.items() if key[2] == "held out" for x in those]
    return _worst_of("Worst of those held out", every, count)


def _worst_of(title, every, count):
    table = Table(title, ("error, %", "kernels", "pass", "us", "problem"))
    for wrong, one in sorted(every, key=lambda x: -abs(x[0]))[:count]:
        p = one.problem
        words = f"{p.batch} x {p.heads}/{p.kv_heads}, {p.n_q} x {p.n_kv}, d={p.head_dim}"
        words += f"{' causal' * p.causal} {p.window or ''}{' packed' * bool(p.cu_seqlens_q)}"
        table.add(f"{100 * wrong:+.1f}", one.kernels, one.name, f"{1e6 * one.seconds:.1f}", words)
    return table


def pairs(found):
    """Return {series: [(predicted, measured)]} in ms for the held-out passes."""
    return {
        f"{kernels} {name}": [(1e3 * (1 + x) * one.seconds, 1e3 * one.seconds) for x, one in those]
        for (kernels, name, where), those in found.items()
        if where == "held out"
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fit", action="store_true", help="fit the constants and print them")
    parser.add_argument("--kernels", default=",".join(("hopper", "portable", "python")))
    parser.add_argument("--leave-one-out", action="store_true", help="fit without each seed")
    parser.add_argument("--jobs", type=int, default=2, help="processes that fit")
    parser.add_argument("--worst", type=int, default=0, help="print this many of the worst")
    parser.add_argument("--decode", action="store_true", help="the decode kernel instead")
    parser.add_argument("--plot", type=Path, help="plot predicted over measured to this file")
    chosen = parser.parse_args()
    if chosen.decode:
        cases = predict_decode.decode_cases()
        if chosen.fit:
            print(predict_decode.fit_decode(cases))
        print(predict_decode.decode_table(cases).text(width=120))
        return
    compared = everything()
    if chosen.leave_one_out:
        for table in left_out_table(predict_times.fitted(), chosen.jobs, chosen.worst):
            print(table.text(width=120))
        return
    if chosen.fit:
        used = predict_times.fitted()
        print("STREAMED", predict_fit.fit_streams(used))
        print("FIRST", predict_fit.fit_first(used))
        families = chosen.kernels.split(",")
        every = [(kernels, names) for kernels in families for names in predict_fit.groups(kernels)]
        with ProcessPoolExecutor(chosen.jobs) as pool:
            for lines in pool.map(partial(_fitted, used), every):
                print(*lines, sep="\n", flush=True)
        return
    found = errors(compared)
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
