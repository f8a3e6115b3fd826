"""Fit the time model's constants to measured times: `predict.py --fit`.

The fit uses only the stages of the shapes in `time_shapes.CALIBRATION`, and random shapes.
"""

import csv
import io
from collections.abc import Callable, Mapping, Set
from functools import partial
from typing import NamedTuple

import numpy as np
from predict_times import PASSES, as_it_ran

from flashsim import Problem
from flashsim.studies.predict import Constants, calibration, model, predict, stage_time
from flashsim.studies.predict.calibration import CALIBRATED
from flashsim.studies.predict.units import bytes_again, once_bytes

#: The constants that each stage's times determine; the others stay 0.
LASTING = ("masked", "own", "item", "launch", "throttle")
COMMON = (*LASTING, "changeover")
SHORT = tuple(name for name in COMMON if name != "throttle")
#: Blocks of Hopper's kernels for dK and dV, and of its fused kernels, may form clusters.
CLUSTERS = "cluster", "doubling"
WARPS = ("tensor", "waits", "shared", "pieces", "visit")
FREE = {
    ("python", "forward"): ("tensor", "scores", "waits", "visit", *COMMON),
    **{
        ("hopper", f"forward{width}"): ("scores", "waits", "visit", *COMMON)
        for width in ("", ", 96", ", 128", ", wide", ", widest")
    },
    **{
        ("hopper", f"dkdv{width}"): ("tensor", "scores", "loads", "visit", *COMMON, *CLUSTERS)
        for width in ("", ", 128")
    },
    **{("hopper", f"dq{width}"): ("tensor", "scores", "visit", *COMMON) for width in ("", ", 128")},
    ("hopper", "dq, 128 rows"): ("tensor", "visit", *COMMON),
    # Loops of up to 1,024 rows, too short for a clock throttle; longer loops; single visits.
    **{
        ("hopper", f"fused{how}{width}"): (
            *("tensor", "scores", "loads", "reduced", "visit"),
            *lasting,
            *CLUSTERS,
        )
        for how, lasting in (("", SHORT), (", deferred", COMMON))
        for width in ("", ", 128")
    },
    **{
        ("hopper", f"fused, once{width}"): (
            *("tensor", "scores", "own", "item", "launch", "changeover", "cluster"),
        )
        for width in ("", ", 128")
    },
    ("hopper", "dkdv, wide"): ("tensor", "visit", *COMMON, *CLUSTERS),
    ("hopper", "dq, wide"): ("tensor", "visit", *COMMON),
    ("hopper", "fused, roles"): ("tensor", "reduced", "visit", *COMMON),
    # There are eight times and twelve, so these have few constants.
    ("hopper", "fused, widest"): ("tensor", "visit", "item", "throttle"),
    ("hopper", "fused, wide"): ("tensor", "visit", "item", *CLUSTERS),
    ("portable", "forward"): ("scores", *WARPS, *COMMON),
    **{(k, s): (*WARPS, *COMMON) for k in ("portable", "python") for s in ("dkdv", "dq")},
    **{(k, "fused"): ("reduced", *WARPS, *COMMON) for k in ("portable", "python")},
}
SECONDS = ("visit", "item", "launch", "changeover", *CLUSTERS)
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
    "cluster": 3.0,
    "doubling": 1.0,
}
MOST = {"throttle": 0.25, "launch": 6.0}
#: The most for a launch of Hopper's kernels: with more, short launches that the fit does not use
#: are up to 18 % too slow.
HOPPER_LAUNCH = 4.0
#: Relative errors above this one count less than their square.
DAMPED = 0.05


class Point(NamedTuple):
    """A measured time that the fit uses; `predicted` returns the model's, from constants by name.

    `names` are those of the constants on which it depends.
    """

    predicted: Callable[[Mapping[str, Constants]], float]
    seconds: float
    seed: str
    names: Set[str]
    problem: Problem


#: Names of constants that are fitted together, by the first one. Hopper's kernel for dQ runs beside
#: the one for dK and dV. Their own times are known only with events between the two, so the fit
#: uses the times of the whole pass.
TOGETHER = {
    ("hopper", "dkdv"): ("dkdv", "dq"),
    ("hopper", "dkdv, 128"): ("dkdv, 128", "dq, 128", "dq, 128 rows"),
    ("hopper", "dkdv, wide"): ("dkdv, wide", "dq, wide"),
}


def groups(kernels):
    """Return a kernel family's names of constants, as tuples that are fitted together."""
    found = [TOGETHER.get((family, name), (name,)) for family, name in FREE if family == kernels]
    seconds = {name for names in TOGETHER.values() for name in names[1:]}
    return [names for names in found if kernels != "hopper" or names[0] not in seconds]


def points(everything, kernels, names):
    """Return the measured times of the calibration set that depend on these constants.

    As in a prediction, a stage whose own head width has no constants uses those of any width.
    Forwards that ran without shares of the visits are left out if they have shares today.
    """
    found = []
    for one in everything:
        if one.kernels != kernels or one.where != "fitted":
            continue
        if names[0].startswith("forward") != (one.name == "forward"):
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
        used = {constants_of(kernels, each, one.problem): each for each in passes}
        if not used.keys() & {*names}:
            continue
        if kernels == "hopper" and one.name == "flash2":
            works = [stage_time.works_of(each, traffic) for each in passes]
            whole = partial(_whole, passes, traffic, works)
            found.append(Point(whole, one.seconds, one.seed, used.keys(), one.problem))
            continue
        for name, each in used.items():
            if name in names and each.stage.name in one.stages:
                if bytes_again(each, traffic):  # their bytes of HBM are an estimate
                    continue
                works = stage_time.works_of(each, traffic)
                seconds = one.stages[each.stage.name]
                alone = partial(_alone, works, name)
                found.append(Point(alone, seconds, one.seed, {name}, one.problem))
    return found


