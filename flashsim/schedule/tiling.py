"""`Tiling`: the size of a tile of scores, its on-chip bytes, and the best size that fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

from flashsim.errors import OptionError, SramOverflow, TilingError, own_errors
from flashsim.problem import checks
from flashsim.problem.hardware import Device
from flashsim.problem.masks import BlockMask
from flashsim.problem.problem import Problem
from flashsim.schedule import plans
from flashsim.schedule.presets import PRESETS
from flashsim.schedule.split import WHOLE, Split

#: Tile sides that `Tiling.fit` considers; real kernels use multiples of the tensor cores' 16.
SIDES = (16, 32, 64, 128, 256, 512)
#: The stage that computes dQ alone.
DQ_ALONE = "dq"


@own_errors
@dataclass(frozen=True)
class Tiling:
    """The size of a tile of scores: `block_q` query rows (B_r) by `block_k` key columns (B_c).

    Parameters
    ----------
    block_q, block_k : int
    dq_rows : int, optional
        Query rows per tile in the pass that computes dQ alone, a multiple of `block_q`. That pass
        keeps no dK and dV on chip, so it has room for more rows. Default: `block_q`.

    Raises
    ------
    DTypeError, TilingError
        If a side is not a positive integer, or `dq_rows` is not a multiple of `block_q`.
    """

    block_q: int
    block_k: int
    dq_rows: int | None = None

    def __post_init__(self) -> None:
        for name in ("block_q", "block_k", *(("dq_rows",) if self.dq_rows is not None else ())):
            try:
                object.__setattr__(self, name, checks.positive_int(name, getattr(self, name)))
            except ValueError as error:
                raise TilingError(str(error)) from None
        if self.dq_rows is None:
            return
        if self.dq_rows % self.block_q:
            raise TilingError(
                f"dq_rows must be a multiple of block_q, got dq_rows={self.dq_rows} and "
                f"block_q={self.block_q}"
            )
        if self.dq_rows == self.block_q:
            object.__setattr__(self, "dq_rows", None)

    def __str__(self) -> str:
        tile = f"{self.block_q} x {self.block_k}"
        return f"{tile} (dQ: {self.dq_rows} x {self.block_k})" if self.dq_rows else tile

    def of(self, stage: str) -> Tiling:
        """Return the size of the tiles of the stage with this name, without `dq_rows`."""
        if self.dq_rows is None:
            return self
        return Tiling(self.dq_rows if stage == DQ_ALONE else self.block_q, self.block_k)

    @staticmethod
    def joined(tiles: Mapping[str, Tiling]) -> Tiling:
        """Return one tiling from the tiles of each stage, by name: the inverse of `of`."""
        tile = next(iter(tiles.values()))
        return replace(tile, dq_rows=tiles[DQ_ALONE].block_q) if DQ_ALONE in tiles else tile

    def refuse_dq_rows(self, backend: str) -> None:
        """Raise `TilingError` if dQ's pass has tiles of another size than other passes."""
        if self.dq_rows:
            raise TilingError(
                f"{backend} has tiles of one size in all passes, not {self}; leave out dq_rows=, "
                "or use backend='simulator'"
            )

    def divides(self, cells: BlockMask | None) -> bool:
        """Return True if there is no block mask, or each tile lies in one cell of the mask."""
        rows = self.dq_rows or self.block_q
        return cells is None or not (cells.block_q % rows or cells.block_k % self.block_k)

    def keeps_scales(self, problem: Problem) -> bool:
        """Return False if a tile overlaps two FP8 scale blocks but cuts a block; otherwise True."""
        if not isinstance(problem.scales, tuple):
            return True
        rows, keys = zip(problem.scales, (problem.n_q, problem.n_kv), strict=True)
        sides = (self.block_q, *rows), (self.dq_rows or self.block_q, *rows), (self.block_k, *keys)
        return all(side >= n or not (side % every and every % side) for side, every, n in sides)

    def clip(self, problem: Problem, split: Split = WHOLE) -> Tiling:
        """Return the tile, with each side limited to the size of the problem's score matrix."""
        checks.instance("problem", problem, Problem, "flashsim.Problem")
        n = problem.n_q * (problem.group if split.pack_gqa else 1)
        return Tiling(min(self.block_q, n), min(self.block_k, problem.n_kv))

    def buffers(
        self,
        problem: Problem,
        algorithm: str = "flash2",
        direction: str = "forward",
        split: Split = WHOLE,
    ) -> dict[str, dict[str, int]]:
        """Return the on-chip bytes of each buffer of each stage: ``{stage: {buffer: bytes}}``.

        In standard attention's softmax, only one complete row of scores counts, because rows can be
        processed one at a time.
        """
        tables = {}
        for stage in plans.stages(problem, algorithm, direction, split):
            tile = self.of(stage.name).clip(problem, split)
            rows = 1 if stage.whole_rows else tile.block_q
            tables[stage.name] = {b.name: b.nbytes(rows, tile.block_k) for b in stage.buffers}
        return tables

    def footprint(
        self,
        problem: Problem,
        algorithm: str = "flash2",
        direction: str = "forward",
        split: Split = WHOLE,
    ) -> int:
        """Return the largest number of on-chip bytes that any stage needs for all its buffers."""
        tables = self.buffers(problem, algorithm, direction, split).values()
        return max(sum(table.values()) for table in tables)

    def check(
        self,
        problem: Problem,
        device: Device | str,
        algorithm: str = "flash2",
        direction: str = "forward",
        split: Split = WHOLE,
    ) -> None:
        """Raise an error unless every stage fits in one thread block's on-chip memory.

        Raises
        ------
        SramOverflow
            If a stage does not fit. The message lists its buffers and the largest tiling that fits.
        TilingError
            If a tile lies partly in two blocks with different scales.
        """
        device = Device.get(device)
        if not self.keeps_scales(problem):
            raise TilingError(
                f"{self} tiles would split the scale blocks of {problem.scales} query and key "
                "rows; use tile sides that divide the block sides, or are multiples of them"
            )
        for stage, table in self.buffers(problem, algorithm, direction, split).items():
            need = sum(table.values())
            if need > device.sram_bytes:
                rows = "".join(f"\n  {name:<6}{size:>14,} B" for name, size in table.items())
                raise SramOverflow(
                    f"in stage {stage!r} of {algorithm} {direction}, a {self} tile with "
                    f"head_dim={problem.head_dim} and {problem.dtype} needs {need:,} B on chip, "
                    f"but a thread block of {device.name} has {device.sram_bytes:,} B; "
                    f"{self._advice(problem, device, algorithm, direction, split)}. The stage's "
                    f"buffers are:{rows}"
                )

    def _advice(
        self, problem: Problem, device: Device, algorithm: str, direction: str, split: Split
    ) -> str:
        try:
            fits = Tiling.fit(problem, device, algorithm, direction, split)
        except SramOverflow:
            return "no tiling fits; use a device with more SRAM or another algorithm"
        return f"the largest tiling that fits is Tiling({fits.block_q}, {fits.block_k})"

    @classmethod
    def common(
        cls,
        problem: Problem,
        device: Device | str,
        algorithms: Sequence[str],
        directions: Sequence[str] = ("forward",),
    ) -> Tiling:
        """Return one tiling that fits on chip for several algorithms, so that a comparison is fair.

        The search tries 64 x 64, 64 x 32, 32 x 32, 32 x 16 and so on. The search ignores algorithms
        that need all keys in one tile ("flash2-once").

        Raises
        ------
        SramOverflow
            If not even a tile of 1 x 1 fits.
        """
        device = Device.get(device)
        wanted = [
            (name, direction, Split(2**62, True) if plans.splits_keys(name) else WHOLE)
            for name in algorithms
            for direction in directions
            if not any(s.once for s in plans.stages(problem, name, direction))
        ]
        rows = cols = 64
        while True:
            try:
                for name, direction, split in wanted:
                    cls(rows, cols).check(problem, device, name, direction, split)
            except TilingError:
                if rows == cols == 1:
                    raise
                rows, cols = (rows, cols // 2) if rows == cols else (rows // 2, cols)
            else:
                return cls(rows, cols)

    @classmethod
    def fit(
        cls,
        problem: Problem,
        device: Device | str = "H100",
        algorithm: str = "flash2",
        direction: str = "forward",
        split: Split = WHOLE,
    ) -> Tiling:
        """Return the tiling that fits on chip and, without a mask, moves the fewest bytes.

        The bytes are those between HBM and SRAM. The choice ignores masks: under a window or a
        causal mask, smaller tiles can move fewer bytes, because they skip more of the scores. It
        also ignores that tiles change the number of splits, if an algorithm splits keys.

        Only the tile side of the *outer* loop reduces HBM traffic. In a Q-outer loop, K and V are
        read once for each of the ``n_q / block_q`` row tiles. In a KV-outer loop, Q (and O) are
        read once for each of the ``n_kv / block_k`` column tiles. So the search chooses the outer
        side first, and the largest inner side that fits second. For an algorithm with both kinds of
        loops (a three-pass backward), the search enlarges the smaller side first. The sides are
        powers of two from 16 to 512.

        Line 1 of Algorithm 1 in arXiv:2205.14135, B_c = ceil(M / 4d), leaves out the score tile, so
        the paper's tiles can need more than M. If an algorithm splits keys, tiles have at most 128
        keys, so that parts are nearly equal. If an algorithm needs one key tile per row tile, a
        tile has all keys of a sequence.

        Raises
        ------
        SramOverflow
            If not even a 1 x 1 tile fits, or, with one key tile per row tile, a tile of one query
            and all keys.
        """
        return _fit(problem, Device.get(device), algorithm, direction, split)

    @classmethod
    def preset(cls, name: str, head_dim: int, *, causal: bool = False) -> Tiling:
        """Return a published kernel's tile for this head_dim; `PRESETS` lists kernels and sources.

        Raises
        ------
        OptionError, ShapeError, DTypeError
            If the preset is unknown, or has no tile for that head_dim.
        """
        checks.one_of("tiling preset", name, PRESETS)
        head_dim = checks.positive_int("head_dim", head_dim)
        causal = checks.flag("causal", causal)
        table = PRESETS[name]
        for limit, (dense, masked) in table.items():
            if head_dim <= limit:
                return cls(*(masked if causal else dense))
        raise OptionError(
            f"preset {name!r} has no tile size for head_dim={head_dim}; pass "
            f"tiling=flashsim.Tiling(block_q, block_k), or a head_dim of at most {max(table)}"
        )


@lru_cache(maxsize=256)
def _fit(problem: Problem, device: Device, algorithm: str, direction: str, split: Split) -> Tiling:
    """Return the cached result of `Tiling.fit`, the best of up to 72 tilings."""
    stages = plans.stages(problem, algorithm, direction, split)
    most_keys = 128 if any(stage.parts for stage in stages) else SIDES[-1]
    whole = any(stage.once for stage in stages)
    fewest_keys = max(s.k_stop - s.k_start for s in problem.sequences) if whole else 1
    outers = {stage.outer for stage in stages if any(buffer.visit for buffer in stage.buffers)}

    def merit(tiling: Tiling) -> tuple[int, ...]:
        q, k = tiling.block_q, tiling.block_k
        if whole:  # no sequence has keys beyond its length
            return q, -k
        if len(outers) == 2:
            return min(q, k), q * k, q
        return (q, k) if outers == {"queries"} else (k, q)

    blocks = problem.scales if isinstance(problem.scales, tuple) else ()
    own = (fewest_keys,) if whole else ()
    for sides in ((*SIDES, *blocks, *own), (1, 2, 4, 8, 16, *own)):
        fitting = [
            tiling
            for tiling in (Tiling(q, k) for q, k in product(sides, sides))
            if fewest_keys <= tiling.block_k <= most_keys
            and tiling.keeps_scales(problem)
            and tiling.footprint(problem, algorithm, direction, split) <= device.sram_bytes
        ]
        if fitting:
            best = max(fitting, key=merit)
            trimmed = _trim(best, problem, split)
            return trimmed if trimmed.keeps_scales(problem) else best
    least = Tiling(1, fewest_keys)
    smallest = least.footprint(problem, algorithm, direction, split)
    raise SramOverflow(
        f"{algorithm} {direction} at head_dim={problem.head_dim}, n_kv={problem.n_kv}, "
        f"{problem.dtype} needs {smallest:,} B on chip even with a {least} tile, but "
        f"a thread block of {device.name} has {device.sram_bytes:,} B; use a device with more SRAM"
        + (
            " or a flash algorithm (standard attention's softmax needs a whole row)"
            if any(s.whole_rows and s.per == "head" for s in stages)
            else ""
        )
    )


def _trim(tiling: Tiling, problem: Problem, split: Split) -> Tiling:
    """Halve each side of `tiling` while half of the side still covers the score matrix."""
    q, k = tiling.block_q, tiling.block_k
    rows = problem.n_q * (problem.group if split.pack_gqa else 1)
    while q // 2 >= rows:
        q //= 2
    while k // 2 >= problem.n_kv:
        k //= 2
    return Tiling(q, k)
