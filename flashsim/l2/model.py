"""Predicts DRAM traffic by the L2 model: `dram` for the device's L2, `curves` for every size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from flashsim import report
from flashsim.counts import questions
from flashsim.counts.traffic import Traffic
from flashsim.errors import UnsupportedError, own_errors
from flashsim.l2.captured import LINE, LINED
from flashsim.l2.curve import Curve
from flashsim.l2.launch import L2Launch, L2Model
from flashsim.l2.requests import SetCache, Stream, TileNumbers, stream
from flashsim.problem import checks
from flashsim.problem.hardware import Device

OPS = ("read", "write", "pending")

#: A sample has at least this many sets, lines in total, and lines per tensor of captured arrays.
LEAST_SETS, LEAST_LINES, LEAST_CAPTURED = 256, 50_000, 64
#: A simulated cache is at most this many times as large as all tensors together.
SPARE = 16


@dataclass(frozen=True)
class StageDram:
    """One kernel's DRAM bytes by tensor; `pending` bytes are dirty in L2 as the kernel ends."""

    name: str
    read: dict[str, int]
    write: dict[str, int]
    pending: dict[str, int]


@own_errors
@dataclass(frozen=True, eq=False)
class Dram:
    """The predicted DRAM traffic of a forward or backward pass.

    Attributes
    ----------
    requested : Traffic
        The bytes that the SMs request from L2.
    stages : tuple of StageDram
        One entry per kernel (stage), in order.
    """

    requested: Traffic
    model: L2Model
    stages: tuple[StageDram, ...]

    def bytes(
        self, op: str | None = None, tensor: str | None = None, stage: str | None = None
    ) -> int:
        """Return the DRAM bytes: all, or only those of an operation, a tensor or a stage (kernel).

        Parameters
        ----------
        op : {"read", "write", "pending"}, optional
            "write": bytes that evictions write back while the kernel runs; the hardware counter
            ``dram__bytes_write.sum`` shows at least these. "pending": bytes that are dirty in L2
            when the kernel ends (with ``flush=False``, when the last kernel ends), and are written
            later. Default: reads and writes, including pending bytes.
        tensor : str, optional
            A tensor's name as in `count`, except that "F" contains "F_own", and "M" contains
            "M_own".
        """
        if op is not None:
            checks.one_of("DRAM operation", op, OPS)
        if stage is not None:
            checks.one_of("stage", stage, [s.name for s in self.stages])
        questions.check_names(None, tensor)
        return sum(
            nbytes
            for part in self.stages
            if stage in (None, part.name)
            for its_op in (OPS if op is None else (op,))
            for its_tensor, nbytes in getattr(part, its_op).items()
            if tensor in (None, its_tensor)
        )

    def hit_rate(self) -> float:
        """Return the fraction of the loaded and reduced bytes that hit in L2."""
        asked = self.requested.bytes("load") + self.requested.bytes("reduce")
        return 1 - self.bytes("read") / asked

    def intensity(self) -> float:
        """Return the arithmetic intensity: FLOPs per byte of DRAM traffic."""
        return self.requested.flops() / self.bytes()

    def table(self) -> report.Table:
        """Return a table that lists each kernel's requested bytes and DRAM bytes."""
        r, columns = self.requested, ("stage", *(f"{op} B" for op in questions.OPS))
        table = report.Table(
            f"{r.algorithm} {r.direction}, {questions.in_words(r.problem)}, tiles {r.tiling}, "
            f"{r.device.name}: "
            f"L2 of {r.device.l2_bytes:,} B, {self.model.launch}, "
            f"{'empty' if self.model.flush else 'warm'} L2 at kernel start",
            (*columns, "DRAM read B", "DRAM write B", "pending B"),
            note=(
                f"compulsory {r.compulsory():,} B · L2 hit rate {self.hit_rate():.1%} · simulated; "
                "docs/reference/predictions.md compares the model with hardware counters"
            ),
        )
        for part in self.stages:
            moved = questions.by_operation(r.transfers, (part.name,))
            asked = (sum(n for (op, _), n in moved.items() if op == its) for its in questions.OPS)
            table.add(part.name, *asked, *(sum(getattr(part, op).values()) for op in OPS))
        table.add("all", *(r.bytes(op) for op in questions.OPS), *(self.bytes(op) for op in OPS))
        return table

    _repr_html_ = report.tabled

    def __str__(self) -> str:
        return self.table().text()

    def __repr__(self) -> str:
        r = self.requested
        return (
            f"<Dram {r.algorithm} {r.direction}: {self.bytes():,} B of {r.bytes():,} B requested>"
        )


