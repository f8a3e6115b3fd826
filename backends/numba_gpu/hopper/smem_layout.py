"""The shared-memory layout of Hopper's kernels, and the number of registers of each role."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

#: Words of a work-tile slot: the head index (-1: no work tile is left), the row tile and its rows;
#: where tile 0 of the keys would start and where their sequence ends; the visits as `begin` of
#: `traversal.walk_functions` returns them.
WALK, OUTER, START, STOP, OFFSET, BASE, END, FIRST, COUNT, LO, FULL_LO, FULL_HI = range(0, 48, 4)
ITEM = 48


@dataclass(frozen=True)
class Layout(ABC):
    """The shared-memory layout of a kernel, as byte offsets.

    Tiles and rows come first, then mbarriers, then the slots of work tiles. Tiles are chunks of 64
    columns (`ptx_hopper`). A visit is one query tile times one key tile.
    """

    block_q: int
    block_k: int
    d: int

    @property
    @abstractmethod
    def groups(self) -> int:
        """Number of consumer warpgroups."""

    @property
    @abstractmethod
    def regions(self) -> dict[str, int]:
        """Bytes of each region of tiles or rows, over all its stages, in layout order."""

    @property
    @abstractmethod
    def arrivals(self) -> dict[str, tuple[int, int]]:
        """Per kind of mbarrier, in layout order: their number, and the arrivals per phase.

        A full barrier expects the producer's arrival and the bytes of its copies. A free barrier
        expects one arrival per warp that reads.
        """

    @property
    def chunks(self) -> int:
        """64-column chunks per row of Q or K."""
        return -(-self.d // 64)

    def region(self, name: str) -> int:
        """Offset of the first stage of a region."""
        before = list(self.regions).index(name)
        return sum(list(self.regions.values())[:before])

    def barrier(self, kind: str) -> int:
        """Offset of the first barrier of a kind."""
        before = list(self.arrivals).index(kind)
        counts = [n for n, _ in self.arrivals.values()]
        return sum(self.regions.values()) + sum(counts[:before]) * 8

    @property
    def barrier_arrivals(self) -> dict[int, int]:
        """The offset of each barrier, with the number of arrivals that end its phase."""
        return {
            self.barrier(kind) + 8 * x: arrivals
            for kind, (count, arrivals) in self.arrivals.items()
            for x in range(count)
        }

    @property
    def items(self) -> int:
        """Offset of the two work-tile slots."""
        return sum(self.regions.values()) + 8 * len(self.barrier_arrivals)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole layout."""
        return self.items + 2 * ITEM


