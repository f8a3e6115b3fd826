"""Where everything of Hopper's kernels lies in shared memory, and who has how many registers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

#: Words of an item slot: the walk (-1: no work is left), the row tile and its rows; where tile 0 of
#: the keys would start and where their sequence ends; the visits as `walk.begin` gives them.
WALK, OUTER, START, STOP, OFFSET, BASE, END, FIRST, COUNT, LO, FULL_LO, FULL_HI = range(0, 48, 4)
ITEM = 48


@dataclass(frozen=True)
class Layout(ABC):
    """Where everything of a kernel lies in shared memory, as byte offsets: tiles and rows first,
    then mbarriers, then the item slots. Tiles are chunks of 64 columns (`ptx_hopper`)."""

    block_q: int
    block_k: int
    d: int

    @property
    @abstractmethod
    def groups(self) -> int:
        """Consumer warpgroups."""

    @property
    @abstractmethod
    def regions(self) -> dict[str, int]:
        """Tiles and rows, in their order: the bytes of all their stages."""

    @property
    @abstractmethod
    def arrivals(self) -> dict[str, tuple[int, int]]:
        """Kinds of mbarriers, in their order: how many, and the arrivals that end a phase.

        A full barrier takes the producer's arrival, and its copies' bytes; a free one takes one of
        each warp that reads.
        """

    @property
    def chunks(self) -> int:
        """64-column chunks of a row of Q or K."""
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
        """Of each barrier, its offset and the arrivals that end a phase."""
        return {
            self.barrier(kind) + 8 * x: arrivals
            for kind, (count, arrivals) in self.arrivals.items()
            for x in range(count)
        }

    @property
    def items(self) -> int:
        """Both item slots."""
        return sum(self.regions.values()) + 8 * len(self.barrier_arrivals)

    @property
    def nbytes(self) -> int:
        """All of it."""
        return self.items + 2 * ITEM


@dataclass(frozen=True)
class OnChip(Layout):
    """The forward's. Q's tiles live for one item, a stage of K or V for one visit."""

    dv: int
    stages: int

    @property
    def groups(self) -> int:
        """Consumer warpgroups, 64 query rows each."""
        return self.block_q // 64

    @property
    def chunks_v(self) -> int:
        """64-column chunks of a row of V."""
        return -(-self.dv // 64)

    @property
    def q_bytes(self) -> int:
        """A warpgroup's rows of Q."""
        return 64 * 128 * self.chunks

    @property
    def k_bytes(self) -> int:
        """A stage of K."""
        return self.block_k * 128 * self.chunks

    @property
    def v_bytes(self) -> int:
        """A stage of V."""
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
    """The backward's with keys outside.

    K and V live for one item; Q, dO and their rows' statistics (where a row's scores and its dP
    start) are rings of two stages, one visit each, and so is dS^T, a key to a row. Of dQ each
    warpgroup has a piece that leaves, 64 columns of `dq_rows` queries in two boxes of 32 columns.
    `deferred`, dS^T is waited for in the next visit, at barriers of its own.
    """

    fused: bool
    deferred: bool

    @property
    def groups(self) -> int:
        """Consumer warpgroups, 64 keys each."""
        return self.block_k // 64

    @property
    def key_bytes(self) -> int:
        """K, and V."""
        return self.block_k * 128 * self.chunks

    @property
    def query_bytes(self) -> int:
        """A stage of Q, and one of dO."""
        return self.block_q * 128 * self.chunks

    @property
    def ds_wide(self) -> int:
        """Queries to a chunk of dS^T."""
        return 16 if self.block_q % 64 else 64

    @property
    def ds_bytes(self) -> int:
        """A stage of dS^T."""
        return self.block_k * self.block_q * 2 if self.fused else 0

    @property
    def split_columns(self) -> bool:
        """Whether the warpgroups share out dQ's columns, and not its rows."""
        return self.d == 128

    @property
    def dq_rows(self) -> int:
        """Queries of a warpgroup's piece of dQ."""
        return self.block_q if self.split_columns else self.block_q // 2

    @property
    def dq_bytes(self) -> int:
        """A warpgroup's piece of dQ, in float32."""
        return self.dq_rows * 64 * 4 if self.fused else 0

    @property
    def row_of_threads(self) -> int:
        """Bytes between two of a thread's floats of dK and dV where a block of a cluster lays them
        down for the others, in the place of k, v, q and dout."""
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
        """See `Layout`. Full takes the copies, and each lane of the warp with the statistics.

        Every warp writes a part of dS^T, and its warpgroup reads all keys of it.
        """
        warps = 4 * self.groups
        readers = warps + 1 + (self.groups if self.fused else 0)  # of an item
        ds = {"ds_full": (2, warps), "ds_free": (2, warps)} if self.deferred else {}
        return {
            **{"kv_full": (1, 1), "k_free": (1, warps), "v_free": (1, warps)},
            **{"full": (2, 1 + 32), "free": (2, warps), **ds},
            **{"item_full": (2, 1), "item_free": (2, readers)},
        }


@dataclass(frozen=True)
class DqAlone(Layout):
    """The backward's last of three passes: queries outside.

    Each piece of 64 rows of Q, with its dO, lives for one item; K and V are a ring of two stages,
    one visit each. Where there is but one such piece, two warpgroups share out the keys, and one
    gives the other its dQ, 64 columns at a time, through `scratch`.
    """

    groups = 2

    @property
    def pieces(self) -> int:
        """Pieces of 64 rows."""
        return self.block_q // 64

    @property
    def own_bytes(self) -> int:
        """A piece of Q, and one of dO."""
        return 64 * 128 * self.chunks

    @property
    def key_bytes(self) -> int:
        """A stage of K, and one of V."""
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
    """Registers of a producer's and of a consumer's thread: 65,536 go to 128 (groups + 1)."""
    return (32, 160) if groups == 3 else (40, 232)


#: The same of the backward with keys outside.
KEYS_OUTSIDE_REGISTERS = 24, 240
