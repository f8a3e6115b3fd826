"""Compare the time model's decode kernel with measurements: `predict.py --decode [--fit]`."""

from dataclasses import replace

import numpy as np
from gpu_lab import read_table
from predict_times import DATA, H200

from flashsim import Problem
from flashsim.backends.launch.kernel import Gpu
from flashsim.backends.launch_policy.decode_plan import plan
from flashsim.report import Table
from flashsim.studies.predict import decode_time
from flashsim.studies.predict.calibration import DECODING, DecodeConstants

#: The measured GPU; its driver reports as many clusters as an H100's, which has as many SMs.
MEASURED = replace(Gpu.like(H200), clusters=((2, 66), (4, 30), (8, 15)))


def decode_cases():
    """Return (row, launch, whether it was fitted) of each call in docs/data/decode-h200.csv.

    The launch is the one that was measured; the current rules may choose another.
    """
    every = read_table(DATA / "decode-h200.csv")
    rows = [row for row in every if row["implementation"].startswith("flashsim")]
    found = []
    for row in rows:
        batch, keys = int(row["batch"]), int(row["keys"])
        p = Problem(
            *(int(row["n_q"]), keys, int(row["head_dim"])),
            batch=batch, heads=32, kv_heads=8, dtype="bfloat16",
        )  # fmt: skip
        made = plan(p, (keys,) * batch, MEASURED, int(row["splits"]), page_of(row))
        swept = (batch, keys) in ((8, 4096), (1, 131072))
        chosen = swept if "splits=" in row["implementation"] else batch in (1, 32)
        found.append((row, made, chosen))
    return found


def page_of(row):
    """Return the keys per page; 0 for a contiguous cache."""
    return int(row["implementation"].partition("pages of ")[2] or 0)


def decode_error(row, made, constants=DECODING):
    """Return predicted / measured - 1."""
    stages = decode_time.stages(made, page_of(row), H200, constants)
    return 1e6 * sum(s.seconds for s in stages) / float(row["us"]) - 1


def decode_table(cases):
    """Return the table of mean absolute and largest errors, fitted and held out."""
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
    """Return the constants with the least squares of the fitted calls' relative errors."""
    from scipy.optimize import least_squares

    unit = np.array(DECODING)
    fitted = [(row, made) for row, made, chosen in cases if chosen]

    def errors(x):
        return [decode_error(row, made, DecodeConstants(*x * unit)) for row, made in fitted]

    best = least_squares(errors, np.ones(len(unit)), bounds=(0, np.inf)).x
    return DecodeConstants(*(float(f"{x:.3g}") for x in best * unit))