@own_errors
def dram(requested: Traffic, model: L2Model | None = None) -> Dram:
    """Predict the DRAM traffic of a pass, by replaying all requests through the device's L2.

    Parameters
    ----------
    requested : Traffic
        From `flashsim.count`, or `Trace.predicted`.
    model : L2Model, optional

    Raises
    ------
    UnsupportedError
        If there are too many requests to replay, or if a score function indexes a captured array
        with elements of another captured array.
    """
    model = _model(requested, model)
    r, whole = requested, model.ways is None
    tiles = TileNumbers.of(r)
    cache = _WholeTiles(tiles, r.device) if whole else _Sets(tiles, r.device, model)
    stages: list[StageDram] = []
    for stage in r.stages:
        waited_for = cache.copy() if isinstance(cache, _Sets) else None
        part = stream(L2Launch(model, r, stage), tiles, waited_for)
        read, written = cache.replay(part)
        last = len(stages) + 1 == len(r.stages)
        # Otherwise the next kernel may still use the dirty lines.
        pending = cache.drain() if model.flush or last else {}
        stages.append(StageDram(part.stage.name, read, written, pending))
    return Dram(requested, model, tuple(stages))


@own_errors
def curves(requested: Traffic, model: L2Model | None = None) -> dict[str, Curve]:
    """Return each kernel's (stage's) DRAM bytes as a function of L2's size.

    The simulated cache is the textbook cache of `L2Model(ways=None)`, and each kernel starts with
    an empty cache.
    """
    tiles, streams = _streams(requested, _model(requested, model))
    return {part.stage.name: Curve.measure(part, tiles.size) for part in streams}


def _model(requested: Traffic, model: L2Model | None) -> L2Model:
    """Return `model` (None: the default model), after checking that the model supports the pass."""
    checks.instance("requested", requested, Traffic, "Traffic, from flashsim.count")
    shared = requested.problem.shared_prefix
    if shared or (requested.split.pack_gqa and requested.problem.bias):
        what = "rows of several sequences" if shared else "a bias of packed heads"
        instead = "leave out shared_prefix=" if shared else "pass pack_gqa=False"
        raise UnsupportedError(f"the L2 model does not support {what}; {instead}")
    if requested.problem.scales is not None:
        raise UnsupportedError(
            "the L2 model replays whole tiles, so it does not support scales, which have 4 "
            "bytes each and share cache lines; leave out scales=, which does not change the "
            "other tensors' bytes"
        )
    model = L2Model() if model is None else model
    return checks.instance("l2", model, L2Model, "flashsim.l2.L2Model")


def _streams(requested: Traffic, model: L2Model) -> tuple[TileNumbers, Iterator[Stream]]:
    """Return the tiles and every stage's requests, of visits that do not wait for lines."""
    tiles = TileNumbers.of(requested)
    return tiles, (stream(L2Launch(model, requested, stage), tiles) for stage in requested.stages)


class _WholeTiles:
    """A textbook cache (fully associative, whole tiles), simulated by `caches.replay`."""

    def __init__(self, tiles: TileNumbers, device: Device) -> None:
        self.tiles, self.capacity = tiles, device.l2_bytes
        self._empty()

    def _empty(self) -> None:
        count = len(self.tiles.size)
        self.links = np.zeros((count + 1, 2), np.int32)
        self.links[count] = count  # the sentinel, linked to itself: an empty list
        self.state, self.used = np.zeros(count + 1, np.uint8), np.zeros(1, np.int64)

    def replay(self, part: Stream) -> tuple[dict[str, int], dict[str, int]]:
        """Replay a kernel's requests; return the DRAM bytes read and written, by tensor."""
        from flashsim.l2.caches import replay

        size = self.tiles.size
        fetched, lost = np.zeros((2, len(size)), np.int64)
        arrays = self.links, self.state, self.used
        replay(part.ids, part.codes, size, self.capacity, *arrays, fetched, lost)
        return self.tiles.by_tensor(fetched), self.tiles.by_tensor(lost)

    def drain(self) -> dict[str, int]:
        """Empty the cache, and return the dirty bytes by tensor."""
        from flashsim.l2.caches import DIRTY

        dirty = self.tiles.by_tensor(self.tiles.size * (self.state[:-1] == DIRTY))
        self._empty()
        return dirty


