"""Compute the Python Hopper kernels' shared-memory layouts and registers per thread."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

#: Words of a work-tile slot: the head index (-1: no work tile is left), the row tile and its rows;
#: where tile 0 of the keys would start and where their sequence ends; the visits as `begin` of
#: `traversal.walk_functions` returns them.
WALK, OUTER, START, STOP, OFFSET, BASE, END, FIRST, COUNT, LO, FULL_LO, FULL_HI = range(0, 48, 4)
ITEM = 48


def columns_taken(head_dim: int, head_dim_v: int, step: int) -> int:
    """Return the larger of head_dim and head_dim_v, rounded up to a multiple of `step`."""
    return -(-max(head_dim, head_dim_v) // step) * step


@dataclass(frozen=True)
class SmemLayout(ABC):
    """The byte offsets of everything that a kernel keeps in shared memory.

    The order is: tiles and per-row values, mbarriers, slots for work tiles. A tile consists of
    chunks of 64 columns (see `ptx`). A visit is one query tile times one key tile.
    """

    block_q: int
    block_k: int
    d: int

    @property
    @abstractmethod
    def groups(self) -> int:
        """The number of consumer warpgroups."""

    @property
    @abstractmethod
    def regions(self) -> dict[str, int]:
        """The bytes of each region over all pipeline stages, by name and in layout order."""

    @property
    @abstractmethod
    def arrivals(self) -> dict[str, tuple[int, int]]:
        """The (number of barriers, arrivals per phase) of each kind of mbarrier, by name.

        A "full" barrier waits for the producer's arrival, and for the bytes that it copies. A
        "free" barrier waits for one arrival per warp that reads the stage.
        """

    @property
    def chunks(self) -> int:
        """The number of 64-column chunks per row of Q or K."""
        return -(-self.d // 64)

    def region(self, name: str) -> int:
        """Return the byte offset of a region's first stage."""
        before = list(self.regions).index(name)
        return sum(list(self.regions.values())[:before])

    def barrier(self, kind: str) -> int:
        """Return the byte offset of the first mbarrier of a kind."""
        before = list(self.arrivals).index(kind)
        counts = [n for n, _ in self.arrivals.values()]
        return sum(self.regions.values()) + sum(counts[:before]) * 8

    @property
    def barrier_arrivals(self) -> dict[int, int]:
        """The arrivals per phase of each barrier, by the barrier's byte offset."""
        return {
            self.barrier(kind) + 8 * x: arrivals
            for kind, (count, arrivals) in self.arrivals.items()
            for x in range(count)
        }

    @property
    def items(self) -> int:
        """The byte offset of the two slots for work tiles."""
        return sum(self.regions.values()) + 8 * len(self.barrier_arrivals)

    @property
    def nbytes(self) -> int:
        """The bytes of shared memory in the entire layout."""
        return self.items + 2 * ITEM


