"""The portable kernels' traces on a GPU: counts equal the simulator's, the timeline nests."""

import pytest
from cupy_checks import (  # noqa: F401
    FEATURES,
    MARKS,
    PORTABLE,
    check_counts,
    check_timelines,
    poisoned,
)

from flashsim import Problem, Tiling

pytestmark = MARKS

#: Padded tiles; rows as wide as a tile's; padded rows; scores that cross warps. (head_dim, value's)
SIDES = [(40, 24), (64, 64), (37, 61), (96, 128)]


@pytest.mark.parametrize("key_order", ["ascending", "descending"])
@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize(
    ("dtype", "sides"),
    [*((dtype, s) for dtype in ("bfloat16", "float32") for s in SIDES), ("tf32", SIDES[2])],
)
def test_counted_bytes_are_the_simulators(sides, name, dtype, key_order):
    head_dim, head_dim_v = sides
    tf32 = dtype == "tf32"
    dtype = "float32" if tf32 else dtype
    p = Problem(head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype, **FEATURES[name])
    check_counts(p, PORTABLE, key_order, (Tiling(32, 64), Tiling(64, 32)), allow_tf32=tf32)


@pytest.mark.parametrize(("dtype", "head_dim"), [("bfloat16", 64), ("float32", 64)])
def test_timeline_of_many_blocks(dtype, head_dim):
    check_timelines(Problem(1000, 1000, head_dim, heads=8, dtype=dtype, causal=True), PORTABLE)


@pytest.mark.parametrize(
    ("dtype", "head_dim"), [("bfloat16", 64), ("float16", 256), ("float32", 64)]
)
@pytest.mark.parametrize("name", ["gqa", "window", "varlen", "blocks"])
def test_timeline_has_every_visit_in_order(name, dtype, head_dim):
    check_timelines(Problem(head_dim=head_dim, dtype=dtype, **FEATURES[name]), PORTABLE)
