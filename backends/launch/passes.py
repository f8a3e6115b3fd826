"""One launch, or a few: a stage's walk over the schedule, and the kernel that makes it."""

from __future__ import annotations

from dataclasses import dataclass

from flashsim.backends.launch.device_tables import Lowered
from flashsim.backends.launch.kernel import Kernel
from flashsim.schedule import plans


@dataclass(frozen=True, eq=False)
class KernelPass:
    """One launch: a stage of `flashsim.schedule.plans` with its walk and its kernel.

    Attributes
    ----------
    stage : plans.Stage
    tables : Lowered
    kernel : Kernel
    grid : tuple of int
        Thread blocks. A walk's blocks are numbered in one dimension, a row-wise pass's in two.
    walks : int
        How many times the walk is made: query heads, or key heads with keys outside.
    clump : int
        Heads whose tensors are worked on together, to stay in L2 (`take_work` in common.cuh).
    items : range
        Outer tiles of all walks, by number in the order in which blocks take them: this launch's.
    before : tuple of KernelPass
        Launches of the same stage that come first and take the other items; none where anything is
        reported.
    """

    stage: plans.Stage
    tables: Lowered
    kernel: Kernel
    grid: tuple[int, ...]
    walks: int
    clump: int
    items: range
    before: tuple[KernelPass, ...] = ()
