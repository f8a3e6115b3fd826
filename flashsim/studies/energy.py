"""Joules: what a chip's units take for what they do, and the board for as long as it takes.

The constants were measured with NVML's energy counter. Where a kernel can use one unit alone, that
unit was measured alone (`benchmarks/power.py`, docs/data/power-h200.csv). Those of products, scores
and sums are fitted to some of the attention passes in that file and judged on the others
(docs/reference/predictions.md).

A chip that is kept busy meets the limit of its power, and lowers its clock until it keeps it: with
the clock falls the voltage, and so the energy of what the SMs do, in proportion, as was measured of
one product at 1,980 and at 1,540 MHz (1.06 and 0.82 pJ a FLOP). What HBM takes stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import NamedTuple

from flashsim.errors import own_errors
from flashsim.problem.hardware import Device


@dataclass(frozen=True)
class Use:
    """What a kernel asks of a chip.

    Attributes
    ----------
    flops : float
        Of the tensor cores, whole tiles.
    scores : float
        Scores that are computed, those masked included.
    shared : float
        Bytes that warps read from shared memory.
    moved, added : float
        Bytes between L2 and the SMs: loaded and stored; added at L2.
    hbm : float
        Bytes that cross HBM.
    by_threads : bool
        Whether threads load and warps fill registers (mma.sync), or the copy engine does and
        products read shared memory (wgmma).
    """

    flops: float = 0.0
    scores: float = 0.0
    shared: float = 0.0
    moved: float = 0.0
    added: float = 0.0
    hbm: float = 0.0
    by_threads: bool = False


class Sustained(NamedTuple):
    """A call that is made again and again: its seconds and joules, and the clock that it has, as a
    share of the highest.
    """

    seconds: float
    joules: float
    clock: float


@dataclass(frozen=True)
class Energy:
    """A chip's constants, at its highest clock.

    Attributes
    ----------
    waiting : float
        Watts of the board while SMs wait.
    most : float
        Watts that it holds when its power is limited.
    flop : (float, float)
        Joules of a FLOP on the tensor cores: wgmma, and mma.sync.
    score : float
        Joules of a score: its exponential and all other instructions.
    shared : float
        Joules of a byte that warps read from shared memory.
    moved : (float, float)
        Joules of a byte between L2 and an SM: by the copy engine, and by threads.
    added : float
        Joules of a byte added at L2, with what brings it there.
    hbm : float
        Joules of a byte between HBM and L2.
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
        """Of a kernel that takes so long at the highest clock."""
        return self.waiting * seconds + self._inside(use) + self.hbm * use.hbm

    def sustained(self, uses: Sequence[Use], seconds: float) -> Sustained:
        """Of kernels that take so long at the highest clock, when the power is limited.

        At the share x of the clock they take 1 / x of the time, and x of the energy but HBM's: the
        power is what the board may have where ``x^2 inside + x hbm = (most - waiting) seconds``.
        """
        inside, hbm = sum(map(self._inside, uses)), sum(self.hbm * use.hbm for use in uses)
        left, clock = (self.most - self.waiting) * seconds, 1.0
        if inside + hbm > left:
            clock = 2 * left / (hbm + sqrt(hbm**2 + 4 * inside * left))
        joules = self.waiting * seconds / clock + clock * inside + hbm
        return Sustained(seconds / clock, joules, clock)

    def _inside(self, use: Use) -> float:
        """What the SMs and L2 take."""
        return (
            self.flop[use.by_threads] * use.flops
            + self.score * use.scores
            + self.shared * use.shared
            + self.moved[use.by_threads] * use.moved
            + self.added * use.added
        )


#: By a device's name; of others nothing was measured.
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


@own_errors
def energy_of(device: Device | str) -> Energy | None:
    """A device's constants; None where nothing was measured.

    Parameters
    ----------
    device : str or Device
    """
    return ENERGIES.get(Device.get(device).name)


def joules(use: Use, seconds: float, device: Device) -> float | None:
    """Of a kernel at the highest clock; None where nothing was measured."""
    energy = energy_of(device)
    return None if energy is None else energy.joules(use, seconds)
