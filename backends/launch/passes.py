"""Describe the kernel launches of a forward or backward pass, with their schedule tables."""

from __future__ import annotations

from dataclasses import dataclass

from flashsim.backends.launch.device_tables import Lowered
from flashsim.backends.launch.kernel import Kernel
from flashsim.schedule import plans


@dataclass(frozen=True, eq=False)
class KernelPass:
    """One kernel launch: a stage of `flashsim.schedule.plans`, the tables and the kernel.

    The grid is one-dimensional for a loop over tile pairs, and two-dimensional for a row-wise
    kernel. `walks` is the number of heads in the batch: KV heads for a KV-outer loop or packed
    heads, and otherwise query heads. `clump` is the number of heads in a head group; grouped heads
    run together so that their tensors stay in L2 (`take_work` in common.cuh). `items` is the
    launch's range of work tiles, numbered in the order in which blocks take them. `before` holds
    earlier launches for other work tiles of the same stage. `before` is empty if the kernels report
    counts or times.
    """

    stage: plans.Stage
    tables: Lowered
    kernel: Kernel
    grid: tuple[int, ...]
    walks: int
    clump: int
    items: range
    before: tuple[KernelPass, ...] = ()

    @property
    def visit_records(self) -> tuple[int, int]:
        """The shape of a report on visits: query heads (or packed groups), visits of each."""
        p, packed = self.tables.schedule.problem, self.tables.schedule.split.pack_gqa
        return self.walks if packed else p.batch * p.heads, self.tables.n_visits
