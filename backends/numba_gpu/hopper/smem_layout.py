"""Compute the Python Hopper kernels' shared-memory layouts and registers per thread."""

from collections.abc import Mapping
from itertools import accumulate

#: Words of a work-tile slot: the head index (-1: no work tile is left), the row tile and its rows;
#: where tile 0 of the keys would start and where their sequence ends; the visits as `begin` of
#: `traversal.walk_functions` returns them.
WALK, OUTER, START, STOP, OFFSET, BASE, END, FIRST, COUNT, LO, FULL_LO, FULL_HI = range(0, 48, 4)
ITEM = 48


def columns_taken(head_dim: int, head_dim_v: int, step: int) -> int:
    """Return the larger of head_dim and head_dim_v, rounded up to a multiple of `step`."""
    return -(-max(head_dim, head_dim_v) // step) * step


def chunks_of(d: int) -> int:
    """Return the number of 64-column chunks per row of `d` columns."""
    return -(-d // 64)


class SmemLayout:
    """The byte offsets of everything that a kernel keeps in shared memory.

    The order is: tiles and per-row values, mbarriers, slots for work tiles. A tile consists of
    chunks of 64 columns (see `ptx`). A visit is one query tile times one key tile.

    Attributes
    ----------
    groups : the number of consumer warpgroups
    regions : the bytes of each region over all pipeline stages, by name and in layout order
    arrivals : the (number of barriers, arrivals per phase) of each kind of mbarrier, by name. A
        "full" barrier waits for the producer's arrival, and for the bytes that it copies. A "free"
        barrier waits for one arrival per warp that reads the stage.
    chunks : the number of 64-column chunks per row of Q or K
    barrier_arrivals : the arrivals per phase of each barrier, by the barrier's byte offset
    items : the byte offset of the two slots for work tiles
    nbytes : the bytes of shared memory in the entire layout
    """

    def __init__(
        self,
        block_q: int,
        block_k: int,
        d: int,
        groups: int,
        regions: Mapping[str, int],
        arrivals: Mapping[str, tuple[int, int]],
    ) -> None:
        self.block_q, self.block_k, self.d, self.groups = block_q, block_k, d, groups
        self.regions, self.arrivals, self.chunks = regions, arrivals, chunks_of(d)
        ends = accumulate(regions.values(), initial=0)
        self._regions = dict(zip(regions, ends, strict=False))
        first, self._barriers = sum(regions.values()), dict[str, int]()
        self.barrier_arrivals: dict[int, int] = {}
        for kind, (count, each) in arrivals.items():
            self._barriers[kind] = at = first + 8 * len(self.barrier_arrivals)
            self.barrier_arrivals |= {at + 8 * x: each for x in range(count)}
        self.items = first + 8 * len(self.barrier_arrivals)
        self.nbytes = self.items + 2 * ITEM

    def region(self, name: str) -> int:
        """Return the byte offset of a region's first stage."""
        return self._regions[name]

    def barrier(self, kind: str) -> int:
        """Return the byte offset of the first mbarrier of a kind."""
        return self._barriers[kind]


class OnChip(SmemLayout):
    """The forward's shared-memory layout: a work tile's Q, and pipeline stages of K and V.

    `q_bytes` is the number of bytes of Q that one warpgroup reads (64 query rows). `k_bytes` and
    `v_bytes` are the bytes per pipeline stage of K and of V.
    """

    def __init__(self, block_q: int, block_k: int, d: int, dv: int, stages: int) -> None:
        groups, self.stages, self.chunks_v = block_q // 64, stages, chunks_of(dv)
        self.q_bytes, self.k_bytes = 64 * 128 * chunks_of(d), block_k * 128 * chunks_of(d)
        self.v_bytes = block_k * 128 * self.chunks_v
        regions = {
            **{"q": groups * self.q_bytes},
            **{"k": stages * self.k_bytes, "v": stages * self.v_bytes},
        }
        arrivals = {
            **{"q_full": (groups, 1), "q_free": (groups, 4)},
            **{"k_full": (stages, 1), "k_free": (stages, 4 * groups)},
            **{"v_full": (stages, 1), "v_free": (stages, 4 * groups)},
            **{"item_full": (2, 1), "item_free": (2, 4 * groups)},
        }
        super().__init__(block_q, block_k, d, groups, regions, arrivals)


class ByKeys(SmemLayout):
    """The base class of the shared-memory layouts of KV-outer backward kernels.

    Attributes
    ----------
    key_bytes, query_bytes : the bytes per tile of K or V, and per pipeline stage of Q or dO
    scores_bytes : the bytes per pipeline stage of P^T or dS^T, with one row per key
    dq_rows : the number of queries in one warpgroup's piece of dQ
    dq_columns : the one or two ranges of columns of dQ that a warpgroup writes to shared memory. A
        range is (first, apart, width): warpgroup g writes `width` columns, beginning at column
        first + g * apart.
    dq_bytes : the bytes of the float32 piece of dQ that one warpgroup writes
    row_of_threads : the bytes between two floats of the same thread in the exchange area for dK and
        dV. In the exchange area, a block of a cluster stores dK and dV, which the other blocks
        read. The exchange area overlaps tiles of K, V, Q and dO.
    """

    def __init__(
        self,
        sides: tuple[int, int, int],
        groups: int,
        dq_rows: int,
        dq_columns: tuple[tuple[int, int, int], ...],
        scores: Mapping[str, int],
        arrivals: Mapping[str, tuple[int, int]],
        *,
        pieces: int,
        dout_stages: int = 2,
    ) -> None:
        block_q, block_k, d = sides
        self.key_bytes = block_k * 128 * chunks_of(d)
        self.query_bytes = block_q * 128 * chunks_of(d)
        self.dq_rows, self.dq_columns = dq_rows, dq_columns
        self.dq_bytes = dq_rows * 4 * sum(wide for _, _, wide in dq_columns)
        self.row_of_threads = 128 * groups * 4
        regions = {
            **{"k": self.key_bytes, "v": self.key_bytes},
            **{"q": 2 * self.query_bytes, "dout": dout_stages * self.query_bytes},
            **{**scores, "dq": pieces * self.dq_bytes},
            **{"lse": 2 * block_q * 4, "delta": 2 * block_q * 4},
        }
        super().__init__(block_q, block_k, d, groups, regions, arrivals)


class KeysOutside(ByKeys):
    """The shared-memory layout of the KV-outer backward for head dims up to 128.

    K and V stay in shared memory for one work tile. Q, dO and their row statistics have two
    pipeline stages, and each visit (tile pair) uses one stage. The statistics are a row's initial
    scores and initial dP. The matrix dS^T, with one row per key, also has two pipeline stages. Each
    warpgroup has a staging area for 64 columns of `dq_rows` queries of dQ, in two boxes of 32
    columns. With `deferred`, the next visit reads dS^T, for which it waits at separate barriers.

    Attributes
    ----------
    ds_wide : the number of queries per chunk of dS^T
    ds_bytes : the bytes per pipeline stage of dS^T
    split_columns : whether each warpgroup computes some columns of dQ; otherwise it computes some
        rows
    ds_part : the bytes from the first query of dS^T to the first query of warpgroup 1's piece of
        dQ. The piece may begin inside a chunk of `ds_wide` queries, in which a row is one key.
    """

    def __init__(self, block_q: int, block_k: int, d: int, fused: bool, deferred: bool) -> None:
        groups, self.deferred = block_k // 64, deferred
        self.ds_wide = wide = 16 if block_q % 64 else 64
        self.ds_bytes = block_k * block_q * 2 if fused else 0
        self.split_columns = d == 128
        dq_rows = block_q if self.split_columns else block_q // 2
        first = 0 if self.split_columns else dq_rows
        self.ds_part = (first // wide * block_k * wide + first % wide) * 2
        columns = ((0, 64 if self.split_columns else 0, 64 if fused else 0),)
        warps = 4 * groups
        # "full" also waits for one arrival per lane of the statistics warp. Each warp writes a part
        # of dS^T, and each warpgroup reads dS^T for all keys.
        readers = warps + 1 + (groups if fused else 0)  # of a work tile
        ds = {"ds_full": (2, warps), "ds_free": (2, warps)} if deferred else {}
        arrivals = {
            **{"kv_full": (1, 1), "k_free": (1, warps), "v_free": (1, warps)},
            **{"full": (2, 1 + 32), "free": (2, warps), **ds},
            **{"item_full": (2, 1), "item_free": (2, readers)},
        }
        sides, scores = (block_q, block_k, d), {"ds": 2 * self.ds_bytes}
        super().__init__(sides, groups, dq_rows, columns, scores, arrivals, pieces=groups)


class ColumnsDivided(ByKeys):
    """The shared-memory layout of the KV-outer backward for head dims of 192 and 256.

    The two warpgroups divide the columns of dK, dV and dQ. P^T and dS^T, with one row per key, pass
    through shared memory, in two pipeline stages. If dQ is `staged`, each warpgroup has a staging
    area for dQ, in boxes of 32 columns, from which separate warps send dQ to HBM. A `fused` kernel
    for 256 columns has no space for staging areas.

    Attributes
    ----------
    wide : the number of a warpgroup's columns in chunks that only this warpgroup uses. The chunks
        of warpgroup 1 begin 128 columns after those of warpgroup 0.
    narrow : the number of a warpgroup's columns in the chunk that both warpgroups use
    """

    def __init__(self, block_q: int, block_k: int, d: int, fused: bool) -> None:
        self.staged, self.scores_bytes = fused and d < 256, block_q * block_k * 2
        self.wide, self.narrow = (128, 0) if d == 256 else (64, 32)
        columns = ((0, 128, self.wide), (64, 32, self.narrow)) if self.staged else ((0, 0, 0),)
        readers = 8 + 1 + (2 if self.staged else 0)  # of a work tile
        arrivals = {
            **{"kv_full": (1, 1), "k_free": (1, 8), "v_free": (1, 8)},
            **{"full": (2, 1 + 32), "free": (2, 8)},
            **{"item_full": (2, 1), "item_free": (2, readers)},
        }
        sides, scores = (block_q, block_k, d), dict.fromkeys(("p", "ds"), 2 * self.scores_bytes)
        super().__init__(sides, 2, block_q, columns, scores, arrivals, pieces=2)


class Roles(ByKeys):
    """The shared-memory layout of the fused backward whose warpgroups compute different products.

    One warpgroup computes P, dS and dQ (of `dq_wide` columns), another computes dV, and a third
    computes dK. P^T, dS^T and dO have one pipeline stage each. P^T and dS^T have one row per key.
    Each 64-column chunk of dO has its own barriers.
    """

    def __init__(self, block_q: int, block_k: int, d: int, dq_wide: int) -> None:
        self.dq_wide, self.scores_bytes, chunks = dq_wide, block_q * block_k * 2, chunks_of(d)
        # "full" waits for the same arrivals as in `KeysOutside`. The warps that compute dK release
        # each pipeline stage of Q. They wait for dS, so all other warps have finished reading Q.
        # The warps for dP and those for dV read each chunk of dO.
        arrivals = {
            **{"kv_full": (1, 1), "k_free": (1, 4), "v_free": (1, 4)},
            **{"full": (2, 1 + 32), "free": (2, 4)},
            **{"dout_full": (chunks, 1), "dout_free": (chunks, 8)},
            **{"item_full": (2, 1), "item_free": (2, 4 * 3 + 2)},
        }
        sides, scores = (block_q, block_k, d), dict.fromkeys(("p", "ds"), self.scores_bytes)
        how = {"pieces": 1, "dout_stages": 1}
        super().__init__(sides, 3, block_q, ((0, 0, dq_wide),), scores, arrivals, **how)


class DqAlone(SmemLayout):
    """The shared-memory layout of the Q-outer dQ kernel, the third of three backward passes.

    A row tile is divided into `pieces` of 64 rows. A piece of Q, or of dO, has `own_bytes`. Q and
    dO stay in shared memory for one work tile. K and V have two pipeline stages of `key_bytes`
    each, and each visit (tile pair) uses one stage. If there is only one piece, two warpgroups
    divide the keys, and pass dQ through `scratch`, 64 columns at a time.
    """

    def __init__(self, block_q: int, block_k: int, d: int) -> None:
        self.pieces = pieces = block_q // 64
        self.own_bytes, self.key_bytes = (rows * 128 * chunks_of(d) for rows in (64, block_k))
        regions = {
            **dict.fromkeys(("q", "dout"), pieces * self.own_bytes),
            **dict.fromkeys(("k", "v"), 2 * self.key_bytes),
            "scratch": 64 * 64 * 4 if pieces == 1 else 0,
        }
        arrivals = {
            **{"own_full": (pieces, 1), "own_free": (pieces, 8 // pieces)},
            **{"full": (2, 1), "free": (2, 8)},
            **{"item_full": (2, 1), "item_free": (2, 8)},
        }
        super().__init__(block_q, block_k, d, 2, regions, arrivals)


def registers(groups: int) -> tuple[int, int]:
    """Return the registers per thread of producers, and those of consumers."""
    return (32, 160) if groups == 3 else (40, 232)


#: Registers of a producer and of a consumer of the KV-outer backward.
KEYS_OUTSIDE_REGISTERS = 24, 240
#: Registers of a producer, of the scores' warpgroup, and of those that accumulate dV and dK.
ROLES_REGISTERS = 24, 136, 176
