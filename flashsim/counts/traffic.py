"""Traffic in closed form: the bytes that a schedule moves, computed without a run.

The closed forms need sums over a schedule's visits (pairs of a query tile and a key tile). For
causal and windowed problems, sums over visits cost O(row tiles), so a million queries take
milliseconds. This module shares no code with the simulator; the tests assert that both count the
same bytes and FLOPs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from flashsim.counts.forms import Forms
from flashsim.counts.questions import OPS, Answers, Extent
from flashsim.errors import own_errors
from flashsim.problem.hardware import Device
from flashsim.problem.problem import Problem
from flashsim.schedule import plans
from flashsim.schedule.schedule import Schedule, check_visits
from flashsim.schedule.split import WHOLE, Split
from flashsim.schedule.tensors import SCALES, whole_bytes
from flashsim.schedule.tiling import Tiling


@own_errors
class Traffic(Answers):
    """The bytes and FLOPs of a pass in closed form, with the same query methods as `Trace`.

    `transfers` has the requested bytes over all heads, ``{(stage, op, tensor): bytes}``.
    """

    backend = "closed form"

    def __init__(
        self,
        problem: Problem,
        tiling: Tiling,
        algorithm: str,
        direction: str,
        device: Device,
        key_order: str = "ascending",
        split: Split = WHOLE,
    ) -> None:
        self.problem, self.tiling, self.device = problem, tiling, device  # type: ignore[misc]
        self.algorithm, self.direction, self.split = algorithm, direction, split
        self.stages = plans.stages(problem, algorithm, direction, split)
        walks = {(s.outer, s.dense, tiling.of(s.name)) for s in self.stages}
        self._schedules = {
            (outer, dense, tile): Schedule(problem, tile, outer, key_order, dense, split)  # type: ignore[arg-type]
            for outer, dense, tile in walks
        }
        self.transfers: dict[tuple[str, str, str], int] = {}
        forms = Forms(problem)
        table = forms.forward if direction == "forward" else forms.backward
        for stage in self.stages:
            walk = self.schedule(stage)
            moved = table(algorithm, stage.name, walk)
            loaded = {tensor for op, tensor in moved if op == "load"}
            owners = plans.heads_of(stage, problem)[0]
            scales = forms.scales(loaded, stage.outer, walk, owners)
            moved |= {("load", name): nbytes for name, nbytes in scales.items()}
            moved |= forms.functions(algorithm, stage.name, stage.outer, walk)
            for (op, tensor), nbytes in moved.items():
                if nbytes:
                    self.transfers[stage.name, op, tensor] = nbytes

    def schedule(self, stage: plans.Stage) -> Schedule:
        """Return the schedule of one stage: the visits and the order of visits."""
        return self._schedules[stage.outer, stage.dense, self.tiling.of(stage.name)]

    @property
    def parts(self) -> int:
        """The largest number of parts into which the keys of any row tile are split."""
        return max(int(walk.part_counts.max(initial=1)) for walk in self._schedules.values())

    def compulsory(self) -> int:
        """Return the bytes that any algorithm must move: each input and each output once."""
        return compulsory(self.problem, self.direction)

    def _extents(self) -> Iterator[tuple[plans.Stage, Extent, Extent]]:
        p = self.problem
        for stage in self.stages:
            schedule = self.schedule(stage)
            sums = schedule.sums
            walks, _ = plans.heads_of(stage, p)
            each = walks * plans.members_of(stage, p, self.split)
            if stage.outer == "keys":
                step = 0, p.n_kv, 0
            elif stage.parts:
                whole, parts = schedule.part_sums
                step = parts + (whole if stage.parts == "walks" else 0), 0, 0
            else:
                step = schedule.n_rows, 0, sums.area if stage.whole_rows else 0
            visits = each * sums.col_rows, each * sums.row_cols, each * sums.area
            yield stage, visits, (walks * step[0], walks * step[1], walks * step[2])

    def peak_sram(self) -> int:
        """Return the largest number of bytes that a thread block has on chip, over all stages."""
        return max(self._peak(stage) for stage in self.stages)

    def _peak(self, stage: plans.Stage) -> int:
        if stage.whole_rows:
            return self._strip_peak(stage)
        schedule = self.schedule(stage)
        if stage.parts == "merges":  # a step loads partial results only if there are several
            own = schedule.heights[schedule.merged]
            inner = np.ones_like(own)
        elif self.problem.page_size is not None:
            return self._paged_peak(stage)
        else:
            own, inner = schedule.extents()
        rows, cols = (own, inner) if stage.outer == "queries" else (inner, own)
        held = sum(b.nbytes(rows, cols) * (inner > 0 if b.visit else 1) for b in stage.buffers)
        return int(max(held, default=0)) if stage.buffers else 0

    def _paged_peak(self, stage: plans.Stage) -> int:
        """Return the peak on-chip bytes of a stage that loads page numbers of a paged KV cache."""
        s = self.schedule(stage)
        ptr, col, _ = s.row_csr
        held = sum(b.nbytes(s.heights, 0) for b in stage.buffers if not b.visit)
        owner = np.repeat(np.arange(s.t_r), np.diff(ptr))
        each = [b for b in stage.buffers if b.visit and b.name != "table"]
        visits = held[owner] + sum(b.nbytes(s.heights[owner], s.widths[col]) for b in each)
        visits += s.page_counts[col] * whole_bytes(self.problem, "table") // self.problem.pages
        return int(max(held.max(), visits.max(initial=0)))

    def _strip_peak(self, stage: plans.Stage) -> int:
        """Return the peak on-chip bytes of a stage that keeps complete rows of scores on chip."""
        tiles = [move.tile for move in stage.visit if move.holds]
        most = strip_rows(stage, self.schedule(stage), self.device)
        peak = 0
        for s in self.problem.sequences:
            keys = self.problem.n_kv if stage.per == "bias" else s.k_stop - s.k_start
            height = min(self.tiling.block_q, s.q_stop - s.q_start, most)
            peak = max(peak, sum(tile.nbytes(height, keys) for tile in tiles))
        return peak

    def saved(self) -> int:
        """Return the HBM bytes of the inputs, and of the tensors saved for the backward pass."""
        return saved(self.problem, self.algorithm)

    def workspace(self) -> int:
        """Return the HBM bytes besides inputs, outputs and saved tensors: accumulators, dP, dS."""
        parts = [int(self.schedule(s).slots[:, 1].max()) for s in self.stages if s.parts]
        return workspace(self.problem, self.algorithm, self.direction, max(parts, default=1))

    def __repr__(self) -> str:
        return f"<Traffic {self.algorithm} {self.direction}: {self.bytes():,} B requested>"


def count_schedule(
    problem: Problem,
    tiling: Tiling,
    algorithm: str,
    direction: str,
    device: Device,
    key_order: str = "ascending",
    split: Split = WHOLE,
) -> Traffic:
    """Return the traffic of one algorithm with one tiling, in closed form.

    Raises
    ------
    SramOverflow
        If a stage does not fit in the device's on-chip memory.
    TilingError
        If the algorithm needs exactly one visit per row tile, and a row tile has several or none.
    """
    tiling.check(problem, device, algorithm, direction, split)
    check_visits(plans.stages(problem, algorithm, direction, split), problem, tiling)
    return Traffic(problem, tiling, algorithm, direction, device, key_order, split)


# -- bounds and memory ----------------------------------------------------------------------------


def compulsory(problem: Problem, direction: str = "forward") -> int:
    """Return the bytes that any algorithm must move: each input and each output once.

    A forward pass reads q, k, v (and bias) and writes out and LSE. A backward pass reads the same
    inputs, out, dout, LSE (and the LSE's gradient), and writes dq, dk, dv (and the bias's
    gradient). Only the algorithm "flash2-once" may move fewer bytes, because it does not read
    `out`.
    """
    f = Forms(problem)
    inputs, results = (f.q(item) + f.k(item) + f.v(item) for item in (f.e, f.r))
    inputs += f.matrix(f.r) + whole_bytes(problem, "table")
    inputs += whole_bytes(problem, "F") + whole_bytes(problem, "M")
    inputs += whole_bytes(problem, "sink") if problem.sinks else 0
    if problem.scales is not None:
        inputs += sum(whole_bytes(problem, name) for name in SCALES)
    if direction == "forward":
        return inputs + f.o(f.r) + f.stat()
    gradients = results + f.matrix(f.r)
    gradients += whole_bytes(problem, "dF") if problem.score_grads else 0
    gradients += whole_bytes(problem, "dSink") if problem.sinks else 0
    return inputs + gradients + 2 * f.o(f.r) + f.stat() * (1 + problem.dlse)


def once(problem: Problem, algorithm: str, direction: str = "forward") -> int:
    """Return the bytes that a pass moves if each stage moves each tensor only once.

    This is the traffic of a cache that is empty as each kernel starts, and misses only once per
    datum. For FlashAttention-2's forward pass, which is one kernel, the result equals the
    compulsory bytes. For standard attention, the result also includes the N x N matrices. The
    problem's mask is ignored.
    """
    p = replace(problem, mask=None, mask_mod=None, block_mask=None, causal=False, window=None)
    whole = Tiling(p.n_q, p.n_kv)
    return Traffic(p, whole, algorithm, direction, Device.get("H100"), "ascending").bytes()


def saved(problem: Problem, algorithm: str) -> int:
    """Return the bytes that stay in HBM from forward to backward, including the inputs.

    Standard attention keeps P (and, with a softcap, the softcap's derivative), which takes O(N^2)
    bytes. FlashAttention-1 keeps out, l and m, and FlashAttention-2 keeps out and LSE, which take
    O(N) bytes. The algorithm "flash2-once" does not keep `out`.
    """
    return sum(whole_bytes(problem, name) for name in _kept(problem, algorithm))


_RESULTS = {"O", "dQ", "dK", "dV", "dBias", "dF", "dSink"}


def workspace(problem: Problem, algorithm: str, direction: str = "forward", parts: int = 1) -> int:
    """Return the bytes of HBM that a pass uses besides inputs, outputs and saved tensors.

    `parts` is the largest number of parts into which the keys of any query are split.
    """
    written = set(plans.tensors_of(problem, algorithm, direction, "store", "reduce"))
    rest = written - _kept(problem, algorithm) - _RESULTS
    return sum(
        whole_bytes(problem, name) * ((parts > 1) * parts if name.endswith("_part") else 1)
        for name in rest
    )


def _kept(problem: Problem, algorithm: str) -> set[str]:
    """Return the names of the inputs, and of the tensors that forward saves for backward."""
    written = set(plans.tensors_of(problem, algorithm, "forward", "store"))
    inputs = set(plans.tensors_of(problem, algorithm, "forward", "load")) - written
    if algorithm not in plans.TRAINING:  # without a backward pass, nothing is saved
        return inputs | written & {"O", "L"}
    return inputs | written & set(plans.tensors_of(problem, algorithm, "backward", "load"))


def strip_rows(stage: plans.Stage, schedule: Schedule, device: Device) -> int:
    """Return the number of complete rows of scores that a stage keeps on chip at the same time."""
    row = sum(b.per_row for b in stage.buffers)
    longest = max(s.q_stop - s.q_start for s in schedule.problem.sequences)
    tallest = min(schedule.tiling.block_q, longest)
    return max(1, min(tallest, device.sram_bytes // row)) if row else tallest


def live(problem: Problem, algorithm: str) -> int:
    """Return the HBM bytes of a backward pass: saved tensors, out, dout, workspace, gradients."""
    p = problem
    outputs = p.batch * p.heads * p.n_q * (p.head_dim + p.head_dim_v)  # dq and dout
    outputs += p.batch * p.kv_heads * p.n_kv * (p.head_dim + p.head_dim_v)  # dk and dv
    if "O" not in _kept(p, algorithm):  # the pass does not read out, but the caller still has it
        outputs += p.batch * p.heads * p.n_q * p.head_dim_v
    held = saved(p, algorithm) + workspace(p, algorithm, "backward")
    held += whole_bytes(p, "dL") if p.dlse else 0
    return held + outputs * p.result_itemsize


def figures(source: Answers) -> dict[str, int | float | None]:
    """Return the bytes and FLOPs of a pass over all heads, with the column names of a sweep."""
    p, algorithm, own = source.problem, source.algorithm, getattr(source, "own", None)
    return {
        **{f"{op}_bytes": source.bytes(op) for op in OPS},
        "requested_bytes": source.bytes(),
        "compulsory_bytes": source.compulsory(),
        "flops": source.flops(),
        "matmul_flops": source.flops("matmul"),
        "intensity": source.intensity(),
        "peak_sram_bytes": source.peak_sram(),
        "saved_bytes": saved(p, algorithm) if own is None else None,
        "workspace_bytes": (
            workspace(p, algorithm, source.direction) if own is None else own.workspace
        ),
    }