class _Sets:
    """A cache like a GPU's L2; `caches.replay_sets` simulates a sample of the sets.

    Each line hashes to one set, so a sample of sets represents all sets (set sampling: Kessler,
    Hill and Wood, 1994). The same fraction of each tile's lines is in the sample. Counts of a
    tensor's sampled lines are scaled up to all bytes of the tensor.
    """

    def __init__(self, tiles: TileNumbers, device: Device, model: L2Model) -> None:
        assert model.ways is not None
        self.tiles = tiles
        rng = np.random.default_rng(model.seed)
        lines = -(-tiles.size // LINE)
        parts = model.parts(device)
        # A cache many times as large as all tensors behaves like a smaller one, so it is cut.
        capacity = min(device.l2_bytes, SPARE * (int(lines.sum()) + 1) * LINE)
        all_sets = max(1, round(capacity / (parts * LINE * model.ways)))
        share = min(1.0, max(LEAST_SETS / all_sets, LEAST_LINES / int(lines.sum())))
        sets = max(1, round(all_sets * share))
        if share < 1:
            lines = np.floor(tiles.size / LINE * sets / all_sets + rng.random(len(lines)))
            lines = lines.astype(np.int64)
            for name in filter(LINED.__contains__, tiles.names):  # may have a single line
                its = tiles.range_of(name)
                n = its.stop - its.start
                some = rng.permutation(n)[: max(round(n * sets / all_sets), LEAST_CAPTURED)]
                lines[its] = np.bincount(some, minlength=n)
        first = np.concatenate([[0], np.cumsum(lines)])
        count = int(first[-1])
        places = rng.integers(sets, size=count, dtype=np.int32)
        homes = rng.integers(parts, size=count, dtype=np.uint8)
        tile_of = np.repeat(np.arange(len(lines), dtype=np.int32), lines)
        shape = parts, sets, model.ways
        self.cache = SetCache.empty(first, places, homes, tile_of, shape=shape)
        per_tensor, nbytes = tiles.by_tensor(lines), tiles.by_tensor(tiles.size)
        self.bytes_a_line = {name: nbytes[name] / n for name, n in per_tensor.items()}
        # A captured array's tiles are its lines, and the last line of an array may be shorter.
        listed = {name: tiles.range_of(name) for name in tiles.names if name in LINED}
        self.whole = {name: its for name, its in listed.items() if lines[its].all()}

    def copy(self) -> SetCache:
        """Return a copy of the cache and its state."""
        return SetCache(*(x.copy() for x in self.cache))

    def replay(self, part: Stream) -> tuple[dict[str, int], dict[str, int]]:
        """Replay a kernel's requests; return the DRAM bytes read and written, by tensor."""
        from flashsim.l2.caches import replay_sets

        fetched, lost = np.zeros((2, len(self.tiles.size)), np.int64)
        replay_sets(part.ids, part.codes, self.cache._replace(fetched=fetched, lost=lost))
        return self._bytes(fetched), self._bytes(lost)

    def drain(self) -> dict[str, int]:
        """Empty the cache, and return the dirty bytes by tensor."""
        c = self.cache
        lines = c.held[c.dirty & (c.held >= 0)]
        dirty = np.bincount(c.tile_of[lines], minlength=len(self.tiles.size))
        self.cache = SetCache.empty(*c[:4], shape=c.held.shape)
        return self._bytes(dirty)

    def _bytes(self, lines: np.ndarray) -> dict[str, int]:
        found = self.tiles.by_tensor(lines)
        exact = {name: lines[its] @ self.tiles.size[its] for name, its in self.whole.items()}
        return {
            name: round(exact.get(name, n * self.bytes_a_line[name])) for name, n in found.items()
        }
