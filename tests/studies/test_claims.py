"""Claims of other texts: each verdict is computed, and each check can come out either way."""

import re

import numpy as np
import pytest
from repository import page

from flashsim import Device, Problem, Tiling, claims
from flashsim.studies.reproduce import pallas

pytestmark = pytest.mark.promise("doc figures are measured")

WRONG = {
    *("bf16-52", "faster-backward", "a100-335", "blocks-64-45", "scores-32", "268-times"),
    *("incoherent", "tile-softmax", "l-sum", "advance-k"),
}


def test_what_is_wrong_is_called_wrong_and_nothing_else():
    found = {name: claims.judge(name) for name in claims.CLAIMS}
    assert {name for name, finding in found.items() if not finding.right} == WRONG
    assert all(finding.found and finding.why for finding in found.values())


def test_the_page_has_every_claim_with_its_verdict():
    rows = re.findall(r"^\| `(\S+)` \| (.+) \| (right|wrong) \|$", page("reference/texts.md"), re.M)
    table = claims.table().records()
    assert rows == [(r["claim"], r["said"], r["verdict"]) for r in table]
    assert "why" not in claims.overview(claims.table()).columns


@pytest.mark.parametrize(
    ("change", "name"),
    [
        # Had the text been right, each check would say so.
        ((claims, "MIB", 1 << 19), "scores-32"),
        ((claims, "_hadamard", np.eye), "incoherent"),  # nothing is spread any more
        ((claims, "_BLOCK", claims._N), "tile-softmax"),  # one tile, the whole row
    ],
)
def test_a_verdict_follows_what_is_computed(monkeypatch, change, name):
    monkeypatch.setattr(*change)
    assert claims.judge(name).right


def test_the_tile_that_fits_an_a100_is_the_largest_square():
    device = Device.get("A100")
    side = claims._largest_square(device, "float16")
    problem = Problem(1 << 20, head_dim=64, dtype="float16")
    assert Tiling(side, side).footprint(problem) <= device.sram_bytes
    assert Tiling(side + 1, side + 1).footprint(problem) > device.sram_bytes


def test_the_same_work_is_what_the_reason_of_the_backward_claim_compares():
    mine, theirs = (pallas.TIMES["backward", k][-1] for k in ("flash", "cuDNN"))
    why = claims.judge("faster-backward").why
    alike = 10 / 14 * pallas.speed("backward", "flash", -1) / 1e12
    assert f"{alike:.0f} versus" in why
    assert alike * mine == pytest.approx(pallas.speed("backward", "cuDNN", -1) / 1e12 * theirs)
