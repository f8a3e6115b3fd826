"""`Answers`: the query methods that `Trace` and `Traffic` share, for bytes, FLOPs and tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from flashsim import report
from flashsim.counts.work import KINDS, on_chip_bytes, stage_work, total_flops
from flashsim.problem import checks
from flashsim.problem.hardware import Device
from flashsim.problem.problem import Problem
from flashsim.schedule import plans
from flashsim.schedule.dataflow import ALGORITHMS
from flashsim.schedule.names import TENSORS
from flashsim.schedule.tensors import title
from flashsim.schedule.tiling import Tiling

OPS = ("load", "store", "reduce")


Transfers = Mapping[tuple[str, str, str], int]
Extent = tuple[int, int, int]


class Answers:
    """The query methods that a `Trace` and its closed form, a `Traffic`, have in common.

    `transfers` has the requested bytes over all heads, as ``{(stage, op, tensor): bytes}``.
    """

    problem: Problem
    device: Device
    algorithm: str
    direction: str
    backend: str

    if TYPE_CHECKING:  # each subclass has its own

        @property
        def transfers(self) -> Transfers: ...  # noqa: D102
        @property
        def tiling(self) -> Tiling: ...  # noqa: D102
        @property
        def parts(self) -> int: ...  # noqa: D102
        def _extents(self) -> Iterator[tuple[plans.Stage, Extent, Extent]]: ...
        def compulsory(self) -> int: ...  # noqa: D102
        def peak_sram(self) -> int: ...  # noqa: D102

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names of all tensors."""
        return TENSORS

    def bytes(self, op: str | None = None, tensor: str | None = None) -> int:
        """Return the number of requested bytes (moved between HBM and SRAM), over all heads.

        Without an argument, the bytes of all operations, or of all tensors, are summed.

        Parameters
        ----------
        op : {"load", "store", "reduce"}, optional
        tensor : str, optional
            For example "K"; see `TENSORS`.

        Raises
        ------
        OptionError
            If no operation or tensor has this name.
        """
        check_names(op, tensor, self.tensors)
        return sum(
            nbytes
            for (_, its_op, its_tensor), nbytes in self.transfers.items()
            if op in (None, its_op) and tensor in (None, its_tensor)
        )

    def by_tensor(self) -> dict[str, dict[str, int]]:
        """Return the requested bytes over all heads and stages, as ``{tensor: {op: bytes}}``."""
        result: dict[str, dict[str, int]] = {}
        for (_, op, tensor), nbytes in self.transfers.items():
            result.setdefault(tensor, dict.fromkeys(OPS, 0))[op] += nbytes
        return result

    @cached_property
    def _work(self) -> tuple[dict[str, int], dict[str, int]]:
        """The FLOPs by kind and the on-chip bytes by operation, over all stages.

        `_extents` yields each stage with two sums over all heads, of the tiles of its visits and of
        its outer steps. A sum consists of rows, columns and scores.
        """
        flops: Counter[str] = Counter()
        chip: Counter[str] = Counter()
        for stage, visits, steps in self._extents():
            work = stage_work(self.problem, self.algorithm, self.direction, stage.name)
            for ops, extent in ((work.visit, visits), (work.outer, steps)):
                flops.update(total_flops(ops, *extent))
                chip.update(on_chip_bytes(ops, stage, *extent))
        return dict(flops), dict(chip)

    def flops(self, kind: str | None = None) -> int:
        """Return the FLOPs over all heads, of one kind in `work.KINDS` or of all kinds."""
        flops, _ = self._work
        if kind is None:
            return sum(flops.values())
        return flops.get(checks.one_of("kind of FLOP", kind, KINDS), 0)

    def on_chip(self, op: str | None = None) -> int:
        """Return the SRAM bytes that tile operations "read", "write" or, by default, both."""
        _, chip = self._work
        if op is None:
            return sum(chip.values())
        return chip.get(checks.one_of("on-chip operation", op, ("read", "write")), 0)

    def intensity(self) -> float:
        """Return the arithmetic intensity: FLOPs per requested byte of HBM."""
        return self.flops() / self.bytes()

    def table(self) -> report.Table:
        """Return a table of bytes by tensor and operation, FLOPs, intensity and peak SRAM."""
        return summary(self)

    __str__ = report.text
    _repr_html_ = report.tabled


def check_names(op: str | None, tensor: str | None, tensors: Sequence[str] = TENSORS) -> None:
    """Raise `OptionError` unless the operation and the tensor both exist."""
    if op is not None:
        checks.one_of("operation", op, OPS)
    if tensor is not None:
        checks.one_of("tensor", tensor, tensors[1:])


def by_operation(
    transfers: Transfers, stages: Container[str] | None = None
) -> dict[tuple[str, str], int]:
    """Return ``{(op, tensor): bytes}``, summed over the given stages (default: all stages)."""
    total: Counter[tuple[str, str]] = Counter()
    for (stage, op, tensor), nbytes in transfers.items():
        if stages is None or stage in stages:
            total[op, tensor] += nbytes
    return dict(total)


def in_words(p: Problem) -> str:
    """Return a problem's sizes, element type and mask as text, for the titles of tables."""
    heads = f"{p.heads} / {p.kv_heads}" if p.group > 1 else f"{p.heads}"
    width = f"{p.head_dim}" if p.head_dim_v == p.head_dim else f"{p.head_dim} / {p.head_dim_v}"
    words = [f"{p.batch} x {heads} heads", f"{p.n_q:,} x {p.n_kv:,}", f"d={width}", p.dtype]
    if p.page_size is not None:
        words.append(f"pages of {p.page_size}")
    if p.latent:
        words.append("V in K")
    if p.shared_prefix:
        words.append(f"{p.shared_prefix:,} of the keys shared")
    if p.causal:
        words.append("causal")
    if p.window is not None:
        words.append(f"window {p.window[0]}:{p.window[1]}")
    return ", ".join(words)


def summary(source: Answers) -> report.Table:
    """Return the table that `print(trace)` and `print(traffic)` show."""
    p, tables = source.problem, source.by_tensor()
    parts = ""
    known = source.algorithm in plans.ALGORITHMS  # False for a user's own algorithm
    way = source.direction
    if known:
        way = ALGORITHMS[source.algorithm].direction(way)
    if known and plans.splits_keys(source.algorithm):
        parts = f"{source.parts} split{'s' * (source.parts != 1)}, "
    table = report.Table(
        f"{source.algorithm} {way} ({source.backend}): {in_words(p)}, "
        f"tiles {source.tiling}, {parts}{source.device.name}",
        ("tensor", "load B", "store B", "reduce B", "total B"),
        note=(
            f"compulsory {source.compulsory():,} B · {source.flops():,} FLOPs "
            f"(matmul {source.flops('matmul'):,}) · {source.intensity():.4g} FLOP/B · "
            f"{source.on_chip():,} B read and written on chip · peak {source.peak_sram():,} B of "
            "SRAM per block"
        ),
    )
    for tensor, row in tables.items():
        name = title(p, tensor, source.direction)
        table.add(name, *(row[op] for op in OPS), sum(row.values()))
    totals = [source.bytes(op) for op in OPS]
    table.add("all", *totals, sum(totals))
    return table
