"""Traces of the kernels for any GPU: counts equal the simulator's, the timeline nests."""

import pytest
from compiled import star
from cupy_checks import (  # noqa: F401
    FEATURES,
    MARKS,
    PORTABLE,
    check_counts,
    check_timelines,
    families,
    poisoned,
)
from test_cupy import ways

from flashsim import Problem, Tiling

pytestmark = [*MARKS, pytest.mark.promise("three counts equal")]

#: Padded rows; padded tiles; rows as wide as a tile's; scores that cross warps. (head_dim, value's)
SIDES = [(37, 61), (40, 24), (64, 64), (96, 128)]
ORDERS = ["ascending", "descending"]
#: A block mask's visits are listed, where other masks' are counted through.
LISTED = (SIDES[0], "blocks", "descending")
TILINGS = Tiling(32, 64), Tiling(64, 32)


@pytest.mark.parametrize(
    ("dtype", "sides", "name", "key_order"),
    [
        case
        for dtype, sides in (("bfloat16", SIDES), ("float32", SIDES), ("tf32", SIDES[:1]))
        for case in star([dtype], sides, [*FEATURES], ORDERS, also=[(dtype, *LISTED)])
    ],
)
def test_counted_bytes_are_the_simulators(sides, name, dtype, key_order):
    head_dim, head_dim_v = sides
    tf32 = dtype == "tf32"
    dtype = "float32" if tf32 else dtype
    p = Problem(head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype, **FEATURES[name])
    check_counts(p, PORTABLE, key_order, TILINGS, allow_tf32=tf32)


@pytest.mark.parametrize("family", families("python"))
@pytest.mark.parametrize(
    ("sides", "name", "key_order"), star(SIDES[:3], [*FEATURES], ORDERS, also=[LISTED])
)
def test_counted_bytes_of_kernels_in_python(sides, name, key_order, family):
    head_dim, head_dim_v = sides
    p = Problem(head_dim=head_dim, head_dim_v=head_dim_v, dtype="bfloat16", **FEATURES[name])
    check_counts(p, family, key_order, TILINGS)


@ways("bfloat16", "float32", in_python="bfloat16")
def test_timeline_of_many_blocks(family, dtype):
    check_timelines(Problem(1000, 1000, 64, heads=8, dtype=dtype, causal=True), family)


@pytest.mark.parametrize(
    ("kind", "name"),
    star(
        [("bfloat16", 64), ("float16", 256), ("float32", 64)], ["gqa", "window", "varlen", "blocks"]
    ),
)
def test_timeline_has_every_visit_in_order(name, kind):
    dtype, head_dim = kind
    check_timelines(Problem(head_dim=head_dim, dtype=dtype, **FEATURES[name]), PORTABLE)
