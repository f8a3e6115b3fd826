"""`Geometry`: the tile and matrix of each access, and which tensors have queries or keys as rows.

A kernel gets only pointers, so a record only says which elements were accessed. From the elements,
`Geometry` derives each access's rows, columns and head, the tile sizes, and the attention problem.
`Geometry` also finds the axis along which each tensor is tiled: queries, keys or, for scores, both.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from flashsim.errors import FlashSimError, OptionError
from flashsim.own_kernels.names import labels
from flashsim.own_kernels.record import KernelRecord
from flashsim.own_kernels.tensors import KernelTensor
from flashsim.problem.checks import DTYPES
from flashsim.problem.problem import MAX_HEAD_DIM, Problem
from flashsim.schedule.names import LOAD
from flashsim.schedule.tensors import AXES, COL, ROW, STATISTICS, TILE

#: Usual parameter names of a kernel's causal flag and scale.
_CAUSAL = ("causal", "is_causal")
_OFFSETS = re.compile(r"cu|seq|off|ptr|start|loc|len|bound|lim", re.IGNORECASE)
_MATRICES = ("Q", "K", "V", "O", "dO", "dQ", "dK", "dV")
_SCALE = ("scale", "sm_scale", "softmax_scale", "sm_scale_", "qk_scale")


@dataclass(frozen=True)
class Sides:
    """The tiling of a kernel's tensor: along queries, keys or both.

    Attributes
    ----------
    axis : ROW if the rows are queries, COL if they are keys, TILE for query rows and key columns
    rows : index of the axis along which the tensor's rows lie
    vector : True for a tensor with one number per row
    """

    axis: int
    rows: int
    vector: bool


class Geometry:
    """The tiles, heads and tiled axes of all tensors and accesses in a record.

    Attributes
    ----------
    labels : the tensors' names in the FlashAttention papers, where known, or else in the kernel
    lead : which matrix of the tensor each access touches (0 is the first), int32 (accesses,)
    row, rows, col, cols : each access's bounding box in that matrix: first row, number of rows, ...
    spans : how many matrices (heads) the bounding box spans
    shapes : the tensors' shapes, with an axis of heads if a tensor stacks the rows of all heads
    """

    def __init__(
        self,
        record: KernelRecord,
        names: Mapping[str, str] | None = None,
        problem: Problem | None = None,
        values: Sequence[np.ndarray] = (),
    ) -> None:
        self.record = record
        self.labels = labels([t.name for t in record.tensors], names)
        axes = next((len(t.shape) for t in record.tensors if self.labels[t.code] in ("Q", "O")), 0)
        self.shapes = [
            _stacked(_column(t.shape, label, axes), label, problem)
            for t, label in zip(record.tensors, self.labels, strict=True)
        ]
        n = len(record.accesses)
        self.lead, self.row, self.col = (np.full(n, -1, np.int32) for _ in range(3))
        self.rows, self.cols, self.spans = (np.zeros(n, np.int32) for _ in range(3))
        self.sides: list[Sides] = []
        self.leads: list[int] = []
        self.lengths: list[int] = []
        self.widths: list[int] = []
        self._of: dict[int, np.ndarray] = {}  # by tensor, its accesses
        self._single = self._one_query(problem)
        for t, label in zip(record.tensors, self.labels, strict=True):
            low, high = self._box(t)
            self.sides.append(Sides(AXES.get(label, -1), *self._matrix(t, label, high - low)))
            self._split(t.code, low, high)
        self._place_others()
        self.derived = problem is None
        self.problem = self._problem(values) if problem is None else problem

    def _one_query(self, problem: Problem | None) -> bool:
        """Return True if each row of Q is a head with a single query, as in decoding."""
        by = dict(zip(self.labels, self.record.tensors, strict=True))
        if "Q" not in by or "K" not in by:
            return False
        q, k = by["Q"].shape, by["K"].shape
        one_fewer = len(q) == len(k) - 1 and len(q) >= 2 and k[0] % q[0] in (0, k[0])
        return one_fewer if problem is None else problem.n_q == 1

    # -- boxes ----------------------------------------------------------------------------------

    def _box(self, t: KernelTensor) -> tuple[np.ndarray, np.ndarray]:
        """Return the lowest and the highest indices of each access, int32 (axes, accesses)."""
        a, shape = self.record.accesses, self.shapes[t.code] or (1,)
        mine = np.flatnonzero((a["tensor"] == t.code) & (a["active"] > 0))
        if len(mine):
            self._of[t.code] = mine
        low, high = (_indices(a[name][mine], shape) for name in ("first", "last"))
        if shape != (t.shape or (1,)):  # a box over two heads holds whole rows of both
            across = low[0] != high[0]
            low[1:, across] = 0
            high[1:, across] = np.array(shape[1:])[:, None] - 1
        return low, high

    def _matrix(self, t: KernelTensor, label: str, extents: np.ndarray) -> tuple[int, bool]:
        """Return the axis that holds a tensor's rows, and True if the tensor is a vector."""
        shape = self.shapes[t.code]
        thinner = any(
            len(other.shape) > 1
            and other.size == t.size * other.shape[-1]
            and shape[-1] in self.shapes[other.code][:-1]
            for other in self.record.tensors
            if shape and other is not t
        )
        if len(shape) < 2 or label in STATISTICS or label == "L_part" or thinner:
            return max(len(shape) - 1, 0), True
        extent = extents.max(axis=1, initial=0)[:-1]
        return int(np.argmax(extent)) if extent.any() else len(shape) - 2, False

    def _split(self, code: int, low: np.ndarray, high: np.ndarray) -> None:
        """Split each access's box into matrices (heads), rows and columns."""
        shape, side = self.shapes[code] or (1,), self.sides[code]
        others = [x for x in range(len(shape)) if x != side.rows]
        if not side.vector:
            others.remove(len(shape) - 1)
        single = self._single and side.axis == ROW
        leads, length = math.prod(shape[x] for x in others), shape[side.rows]
        self.leads.append(leads * length if single else leads)
        self.lengths.append(1 if single else length)
        self.widths.append(1 if side.vector else shape[-1])
        mine = self._of.get(code, np.zeros(0, np.int64))
        lead, spans = np.zeros(len(mine), np.int32), np.ones(len(mine), np.int32)
        for x in others:
            lead = lead * shape[x] + low[x]
            spans *= high[x] - low[x] + 1
        row, rows = low[side.rows], high[side.rows] - low[side.rows] + 1
        if single:
            lead, row, rows = lead * length + row, 0 * row, 0 * row + 1
        self.lead[mine], self.row[mine], self.rows[mine] = lead, row, rows
        self.spans[mine] = spans
        self.col[mine] = 0 if side.vector else low[-1]
        self.cols[mine] = 1 if side.vector else high[-1] - low[-1] + 1

    # -- sides ----------------------------------------------------------------------------------

    def _place_others(self) -> None:
        """Find the tiled axis of tensors with unknown names from the tiles that programs access."""
        a = self.record.accesses
        self.outer: list[str] = []
        for launch in range(len(self.record.launches)):
            moving: dict[int, tuple[bool, bool]] = {}
            for code, its in self._of.items():
                mine = its[a["launch"][its] == launch]
                if len(mine):
                    program = a["program"][mine]
                    down = _varies(program, self.row[mine])
                    across = not self.sides[code].vector and _varies(program, self.col[mine])
                    moving[code] = down, across
            self.outer.append(self._outer(moving))
            own, other = (ROW, COL) if self.outer[-1] == "queries" else (COL, ROW)
            for code, (down, across) in moving.items():
                side = self.sides[code]
                if side.axis < 0:
                    wide = self.widths[code] > MAX_HEAD_DIM
                    axis = TILE if (across and not down) or wide else other if down else own
                    self.sides[code] = replace(side, axis=axis)
        self.sides = [replace(s, axis=ROW) if s.axis < 0 else s for s in self.sides]

    def _outer(self, moving: Mapping[int, tuple[bool, bool]]) -> str:
        votes = 0
        for code, (down, _) in moving.items():
            axis = self.sides[code].axis
            if axis in (ROW, COL) and not self.sides[code].vector:
                votes += 1 if (axis == COL) == down else -1
        return "keys" if votes < 0 else "queries"

    # -- the problem ----------------------------------------------------------------------------

    def constant(self, names: tuple[str, ...]) -> object:
        """Return the value of the first launch argument that has one of these names, or None."""
        for launch in self.record.launches:
            for name, value in launch.constants.items():
                if name.lower() in names:
                    return value
        return None

    @property
    def may_be_causal(self) -> bool:
        """Return True if no argument tells whether a derived problem is causal."""
        return self.derived and not self.problem.causal and self.constant(_CAUSAL) is None

    @property
    def scale(self) -> float | None:
        """Return the softmax scale that the launches pass as an argument, or None."""
        given = self.constant(_SCALE)
        return float(given) if isinstance(given, (int, float)) else None

    def _packed(self, n_q: int, n_kv: int, values: Sequence[np.ndarray]) -> dict[str, list[int]]:
        """Return the sequence offsets that a kernel loads, or {} if sequences are not packed.

        Offsets are integers that begin with 0 and end with the number of queries or keys.
        """
        found: dict[str, list[int]] = {}
        a = self.record.accesses
        for t, value in zip(self.record.tensors, values, strict=False):
            if value.ndim != 1 or len(value) < 2 or value.dtype.kind not in "iu":
                continue
            ops = a["op"][a["tensor"] == t.code]
            rises = value[0] == 0 and (np.diff(value) >= 0).all()
            if not rises or not len(ops) or (ops != LOAD).any() or not _OFFSETS.search(t.name):
                continue
            of_keys = value[-1] == n_kv and (value[-1] != n_q or "q" in found)
            if of_keys or value[-1] == n_q:
                found.setdefault("k" if of_keys else "q", value.tolist())
        if not found or (len(found) == 1 and n_q != n_kv):
            return {}
        q = found.get("q") or found["k"]
        return {"cu_seqlens_q": q, "cu_seqlens_k": found.get("k", q)}

    def _problem(self, values: Sequence[np.ndarray]) -> Problem:
        rows = self._pick(ROW, ("Q", "O", "dO", "dQ"))
        cols = self._pick(COL, ("K", "V", "dK", "dV"))
        tile = self._pick(TILE, ("S", "P"))
        n_q = n_kv = heads = width = 1
        if tile is not None:
            n_q, n_kv, heads = self.lengths[tile], self.widths[tile], self.leads[tile]
        if rows is not None:
            n_q, heads, width = self.lengths[rows], self.leads[rows], self.widths[rows]
        kv_heads = heads
        if cols is not None:
            n_kv, kv_heads = self.lengths[cols], self.leads[cols]
        elif tile is None:
            n_kv = n_q
        width_v = self.widths[self.labels.index("V")] if "V" in self.labels else width
        if kv_heads < 1 or heads % kv_heads:
            kv_heads = heads
        batch = 1
        first = () if rows is None else self.record.tensors[rows].shape
        if len(first) == 4 and heads % first[0] == 0 and kv_heads % first[0] == 0:
            batch = first[0]
        # L and workspaces may be float32 in kernels of any type.
        codes = sorted(range(len(self.labels)), key=lambda code: self.labels[code] not in _MATRICES)
        types = [self.record.tensors[code].dtype for code in codes]
        dtype = next((one for one in types if one in DTYPES), "float32")
        scale = self.scale
        if scale is not None and math.isclose(scale, width**-0.5, rel_tol=1e-6):
            scale = None
        try:
            return Problem(
                n_q=n_q,
                n_kv=n_kv,
                head_dim=min(width, MAX_HEAD_DIM),
                head_dim_v=min(width_v, MAX_HEAD_DIM),
                batch=batch,
                heads=heads // batch,
                kv_heads=kv_heads // batch,
                dtype=dtype,
                causal=bool(self.constant(_CAUSAL)),
                **self._packed(n_q, n_kv, values),  # type: ignore[arg-type]
                scale=scale,  # type: ignore[arg-type]
            )
        except FlashSimError as error:
            raise OptionError(
                f"the attention problem cannot be derived from the tensors' shapes ({error}); pass "
                "problem=flashsim.Problem(...)"
            ) from error

    def _pick(self, axis: int, first: tuple[str, ...]) -> int | None:
        """Return the code of a tensor that is tiled along `axis`; labels in `first` come first."""
        known = [self.labels.index(label) for label in first if label in self.labels]
        used = sorted(self._of, key=lambda code: self.sides[code].vector)
        return next((c for c in (*known, *used) if self.sides[c].axis == axis), None)

    # -- attention ------------------------------------------------------------------------------

    @cached_property
    def heights(self) -> list[tuple[int, int]]:
        """Return two lengths per launch: the rows of a query tile, and the rows of a key tile."""
        a = self.record.accesses
        axis = np.array([s.axis for s in self.sides] + [-1])[a["tensor"]]
        found = []
        for launch in range(len(self.record.launches)):
            mine = (a["launch"] == launch) & (a["active"] > 0) & (self.spans <= 1)
            down = mine & ((axis == ROW) | (axis == TILE))
            along = np.where(axis == TILE, self.cols, self.rows)[mine & (axis != ROW)]
            found.append((int(self.rows[down].max(initial=0)), int(along.max(initial=0))))
        # A launch that touches only query or only key tensors gets the other size from the others.
        q = max((q for q, _ in found), default=0) or self.problem.n_q
        k = max((k for _, k in found), default=0) or self.problem.n_kv
        return [(mine_q or q, mine_k or k) for mine_q, mine_k in found]


