"""Joules: what a chip's units take for what they do, and the board for as long as it takes.

The constants were measured with NVML's count of energy, each unit by a kernel of its own where one
does nothing else (`benchmarks/power.py`, docs/data/power-h200.csv). Those of products, scores and
sums are fitted to some of attention's passes there and judged on the others (docs/guides/truth.md).
"""

from __future__ import annotations

from dataclasses import dataclass

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
    """

    flops: float = 0.0
    scores: float = 0.0
    shared: float = 0.0
    moved: float = 0.0
    added: float = 0.0
    hbm: float = 0.0


@dataclass(frozen=True)
class Energy:
    """A chip's constants.

    Attributes
    ----------
    idle : float
        Watts of the board that waits, clocks up.
    flop : (float, float)
        Joules of a FLOP on the tensor cores, operands from shared memory (wgmma) and from registers
        that warps fill (mma.sync).
    score : float
        Joules of a score: its exponential and all other instructions.
    shared : float
        Joules of a byte that warps read from shared memory.
    moved, added : (float, float)
        Joules of a byte between L2 and an SM, and of one added at L2: by the copy engine, and by
        threads.
    hbm : float
        Joules of a byte between HBM and L2.
    """

    idle: float
    flop: tuple[float, float]
    score: float
    shared: float
    moved: tuple[float, float]
    added: tuple[float, float]
    hbm: float

    def joules(self, use: Use, seconds: float, *, by_threads: bool) -> float:
        """Of a kernel that takes so long. `by_threads`: mma.sync and loads by threads."""
        return (
            self.idle * seconds
            + self.flop[by_threads] * use.flops
            + self.score * use.scores
            + self.shared * use.shared
            + self.moved[by_threads] * use.moved
            + self.added[by_threads] * use.added
            + self.hbm * use.hbm
        )


#: By a device's name; of others nothing was measured.
ENERGIES = {
    "H200": Energy(
        idle=131.2,
        flop=(0.61e-12, 1.06e-12),
        score=119e-12,
        shared=1.07e-12,
        moved=(28.3e-12, 44.1e-12),
        added=(120e-12, 120e-12),
        hbm=87e-12,
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
