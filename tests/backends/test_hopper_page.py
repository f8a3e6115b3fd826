"""The table of tiles in docs/reference/hopper.md lists the tilings that the kernels have."""

import re
from pathlib import Path

import pytest
from gpus import H200

from flashsim import Problem, Tiling
from flashsim.backends.launch_policy.hopper import HOPPER

PAGE = Path(__file__).parents[2] / "docs/reference/hopper.md"


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_the_page_lists_the_forward_tiles(head_dim):
    (row,) = re.findall(rf"^\| tile, d ≤ {head_dim} \|(.*)$", PAGE.read_text("utf-8"), re.M)
    cell = row.split("|")[0]
    listed = {Tiling(int(q), int(k)) for q, k in re.findall(r"(\d+) × (\d+)", cell)}
    problem = Problem(4096, 4096, head_dim, dtype="bfloat16")
    assert listed == set(HOPPER.tilings(problem, H200, "forward"))
