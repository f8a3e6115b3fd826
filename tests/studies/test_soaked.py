"""The kept results of soaks on an H100 and an H200, which the docs print."""

import pytest
from repository import page, recorded, script

pytestmark = pytest.mark.promise("doc figures are measured")

PAGE, MODELS = page("notebooks/counters.md"), page("reference/predictions.md")
RESULTS, GUIDE = page("notebooks/predictions.md"), page("guides/truth.md")

#: By quantity and target: the start of the quantity's row in a table of a judging run.
KINDS = {
    ("tensor FLOPs", "0.0"): "| tensor FLOPs | equal |",
    ("requested reduce", "0.001"): "| requested reduce | 0.1 % |",
    ("requested read", "0.001"): "| requested read | 0.1 % |",
    ("DRAM read", "0.05"): "| DRAM read, tensors exceed L2 | 5 % |",
    ("DRAM read", "0.1"): "| DRAM read, tensors fit in L2 | 10 % |",
}


def test_every_pass_that_was_soaked_agreed():
    table = script("doc_tables").soaked_counts()
    assert table.markdown() in PAGE
    *rows, whole = table.records()
    assert sum(whole[name] for name in list(whole)[2:6]) == 3345
    assert (whole["refused"], whole["failed"]) == (0, 0)
    assert all(row["forward"] for row in rows)


def judged(name):
    """Return a file's rows by quantity and target."""
    rows, found = recorded(f"soak-judged-{name}.csv"), {kind: [] for kind in KINDS}
    for row in rows:
        found[row["quantity"], row["target"]].append(row)
    return found


def inside(those, column="predicted"):
    """Return how many of the rows are within their target."""
    ratios = [(int(x[column]), int(x["measured"]), float(x["target"])) for x in those]
    return sum(abs(measured - said) <= said * target for said, measured, target in ratios)


@pytest.mark.parametrize(("gpu", "which"), [("h100", "both"), ("h200", "these")])
def test_the_page_counts_what_the_judging_run_says(gpu, which):
    """Rows within their targets as predicted before the run; reads with the later rules, too."""
    kinds = judged(gpu)
    for kind, those in kinds.items():
        found = inside(those)
        share = f"{100 * found / len(those):.{1 if found < len(those) else 0}f}"
        assert f"{KINDS[kind]} {found} | {len(those)} | {share} %" in PAGE
    reads = kinds["requested read", "0.001"]
    later = inside(reads, "predicted with the later rules")
    assert f"With {which} rules, {later} of {len(reads)} reads" in PAGE


def test_the_page_counts_what_the_last_run_says():
    flops, adds, reads, past, others = judged("again-h100").values()
    assert all(inside(those) == len(those) for those in (flops, adds, others))
    text = " ".join(PAGE.split())
    assert f"{len(flops)} FLOPs and {len(adds)} reductions are equal or within 0.1 %." in text
    for name, those, limit in (("requested reads", reads, 0.1), ("DRAM reads past L2", past, 5)):
        said = f"Of {len(those)} {name}, {inside(those)} are within {limit} % "
        assert f"{said}({100 * inside(those) / len(those):.1f} %; the goal" in text
    assert f"All {len(others)} others are within 10 %." in text


FIRST = {"520173", "927626", "758429", "269482", "510392"}


@pytest.mark.parametrize("name", ["eight-h100", "last-h100", "last-h200"])
def test_the_page_counts_what_the_last_soaks_say(name):
    """The eight soaks' table has a column for the first five, and one for all."""
    for kind, those in judged(name).items():
        five = [x for x in those if x["seed"] in FIRST] if name == "eight-h100" else those
        found = inside(five)
        share = f"{100 * found / len(five):.{1 if found < len(five) else 0}f} %"
        row = f"{KINDS[kind]} {found} of {len(five)} | {share} |"
        end = f" | {inside(those)} of {len(those)} |" if five is not those else " |"
        assert any(x.startswith(row) and x.endswith(end) for x in PAGE.splitlines()), row + end


def test_the_page_counts_the_reads_of_rows_of_400_bytes():
    reads, column = (
        judged("eight-h100")["requested read", "0.001"],
        "predicted with the later rules",
    )
    five = [x for x in reads if x["seed"] in FIRST]
    text = " ".join(PAGE.split())
    assert f"{inside(five, column)} of the first five soaks' {len(five)} reads" in text
    assert f"and {inside(reads, column)} of all {len(reads)}." in text
    past = [x for name in ("eight", "again") for x in judged(f"{name}-h100")["DRAM read", "0.05"]]
    share = f"{100 * inside(past) / len(past):.1f} %"
    assert f"{inside(past)} of {len(past)} DRAM reads past L2 are within 5 % ({share})" in text


def past_l2(name):
    """Return how many DRAM reads past L2 are within 5 %, of how many, and the largest error."""
    past = judged(name)["DRAM read", "0.05"]
    off = max(abs(int(x["measured"]) / int(x["predicted"]) - 1) for x in past)
    return inside(past), len(past), f"worst {100 * off:.0f} % |"


@pytest.mark.parametrize(
    "name", ["h100", "h200", "again-h100", "eight-h100", "last-h100", "last-h200"]
)
def test_the_reference_says_how_far_dram_reads_are_off(name):
    found, of, worst = past_l2(name)
    assert f"where the tensors exceed L2, {found} of {of} within 5 %, {worst}" in MODELS


def test_the_notebook_and_the_guide_say_how_far_dram_reads_are_off():
    found, of, worst = past_l2("h200")
    assert f"that exceed L2: {found} of {of} within 5 %, {worst}" in RESULTS
    guide = " ".join(GUIDE.split())
    assert f"{100 * found / of:.1f} % of the H200's predicted DRAM reads" in guide
    reads = judged("again-h100")["requested read", "0.001"]
    assert f"{inside(reads)} of {len(reads)} passes read as many bytes" in guide
    later = [past_l2(f"{name}-h100")[:2] for name in ("again", "eight", "last")]
    *some, last = (f"{100 * found / of:.1f} %" for found, of in later)
    assert f"{', '.join(some)} and {last}. The worst" in guide
