"""What was kept of the soaks on an H200, judged again; docs/notebooks/counters.md prints it."""

from statistics import median

import pytest
from repository import ROOT, page, recorded, script

from flashsim.backends.launch_policy import hopper_kernels
from flashsim.studies import verify
from flashsim.studies.verify.crossing import WALKS, StageKernel

pytestmark = pytest.mark.promise("doc figures are measured")

PAGE, MODELS = page("notebooks/counters.md"), page("reference/predictions.md")


@pytest.fixture(scope="module")
def tables():
    return script("doc_tables")


def test_every_pass_that_was_soaked_agreed(tables):
    table = tables.soaked_counts()
    assert table.markdown() in PAGE
    *rows, whole = table.records()
    assert sum(whole[name] for name in list(whole)[2:6]) == 3345
    assert (whole["refused"], whole["failed"]) == (0, 0)
    assert all(row["forward"] for row in rows)


@pytest.mark.thorough  # replays every case
def test_random_shapes_under_the_counters(tables):
    """Counts and FLOPs equal, DRAM within 5 % but once, and four of the reads beyond 0.1 %."""
    worst, inside = tables.soaked()
    assert worst.markdown() in PAGE
    assert inside.markdown() in PAGE
    missed = {row["quantity"]: row["of"] - row["within its target"] for row in inside.records()}
    assert missed.pop("requested read") == 4
    assert missed.pop("DRAM read") == 1
    assert set(missed.values()) == {0}
    assert sum(row["of"] for row in inside.records()) > 800
    kept = verify.Record.load(ROOT / "docs" / "data" / "soak-h200.csv")
    found = verify.compare(kept.cases, verify.passes_of(kept))
    exceeding = sorted(
        100 * abs(one.difference)
        for one in found
        if (one.quantity, one.target) == ("DRAM read", 0.05) and one.stage in WALKS
    )
    of, (*others, worst) = len(exceeding), exceeding
    assert max(others) < 5 < worst
    counted = f"one misses it, by {worst:.1f} % (median {median(exceeding):.1f} %)"
    assert f"Of the {of} [random shapes](#random-shapes) that exceed L2" in " ".join(PAGE.split())
    assert counted in " ".join(PAGE.split())
    results = (ROOT / "docs" / "notebooks" / "predictions.md").read_text(encoding="utf-8")
    share = f"{of - 1} of {of} within 5 %, one {worst:.1f} % off, median {median(exceeding):.1f} %"
    assert f"Random shapes: {share}" in results


def test_the_soak_has_kernels_that_defer_dq_and_their_flops_are_equal(monkeypatch):
    """When the soak ran, no product added log-sum-exp and delta."""
    monkeypatch.setattr(hopper_kernels, "adds_statistics", lambda *_, **__: False)
    kept, late = verify.Record.load(ROOT / "docs" / "data" / "soak-h200.csv"), 0
    for one in (x for those in verify.passes_of(kept) for x in those):
        for stage in one.traffic.stages:
            for launch in one.launches.get(stage.name, ())[:1]:
                if "hopper_" not in launch.kernel or stage.name != "fused":
                    continue
                kernel = StageKernel(one.traffic, stage, True, one.python)
                kernel = kernel.shared(in_turns=one.in_turns)
                measured = [n for name, n in launch.counters.items() if "tensor FLOPs" in name]
                assert kernel.tensor_flops() == sum(measured)
                late += any(share.unused for share in kernel.launches)
    assert late == 4


@pytest.mark.parametrize("gpu", ["h100", "h200"])
def test_the_page_counts_what_the_judging_run_says(gpu):
    """Rows within their targets as predicted before the run; reads with the later rules, too."""
    rows = recorded(f"soak-judged-{gpu}.csv")
    kinds = {
        ("tensor FLOPs", "0.0"): "| tensor FLOPs | equal |",
        ("requested reduce", "0.001"): "| requested reduce | 0.1 % |",
        ("requested read", "0.001"): "| requested read | 0.1 % |",
        ("DRAM read", "0.05"): "| DRAM read, tensors exceed L2 | 5 % |",
        ("DRAM read", "0.1"): "| DRAM read, tensors fit in L2 | 10 % |",
    }
    assert {(row["quantity"], row["target"]) for row in rows} == set(kinds)

    def inside(those, column):
        ratios = [(int(x[column]), int(x["measured"]), float(x["target"])) for x in those]
        return sum(abs(measured - said) <= said * target for said, measured, target in ratios)

    for (quantity, target), begins in kinds.items():
        those = [row for row in rows if (row["quantity"], row["target"]) == (quantity, target)]
        found = inside(those, "predicted")
        share = 100 * found / len(those)
        assert (
            f"{begins} {found} | {len(those)} | {share:.{1 if found < len(those) else 0}f} %"
            in PAGE
        )
        if (quantity, target) == ("DRAM read", "0.05") and gpu == "h100":
            said = f"where the tensors exceed L2, {found} of {len(those)} within 5 %"
            off = (abs(int(x["measured"]) / int(x["predicted"]) - 1) for x in those)
            assert f"{said}, worst {100 * max(off):.0f} % |" in MODELS
        if quantity == "requested read":
            later = inside(those, "predicted with the later rules")
            which = {"h100": "both", "h200": "these"}[gpu]
            assert f"With {which} rules, {later} of {len(those)} reads" in PAGE