@dataclass(frozen=True)
class OnChip(SmemLayout):
    """The forward's shared-memory layout: a work tile's Q, and pipeline stages of K and V."""

    dv: int
    stages: int

    @property
    def groups(self) -> int:
        """The number of consumer warpgroups, each of which has 64 query rows."""
        return self.block_q // 64

    @property
    def chunks_v(self) -> int:
        """The number of 64-column chunks per row of V."""
        return -(-self.dv // 64)

    @property
    def q_bytes(self) -> int:
        """The bytes of Q that one warpgroup reads."""
        return 64 * 128 * self.chunks

    @property
    def k_bytes(self) -> int:
        """The bytes per pipeline stage of K."""
        return self.block_k * 128 * self.chunks

    @property
    def v_bytes(self) -> int:
        """The bytes per pipeline stage of V."""
        return self.block_k * 128 * self.chunks_v

    @property
    def regions(self) -> dict[str, int]:
        """The bytes of each region over all pipeline stages, by name and in layout order."""
        stages = {"k": self.stages * self.k_bytes, "v": self.stages * self.v_bytes}
        return {"q": self.groups * self.q_bytes, **stages}

    @property
    def arrivals(self) -> dict[str, tuple[int, int]]:
        """The (number of barriers, arrivals per phase) of each kind of mbarrier, by name."""
        groups, stages = self.groups, self.stages
        return {
            **{"q_full": (groups, 1), "q_free": (groups, 4)},
            **{"k_full": (stages, 1), "k_free": (stages, 4 * groups)},
            **{"v_full": (stages, 1), "v_free": (stages, 4 * groups)},
            **{"item_full": (2, 1), "item_free": (2, 4 * groups)},
        }


class ByKeys(SmemLayout):
    """The base class of the shared-memory layouts of KV-outer backward kernels."""

    @property
    def key_bytes(self) -> int:
        """The bytes per tile of K, and per tile of V."""
        return self.block_k * 128 * self.chunks

    @property
    def query_bytes(self) -> int:
        """The bytes per pipeline stage of Q, and per stage of dO."""
        return self.block_q * 128 * self.chunks

    @property
    def dq_rows(self) -> int:
        """The number of queries in one warpgroup's piece of dQ."""
        return self.block_q

    @property
    @abstractmethod
    def dq_columns(self) -> tuple[tuple[int, int, int], ...]:
        """The one or two ranges of columns of dQ that a warpgroup writes to shared memory.

        A range is (first, apart, width): warpgroup g writes `width` columns, beginning at column
        first + g * apart.
        """

    @property
    def dq_bytes(self) -> int:
        """The bytes of the float32 piece of dQ that one warpgroup writes."""
        return self.dq_rows * 4 * sum(wide for _, _, wide in self.dq_columns)

    @property
    def row_of_threads(self) -> int:
        """The bytes between two floats of the same thread in the exchange area for dK and dV.

        In the exchange area, a block of a cluster stores dK and dV, which the other blocks read.
        The exchange area overlaps tiles of K, V, Q and dO.
        """
        return 128 * self.groups * 4


@dataclass(frozen=True)
class KeysOutside(ByKeys):
    """The shared-memory layout of the KV-outer backward for head dims up to 128.

    K and V stay in shared memory for one work tile. Q, dO and their row statistics have two
    pipeline stages, and each visit (tile pair) uses one stage. The statistics are a row's initial
    scores and initial dP. The matrix dS^T, with one row per key, also has two pipeline stages. Each
    warpgroup has a staging area for 64 columns of `dq_rows` queries of dQ, in two boxes of 32
    columns. With `deferred`, the next visit reads dS^T, for which it waits at separate barriers.
    """

    fused: bool
    deferred: bool

    @property
    def groups(self) -> int:
        """The number of consumer warpgroups, each of which has 64 keys."""
        return self.block_k // 64

    @property
    def ds_wide(self) -> int:
        """The number of queries per chunk of dS^T."""
        return 16 if self.block_q % 64 else 64

    @property
    def ds_bytes(self) -> int:
        """The bytes per pipeline stage of dS^T."""
        return self.block_k * self.block_q * 2 if self.fused else 0

    @property
    def split_columns(self) -> bool:
        """Whether each warpgroup computes some columns of dQ; otherwise it computes some rows."""
        return self.d == 128

    @property
    def dq_rows(self) -> int:
        """The number of queries in one warpgroup's piece of dQ."""
        return self.block_q if self.split_columns else self.block_q // 2

    @property
    def ds_part(self) -> int:
        """The bytes from the first query of dS^T to the first query of warpgroup 1's piece of dQ.

        The piece may begin inside a chunk of `ds_wide` queries, in which a row is one key.
        """
        first = 0 if self.split_columns else self.dq_rows
        return (first // self.ds_wide * self.block_k * self.ds_wide + first % self.ds_wide) * 2

    @property
    def dq_columns(self) -> tuple[tuple[int, int, int], ...]:
        """The one or two ranges of columns of dQ that a warpgroup writes to shared memory."""
        return ((0, 64 if self.split_columns else 0, 64 if self.fused else 0),)

    @property
    def regions(self) -> dict[str, int]:
        """The bytes of each region over all pipeline stages, by name and in layout order."""
        return {
            **{"k": self.key_bytes, "v": self.key_bytes},
            **{"q": 2 * self.query_bytes, "dout": 2 * self.query_bytes},
            **{"ds": 2 * self.ds_bytes, "dq": self.groups * self.dq_bytes},
            **{"lse": 2 * self.block_q * 4, "delta": 2 * self.block_q * 4},
        }

    @property
    def arrivals(self) -> dict[str, tuple[int, int]]:
        """The (number of barriers, arrivals per phase) of each kind of mbarrier, by name.

        The barrier "full" also waits for one arrival per lane of the statistics warp. Each warp
        writes a part of dS^T, and each warpgroup reads dS^T for all keys.
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
class ColumnsDivided(ByKeys):
    """The shared-memory layout of the KV-outer backward for head dims of 192 and 256.

    The two warpgroups divide the columns of dK, dV and dQ. P^T and dS^T, with one row per key, pass
    through shared memory, in two pipeline stages. If dQ is `staged`, each warpgroup has a staging
    area for dQ, in boxes of 32 columns. A `fused` kernel for 256 columns has no space for staging
    areas.
    """

    fused: bool

    groups = 2

    @property
    def staged(self) -> bool:
        """Whether dQ is staged in shared memory, from which separate warps send it to HBM."""
        return self.fused and self.d < 256

    @property
    def wide(self) -> int:
        """The number of a warpgroup's columns in chunks that only this warpgroup uses.

        The chunks of warpgroup 1 begin 128 columns after those of warpgroup 0.
        """
        return 128 if self.d == 256 else 64

    @property
    def narrow(self) -> int:
        """The number of a warpgroup's columns in the chunk that both warpgroups use."""
        return 0 if self.d == 256 else 32

    @property
    def scores_bytes(self) -> int:
        """The bytes per pipeline stage of P^T, and per stage of dS^T."""
        return self.block_q * self.block_k * 2

    @property
    def dq_columns(self) -> tuple[tuple[int, int, int], ...]:
        """The one or two ranges of columns of dQ that a warpgroup writes to shared memory."""
        return ((0, 128, self.wide), (64, 32, self.narrow)) if self.staged else ((0, 0, 0),)

    @property
    def regions(self) -> dict[str, int]:
        """The bytes of each region over all pipeline stages, by name and in layout order."""
        return {
            **{"k": self.key_bytes, "v": self.key_bytes},
            **{"q": 2 * self.query_bytes, "dout": 2 * self.query_bytes},
            **{"p": 2 * self.scores_bytes, "ds": 2 * self.scores_bytes, "dq": 2 * self.dq_bytes},
            **{"lse": 2 * self.block_q * 4, "delta": 2 * self.block_q * 4},
        }

    @property
    def arrivals(self) -> dict[str, tuple[int, int]]:
        """The (number of barriers, arrivals per phase) of each kind of mbarrier, by name."""
        readers = 8 + 1 + (2 if self.staged else 0)  # of a work tile
        return {
            **{"kv_full": (1, 1), "k_free": (1, 8), "v_free": (1, 8)},
            **{"full": (2, 1 + 32), "free": (2, 8)},
            **{"item_full": (2, 1), "item_free": (2, readers)},
        }


@dataclass(frozen=True)
class Roles(ByKeys):
    """The shared-memory layout of the fused backward whose warpgroups compute different products.

    One warpgroup computes P, dS and dQ, another computes dV, and a third computes dK. P^T, dS^T and
    dO have one pipeline stage each. P^T and dS^T have one row per key. Each 64-column chunk of dO
    has its own barriers.
    """

    dq_wide: int

    groups = 3

    @property
    def scores_bytes(self) -> int:
        """The bytes of P^T in shared memory, and of dS^T."""
        return self.block_q * self.block_k * 2

    @property
    def dq_columns(self) -> tuple[tuple[int, int, int], ...]:
        """The one or two ranges of columns of dQ that a warpgroup writes to shared memory."""
        return ((0, 0, self.dq_wide),)

    @property
    def regions(self) -> dict[str, int]:
        """The bytes of each region over all pipeline stages, by name and in layout order."""
        return {
            **{"k": self.key_bytes, "v": self.key_bytes},
            **{"q": 2 * self.query_bytes, "dout": self.query_bytes},
            **{"p": self.scores_bytes, "ds": self.scores_bytes, "dq": self.dq_bytes},
            **{"lse": 2 * self.block_q * 4, "delta": 2 * self.block_q * 4},
        }

    @property
    def arrivals(self) -> dict[str, tuple[int, int]]:
        """The (number of barriers, arrivals per phase) of each kind of mbarrier, by name.

        The barrier "full" waits for the same arrivals as in `KeysOutside`. The warps that compute
        dK release each pipeline stage of Q. The warps that compute dK wait for dS, so all other
        warps have finished reading Q. The warps for dP and those for dV read each chunk of dO.
        """
        chunks = self.chunks
        return {
            **{"kv_full": (1, 1), "k_free": (1, 4), "v_free": (1, 4)},
            **{"full": (2, 1 + 32), "free": (2, 4)},
            **{"dout_full": (chunks, 1), "dout_free": (chunks, 8)},
            **{"item_full": (2, 1), "item_free": (2, 4 * self.groups + 2)},
        }


@dataclass(frozen=True)
class DqAlone(SmemLayout):
    """The shared-memory layout of the Q-outer dQ kernel, the third of three backward passes.

    A row tile is divided into pieces of 64 rows. Q and dO stay in shared memory for one work tile.
    K and V have two pipeline stages, and each visit (tile pair) uses one stage. If there is only
    one piece, two warpgroups divide the keys, and pass dQ through `scratch`, 64 columns at a time.
    """

    groups = 2

    @property
    def pieces(self) -> int:
        """The number of 64-row pieces in a row tile."""
        return self.block_q // 64

    @property
    def own_bytes(self) -> int:
        """The bytes per 64 rows of Q, and per 64 rows of dO."""
        return 64 * 128 * self.chunks

    @property
    def key_bytes(self) -> int:
        """The bytes per pipeline stage of K, and per stage of V."""
        return self.block_k * 128 * self.chunks

    @property
    def regions(self) -> dict[str, int]:
        """The bytes of each region over all pipeline stages, by name and in layout order."""
        return {
            **{"q": self.pieces * self.own_bytes, "dout": self.pieces * self.own_bytes},
            **{"k": 2 * self.key_bytes, "v": 2 * self.key_bytes},
            "scratch": 64 * 64 * 4 if self.pieces == 1 else 0,
        }

    @property
    def arrivals(self) -> dict[str, tuple[int, int]]:
        """The (number of barriers, arrivals per phase) of each kind of mbarrier, by name."""
        warps = 4 * self.groups
        return {
            **{"own_full": (self.pieces, 1), "own_free": (self.pieces, warps // self.pieces)},
            **{"full": (2, 1), "free": (2, warps)},
            **{"item_full": (2, 1), "item_free": (2, warps)},
        }


def registers(groups: int) -> tuple[int, int]:
    """Return the registers per thread of producers, and those of consumers."""
    return (32, 160) if groups == 3 else (40, 232)


#: Registers of a producer and of a consumer of the KV-outer backward.
KEYS_OUTSIDE_REGISTERS = 24, 240
#: Registers of a producer, of the scores' warpgroup, and of those that accumulate dV and dK.
ROLES_REGISTERS = 24, 136, 176