def _column(shape: tuple[int, ...], label: str, axes: int) -> tuple[int, ...]:
    """Return the shape of one number per row without a last axis of length 1.

    `axes` is the number of axes of Q or O: with as many, (heads, rows, 1) is a column per head.
    """
    column = label in STATISTICS and len(shape) == axes > 1 and shape[-1] == 1
    return shape[:-1] if column else shape


def _stacked(shape: tuple[int, ...], label: str, p: Problem | None) -> tuple[int, ...]:
    """Return a tensor's shape, with an axis of heads if the tensor stacks the rows of all heads."""
    axis = AXES.get(label, -1)
    if p is None or axis not in (ROW, COL) or p.cu_seqlens_q is not None:
        return shape
    heads, n = (p.heads, p.n_q) if axis == ROW else (p.kv_heads, p.n_kv)
    heads *= p.batch
    wide = 1 if label in STATISTICS else 2
    if heads == 1 or len(shape) != wide or shape[0] != heads * n:
        return shape
    return (heads, n, *shape[1:])


def _indices(numbers: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Convert row-major element numbers to the elements' indices, int32 (axes, accesses)."""
    found = np.empty((len(shape), len(numbers)), np.int32)
    for axis in range(len(shape) - 1, 0, -1):
        numbers, found[axis] = np.divmod(numbers, shape[axis])
    found[0] = numbers
    return found


def _varies(program: np.ndarray, value: np.ndarray) -> bool:
    """Return True if `value`, a number per access, differs between accesses of the same program."""
    order = np.argsort(program, kind="stable")
    p, v = program[order], value[order]
    return bool(((p[1:] == p[:-1]) & (v[1:] != v[:-1])).any())
