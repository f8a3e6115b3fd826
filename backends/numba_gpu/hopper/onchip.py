"""Where everything of Hopper's forward lies in shared memory, and who has how many registers."""

from __future__ import annotations

from dataclasses import dataclass

#: Words of an item slot: the walk (-1: no work is left), the row tile and its rows; where tile 0 of
#: the keys would start and where their sequence ends; the visits as `walk.begin` gives them.
WALK, OUTER, START, STOP, OFFSET, BASE, END, FIRST, COUNT, LO, FULL_LO, FULL_HI = range(0, 48, 4)
ITEM = 48


@dataclass(frozen=True)
class OnChip:
    """Where everything lies in shared memory: byte offsets.

    Tiles are chunks of 64 columns (`ptx_hopper`). Q's lives for one item, a stage of K or V for one
    visit.
    """

    block_q: int
    block_k: int
    d: int
    dv: int

    @property
    def groups(self) -> int:
        """Consumer warpgroups, 64 query rows each."""
        return self.block_q // 64

    @property
    def chunks(self) -> int:
        """64-column chunks of a row of Q or K."""
        return -(-self.d // 64)

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
    def k(self) -> int:
        """Both stages of K, behind Q."""
        return self.groups * self.q_bytes

    @property
    def v(self) -> int:
        """Both stages of V."""
        return self.k + 2 * self.k_bytes

    @property
    def barriers(self) -> int:
        """The mbarriers, in `arrivals`' order."""
        return self.v + 2 * self.v_bytes

    @property
    def arrivals(self) -> dict[str, tuple[int, int]]:
        """Kinds of mbarriers, in their order: how many, and the arrivals that end a phase.

        A full barrier takes the producer's arrival, and its copies' bytes; a free one takes one of
        each warp that reads.
        """
        groups = self.groups
        return {
            **{"q_full": (groups, 1), "q_free": (groups, 4)},
            **{"k_full": (2, 1), "k_free": (2, 4 * groups)},
            **{"v_full": (2, 1), "v_free": (2, 4 * groups)},
            **{"item_full": (2, 1), "item_free": (2, 4 * groups)},
        }

    def barrier(self, kind: str) -> int:
        """Offset of the first barrier of a kind."""
        before = list(self.arrivals).index(kind)
        return self.barriers + sum(n for n, _ in list(self.arrivals.values())[:before]) * 8

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
        return self.barriers + sum(n for n, _ in self.arrivals.values()) * 8

    @property
    def nbytes(self) -> int:
        """All of it."""
        return self.items + 2 * ITEM


def registers(groups: int) -> tuple[int, int]:
    """Registers of a producer's and of a consumer's thread: 65,536 go to 128 (groups + 1)."""
    return (32, 160) if groups == 3 else (40, 232)
