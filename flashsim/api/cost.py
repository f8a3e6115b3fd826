"""Estimate the cost of a simulation before it begins: bytes of host memory, and seconds."""

import os
from dataclasses import dataclass

from flashsim.counts.traffic import Traffic, saved, workspace
from flashsim.errors import OptionError
from flashsim.l2.requests import requests
from flashsim.report import format_cell

#: For one core of 2020 in NumPy: seconds per visit without its products, FLOPs of products per
#: second, and bytes of a visit's events. Orders of magnitude, for a warning.
VISIT, FLOPS, EVENTS = 40e-6, 30e9, 1500
#: The same for the CPU engine: a visit's cost is that of its products.
NUMBA_FLOPS = 60e9
#: Per request that is replayed through a model of L2: seconds, and bytes while its stage is
#: replayed, for one size of the cache and for all sizes.
REQUEST, REQUEST_BYTES = 0.2e-6, (7, 50)


@dataclass(frozen=True)
class Estimate:
    """The estimated host memory and time of simulated passes that run one after another."""

    seconds: float
    nbytes: int

    def __str__(self) -> str:
        minutes = self.seconds / 60
        time = f"{minutes:,.0f} min" if minutes < 120 else f"{minutes / 60:,.0f} h"
        return f"about {time}" if minutes >= 1 else "less than a minute"


def cost(passes: list[Traffic], backend: str = "simulator") -> Estimate:
    """Estimate the time and memory of simulating passes; raise if memory does not suffice."""
    seconds, nbytes = 0.0, 0
    for t in passes:
        visits = sum(t.schedule(stage).sums.visits for stage in t.stages)
        products = t.flops("matmul")
        simulated = visits * VISIT + products / FLOPS
        seconds += simulated if backend == "simulator" else products / NUMBA_FLOPS
        nbytes += saved(t.problem, t.algorithm) + EVENTS * visits * (backend == "simulator")
        nbytes += workspace(t.problem, t.algorithm, t.direction)
    fits(nbytes, "`flashsim count` counts the same without arrays")
    return Estimate(seconds, nbytes)


def replay_cost(passes: list[Traffic], *, at_every_size: bool = False) -> Estimate:
    """Estimate the cost of replaying passes in a simulated L2; raise if memory is too small."""
    each = [
        requests(stage, t.schedule(stage), t.schedule(t.stages[0]))
        for t in passes
        for stage in t.stages
    ]
    nbytes = max(each) * REQUEST_BYTES[at_every_size]
    fits(nbytes, "larger tiles or fewer heads make fewer requests")
    return Estimate(sum(each) * REQUEST, nbytes)


def fits(nbytes: int, instead: str) -> None:
    """Raise `OptionError` if this computer has less than `nbytes` bytes of memory."""
    there = memory()
    if nbytes > there:
        raise OptionError(
            f"this call needs about {format_cell(nbytes / 1e9)} GB of memory, but this machine has "
            f"{format_cell(there / 1e9)} GB; {instead}"
        )


def memory() -> int:
    """Return the size of this computer's memory, in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