@dataclass(frozen=True)
class OnChip(Layout):
    """The forward's layout. Q's tiles live for one work tile, a stage of K or V for one visit."""

    dv: int
    stages: int

    @property
    def groups(self) -> int:
        """Number of consumer warpgroups; each has 64 query rows."""
        return self.block_q // 64

    @property
    def chunks_v(self) -> int:
        """64-column chunks per row of V."""
        return -(-self.dv // 64)

    @property
    def q_bytes(self) -> int:
        """Bytes of one warpgroup's rows of Q."""
        return 64 * 128 * self.chunks

    @property
    def k_bytes(self) -> int:
        """Bytes of one stage of K."""
        return self.block_k * 128 * self.chunks

    @property
    def v_bytes(self) -> int:
        """Bytes of one stage of V."""
        return self.block_k * 128 * self.chunks_v

    @property
    def regions(self) -> dict[str, int]:
        """See `Layout`."""
        stages = {"k": self.stages * self.k_bytes, "v": self.stages * self.v_bytes}
        return {"q": self.groups * self.q_bytes, **stages}

    @property
    def arrivals(self) -> dict[str, tuple[int, int]]:
        """See `Layout`."""
        groups, stages = self.groups, self.stages
        return {
            **{"q_full": (groups, 1), "q_free": (groups, 4)},
            **{"k_full": (stages, 1), "k_free": (stages, 4 * groups)},
            **{"v_full": (stages, 1), "v_free": (stages, 4 * groups)},
            **{"item_full": (2, 1), "item_free": (2, 4 * groups)},
        }


@dataclass(frozen=True)
class KeysOutside(Layout):
    """The layout of the KV-outer backward.

    K and V live for one work tile. Q, dO and their rows' statistics (the initial values of a row's
    scores and of its dP) are rings of two stages, one visit each. So is dS^T, which has one row per
    key. Each warpgroup has a staging piece of dQ, 64 columns of `dq_rows` queries in two boxes of
    32 columns. With `deferred`, the next visit waits for dS^T, at separate barriers.
    """

    fused: bool
    deferred: bool

    @property
    def groups(self) -> int:
        """Number of consumer warpgroups; each has 64 keys."""
        return self.block_k // 64

    @property
    def key_bytes(self) -> int:
        """Bytes of K, and of V."""
        return self.block_k * 128 * self.chunks

    @property
    def query_bytes(self) -> int:
        """Bytes of one stage of Q, and of one stage of dO."""
        return self.block_q * 128 * self.chunks

    @property
    def ds_wide(self) -> int:
        """Queries per chunk of dS^T."""
        return 16 if self.block_q % 64 else 64

    @property
    def ds_bytes(self) -> int:
        """Bytes of one stage of dS^T."""
        return self.block_k * self.block_q * 2 if self.fused else 0

    @property
    def split_columns(self) -> bool:
        """Whether the warpgroups split dQ by columns instead of by rows."""
        return self.d == 128

    @property
    def dq_rows(self) -> int:
        """Number of queries in one warpgroup's piece of dQ."""
        return self.block_q if self.split_columns else self.block_q // 2

    @property
    def dq_bytes(self) -> int:
        """Bytes of one warpgroup's piece of dQ, in float32."""
        return self.dq_rows * 64 * 4 if self.fused else 0

    @property
    def row_of_threads(self) -> int:
        """Bytes between two consecutive floats of one thread's dK and dV in the exchange area.

        In that area, in place of k, v, q and dout, a block of a cluster stores its dK and dV for
        the other blocks.
        """
        return 128 * self.groups * 4

    @property
    def regions(self) -> dict[str, int]:
        """See `Layout`."""
        return {
            **{"k": self.key_bytes, "v": self.key_bytes},
            **{"q": 2 * self.query_bytes, "dout": 2 * self.query_bytes},
            **{"ds": 2 * self.ds_bytes, "dq": self.groups * self.dq_bytes},
            **{"lse": 2 * self.block_q * 4, "delta": 2 * self.block_q * 4},
        }

    @property
    def arrivals(self) -> dict[str, tuple[int, int]]:
        """See `Layout`. `full` also takes an arrival per lane of the statistics warp.

        Every warp writes a part of dS^T, and its warpgroup reads all keys of it.
        """
        warps = 4 * self.groups
        readers = warps + 1 + (self.groups if self.fused else 0)  # of a work tile
        ds = {"ds_full": (2, warps), "ds_free": (2, warps)} if self.deferred else {}
        return {
            **{"kv_full": (1, 1), "k_free": (1, warps), "v_free": (1, warps)},
            **{"full": (2, 1 + 32), "free": (2, warps), **ds},
            **{"item_full": (2, 1), "item_free": (2, readers)},
        }


@dataclass(frozen=True)
class DqAlone(Layout):
    """The layout of the Q-outer dQ kernel, the last of the backward's three passes.

    Each piece of 64 rows of Q, with its dO, lives for one work tile. K and V are a ring of two
    stages, one visit each. If there is only one such piece, two warpgroups split the keys, and one
    gives the other its dQ, 64 columns at a time, through `scratch`.
    """

    groups = 2

    @property
    def pieces(self) -> int:
        """Number of 64-row pieces."""
        return self.block_q // 64

    @property
    def own_bytes(self) -> int:
        """Bytes of one piece of Q, and of one piece of dO."""
        return 64 * 128 * self.chunks

    @property
    def key_bytes(self) -> int:
        """Bytes of one stage of K, and of one stage of V."""
        return self.block_k * 128 * self.chunks

    @property
    def regions(self) -> dict[str, int]:
        """See `Layout`."""
        return {
            **{"q": self.pieces * self.own_bytes, "dout": self.pieces * self.own_bytes},
            **{"k": 2 * self.key_bytes, "v": 2 * self.key_bytes},
            "scratch": 64 * 64 * 4 if self.pieces == 1 else 0,
        }

    @property
    def arrivals(self) -> dict[str, tuple[int, int]]:
        """See `Layout`."""
        warps = 4 * self.groups
        return {
            **{"own_full": (self.pieces, 1), "own_free": (self.pieces, warps // self.pieces)},
            **{"full": (2, 1), "free": (2, warps)},
            **{"item_full": (2, 1), "item_free": (2, warps)},
        }


def registers(groups: int) -> tuple[int, int]:
    """Return the registers per thread of a producer and of a consumer.

    128 (groups + 1) threads share 65,536 registers.
    """
    return (32, 160) if groups == 3 else (40, 232)


#: Registers of a producer and of a consumer of the KV-outer backward.
KEYS_OUTSIDE_REGISTERS = 24, 240
