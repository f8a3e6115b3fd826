"""`flashsim walkthrough`: what is asked reaches the study."""

import json

import pytest
from typer.testing import CliRunner

from flashsim import Tiling, banks, walkthrough
from flashsim.cli.app import app


def invoke(*arguments):
    return CliRunner().invoke(app, [str(x) for x in arguments])


def rows(*arguments):
    result = invoke(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize(
    ("arguments", "table"),
    [
        ("softmax --logits -90,-95 --chunk 2", walkthrough.softmax([-90, -95], chunk=2)),
        (
            "tiles -n 40 -d 8 -t 16x8 --row 30 --causal --seed 3",
            walkthrough.tiles(40, 8, tiling=Tiling(16, 8), row=30, causal=True, seed=3),
        ),
        ("delta -n 16", walkthrough.delta(16)),
        ("corrections -t 32x32", walkthrough.corrections(tiling=Tiling(32, 32))),
        ("reread --dtype float16", walkthrough.reread(dtype="float16")),
    ],
)
def test_walkthroughs_print_what_the_library_gives(arguments, table):
    found = invoke("walkthrough", *arguments.split(), "--csv")
    assert found.stdout == table.csv()


def test_walkthroughs_are_listed_and_unknown_ones_refused():
    assert [row["name"] for row in rows("walkthrough")] == list(walkthrough.NAMES)
    assert "did you mean 'tiles'" in invoke("walkthrough", "tile").output


def test_banks_prints_every_layout_and_draws_one_pattern(tmp_path):
    assert rows("banks") == banks.table().records()
    out = tmp_path / "banks.svg"
    found = rows("banks", "column", "--columns", 64, "--plot", out)
    assert found == banks.table(pattern="column", columns=64).records()
    assert "xor: 1 wavefront" in out.read_text()
