"""benchmarks/cpu_queue.py: who takes which item when, and which items there are."""

import pytest
from repository import script


@pytest.fixture(scope="module")
def queue():
    return script("cpu_queue")


def test_items_go_to_whoever_is_free_first(queue):
    assert queue.makespan([3, 1, 1, 1], 2) == 3  # one takes 3, the other all the rest
    assert queue.makespan([1, 1, 1, 3], 2) == 4  # the longest comes last
    assert queue.makespan([2.5], 64) == 2.5
    assert queue.makespan([1] * 9, 4) == 3


@pytest.mark.promise("right tiles")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("heads", "n", "threads"), [(8, 4096, 2), (8, 4096, 64), (1, 1000, 4)])
def test_items_are_the_engines_and_cover_every_query_once(queue, heads, n, causal, threads):
    runs = queue.runs_of(heads, n, causal, threads)
    assert sorted(q for first, last in runs for q in range(first, last)) == list(range(n))
    assert runs == sorted(runs, reverse=causal) or not causal  # the longest first
    assert (len(runs) * heads >= 4 * threads) == (heads > 1 or threads == 2)
