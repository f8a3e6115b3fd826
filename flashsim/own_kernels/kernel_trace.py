"""`KernelTrace`: the result of tracing a user's kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from flashsim import report
from flashsim.errors import TraceError, own_errors
from flashsim.l2 import Dram, L2Model
from flashsim.own_kernels.as_trace import as_trace
from flashsim.own_kernels.check import Reference, Verdict, check
from flashsim.own_kernels.compare import ByteRow, Expected, expected_of, rows_of
from flashsim.own_kernels.findings import KernelFinding, findings_of
from flashsim.own_kernels.geometry import Geometry
from flashsim.own_kernels.predictions import dram_of, roofline_of
from flashsim.own_kernels.record import SECTOR, KernelRecord, restricted
from flashsim.own_kernels.steps import Again, followed
from flashsim.problem import checks
from flashsim.problem.hardware import Device
from flashsim.problem.problem import Problem
from flashsim.schedule.names import LOAD, OPS, REDUCE, STORE
from flashsim.schedule.tiling import Tiling
from flashsim.studies.roofline import Roofline
from flashsim.trace.trace import Trace
from flashsim.version import __version__


@own_errors
class KernelTrace:
    """All accesses that a user's kernel made, with methods that count and check them.

    Functions that accept a `Result` also accept a `KernelTrace`: `viz.page(traced)`,
    `viz.traffic([traced, other])`.

    Attributes
    ----------
    record : every access, as the frontend recorded it
    name : the kernel's name in tables and pictures
    outputs : the final values of the tensors that were stored to, by label
    values : the final values of all tensors, in the order of the tensors' codes
    verdict : the result of the last `check`, or None

    Notes
    -----
    If a frontend passes `again`, a function that runs one program a second time, `check` names the
    first wrong step of that program.
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
                "no kernel was launched, so there is nothing to show; launch at least one "
                "kernel while you trace"
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
        self.values = tuple(values)
        stored = {self.geometry.labels[code]: values[code] for code in record.stored if values}
        self.outputs = stored if outputs is None else dict(outputs)
        self.verdict: Verdict | None = None
        self._again = again

    @property
    def problem(self) -> Problem:
        """Return the attention problem: the user's, or one derived from shapes and arguments."""
        return self.geometry.problem

    @property
    def tensors(self) -> tuple[str, ...]:
        """Return each tensor's name: the FlashAttention papers' if known, else the kernel's."""
        return tuple(self.geometry.labels)

    @property
    def tiling(self) -> Tiling:
        """Return the tile sizes of the first launch that loops over both queries and keys."""
        return self.trace.tiling if len(self.record.launches) == 1 else self.trace.schedule.tiling

    # -- totals ---------------------------------------------------------------------------------

    def _chosen(self, op: str | None, tensor: str | None) -> np.ndarray:
        a = self.record.accesses
        chosen = a["active"] > 0
        if op is not None:
            checks.one_of("operation", op, OPS[:3])
            chosen = chosen & (a["op"] == OPS.index(op))
        if tensor is not None:
            checks.one_of("tensor", tensor, self.tensors)
            chosen = chosen & (a["tensor"] == self.tensors.index(tensor))
        return chosen

    def bytes(self, op: str | None = None, tensor: str | None = None) -> int:
        """Return the bytes that all programs request, in total or for one operation or tensor.

        Parameters
        ----------
        op : {"load", "store", "reduce"}, optional
            Count only this operation; "reduce" is an atomic operation.
        tensor : str, optional
            Count only this tensor.
        """
        return int(self.record.bytes_asked[self._chosen(op, tensor)].sum())

    def sectors(self, op: str | None = None, tensor: str | None = None) -> int:
        """Return the bytes moved between L2 and the SMs: 32 bytes per sector accessed."""
        return int(self.record.accesses["sectors"][self._chosen(op, tensor)].sum()) * SECTOR

    @property
    def n_events(self) -> int:
        """Return the number of accesses that all programs make together."""
        return len(self.record.accesses)

    def compulsory(self) -> int:
        """Return the bytes of all inputs and outputs, each of which any kernel moves at least once.

        Tensors that are stored before they are loaded, such as partial results, are not counted.
        """
        return sum(sum(self.compulsory_of(label)) for label in self.tensors)

    def compulsory_of(self, tensor: str) -> tuple[int, int]:
        """Return how many bytes of a tensor must be read, and how many must be written."""
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
        """Return the accesses as a `Trace`, for pictures, players, tables and files."""
        about = {"flashsim": __version__, "source": self.record.source}
        return as_trace(self.geometry, self.name, self.device, self.compulsory(), about)

    def only(self, *kernels: str) -> KernelTrace:
        """Return a `KernelTrace` with only the launches that ran one of these kernels.

        Raises
        ------
        OptionError
            If no launch ran a kernel of one of these names.
        """
        there = [one.kernel for one in self.record.launches]
        for name in kernels:
            checks.one_of("kernel", name, dict.fromkeys(there))
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
        """Return FlashAttention-2's or split-KV decoding's bytes, or None for other kernels."""
        return expected_of(self.geometry, self.device)

    @cached_property
    def byte_rows(self) -> list[ByteRow]:
        """Return bytes moved, bytes needed and reasons for excess, per operation and tensor."""
        return rows_of(self.geometry, self.expected, self.compulsory_of)

    @cached_property
    def findings(self) -> list[KernelFinding]:
        """Return warnings about the kernel, each with its source line and program."""
        return findings_of(self.geometry)

    def compared(self) -> report.Table:
        """Return a table of bytes moved, bytes needed, compulsory bytes, and reasons for excess."""
        beside = "compulsory bytes"
        if self.expected is not None:
            beside = f"the bytes of {self.expected.algorithm} with tiles {self.expected.tiles}"
        table = report.Table(
            f"{self.name}: bytes moved, beside {beside}",
            ("op", "tensor", "B", "needed B", "compulsory B", "why"),
            note="needed: the bytes that flashsim.count predicts; compulsory: each input is read "
            "once and each output is written once",
        )
        for row in self.byte_rows:
            cells = row.op, row.tensor, row.nbytes, row.expected, row.compulsory, row.why
            table.rows.append(cells)
        return table

    # -- right or wrong -------------------------------------------------------------------------

    def check(self, reference: Reference | None = None) -> Verdict:
        """Compare the kernel's results with a reference; if they are wrong, look for the mistake.

        Parameters
        ----------
        reference : function, optional
            Takes a dict of all the kernel's tensors, NumPy arrays by label, and returns the
            expected results: a dict of arrays by label, or one array. Default: attention and its
            gradients in float64.

        Raises
        ------
        TraceError
            If nothing can be compared: the record lacks the tensors' values, or the kernel does
            not compute attention and no reference was passed.
        """
        verdict = check(self.geometry, self.values, reference)
        if not verdict.right and reference is None and self.geometry.may_be_causal:
            verdict = self._causal() or verdict
        if not verdict.right and reference is None and self._again is not None:
            verdict = followed(self.geometry, self.values, verdict, self._again)
        self.verdict = verdict
        return verdict

    def _causal(self) -> Verdict | None:
        """Take a causal mask into the problem, and return the verdict, if results are then right.

        Many kernels have a causal mask without an argument of that name.
        """
        names = dict(zip((t.name for t in self.record.tensors), self.tensors, strict=True))
        causal = Geometry(self.record, names, replace(self.problem, causal=True), self.values)
        verdict = check(causal, self.values)
        if not verdict.right:
            return None
        self.geometry = causal
        for name in ("trace", "expected", "byte_rows", "findings"):  # of the other problem
            vars(self).pop(name, None)
        return verdict

    # -- predictions ----------------------------------------------------------------------------

    def dram(self, device: str | Device | None = None, l2: L2Model | None = None) -> Dram:
        """Return the kernel's DRAM bytes, as predicted by a model of a device's L2 cache."""
        return dram_of(self, self.device if device is None else Device.get(device), l2)

    def roofline(self, device: str | Device | None = None) -> Roofline:
        """Return the kernel's roofline on a device: a lower bound on its time."""
        return roofline_of(self, self.device if device is None else Device.get(device))

    # -- by line --------------------------------------------------------------------------------

    def by_line(self) -> report.Table:
        """Return a table with one row per source line: accesses, bytes, masked lanes, sectors."""
        a = self.record.accesses
        table = report.Table(
            f"{self.name}: loads and stores by line ({self.record.source})",
            ("line", "op", "tensor", "accesses", "B", "masked B", "outside B", "sector B", "tile"),
            note="masked: lanes that the mask turns off; sector: bytes of all 32-byte sectors that "
            "the accesses touch",
        )
        groups = self.record.by_line(np.ones(len(a), bool))
        for line, op, code, at in sorted(groups, key=lambda one: self.record.lines[one[0]]):
            mine, known = a[at], code >= 0
            size = self.record.tensors[code].itemsize if known else 0
            rows, cols = self.geometry.rows[at], self.geometry.cols[at]
            table.add(
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
        return table

    def table(self) -> report.Table:
        """Return a table of bytes by tensor and operation."""
        return self.trace.table()

    def __repr__(self) -> str:
        return (
            f"<KernelTrace {self.name}: {self.n_events:,} accesses, {self.bytes():,} B, "
            f"{self.record.source}>"
        )

    __str__ = report.text
    _repr_html_ = report.tabled


_RESULTS = ("O", "L", "dQ", "dK", "dV")
