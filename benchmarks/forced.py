"""Run passes of the Hopper kernels with given decisions, for benchmarks of the rules that decide.

A `Forced` is the kernel family of `backend="cupy"`, except for the decisions in its fields. The
functions `forward` and `backward` return calls that run a pass with such a family.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from flashsim import Problem, Tiling
from flashsim.backends.launch.kernel import Gpu, Kernel, Variant
from flashsim.backends.launch_policy.family import PassRequest, Walked
from flashsim.backends.launch_policy.hopper import HOPPER, Hopper
from flashsim.engines.protocol import Job, Outcome


@dataclass(frozen=True)
class Forced(Hopper):
    """Hopper's kernels with given decisions; a field that is None leaves a decision to the rule.

    `heads_in_group` is the number of heads per head group. `tile` is a backward's tile. `shared`
    lists the launches of a backward's KV-outer pass as pairs (blocks per work tile, work tiles).
    With `early`, the kernel that converts dQ starts while the fused pass runs.
    """

    heads_in_group: int | None = None
    tile: Tiling | None = None
    shared: tuple[tuple[int, int], ...] | None = None
    early: bool = False

    def clump(self, walk: Walked, cluster: int = 1) -> int:
        """See `Hopper.clump`."""
        return self.heads_in_group or super().clump(walk, cluster)

    def possible(self, asked: PassRequest) -> tuple[Tiling, ...]:
        """See `Hopper.possible`."""
        known = super().possible(asked)
        return (self.tile,) if self.tile and asked.direction == "backward" else known

    def launches(self, walk: Walked) -> tuple[tuple[int, int], ...]:
        """See `Hopper.launches`."""
        given = self.shared if walk.stage.outer == "keys" else None
        return given or super().launches(walk)

    def kernel(
        self, stage: str, problem: Problem, tiling: Tiling, variant: Variant, gpu: Gpu
    ) -> Kernel:
        """See `Hopper.kernel`."""
        early = self.early and stage == "fused"
        variant = replace(variant, more=variant.more or early)
        return super().kernel(stage, problem, tiling, variant, gpu)


def forced(**given: Any) -> Forced:
    """Return `HOPPER` with the given fields of `Forced`."""
    return Forced(**vars(HOPPER), **given)


def kernels(passes: Iterable[Any]) -> Iterator[tuple[str, Kernel]]:
    """Yield the kernels of passes, as `gpu_compile.compile_all` takes them."""
    for one in passes:
        yield from (("hopper", x.kernel) for x in (*one.before, one))


def forward(
    problem: Problem, q: Any, k: Any, v: Any, family: Hopper, **options: Any
) -> Callable[[], Outcome]:
    """Return a call that runs a forward pass with the kernels of `family`."""
    from flashsim.backends.cupy_gpu import engine

    job = Job(problem, q, k, v, options=options)
    return partial(engine.forward_with, lambda *_: family, job)


def backward(
    ran: Outcome, job: Job, algorithm: str, dout: Any, family: Hopper
) -> Callable[[], Outcome]:
    """Return a call that runs the backward pass of the forward `ran` with the kernels of `family`.

    `job` is the job of that forward.
    """
    from flashsim.backends.cupy_gpu import engine

    job = replace(job, algorithm=algorithm, memo={})
    return partial(engine.backward_with, lambda *_: family, job, ran.saved, dout)
