"""Roofline: whether bandwidth or arithmetic bounds a pass, for each way of counting its bytes.

Williams, Waterman and Patterson, "Roofline", CACM 2009. Only matrix products count as work here:
only they run on tensor cores, whose peak is `Device.peak`. Exponentials and the other operations
are in `Traffic.flops`, but their roof is another.

Bytes can be counted in several ways that are often confused (`COUNTS`), so each point names its
count.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashsim import report
from flashsim.counts.questions import in_words
from flashsim.counts.traffic import Traffic
from flashsim.errors import OptionError, choices, own_errors
from flashsim.l2 import L2Model, dram
from flashsim.problem import checks
from flashsim.problem.hardware import Device
from flashsim.problem.problem import Problem
from flashsim.schedule import plans
from flashsim.studies.energy import Use, energy_of

#: Ways of counting a pass's bytes. The roof of requested ones is L2's bandwidth, of others HBM's.
COUNTS = {
    "requested": "every tile between L2 and the SMs",
    "dram": "what the model of the L2 cache leaves",
    "compulsory": "each input and each output once, no cache could do better",
    "textbook": "q, k, v and out once, and of standard attention one N x N matrix once, as lecture "
    "notes count it, less than it moves",
    "measured": "read off hardware counters",
}


@dataclass(frozen=True)
class Point:
    """One pass under one way of counting its bytes.

    Attributes
    ----------
    algorithm, direction : str
    count : str
        One of `COUNTS`.
    flops, bytes : int
        Matrix-product FLOPs, and bytes.
    device : Device
    dtype : str
    seconds : float or None
        Measured time of a real kernel, if known.
    """

    algorithm: str
    direction: str
    count: str
    flops: int
    bytes: int
    device: Device
    dtype: str
    seconds: float | None = None

    def __repr__(self) -> str:
        return (
            f"<Point {self.algorithm} {self.direction}, {self.count}: {self.intensity:.4g} FLOP/B "
            f"on {self.device.name}, bound by {self.bound}>"
        )

    @property
    def bandwidth(self) -> float:
        """Bytes per second of the level that these bytes cross: L2 for requested bytes, else HBM.

        0 if the device's L2 bandwidth is not published.
        """
        return self.device.l2_bandwidth if self.count == "requested" else self.device.hbm_bandwidth

    @property
    def intensity(self) -> float:
        """Matrix-product FLOPs per byte."""
        return self.flops / self.bytes

    @property
    def ridge(self) -> float | None:
        """Intensity above which arithmetic bounds the time; None without a bandwidth."""
        return self.device.peak(self.dtype) / self.bandwidth if self.bandwidth else None

    @property
    def attainable(self) -> float | None:
        """FLOP/s under the roof: min(peak, intensity x bandwidth); None without a bandwidth."""
        if not self.bandwidth:
            return None
        return min(self.device.peak(self.dtype), self.intensity * self.bandwidth)

    @property
    def achieved(self) -> float | None:
        """FLOP/s of the kernel, whose time is `seconds`."""
        return None if self.seconds is None else self.flops / self.seconds

    @property
    def joules(self) -> float | None:
        """The least energy, after Choi and others, "A roofline model of energy", IPDPS 2013.

        The sum covers matrix products, these bytes, and the board's idle power for `seconds` or for
        the time under the roof, but no exponentials. None on a device whose energy was never
        measured.
        """
        energy = energy_of(self.device)
        if energy is None or not self.attainable:
            return None
        seconds = self.flops / self.attainable if self.seconds is None else self.seconds
        inside = self.count == "requested"
        use = Use(self.flops, moved=self.bytes * inside, hbm=self.bytes * (not inside))
        return energy.joules(use, seconds)

    @property
    def bound(self) -> str:
        """The limit of the pass: "arithmetic", "HBM", "L2", or "unknown"."""
        if self.ridge is None:
            return "unknown"
        if self.intensity >= self.ridge:
            return "arithmetic"
        return "L2" if self.count == "requested" else "HBM"


@dataclass(frozen=True)
class Roofline:
    """Points of one problem on one device; prints as a table."""

    problem: Problem
    points: tuple[Point, ...]

    def __getitem__(self, count: str) -> Point:
        """The (first) point with that count."""
        for point in self.points:
            if point.count == count:
                return point
        raise OptionError(f"no point {count!r}; {choices(count, [p.count for p in self.points])}")

    def table(self) -> report.Table:
        """The points as a table, one row each."""
        first = self.points[0]
        table = report.Table(
            f"{in_words(self.problem)} on {first.device.name}: "
            f"{first.device.peak(first.dtype) / 1e12:,.1f} "
            f"TFLOP/s, HBM {first.device.hbm_bandwidth / 1e9:,.0f} GB/s, L2 "
            + (
                f"{first.device.l2_bandwidth / 1e9:,.0f} GB/s" if first.device.l2_bandwidth else "?"
            ),
            (
                *("algorithm", "direction", "count", "matmul FLOPs", "B", "FLOP/B", "ridge"),
                *("attainable TFLOP/s", "bound", "achieved TFLOP/s", "% of peak", "least J"),
            ),
            note="; ".join(f"{p.count}: {COUNTS[p.count]}" for p in self.points)
            + "; ridge: FLOP/B above which arithmetic bounds, empty without a published bandwidth; "
            "least J: of products, these bytes and the board, where its constants were measured",
        )
        tera = lambda x: None if x is None else x / 1e12  # noqa: E731
        peak = first.device.peak(first.dtype)
        share = lambda x: None if x is None else 100 * x / peak  # noqa: E731
        for p in self.points:
            table.rows.append(
                (
                    *(p.algorithm, p.direction, p.count, p.flops, p.bytes, p.intensity, p.ridge),
                    *(tera(p.attainable), p.bound, tera(p.achieved), share(p.achieved)),
                    p.joules,
                )
            )
        return table

    __str__ = report.text
    __repr__ = report.titled
    _repr_html_ = report.tabled


@own_errors
def roofline(
    counted: Traffic,
    *,
    l2: L2Model | None = None,
    seconds: float | None = None,
    measured_bytes: int | None = None,
) -> Roofline:
    """The points of one pass.

    Parameters
    ----------
    counted : Traffic
        From `flashsim.count`.
    l2 : L2Model, optional
        For the "dram" point.
    seconds : float, optional
        Measured time of a real kernel: gives each point its achieved FLOP/s.
    measured_bytes : int, optional
        DRAM bytes from hardware counters: adds a "measured" point.

    Raises
    ------
    OptionError
        If `seconds` or `measured_bytes` is not positive, or the device has no peak for the dtype.
    UnsupportedError
        If there are too many requests for the L2 model.
    """
    checks.instance("counted", counted, Traffic, "Traffic, from flashsim.count")
    for name, value in (("seconds", seconds), ("measured_bytes", measured_bytes)):
        if value is not None and not checks.number(name, value) > 0:
            raise OptionError(f"{name} must be positive, got {value!r}")
    counted.device.peak(counted.problem.dtype)
    sizes = {
        "requested": counted.bytes(),
        "dram": dram(counted, l2).bytes(),
        "compulsory": counted.compulsory(),
        "textbook": textbook_bytes(counted.problem, counted.algorithm, counted.direction),
    }
    if measured_bytes is not None:
        sizes["measured"] = measured_bytes
    flops = counted.flops("matmul")
    where = counted.device, counted.problem.dtype, seconds
    return Roofline(
        counted.problem,
        tuple(
            Point(counted.algorithm, counted.direction, count, flops, nbytes, *where)
            for count, nbytes in sizes.items()
        ),
    )


@own_errors
def textbook_bytes(problem: Problem, algorithm: str, direction: str = "forward") -> int:
    """The textbooks' idealised bytes: each tensor once, plus one N x N matrix once for standard.

    Forward: q, k, v, out. Backward: those and their gradients only, without LSE, delta or an
    accumulator. Real standard attention writes and reads S and P, which is four times this one
    matrix. Real FlashAttention reads K and V once per row tile.
    """
    plans.stages(problem, algorithm, direction)  # or say what there is
    p = problem
    own = 0 if p.latent else p.head_dim_v
    per_key = p.batch * p.kv_heads * p.n_kv * (p.head_dim + own)
    inputs = p.batch * p.heads * p.n_q * p.head_dim + per_key
    results = p.batch * p.heads * p.n_q * p.head_dim_v
    if direction == "backward":
        results += inputs + results
    if "P" in plans.tensors_of(problem, algorithm, direction, "load"):
        results += p.batch * p.heads * p.n_q * p.n_kv
    return inputs * p.itemsize + results * p.result_itemsize


@own_errors
def ridge_points(device: Device | str) -> report.Table:
    """Ridge points of a device by dtype: the FLOPs per byte above which arithmetic is the bound."""
    device = Device.get(device)
    table = report.Table(
        f"Ridge points of {device.name}",
        ("dtype", "peak TFLOP/s", "HBM FLOP/B", "L2 FLOP/B"),
        note="L2 FLOP/B is empty where no L2 bandwidth is published",
    )
    for dtype in dict.fromkeys((*device.tensor_flops, *device.cuda_flops)):
        peak = device.peak(dtype)
        l2 = peak / device.l2_bandwidth if device.l2_bandwidth else None
        table.rows.append((dtype, peak / 1e12, device.ridge(dtype), l2))
    return table


__all__ = ["COUNTS", "Point", "Roofline", "ridge_points", "roofline", "textbook_bytes"]
