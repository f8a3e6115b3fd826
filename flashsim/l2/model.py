"""`dram`: what is left for HBM when the L2 cache has served its hits; `curves`: at every size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from flashsim import report, traffic
from flashsim.errors import OptionError, choices
from flashsim.l2.curve import Curve
from flashsim.l2.launch import L2Model
from flashsim.l2.requests import Layout, Stream, layout, stream
from flashsim.traffic import Traffic

OPS = ("read", "write", "pending")


@dataclass(frozen=True)
class StageDram:
    """DRAM bytes of one stage by tensor: read, written, and still dirty in L2 when it ends."""

    name: str
    read: dict[str, int]
    write: dict[str, int]
    pending: dict[str, int]


@dataclass(frozen=True, eq=False)
class Dram:
    """Predicted DRAM traffic of a pass.

    Attributes
    ----------
    requested : Traffic
        What the SMs ask of L2.
    model : L2Model
    stages : tuple of StageDram
        One for each stage, in order.
    """

    requested: Traffic
    model: L2Model
    stages: tuple[StageDram, ...]

    def bytes(
        self, op: str | None = None, tensor: str | None = None, stage: str | None = None
    ) -> int:
        """DRAM bytes: of one operation, tensor and stage, or of all.

        Parameters
        ----------
        op : {"read", "write", "pending"}, optional
            "write": written back by evictions while the stage ran (the counter
            ``dram__bytes_write.sum`` sees at least this). "pending": dirty in L2 when the stage
            ended (with ``flush=False`` when the last stage ended), written some time after.
            Default: reads and writes, pending included.
        """
        if op is not None and op not in OPS:
            raise OptionError(f"unknown DRAM operation {op!r}; {choices(op, OPS)}")
        if stage is not None and stage not in [s.name for s in self.stages]:
            raise OptionError(
                f"no stage {stage!r}; {choices(stage, [s.name for s in self.stages])}"
            )
        traffic.check_names(None, tensor)
        return sum(
            nbytes
            for part in self.stages
            if stage in (None, part.name)
            for its_op in (OPS if op is None else (op,))
            for its_tensor, nbytes in getattr(part, its_op).items()
            if tensor in (None, its_tensor)
        )

    def hit_rate(self) -> float:
        """Share of the loaded and reduced bytes that L2 had."""
        asked = self.requested.bytes("load") + self.requested.bytes("reduce")
        return 1 - self.bytes("read") / asked

    def intensity(self) -> float:
        """FLOPs for each byte of DRAM."""
        return self.requested.flops() / self.bytes()

    def table(self) -> report.Table:
        """Requested and DRAM bytes, stage by stage."""
        r, table = self.requested, self._empty()
        for part in self.stages:
            asked = {
                op: sum(
                    nbytes
                    for (stage, its_op, _), nbytes in r.transfers.items()
                    if (stage, its_op) == (part.name, op)
                )
                for op in traffic.OPS
            }
            totals = [sum(getattr(part, op).values()) for op in OPS]
            table.rows.append((part.name, *asked.values(), *totals))
        totals = [self.bytes(op) for op in OPS]
        table.rows.append(("all", *(r.bytes(op) for op in traffic.OPS), *totals))
        return table

    def _empty(self) -> report.Table:
        r = self.requested
        return report.Table(
            f"{r.algorithm} {r.direction}, tiles {r.tiling}, {r.device.name}: "
            f"L2 of {r.device.l2_bytes:,} B, {self.model.launch}, "
            f"{'cold' if self.model.flush else 'warm'} stages",
            (
                *("stage", "load B", "store B", "reduce B"),
                *("DRAM read B", "DRAM write B", "pending B"),
            ),
            note=(
                f"compulsory {r.compulsory():,} B · L2 hit rate {self.hit_rate():.1%} · a model, "
                "not yet calibrated against hardware counters (docs/truth.md)"
            ),
        )

    def __str__(self) -> str:
        return self.table().text(width=120)

    def __repr__(self) -> str:
        r = self.requested
        return (
            f"<Dram {r.algorithm} {r.direction}: {self.bytes():,} B of {r.bytes():,} B requested>"
        )


def dram(requested: Traffic, model: L2Model | None = None) -> Dram:
    """Replay the requests of a pass through the L2 of its device.

    Parameters
    ----------
    requested : Traffic
        From `flashsim.count`, or `Trace.predicted`.
    model : L2Model, optional

    Raises
    ------
    UnsupportedError
        If there are too many requests to replay.
    """
    from flashsim.l2 import kernels

    model = model or L2Model()
    device = requested.device
    partitions = model.partitions or device.l2_partitions
    tiles, streams = _streams(requested, model)
    size = _pieces(tiles.size, partitions)
    cache = _Cache(len(size), partitions)
    run = kernels.replay if partitions == 1 else kernels.replay_two
    stages: list[StageDram] = []
    for part in streams:
        fetched, lost = np.zeros(len(size), np.int64), np.zeros(len(size), np.int64)
        capacity = device.l2_bytes // partitions
        arrays = cache.links, cache.state, cache.used
        run(part.ids, part.codes, size, capacity, *arrays, fetched, lost)
        dirty = np.zeros(len(size), np.int64)
        if model.flush or len(stages) + 1 == len(requested.stages):  # else it is not over yet
            dirty += size * (cache.state[:, :-1] == kernels.DIRTY).any(axis=0)
            cache = _Cache(len(size), partitions)
        stages.append(
            StageDram(part.stage.name, *(tiles.by_tensor(x) for x in (fetched, lost, dirty)))
        )
    return Dram(requested, model, tuple(stages))


def curves(requested: Traffic, model: L2Model | None = None) -> dict[str, Curve]:
    """DRAM bytes of each stage as a function of the size of L2, from one pass over its requests.

    Each stage starts with an empty cache of one partition; `model.partitions` and `flush` are not
    used.
    """
    model = model or L2Model()
    tiles, streams = _streams(requested, model)
    return {part.stage.name: Curve.measure(part, tiles.size) for part in streams}


def _streams(requested: Traffic, model: L2Model) -> tuple[Layout, Iterator[Stream]]:
    r = requested
    tiles = layout(r.problem, r.schedule(r.stages[0]), r.algorithm, r.direction)
    return tiles, (
        stream(stage, r.schedule(stage), tiles, r.algorithm, r.direction, r.device, model)
        for stage in r.stages
    )


def _pieces(size: np.ndarray, partitions: int) -> np.ndarray:
    """Sizes of whole tiles, or of their halves (even pieces at home in the first partition)."""
    if partitions == 1:
        return size
    return np.stack([size - size // 2, size // 2], axis=1).ravel()


class _Cache:
    """State of `kernels.replay`: an empty cache."""

    def __init__(self, pieces: int, partitions: int) -> None:
        self.links = np.zeros((partitions, pieces + 1, 2), np.int32)
        self.links[:, pieces] = pieces  # the sentinel: an empty ring
        self.state = np.zeros((partitions, pieces + 1), np.uint8)
        self.used = np.zeros(partitions, np.int64)
