"""Describe the kernel launches of a forward or backward pass, with their schedule tables."""

from __future__ import annotations

from dataclasses import dataclass

from flashsim.backends.launch.device_tables import Lowered
from flashsim.backends.launch.kernel import Kernel
from flashsim.schedule import plans


@dataclass(frozen=True, eq=False)
class KernelPass:
    """One kernel launch: a stage of `flashsim.schedule.plans` with its tables and its kernel.

    Attributes
    ----------
    stage : plans.Stage
    tables : Lowered
    kernel : Kernel
    grid : tuple of int
        Thread blocks: in one dimension for a loop over tile pairs, in two for a row-wise kernel.
    walks : int
        How many heads the loop runs for, over the whole batch. These are KV heads for a KV-outer
        loop, and otherwise query heads.
    clump : int
        Heads of a head group, which run together so that their tensors stay in L2 (`take_work` in
        common.cuh).
    items : range
        The work tiles of this launch, each an outer tile of one head. They are numbered over all
        heads, in the order in which blocks take them.
    before : tuple of KernelPass
        Launches of the same stage that come first and take the other work tiles. The tuple is empty
        if the kernels report counts or times.
    """

    stage: plans.Stage
    tables: Lowered
    kernel: Kernel
    grid: tuple[int, ...]
    walks: int
    clump: int
    items: range
    before: tuple[KernelPass, ...] = ()
