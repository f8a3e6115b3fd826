"""Fit the time model's constants to measured times: `predict.py --fit`.

The fit uses only the stages of the shapes in `time_shapes.CALIBRATION`, and random shapes.
"""

import csv
import io
from functools import partial
from typing import NamedTuple

import numpy as np
from predict_times import PASSES, as_it_ran

from flashsim.studies.predict import Constants, model
from flashsim.studies.predict.units import once_bytes

#: The constants that each stage's times determine; the others stay 0.
LASTING = ("masked", "own", "item", "launch", "throttle")
COMMON = (*LASTING, "changeover")
SHORT = tuple(name for name in COMMON if name != "throttle")
WARPS = ("tensor", "waits", "shared", "pieces", "visit")
FREE = {
    ("python", "forward"): ("tensor", "scores", "waits", "visit", *COMMON),
    **{
        ("hopper", f"forward{width}"): ("scores", "waits", "visit", *COMMON)
        for width in ("", ", 96", ", 128", ", wide", ", widest")
    },
    **{
        ("hopper", f"{s}{width}"): ("tensor", "scores", *loads, "visit", *COMMON)
        for s, loads in (("dkdv", ("loads",)), ("dq", ()))
        for width in ("", ", 128")
    },
    # Loops of up to 1,024 rows, too short for a clock throttle; longer loops; single visits.
    **{
        ("hopper", f"fused{how}{width}"): (
            *("tensor", "scores", "loads", "reduced", "visit"),
            *lasting,
        )
        for how, lasting in (("", SHORT), (", deferred", COMMON))
        for width in ("", ", 128")
    },
    **{
        ("hopper", f"fused, once{width}"): ("tensor", "scores", "item", "launch")
        for width in ("", ", 128")
    },
    **{("hopper", f"{s}, wide"): ("tensor", "visit", *COMMON) for s in ("dkdv", "dq")},
    ("hopper", "fused, roles"): ("tensor", "reduced", "visit", *COMMON),
    # There are four times and two, so these have as few constants as possible.
    ("hopper", "fused, widest"): ("tensor", "visit", "item", "throttle"),
    ("hopper", "fused, wide"): ("tensor", "visit"),
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
#: Relative errors above this one count less than their square.
DAMPED = 0.05


class Point(NamedTuple):
    """A stage that the fit uses."""

    one: object
    works: object
    traffic: object
    seconds: float
    seed: str


def points(everything, kernels, name):
    """Return the calibration set's stages that have these constants.

    As in a prediction, a stage whose own head width has no constants uses those of any width.
    Forwards that ran without shares of the visits are left out if they have shares today.
    """
    found = []
    for one in everything:
        if one.kernels != kernels or one.where != "fitted":
            continue
        if name.startswith("forward") != (one.name == "forward"):
            continue
        if one.name == "flash2-fused" and one.problem.n_kv <= 128 and kernels == "hopper":
            continue  # the single-KV-tile backward runs instead
        direction, algorithm = PASSES[one.name]
        how = direction, algorithm, kernels, one.tiling, one.device, one.packs
        if direction == "forward" and not one.shares and kernels == "hopper":
            today, _ = model._prepare(one.problem, *how)
            if today[-1].tables.shares is not None:
                continue
        with as_it_ran(one):
            passes, traffic = model._prepare(one.problem, *how)
        for each in passes:
            if each.stage.name not in one.stages:
                continue  # a pass whose stages were not timed
            if not each.kernel.shared_bytes:
                continue
            names = model.constants_names(each, one.problem)
            if name == next(n for n in names if (kernels, n) in FREE):
                seconds = one.stages[each.stage.name]
                found.append(Point(each, model.works_of(each, traffic), traffic, seconds, one.seed))
    return found


def stage_seconds(point, constants):
    """Return the model's seconds for a point."""
    return model.stage_seconds(point.works, constants)[0]


def fit(those, free, ships=None):
    """Return the constants that minimise the errors of the stages' times, with large errors damped.

    There are several minima: the search starts at rough values and at the shipped ones.
    """
    starts = [[BEGIN.get(n, 0.1) for n in free], [BEGIN.get(n, 0.1) / 3 for n in free]]
    return _scaled(free, _least(those, free, starts, ships, 80).x)


def left_out(those, free, ships):
    """Return the constants by seed of random shapes, each fitted without the points of that seed.

    The fit to all points is refined without the seed's: by Gauss-Newton steps with the derivatives
    of the full fit, as long as they lower the remaining points' cost.
    """
    full = _least(those, free, [], ships, 4)
    seeds, found = np.array([p.seed for p in those]), {}
    begin = _wrong(those, free, full.x)
    slopes = np.array(
        [
            (_wrong(those, free, full.x + step * axis) - begin) / step
            for step, axis in zip(np.maximum(1e-3 * full.x, 1e-4), np.eye(len(free)), strict=True)
        ]
    ).T
    most = np.array([MOST.get(n, np.inf) for n in free])
    for seed in sorted({*seeds.tolist()} - {""}):
        kept = seeds != seed
        rest = [p for p, its in zip(those, kept, strict=True) if its]
        x, wrong = full.x, begin[kept]
        for _ in range(3):
            moved = _step(wrong, slopes[kept], x, most)
            for _ in range(4):
                tried = np.clip(x + moved, 0, most)
                after = _wrong(rest, free, tried)
                if _cost(after) < _cost(wrong):
                    break
                moved = moved / 3
            else:
                break
            gained = _cost(wrong) - _cost(after)
            x, wrong = tried, after
            if gained < 1e-4 * _cost(wrong):
                break
        found[seed] = _scaled(free, x)
    return found


def _step(wrong, slopes, x, most):
    """Return the step from x that minimises the damped errors, if they depend on x linearly."""
    from scipy.optimize import lsq_linear

    moved = np.zeros(len(x))
    for _ in range(6):
        left = wrong + slopes @ moved
        weights = (1 + (left / DAMPED) ** 2) ** -0.25
        limits = -x - moved - 1e-9, most - x - moved + 1e-9
        moved += lsq_linear(slopes * weights[:, None], -left * weights, limits).x
    return moved


def _cost(wrong):
    return float(np.sum(np.sqrt(1 + (wrong / DAMPED) ** 2)))


def _scaled(free, x):
    scaled = {n: v * 1e-6 if n in SECONDS else v for n, v in zip(free, x, strict=True)}
    return Constants(**scaled)


def _wrong(those, free, x):
    c = _scaled(free, x)
    return np.array([np.log(stage_seconds(p, c) / p.seconds) for p in those])


def _least(those, free, starts, ships, steps):
    """Return the best result of `least_squares` from these starts and the shipped constants."""
    from scipy.optimize import least_squares

    limits = 0.0, [MOST.get(n, np.inf) for n in free]
    options = {
        "loss": "soft_l1",
        "f_scale": DAMPED,
        "diff_step": 1e-3,
        "max_nfev": steps,
        "x_scale": "jac",
    }
    starts = list(starts)
    if ships is not None:
        units = [1e6 if n in SECONDS else 1.0 for n in free]
        found = [getattr(ships, n) * unit for n, unit in zip(free, units, strict=True)]
        starts.append(
            [min(max(x, 1e-3), MOST.get(n, np.inf)) for n, x in zip(free, found, strict=True)]
        )
    wrong = partial(_wrong, those, free)
    found = [least_squares(wrong, x, bounds=limits, **options) for x in starts]
    return min(found, key=lambda x: x.cost)


def fit_streams(everything):
    """Return launch seconds and the share of HBM's bandwidth of streaming kernels, by overlap."""
    from scipy.optimize import least_squares

    found = {False: [], True: []}
    for one in everything:
        if one.where != "fitted" or one.seed or one.name == "forward":
            continue
        passes, traffic = model._prepare(
            one.problem, *PASSES[one.name], one.kernels, one.tiling, one.device
        )
        for each in passes:
            if not each.kernel.shared_bytes and one.kernels != "python":
                name = each.stage.name
                least = once_bytes(traffic, name) / one.device.hbm_bandwidth
                found[each.kernel.overlaps].append((least, one.stages[name]))

    def best(those):
        least, took = np.array(those).T
        wrong = lambda x: np.log((x[0] * 1e-6 + least / x[1]) / took)  # noqa: E731
        seconds, share = least_squares(wrong, (3.0, 0.8), loss="soft_l1", f_scale=0.05).x
        return f"({seconds:.2f}e-6, {share:.3f})"

    return {overlaps: best(those) for overlaps, those in found.items()}


def as_line(kernels, name, c):
    """Return a line of flashsim/data/time_model.csv; zeros, except for a launch, stay empty."""
    cells = [kernels, name]
    for field, value in c._asdict().items():
        text = f"{value * 1e6:.2f}e-6" if field in SECONDS else f"{value:.3f}"
        cells.append(text if abs(value) > 1e-9 or field == "launch" else "")
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(cells)
    return line.getvalue()
