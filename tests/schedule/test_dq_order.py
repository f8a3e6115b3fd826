"""The fixed order in which keys-outside blocks add to one dQ."""

import numpy as np
import pytest

import flashsim
from flashsim import Problem, Tiling, l2
from flashsim.l2 import model as replays
from flashsim.schedule.dq_order import turns

pytestmark = pytest.mark.promise("right tiles")


def test_each_row_is_added_to_by_turns_that_have_come():
    """Every visit's rank is the number of columns before its own that visit its row."""
    ptr, index = np.array([0, 3, 3, 5, 7]), np.array([0, 1, 2, 1, 2, 0, 2])
    order, ranks = turns(ptr, index)
    assert order.tolist() == [2, 0, 3, 1]  # from row 1, from row 0 twice, no rows
    assert ranks.tolist() == [0, 1, 1, 0, 0, 1, 2]


def woven(problem, launch, **options):
    """(tile numbers, requests) of the fused kernel, blocks in step."""
    traffic = flashsim.count(
        problem, algorithm="flash2-fused", direction="backward", tiling=Tiling(16, 16)
    )
    model = l2.L2Model(launch=launch, jitter=0.0, **options)
    tiles, parts = replays._streams(traffic, model)
    return tiles, next(part for part in parts if part.stage.name == "fused")


def added(tiles, part, row, walk=0):
    """The places in the stream at which a row tile's dQ is added to."""
    number = tiles.first["dQ_acc"] + walk * tiles.tiles(tiles.tensors["dQ_acc"]) + row
    return np.flatnonzero((part.ids == number) & (part.codes % l2.launch.SIDE == 2))


def test_blocks_wait_for_their_turns():
    """Without a mask all columns begin with the first row; in turns one block adds at a time."""
    problem = Problem(64, head_dim=8, dtype="bfloat16")
    tiles, at_once = woven(problem, "grouped")
    _, by_turns = woven(problem, "in-turns", turn=1e-4)  # far longer than a visit
    assert np.array_equal(np.sort(at_once.ids), np.sort(by_turns.ids))
    last = [added(tiles, part, 3)[0] for part in (at_once, by_turns)]
    first = [added(tiles, part, 0) for part in (at_once, by_turns)]
    assert last[0] > first[0][-1]  # all blocks leave row 0 together, and come to row 3 together
    assert last[1] < first[1][-1]  # column 0 is at row 3 before column 3 is at row 0


def test_causal_columns_are_taken_from_the_end():
    problem = Problem(64, head_dim=8, dtype="bfloat16", causal=True)
    tiles, part = woven(problem, "in-turns", blocks_per_sm=1)
    keys = part.ids[(part.ids >= tiles.first["K"]) & (part.ids < tiles.first["K"] + 4)]
    assert (keys - tiles.first["K"]).tolist() == [3, 2, 1, 0]
