"""`KernelTrace`: the result of tracing a reader's kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from flashsim import report
from flashsim.errors import OptionError, TraceError, choices, own_errors, shown
from flashsim.l2 import Dram, L2Model
from flashsim.own_kernels.as_trace import as_trace
from flashsim.own_kernels.check import Reference, Verdict, check
from flashsim.own_kernels.compare import ByteRow, Expected, expected_of, rows_of
from flashsim.own_kernels.findings import KernelFinding, findings_of
from flashsim.own_kernels.geometry import Geometry
from flashsim.own_kernels.predictions import dram_of, roofline_of
from flashsim.own_kernels.record import SECTOR, KernelRecord, restricted
from flashsim.own_kernels.steps import Again, followed
from flashsim.problem.hardware import Device
from flashsim.problem.problem import Problem
from flashsim.schedule.names import LOAD, OPS, REDUCE, STORE
from flashsim.schedule.tiling import Tiling
from flashsim.studies.roofline import Roofline
from flashsim.trace.trace import Trace
from flashsim.version import __version__


@own_errors
class KernelTrace:
    """The accesses that a user's kernel made, one by one, with methods that query them.

    It goes wherever a `Result` goes: `viz.page(traced)`, `viz.traffic([traced, other])`.

    Attributes
    ----------
    record : KernelRecord
        Every access, as the frontend noted it.
    name : str
        The kernel's name in tables and pictures.
    device : Device
    outputs : dict of str to array
        What the tensors that were stored to hold at the end, by label.
    values : tuple of ndarray
        What all tensors held at the end, in the order of their codes: for `check`. A frontend gives
        `again`, too: it runs one program once more, so that `check` names its first wrong step.
    verdict : Verdict or None
        What the last `check` found.
    """

    def __init__(
        self,
        record: KernelRecord,
        *,
        names: Mapping[str, str] | None = None,
        problem: Problem | None = None,
        device: str | Device = "H100",
        name: str | None = None,
        outputs: Mapping[str, Any] | None = None,
        values: Sequence[np.ndarray] = (),
        again: Again | None = None,
    ) -> None:
        if not record.launches:
            raise TraceError(
                "no kernel was launched, so there is nothing to show; launch one while it is traced"
            )
        if not (record.accesses["active"] > 0).any():
            raise TraceError(
                f"{record.launches[0].kernel} loaded and stored nothing: every lane was masked off "
                "or outside of its tensor; compare the grid and the masks with the shapes"
            )
        self.record = record
        self.device = Device.get(device)
        self.geometry = Geometry(record, names, problem, values)
        kernels = list(dict.fromkeys(one.kernel for one in record.launches))
        self.name = name or ", ".join(kernels)[:60]
        self.outputs = dict(outputs or {})
        self.values = tuple(values)
        self.verdict: Verdict | None = None
        self._again = again

    @property
    def problem(self) -> Problem:
        """The attention problem: as given, or as the shapes and arguments say."""
        return self.geometry.problem

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the tensors: the papers' where known."""
        return tuple(self.geometry.labels)

    @property
    def tiling(self) -> Tiling:
        """The tile of the first launch that moves over both queries and keys."""
        return self.trace.tiling if len(self.record.launches) == 1 else self.trace.schedule.tiling

    # -- totals ---------------------------------------------------------------------------------

    def _chosen(self, op: str | None, tensor: str | None) -> np.ndarray:
        a = self.record.accesses
        chosen = a["active"] > 0
        if op is not None:
            if op not in OPS[:3]:
                raise OptionError(f"no operation {shown(op)}; {choices(op, OPS[:3])}")
            chosen = chosen & (a["op"] == OPS.index(op))
        if tensor is not None:
            if tensor not in self.tensors:
                raise OptionError(f"no tensor {shown(tensor)}; {choices(tensor, self.tensors)}")
            chosen = chosen & (a["tensor"] == self.tensors.index(tensor))
        return chosen

    def bytes(self, op: str | None = None, tensor: str | None = None) -> int:
        """Bytes that all programs ask for: of one operation and tensor, or all.

        Parameters
        ----------
        op : {"load", "store", "reduce"}, optional
            "reduce" is an atomic operation.
        """
        return int(self.record.bytes_asked[self._chosen(op, tensor)].sum())

    def sectors(self, op: str | None = None, tensor: str | None = None) -> int:
        """Bytes of the 32-byte sectors that the accesses touch: what passes between L2 and SMs."""
        return int(self.record.accesses["sectors"][self._chosen(op, tensor)].sum()) * SECTOR

    @property
    def n_events(self) -> int:
        """Number of accesses of all programs."""
        return len(self.record.accesses)

    def compulsory(self) -> int:
        """Bytes that any kernel for these results moves: inputs read once, outputs written once.

        A tensor that is first stored and then loaded, such as partial results, need not move.
        """
        return sum(sum(self.compulsory_of(label)) for label in self.tensors)

    def compulsory_of(self, tensor: str) -> tuple[int, int]:
        """Return the bytes of a tensor that must be read, and that must be written."""
        a, code = self.record.accesses, self.tensors.index(tensor)
        ops = a["op"][(a["tensor"] == code) & (a["active"] > 0)]
        if not len(ops):
            return 0, 0
        nbytes = self.record.tensors[code].nbytes
        loaded, stored = LOAD in ops, STORE in ops or REDUCE in ops
        result = stored and (ops[0] == LOAD or not loaded or tensor in _RESULTS)
        return nbytes * bool(ops[0] == LOAD), nbytes * bool(result)

    # -- as any other trace ---------------------------------------------------------------------

    @cached_property
    def trace(self) -> Trace:
        """The same as a `Trace`: for pictures, players, tables and files."""
        about = {"flashsim": __version__, "source": self.record.source}
        return as_trace(self.geometry, self.name, self.device, self.compulsory(), about)

    def only(self, *kernels: str) -> KernelTrace:
        """Return the trace of some of the launches, by their kernels' names.

        Raises
        ------
        OptionError
            If none has such a name.
        """
        there = [one.kernel for one in self.record.launches]
        for name in kernels:
            if name not in there:
                raise OptionError(f"no launch of {shown(name)}; {choices(name, set(there))}")
        kept = [n for n, name in enumerate(there) if name in kernels]
        return KernelTrace(
            restricted(self.record, kept),
            names=dict(zip((t.name for t in self.record.tensors), self.tensors, strict=True)),
            problem=self.problem,
            device=self.device,
            outputs=self.outputs,
            values=self.values,
        )

    # -- against what is needed -----------------------------------------------------------------

    @cached_property
    def expected(self) -> Expected | None:
        """FlashAttention-2's bytes with this kernel's tile; None for another computation."""
        return expected_of(self.geometry, self.device)

    @cached_property
    def byte_rows(self) -> list[ByteRow]:
        """Bytes of each operation and tensor, beside those needed, with reasons and lines."""
        return rows_of(self.geometry, self.expected, self.compulsory_of)

    @cached_property
    def findings(self) -> list[KernelFinding]:
        """Warnings, each with line and program."""
        return findings_of(self.geometry)

    def compared(self) -> report.Table:
        """Return a table: bytes, those of the closed form, compulsory ones, and the reasons."""
        name = "none" if self.expected is None else self.expected.algorithm
        tiles = "" if self.expected is None else f" with tiles {self.expected.tiles}"
        table = report.Table(
            f"{self.name}: bytes beside those of {name}{tiles}",
            ("op", "tensor", "B", "needed B", "compulsory B", "why"),
            note="needed: by the closed form, as flashsim.count gives it; compulsory: each input "
            "and each output once",
        )
        for row in self.byte_rows:
            cells = row.op, row.tensor, row.nbytes, row.expected, row.compulsory, row.why
            table.rows.append(cells)
        return table

    # -- right or wrong -------------------------------------------------------------------------

    def check(self, reference: Reference | None = None) -> Verdict:
        """Compare what the kernel stored with a reference, and guess the mistake.

        Parameters
        ----------
        reference : function, optional
            Gets the tensors that the kernel loads, a dict of NumPy arrays by label, and returns
            what it should store: a dict of arrays by label, or one array. Default: attention and
            its gradients in float64.

        Raises
        ------
        TraceError
            If nothing can be compared: the tensors' values were not kept, or no reference is known.
        """
        verdict = check(self.geometry, self.values, reference)
        if not verdict.right and reference is None and self._again is not None:
            verdict = followed(self.geometry, self.values, verdict, self._again)
        self.verdict = verdict
        return verdict

    # -- predictions ----------------------------------------------------------------------------

    def dram(self, device: str | Device | None = None, l2: L2Model | None = None) -> Dram:
        """Return DRAM bytes by a model of the L2 cache of a device (default: the trace's)."""
        return dram_of(self, self.device if device is None else Device.get(device), l2)

    def roofline(self, device: str | Device | None = None) -> Roofline:
        """Return the kernel's roofline on a device, which gives the least time that it can take."""
        return roofline_of(self, self.device if device is None else Device.get(device))

    # -- by line --------------------------------------------------------------------------------

    def by_line(self) -> report.Table:
        """Return a table of the reader's lines: accesses, bytes, masked lanes, sectors."""
        a = self.record.accesses
        table = report.Table(
            f"{self.name}: loads and stores by line ({self.record.source})",
            ("line", "op", "tensor", "accesses", "B", "masked B", "outside B", "sector B", "tile"),
            note="masked: lanes that the mask turns off; sectors of 32 bytes hold what is asked",
        )
        groups = self.record.by_line(np.ones(len(a), bool))
        for line, op, code, at in sorted(groups, key=lambda one: self.record.lines[one[0]]):
            mine, known = a[at], code >= 0
            size = self.record.tensors[code].itemsize if known else 0
            rows, cols = self.geometry.rows[at], self.geometry.cols[at]
            table.rows.append(
                (
                    self.record.lines[line][1],
                    OPS[op] if op != REDUCE else "atomic",
                    self.tensors[code] if known else "-",
                    len(mine),
                    int(mine["active"].sum()) * size,
                    int(mine["masked"].sum()) * size,
                    int(mine["outside"].sum()) * size,
                    int(mine["sectors"].sum()) * SECTOR,
                    f"{rows.max()} x {cols.max()}" if known else "-",
                )
            )
        return table

    def table(self) -> report.Table:
        """Return a table of bytes by tensor and operation, as of any other trace."""
        return self.trace.table()

    def __repr__(self) -> str:
        return (
            f"<KernelTrace {self.name}: {self.n_events:,} accesses, {self.bytes():,} B, "
            f"{self.record.source}>"
        )

    __str__ = report.text
    _repr_html_ = report.tabled


_RESULTS = ("O", "L", "dQ", "dK", "dV")
