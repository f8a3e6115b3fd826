"""The roofline model: computes whether memory bandwidth or arithmetic limits a pass's speed.

The roofline method is by Williams, Waterman and Patterson, "Roofline", CACM 2009. Only the FLOPs of
matrix products count, because only products run on tensor cores, whose peak is `Device.peak`. Each
roofline point states how its bytes were counted (`COUNTS`), because the ways of counting are often
confused.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashsim import report
from flashsim.counts.questions import in_words
from flashsim.counts.traffic import Traffic
from flashsim.errors import OptionError, own_errors
from flashsim.l2 import L2Model, dram
from flashsim.problem import checks
from flashsim.problem.hardware import Device
from flashsim.problem.problem import Problem
from flashsim.schedule import plans
from flashsim.studies.energy import Use, energy_of

#: Ways of counting a pass's bytes. L2's bandwidth bounds requested bytes; HBM's bounds all others.
COUNTS = {
    "requested": "all tiles that SMs load from L2 or store to it",
    "dram": "the requested bytes that miss in the simulated L2 cache",
    "compulsory": "each input and each output once, the least with any cache",
    "textbook": "q, k, v and out once and, for standard attention, one N x N matrix once; lecture "
    "notes count so, but standard attention moves more",
    "measured": "from hardware counters",
}


@dataclass(frozen=True)
class Point:
    """A roofline point: one pass, with its bytes counted in one way.

    Attributes
    ----------
    count : str
        One of `COUNTS`.
    flops, bytes : int
        Matrix-product FLOPs, and bytes.
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
        """The bandwidth in bytes/s: L2's if the point counts requested bytes, otherwise HBM's.

        The value is 0 if the device's L2 bandwidth is not published.
        """
        return self.device.l2_bandwidth if self.count == "requested" else self.device.hbm_bandwidth

    @property
    def intensity(self) -> float:
        """The arithmetic intensity: FLOPs of matrix products divided by the point's bytes."""
        return self.flops / self.bytes

    @property
    def ridge(self) -> float | None:
        """The FLOPs per byte above which arithmetic limits the pass; None if `bandwidth` is 0."""
        return self.device.peak(self.dtype) / self.bandwidth if self.bandwidth else None

    @property
    def attainable(self) -> float | None:
        """The largest possible FLOP/s: the smaller of the peak and intensity x bandwidth.

        The value is None if the bandwidth is unknown.
        """
        if not self.bandwidth:
            return None
        return min(self.device.peak(self.dtype), self.intensity * self.bandwidth)

    @property
    def achieved(self) -> float | None:
        """The FLOP/s that the measured kernel reached, or None if no time was measured."""
        return None if self.seconds is None else self.flops / self.seconds

    @property
    def joules(self) -> float | None:
        """A lower bound on the joules of the pass; None if the device's energy was never measured.

        The bound follows Choi and others, "A roofline model of energy", IPDPS 2013. The bound
        includes the matrix products, the point's bytes, and the board's idle power during the pass,
        but no exponentials.
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
        """The unit that limits the pass: "arithmetic", "HBM", "L2", or "unknown"."""
        if self.ridge is None:
            return "unknown"
        if self.intensity >= self.ridge:
            return "arithmetic"
        return "L2" if self.count == "requested" else "HBM"


@dataclass(frozen=True, repr=False)
class Roofline(report.Tabled):
    """The roofline points of one problem on one device; prints as a table."""

    problem: Problem
    points: tuple[Point, ...]

    def __getitem__(self, count: str) -> Point:
        """Return the roofline point whose bytes were counted in the way `count`."""
        points = {point.count: point for point in self.points}
        return points[checks.one_of("roofline point", count, points)]

    def table(self) -> report.Table:
        """Return a table with one row per roofline point."""
        device = self.points[0].device
        peak = device.peak(self.points[0].dtype)
        l2 = f"{device.l2_bandwidth / 1e9:,.0f} GB/s" if device.l2_bandwidth else "?"
        table = report.Table(
            f"{in_words(self.problem)} on {device.name}: {peak / 1e12:,.1f} TFLOP/s, HBM "
            f"{device.hbm_bandwidth / 1e9:,.0f} GB/s, L2 {l2}",
            (
                *("algorithm", "direction", "count", "matmul FLOPs", "B", "FLOP/B", "ridge"),
                *("attainable TFLOP/s", "bound", "achieved TFLOP/s", "% of peak", "least J"),
            ),
            note="; ".join(f"{p.count}: {COUNTS[p.count]}" for p in self.points)
            + "; ridge: FLOP/B above which arithmetic bounds the time, empty if no bandwidth is "
            "published; least J: lower bound on the energy of products, these bytes and the board, "
            "empty if the device's energy was not measured",
        )
        tera = lambda x: None if x is None else x / 1e12  # noqa: E731
        share = lambda x: None if x is None else 100 * x / peak  # noqa: E731
        for p in self.points:
            table.add(
                *(p.algorithm, p.direction, p.count, p.flops, p.bytes, p.intensity, p.ridge),
                *(tera(p.attainable), p.bound, tera(p.achieved), share(p.achieved)),
                p.joules,
            )
        return table


@own_errors
def roofline(
    counted: Traffic,
    *,
    l2: L2Model | None = None,
    seconds: float | None = None,
    measured_bytes: int | None = None,
) -> Roofline:
    """Return the roofline points of one pass, one per way of counting its bytes.

    Parameters
    ----------
    counted : Traffic
        From `flashsim.count`.
    l2 : L2Model, optional
        The L2 model for the "dram" point.
    seconds : float, optional
        Measured time of a real kernel, from which each point's achieved FLOP/s is computed.
    measured_bytes : int, optional
        DRAM bytes from hardware counters, for an additional "measured" point.

    Raises
    ------
    OptionError
        If `seconds` or `measured_bytes` is not positive, or the device has no peak for the dtype.
    UnsupportedError
        If there are too many requests for the L2 model.
    """
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
    """Return the idealised bytes that textbooks count: each tensor once.

    In the forward pass, the tensors are q, k, v and out. In the backward pass, the gradients of
    these tensors count too, but LSE, delta and accumulators do not. For standard attention, one N x
    N matrix counts too. Real kernels of standard attention move four N x N matrices: they write S
    and P, and read both. Real kernels of FlashAttention read K and V once per row tile.
    """
    plans.stages(problem, algorithm, direction)  # raises if the algorithm has no such pass
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
    """Return a table of a device's ridge points by dtype.

    A ridge point is the intensity, in FLOPs per byte, above which arithmetic bounds the time.
    """
    device = Device.get(device)
    table = report.Table(
        f"Ridge points of {device.name}",
        ("dtype", "peak TFLOP/s", "HBM FLOP/B", "L2 FLOP/B"),
        note="L2 FLOP/B is empty if no L2 bandwidth is published",
    )
    for dtype in dict.fromkeys((*device.tensor_flops, *device.cuda_flops)):
        peak = device.peak(dtype)
        l2 = peak / device.l2_bandwidth if device.l2_bandwidth else None
        table.add(dtype, peak / 1e12, device.ridge(dtype), l2)
    return table


__all__ = ["COUNTS", "Point", "Roofline", "ridge_points", "roofline", "textbook_bytes"]
