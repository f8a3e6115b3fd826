"""How far the time model is from measured kernels; fits its constants again. Needs no GPU.

    python benchmarks/predict.py          # errors of the constants that ship
    python benchmarks/predict.py --fit    # fit them again, print both
    python benchmarks/predict.py --decode [--fit]    # the same of the decode kernel

Measured: docs/data/verify-h200.csv, seconds of every kernel under Nsight Compute. Fitted: N = 4096
with 4 batch entries, dense and causal, head_dim 64 and 128: four shapes a stage. Held out are the
other lengths, and grouped heads, a window, ragged ones.
Left out altogether: shapes that fit in L2, the fused pass in a fixed order, backend "numba_cuda".
"""

import argparse
import csv
import sys
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from flashsim import Device, Problem
from flashsim.report import Table
from flashsim.studies.predict import Constants, decode, predict
from flashsim.studies.predict.calibration import CALIBRATED, DECODING, DecodeConstants
from flashsim.studies.verify import Case

HERE = Path(__file__).parent
DATA = HERE.parent / "docs" / "data"
H200 = Device.get("H200")
PASSES = {"forward": ("forward", "flash2"), "flash2": ("backward", "flash2")}
PASSES["flash2-fused"] = ("backward", "flash2-fused")
STAGES = {"forward": "forward", "dkdv": "flash2", "dq": "flash2", "fused": "flash2-fused"}
GROUPS = ("fitted", "lengths", "others")


def cases(kernels):
    """The shapes of `benchmarks/verify.py` that exceed L2, with one kernel family."""
    sys.path.insert(0, str(HERE))
    import verify

    return [case for case in verify.cases("H200", [kernels]) if not verify.fits(case)]


def measured():
    """Seconds by (case as text, kernels, pass, stage)."""
    with (DATA / "verify-h200.csv").open(newline="") as stream:
        return {
            (row["shape"], row["kernels"], row["pass"], row["kernel"]): float(row["measured"])
            for row in csv.DictReader(stream)
            if row["quantity"] == "seconds"
        }


def predicted(case, kernels, direction, algorithm, constants=None):
    """What the model says of a measured pass."""
    given = {"direction": direction, "algorithm": algorithm, "kernels": kernels}
    return predict(case.problem, constants=constants, **given)


def group_of(case: Case) -> str:
    p = case.problem
    if p.group > 1 or p.window is not None or p.n_q % 1024 or p.n_q != p.n_kv:
        return GROUPS[2]
    return GROUPS[0] if p.n_q == 4096 else GROUPS[1]


def pass_errors(seconds):
    """Predicted over measured, minus 1, of whole passes: {(kernels, pass, group): [...]}."""
    found = {}
    for kernels in CALIBRATED:
        for case in cases(kernels):
            for name, (direction, algorithm) in PASSES.items():
                guess = predicted(case, kernels, direction, algorithm)
                each = [seconds.get((str(case), kernels, name, s.name)) for s in guess.stages]
                if None not in each:
                    key = kernels, name, group_of(case)
                    found.setdefault(key, []).append(guess.seconds / sum(each) - 1)
    return found


def errors_table(seconds):
    """One row a pass: rms and largest error of the fitted shapes and of those held out."""
    errors = pass_errors(seconds)
    table = Table(
        "Predicted time of a pass on an H200: predicted / measured - 1, %",
        ("kernels", "pass", *(f"{group}, {what}" for group in GROUPS for what in ("rms", "worst"))),
        note="fitted: N = 4096; held out: 8 other lengths; 4 others, grouped, windowed or ragged",
    )
    for kernels in CALIBRATED:
        for name in PASSES:
            cells = [kernels, name]
            for group in GROUPS:
                known = errors.get((kernels, name, group))
                if known is None:
                    cells += [None, None]
                else:
                    worst = max(known, key=abs)
                    cells += [f"{100 * rms(known):.1f}", f"{100 * worst:+.1f}"]
            table.rows.append(cells)
    return table


def rms(errors):
    return float(np.sqrt(np.mean(np.square(errors))))


def fit(kernels, stage, seconds):
    """Constants of a stage that make the squares of its relative errors least, and their rms."""
    name = STAGES[stage]
    direction, algorithm = PASSES[name]
    fitted = [case for case in cases(kernels) if group_of(case) == GROUPS[0]]

    def errors(x):
        found = []
        for case in fitted:
            constants = CALIBRATED[kernels] | {stage: Constants(*x)}
            guess = predicted(case, kernels, direction, algorithm, constants)
            took = next(s.seconds for s in guess.stages if s.name == stage)
            found.append(took / seconds[str(case), kernels, name, stage] - 1)
        return np.array(found)

    starts = (1.0, 0.5, 2e-6), (1.3, 0.2, 1e-6)
    given = {"bounds": (0, np.inf), "x_scale": (1, 1, 1e-6)}
    best = min((least_squares(errors, x, **given) for x in starts), key=lambda fit: fit.cost)
    return Constants(*map(float, best.x)), rms(best.fun)


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
        _, _, fixed = row["implementation"].partition("splits=")
        made = decode.launch(p, int(fixed) if fixed.isdigit() else "auto", H200)
        swept = (batch, keys) in ((8, 4096), (1, 131072))
        found.append((row, made, swept if fixed else batch in (1, 32)))
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
    unit = np.array(DECODING)
    fitted = [(row, made) for row, made, chosen in cases if chosen]

    def errors(x):
        return [decode_error(row, made, DecodeConstants(*x * unit)) for row, made in fitted]

    best = least_squares(errors, np.ones(len(unit)), bounds=(0, np.inf)).x
    return DecodeConstants(*(float(f"{x:.3g}") for x in best * unit))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fit", action="store_true", help="fit the constants again, print them")
    parser.add_argument("--decode", action="store_true", help="of the decode kernel")
    parser.add_argument("--kernels", default=",".join(CALIBRATED))
    parser.add_argument("--stages", default=",".join(STAGES))
    chosen = parser.parse_args()
    if chosen.decode:
        cases = decode_cases()
        if chosen.fit:
            print(fit_decode(cases))
        print(decode_table(cases).text(width=120))
        return
    seconds = measured()
    if chosen.fit:
        for kernels in chosen.kernels.split(","):
            for stage in chosen.stages.split(","):
                found, error = fit(kernels, stage, seconds)
                print(
                    f"{kernels:<9}{stage:<8} Constants({found.busiest:.3f}, {found.others:.3f}, "
                    f"{found.item * 1e6:.2f}e-6)  rms {error:.1%}, now {CALIBRATED[kernels][stage]}"
                )
    print(errors_table(seconds).text(width=120))


if __name__ == "__main__":
    main()
