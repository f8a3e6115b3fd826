"""The predicted time of a pass: each stage's kernel, its busiest unit, and the sum."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from flashsim import report
from flashsim.counts.questions import in_words
from flashsim.counts.traffic import Traffic
from flashsim.problem.hardware import Device
from flashsim.studies.energy import Sustained, Use, energy_of
from flashsim.studies.predict.units import UNITS


@dataclass(frozen=True)
class StageTime:
    """The predicted time of one stage's kernel.

    Attributes
    ----------
    seconds : float
        The time that the kernel adds to the pass. On Hopper, the blocks of dQ start on SMs that the
        blocks of dK and dV leave idle, so dQ adds less time than it takes alone.
    units : dict of float
        Seconds for which each unit is busy if the work is distributed evenly. They are at most
        `seconds`, unless the chip's clock exceeds its nominal clock.
    waves : float
        Thread blocks divided by the number that run at the same time; a fraction means a tail.
    tail : float
        Share of the time in which some SMs have run out of work: 1 - (mean busy time / seconds).
    use : Use
        The quantities from which the stage's energy is computed.
    joules : float or None
        Energy of the board, or None if the device's energy was never measured.
    """

    name: str
    seconds: float
    units: Mapping[str, float]
    waves: float
    tail: float
    use: Use = field(default_factory=Use)
    joules: float | None = None

    @property
    def bound(self) -> str:
        """The name of the hardware unit that is busy for the longest time."""
        return max(self.units, key=lambda unit: self.units[unit])


@dataclass(frozen=True, repr=False)
class Prediction(report.Tabled):
    """The predicted time of a pass; prints as a table."""

    traffic: Traffic
    kernels: str
    stages: tuple[StageTime, ...]

    @property
    def seconds(self) -> float:
        """The predicted seconds of the whole pass: the sum over its stages (kernels)."""
        return sum(stage.seconds for stage in self.stages)

    @property
    def joules(self) -> float | None:
        """The energy of all stages in joules, or None if the device's energy was never measured."""
        known = [stage.joules for stage in self.stages if stage.joules is not None]
        return sum(known) if len(known) == len(self.stages) else None

    @property
    def sustained(self) -> Sustained | None:
        """The time, energy and clock of one call in a long series of calls, at the power limit.

        The value is None if the device's energy was never measured.
        """
        energy = energy_of(self.traffic.device)
        if energy is None or self.joules is None:
            return None
        return energy.sustained([stage.use for stage in self.stages], self.seconds)

    def table(self) -> report.Table:
        """Return a table with one row per stage: total time, time of each unit, waves and tail."""
        t = self.traffic
        units = (*UNITS, "HBM")
        named, source = f"{self.kernels} kernels, tiles {t.tiling}", "calibrated on one H200"
        if t.algorithm == "standard":
            named, source = "a library's kernels", "as fast as a large product and a copy"
        energy, held = "" if self.joules is None else f", {self.joules:.3g} J", self.sustained
        table = report.Table(
            f"{t.algorithm} {t.direction}, {in_words(t.problem)} on {t.device.name}, "
            f"{named}: {self.seconds * 1e3:.3f} ms{energy}",
            ("stage", "ms", "bound", *(f"{unit} ms" for unit in units), "waves", "tail", "J"),
            note=f"{source}{untested(t.device)}; docs/reference/predictions.md has the errors on "
            "other shapes, and the limits of the model",
        )
        if held is not None:
            table.note = (
                f"each of many repeated calls: {1e3 * held.seconds:.3f} ms, {held.joules:.3g} J, "
                f"at {held.clock:.0%} of the highest clock, by the board's power limit; "
                f"{table.note}"
            )
        for s in self.stages:
            busy = [1e3 * s.units.get(unit, 0.0) for unit in units]
            row = s.name, 1e3 * s.seconds, s.bound, *busy, s.waves, s.tail, s.joules
            table.rows.append(row)
        return table


def untested(device: Device) -> str:
    """Return a warning for tables if the model was not calibrated on the device, otherwise ""."""
    return "" if device.name == "H200" else f", untested on {device.name}"
