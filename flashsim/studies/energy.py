"""Predicts a GPU kernel's energy: the energy of its operations, and the board's idle power.

The energy constants were measured with NVML's energy counter, if possible for one unit at a time
(`benchmarks/power.py`, docs/data/power-h200.csv). The constants of products, scores and sums are
fitted to some attention passes in that file, and tested on the rest
(docs/reference/predictions.md).

If a busy chip reaches its power limit, the chip lowers its clock and its voltage. So the energy of
the SMs' operations falls in proportion to the clock: a matrix product took 1.06 pJ per FLOP at
1,980 MHz, and 0.82 at 1,540 MHz. HBM's energy does not depend on the clock.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import NamedTuple

from flashsim.problem.hardware import Device


@dataclass(frozen=True)
class Use:
    """The quantities of a kernel's work that cost energy.

    Attributes
    ----------
    flops, scores : float
        FLOPs that the tensor cores execute, and scores that are computed, both for whole tiles.
    shared : float
        Bytes that warps read from shared memory.
    moved, added : float
        Bytes between L2 and the SMs: loaded or stored (`moved`), and added at L2 (`added`).
    hbm : float
        Bytes read from HBM or written to it.
    by_threads : bool
        True if threads load the tiles and warps copy operands to registers (mma.sync). False if TMA
        loads the tiles and products read shared memory (wgmma).
    """

    flops: float = 0.0
    scores: float = 0.0
    shared: float = 0.0
    moved: float = 0.0
    added: float = 0.0
    hbm: float = 0.0
    by_threads: bool = False


class Sustained(NamedTuple):
    """The time, energy and relative clock of one call in a long series of equal calls."""

    seconds: float
    joules: float
    clock: float


@dataclass(frozen=True)
class Energy:
    """The energy constants of a chip at its highest clock.

    Attributes
    ----------
    waiting, most : float
        Watts of the board while its SMs wait, and the board's power limit.
    flop : (float, float)
        Joules per FLOP on the tensor cores, by wgmma and by mma.sync.
    score : float
        Joules per score, for the exponential and all other instructions on that score.
    shared, added, hbm : float
        Joules per byte that warps read from shared memory, per byte added at L2, including its
        transfer to L2, and per byte between HBM and L2.
    moved : (float, float)
        Joules per byte between L2 and an SM, if TMA loads it and if threads load it.
    """

    waiting: float
    most: float
    flop: tuple[float, float]
    score: float
    shared: float
    moved: tuple[float, float]
    added: float
    hbm: float

    def joules(self, use: Use, seconds: float) -> float:
        """Return the joules of a kernel that takes `seconds` at the highest clock."""
        return self.waiting * seconds + self._inside(use) + self.hbm * use.hbm

    def sustained(self, uses: Sequence[Use], seconds: float) -> Sustained:
        """Return the time and energy of a round of kernels that repeat forever, at the power limit.

        `seconds` is the kernels' time at the highest clock. At a fraction x of the highest clock,
        the kernels take 1 / x times as long, and the SMs use x times the energy; HBM's energy stays
        the same. The clock x follows from ``x^2 inside + x hbm = (most - waiting) seconds``:
        `inside` and `hbm` are the energies of the SMs and of HBM, `most` is the power limit, and
        `waiting` the idle power.
        """
        inside, hbm = sum(map(self._inside, uses)), sum(self.hbm * use.hbm for use in uses)
        left, clock = (self.most - self.waiting) * seconds, 1.0
        if inside + hbm > left:
            clock = 2 * left / (hbm + sqrt(hbm**2 + 4 * inside * left))
        joules = self.waiting * seconds / clock + clock * inside + hbm
        return Sustained(seconds / clock, joules, clock)

    def _inside(self, use: Use) -> float:
        """Return the joules that a kernel uses in the SMs and L2 at the highest clock."""
        return (
            self.flop[use.by_threads] * use.flops
            + self.score * use.scores
            + self.shared * use.shared
            + self.moved[use.by_threads] * use.moved
            + self.added * use.added
        )


#: The energy constants by device name. No other device was measured.
ENERGIES = {
    "H200": Energy(
        waiting=126.8,
        most=682.0,
        flop=(0.642e-12, 1.063e-12),
        score=91.4e-12,
        shared=1.03e-12,
        moved=(29.1e-12, 47.6e-12),
        added=101.2e-12,
        hbm=60.1e-12,
    )
}


def energy_of(device: Device | str) -> Energy | None:
    """Return a device's energy constants, or None if the device's energy was never measured."""
    return ENERGIES.get(Device.get(device).name)


def joules(use: Use, seconds: float, device: Device) -> float | None:
    """Return a kernel's joules at the highest clock, or None if the device was not measured."""
    energy = energy_of(device)
    return None if energy is None else energy.joules(use, seconds)
