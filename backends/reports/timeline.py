"""Convert a kernel's time stamps into time spans in nanoseconds.

The array ``visit_stamps`` holds SM cycles (clock64). Time stamps mark when a visit (one tile pair)
began, when its tiles arrived, and when its scores, softmax and products were done. Each block also
records its start and end on two clocks: the SM's cycle counter, and the GPU's nanosecond clock
(globaltimer). The nanosecond clock has a low resolution. So one linear function per SM converts
cycles to nanoseconds. The linear function goes through the start of the SM's first block and the
end of its last block.

In a warp-specialised kernel, each warp role records time stamps: the producer first, and after it
the consumer warpgroups. The producer's "visit" begins when the producer starts to wait for free
shared memory. The producer's "load" lasts from its first to its last TMA instruction. The producer
has no phases other than "visit" and "load". A consumer's "load" is the time it waits for tiles. In
a visit that its rows do not need (`device_tables.in_shares`), a consumer waits for K in "load" and
for V in "output".

If a kernel divides a tile, "scores" and "softmax" belong to the first part, and "output" to
everything else. The fused backward adds a visit's dQ at the start of the next visit, in the phase
"scores".
"""

import numpy as np

from flashsim.schedule.schedule import Schedule
from flashsim.trace.events import PHASES, ROLES, TIMELINE

#: Phases of a visit, each between two consecutive stamps.
SPANS = {"visit": (0, 4), "load": (0, 1), "scores": (1, 2), "softmax": (2, 3), "output": (3, 4)}
_PRODUCER_SPANS = {"visit": (0, 4), "load": (1, 4)}
_BLOCK, _PRODUCER = ROLES.index("block"), ROLES.index("producer")


def spans(
    stage: int,
    schedule: Schedule,
    by: str,
    tile_stamps: np.ndarray,
    visit_stamps: np.ndarray,
    clock_khz: int,
) -> np.ndarray:
    """Return the time spans of a stage's phases, in ns of the GPU's clock, as `events.TIMELINE`.

    `stage` is the index of the stage in the trace. `tile_stamps`, a uint64 array (walks, tiles,
    roles, 5), holds for each role the SM, cycles and ns at the block's start, and cycles and ns at
    its end. If there are several roles, role 0 is the producer; a single role is the entire block.
    `visit_stamps` is a uint64 array (batch * heads, n_visits, roles, 5). If heads are packed, its
    first axis has the groups, and a span has the number of its group's first head. `clock_khz` is
    the clock rate for SMs whose blocks were too short to measure it. A block or consumer has five
    spans per visit, and one span per outer tile. A producer has two spans per visit.
    """
    ptr, inner, _ = schedule.row_csr if by == "row" else schedule.col_csr
    heads, n_visits, roles, _ = visit_stamps.shape
    walks, tiles = tile_stamps.shape[:2]
    outer = np.repeat(np.arange(tiles), np.diff(ptr))
    i, j = (outer, inner) if by == "row" else (inner, outer)
    blocks = tile_stamps.astype(np.int64)
    clock = SmClocks(blocks.reshape(-1, blocks.shape[-1]), clock_khz)
    owner = np.arange(heads) * walks // heads
    sm = blocks[owner][:, outer, 0, 0]
    parts = []
    for number in range(roles):
        role = _BLOCK if roles == 1 else _PRODUCER + number
        times = clock.ns(sm[..., None], visit_stamps[:, :, number].astype(np.int64))
        for phase, (begin, end) in (_PRODUCER_SPANS if role == _PRODUCER else SPANS).items():
            part = np.zeros((heads, n_visits), TIMELINE)
            part["stage"], part["phase"], part["role"] = stage, PHASES.index(phase), role
            part["head"], part["sm"] = np.arange(heads)[:, None] * schedule.members, sm
            part["i"], part["j"], part["visit"] = i, j, np.arange(n_visits)
            part["start_ns"], part["end_ns"] = times[..., begin], times[..., end]
            parts.append(part.ravel())
        if role != _PRODUCER:
            mine = blocks[:, :, number]
            stores = _stores(stage, by, mine, clock, times, ptr, heads // walks, role)
            stores["head"] *= schedule.members
            parts.append(stores)
    return np.concatenate(parts)


def _stores(stage, by, blocks, clock, times, ptr, group, role) -> np.ndarray:
    """Return one "store" span per block, from the end of its last visit to the block's end.

    Without visits, the span begins at the block's start.
    """
    walks, tiles, _ = blocks.shape
    part = np.zeros((walks, tiles), TIMELINE)
    sm = blocks[..., 0]
    part["stage"], part["phase"], part["role"] = stage, PHASES.index("store"), role
    part["sm"] = sm
    part["head"] = np.arange(walks)[:, None] * group
    part["i"], part["j"] = (np.arange(tiles), -1) if by == "row" else (-1, np.arange(tiles))
    part["visit"] = -1
    start = clock.ns(sm, blocks[..., 1])
    busy = np.diff(ptr) > 0
    last_head = np.arange(walks) * group + group - 1
    start[:, busy] = times[last_head][:, ptr[1:][busy] - 1, 4]
    part["start_ns"], part["end_ns"] = start, clock.ns(sm, blocks[..., 3])
    return part.ravel()


class SmClocks:
    """Converts each SM's cycles to nanoseconds of the GPU's clock."""

    def __init__(self, blocks: np.ndarray, clock_khz: int) -> None:
        n = int(blocks[:, 0].max()) + 1
        self.cycle0 = np.zeros(n, np.int64)
        self.ns0 = np.zeros(n, np.int64)
        self.rate = np.full(n, 1e6 / clock_khz)  # ns per cycle
        for sm in np.unique(blocks[:, 0]):
            mine = blocks[blocks[:, 0] == sm]
            first, last = mine[mine[:, 1].argmin()], mine[mine[:, 3].argmax()]
            self.cycle0[sm], self.ns0[sm] = first[1], first[2]
            if last[4] - first[2] > 20_000 and last[3] > first[1]:
                self.rate[sm] = (last[4] - first[2]) / (last[3] - first[1])

    def ns(self, sm: np.ndarray, cycles: np.ndarray) -> np.ndarray:
        """Return the GPU times in ns (int64) of cycle counts `cycles` on the SMs `sm`."""
        since = (cycles - self.cycle0[sm]) * self.rate[sm]
        return self.ns0[sm] + np.rint(since).astype(np.int64)
