"""The shapes and forms of benchmarks/head_groups.py and short_backwards.py are the stored ones."""

import pytest
from repository import recorded, script

from flashsim import Device
from flashsim.backends.launch.kernel import Gpu
from flashsim.backends.launch_policy.hopper import HOPPER

pytestmark = pytest.mark.promise("predictions are judged")

#: The H100 on which the files were measured.
GPU = Gpu.like(Device.get("H100"))


def cells(rows, columns):
    """Return these columns of rows, sorted, as text."""
    return sorted(tuple(str(row[name]) for name in columns) for row in rows)


def test_head_groups_are_those_of_the_file():
    groups = script("head_groups")
    made = [
        groups.shape_of(p) | {"packed": packed, "heads_in_group": size}
        for p in groups.problems()
        for packed in (True, False)
        for size in groups.sizes(p, GPU, packed=packed)
    ]
    columns = *groups.COLUMNS[:8], "heads_in_group"
    assert cells(made, columns) == cells(recorded("packed-head-groups-h100.csv"), columns)


def test_fresh_shapes_and_both_rules_are_those_of_the_file():
    groups = script("head_groups")
    made = [
        groups.shape_of(p) | {"heads_in_group": size, "old": number == 0}
        for p, *sizes in groups.fresh(24, GPU)
        for number, size in enumerate(sizes)
    ]
    columns = *groups.COLUMNS[:7], "heads_in_group", "old"
    assert cells(made, columns) == cells(recorded("packed-head-groups-fresh-h100.csv"), columns)


def test_short_backwards_are_those_of_the_file():
    """Except for those of other implementations and of the rule."""
    short = script("short_backwards")
    made = [
        short.shape_row(shape) | form.row
        for shape in short.shapes()
        for form in short.forms(shape, GPU)
    ]
    rows = [row for row in recorded("short-backwards-h100.csv") if row["tile"]]
    assert cells(made, short.COLUMNS[:-1]) == cells(rows, short.COLUMNS[:-1])


def test_a_forward_runs_in_the_given_head_groups():
    groups = script("head_groups")
    p = groups.problems()[0]
    (rules,) = HOPPER.forward_passes(p, None, GPU, "ascending", "")
    (forced,) = groups.forced(heads_in_group=7).forward_passes(p, None, GPU, "ascending", "")
    assert rules.clump != 7
    assert forced.clump == 7
    assert (forced.kernel, forced.grid) == (rules.kernel, rules.grid)


def test_a_backward_runs_in_the_given_form():
    """So many launches in clusters of these sizes, with these tiles; delta's kernel as ever."""
    short = script("short_backwards")
    shape = next(s for s in short.shapes() if (s.head_dim, s.n_q, s.batch) == (128, 464, 4))
    for form in short.forms(shape, GPU):
        one = next(
            x
            for x in short.passes(shape, form.algorithm, form.family, GPU)
            if x.stage.outer == "keys" and x.kernel.shared_bytes
        )
        launches = [(x.kernel.cluster, len(x.items)) for x in (*one.before, one)]
        assert tuple(launches) == form.clusters
        assert one.tables.schedule.tiling == form.tile
        assert dict(one.kernel.constants)["FS_MORE"] == form.early