def constants_of(kernels, one, problem):
    """Return the name of a launch's constants; an empty string for a kernel that streams rows."""
    if not one.kernel.shared_bytes:
        return ""
    return next(n for n in stage_time.constants_names(one, problem) if (kernels, n) in FREE)


def _whole(passes, traffic, works, constants):
    return sum(one.seconds for one in stage_time.stage_times(passes, traffic, constants, works))


def _alone(works, name, constants):
    return stage_time.stage_seconds(works, constants[name])[0]


class Search:
    """The search for the constants `names` of a kernel family that fit measured times."""

    def __init__(self, kernels, names, those, free=FREE):
        self.free = [(name, field) for name in names for field in free[kernels, name]]
        self.ships = CALIBRATED[kernels]
        most = MOST | ({"launch": HOPPER_LAUNCH} if kernels == "hopper" else {})
        self.most = np.array([most.get(field, np.inf) for _, field in self.free])
        self.those = those

    def fit(self):
        """Return the constants by name that minimise the errors, with large errors damped.

        There are several minima: the search starts at rough values and at the shipped ones.
        Constants that are fitted together are many, so their search only starts at the latter.
        """
        starts = [self._shipped()]
        if len({name for name, _ in self.free}) == 1:
            rough = np.array([BEGIN.get(field, 0.1) for _, field in self.free])
            starts = [rough, rough / 3, *starts]
        found = [self._refined(x) for x in starts]
        return self._scaled(min(found, key=lambda x: x[1])[0])

    def left_out(self):
        """Return the constants by seed of random shapes, each fitted without the seed's points.

        Each search starts at the shipped constants, and takes a few steps with the derivatives of
        all points.
        """
        seeds, found, every = np.array([p.seed for p in self.those]), {}, self.those
        begin = self._shipped()
        slopes = self._slopes(begin)
        for seed in sorted({*seeds.tolist()} - {""}):
            kept = seeds != seed
            self.those = [p for p, its in zip(every, kept, strict=True) if its]
            found[seed] = self._scaled(self._refined(begin, slopes[kept], steps=3)[0])
        self.those = every
        return found

    def _shipped(self):
        scales = [1e6 if field in SECONDS else 1.0 for _, field in self.free]
        found = [getattr(self.ships[name], field) for name, field in self.free]
        return np.array(found) * scales

    def _scaled(self, x):
        """Return constants by name, whose free ones are those of the vector `x`."""
        found = {name: {"launch": 2e-6} for name, _ in self.free}
        for (name, field), value in zip(self.free, x, strict=True):
            found[name][field] = value * 1e-6 if field in SECONDS else value
        return {name: Constants(**fields) for name, fields in found.items()}

    def _wrong(self, x):
        took = np.array([p.seconds for p in self.those])
        return np.log(self._predicted(x, range(len(took))) / took)

    def _predicted(self, x, where):
        """Return the model's times of the points with the numbers `where`."""
        known = self.ships | self._scaled(x)
        return np.array([self.those[i].predicted(known) for i in where])

    def _slopes(self, x):
        """Return the derivatives of the points' errors by the constants."""
        begin = self._predicted(x, range(len(self.those)))
        found = np.zeros((len(self.those), len(x)))
        for number, (name, _) in enumerate(self.free):
            where = [i for i, point in enumerate(self.those) if name in point.names]
            moved, step = x.copy(), max(1e-3 * x[number], 1e-4)
            moved[number] += step
            found[where, number] = np.log(self._predicted(moved, where) / begin[where]) / step
        return found

    def _refined(self, x, slopes=None, steps=25):
        """Return the constants near `x` that minimise the damped errors, and their cost.

        A step minimises the errors as if they depended on the constants linearly, and is shortened
        until it lowers the cost. `slopes` holds the derivatives, if they stay the same in all
        steps.
        """
        x = np.clip(x, 0, self.most)
        wrong = self._wrong(x)
        for _ in range(steps):
            moved = _step(wrong, self._slopes(x) if slopes is None else slopes, x, self.most)
            before = _cost(wrong)
            for _ in range(4):
                tried = np.clip(x + moved, 0, self.most)
                after = self._wrong(tried)
                if _cost(after) < before:
                    break
                moved = moved / 3
            else:
                break
            x, wrong = tried, after
            if before - _cost(wrong) < 1e-4 * before:
                break
        return x, _cost(wrong)


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


def fit_first(everything):
    """Return `calibration.FIRST`, with the constants of the fused kernels that ship."""
    from scipy.optimize import least_squares

    ran = [one for one in everything if one.name == "flash2-fused-first"]
    kept = calibration.FIRST

    def wrong(x):
        calibration.FIRST = x[0] * 1e-6, x[1] * 1e-6
        return [np.log(_seconds(one) / one.seconds) for one in ran]

    options = {"bounds": (0, np.inf), "loss": "soft_l1", "f_scale": DAMPED, "diff_step": 0.1}
    try:
        flag, stored = least_squares(wrong, np.array(kept) * 1e6, **options).x
    finally:
        calibration.FIRST = kept
    return f"({flag:.2f}e-6, {stored:.2f}e-6)"


def _seconds(one):
    how = {"direction": "backward", "algorithm": one.name, "device": one.device}
    return predict(one.problem, **how, tiling=one.tiling).seconds


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
            name = each.stage.name
            if name in one.stages and not each.kernel.shared_bytes and one.kernels != "python":
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
