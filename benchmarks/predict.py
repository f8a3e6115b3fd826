"""Fit the time model to measured kernels, and test it on the rest. Needs no GPU.

    python benchmarks/predict.py docs/verify-h200.csv

The file is `benchmarks/verify.py`'s. Constants of each stage are fitted to N = 4096 of 4 batch
entries, dense and causal, head_dim 64 and 128; printed are the constants (they stand in
`flashsim.predict.calibration`) and the errors on these shapes and on all others.
"""

import csv
import sys
from pathlib import Path

import numpy as np

from flashsim.predict import Constants, predict
from flashsim.predict.calibration import CALIBRATED
from flashsim.verify import Case


def main(path):
    sys.path.insert(0, str(Path(__file__).parent))
    from verify import cases

    measured = {}
    with Path(path).open(newline="") as stream:
        for row in csv.DictReader(stream):
            if row["quantity"] == "seconds":
                key = row["shape"], row["kernels"], row["pass"], row["kernel"]
                measured[key] = float(row["measured"])
    columns = f"{'kernels':<9}{'stage':<9}{'busiest':>8}{'others':>8}{'item us':>8}"
    print(f"{columns}  fitted, held out: rms, worst")
    for kernels, stages in CALIBRATED.items():
        of_family = [case for case in cases("H200", [kernels])]
        for stage in stages:
            fitted = [x for x in of_family if is_fitted(x)]
            found = fit(kernels, stage, fitted, measured)
            errors = [
                [error(kernels, stage, case, found, measured) for case in group]
                for group in (fitted, [x for x in of_family if not is_fitted(x)])
            ]
            text = "   ".join(f"{rms(e):6.1%} {max(map(abs, e)):6.1%}" for e in errors)
            print(
                f"{kernels:<9}{stage:<9}{found.busiest:8.3f}{found.others:8.3f}"
                f"{found.item * 1e6:8.2f}  {text}"
            )


def is_fitted(case: Case) -> bool:
    p = case.problem
    return p.n_q == p.n_kv == 4096 and p.group == 1 and p.window is None


def error(kernels, stage, case, constants, measured):
    """Predicted over measured, minus 1."""
    backward = "forward" if stage == "forward" else "backward"
    algorithm = "flash2-fused" if stage == "fused" else "flash2"
    name = stage if stage == "forward" else algorithm
    seen = measured[str(case), kernels, name, stage]
    whole = CALIBRATED[kernels] | {stage: constants}
    predicted = predict(
        case.problem, direction=backward, algorithm=algorithm, kernels=kernels, constants=whole
    )
    return next(s.seconds for s in predicted.stages if s.name == stage) / seen - 1


def rms(errors):
    return float(np.sqrt(np.mean(np.square(errors))))


def fit(kernels, stage, fitted, measured):
    """Least squares of relative errors by pattern search, from a few starts."""

    def loss(x):
        return rms([error(kernels, stage, c, Constants(*x), measured) for c in fitted])

    best = None
    for start in ((1.0, 0.5, 2e-6), (1.3, 0.2, 1e-6)):
        x, step = np.array(start), np.array((0.2, 0.2, 1e-6))
        value = loss(x)
        while step[0] > 2e-3:
            moves = [x + s * step * np.eye(3)[i] for i in range(3) for s in (1, -1)]
            moves = [np.maximum(m, 0) for m in moves]
            values = [loss(m) for m in moves]
            if min(values) < value:
                x, value = moves[int(np.argmin(values))], min(values)
            else:
                step /= 2
        if best is None or value < best[0]:
            best = value, x
    return Constants(*map(float, best[1]))


if __name__ == "__main__":
    main(sys.argv[1])
