"""`flashsim study ...`: what is asked reaches the study."""

import pytest
from commands import invoke, rows

import flashsim
from flashsim import Problem, Tiling, banks, blocks, softmax_matmul, walkthrough
from flashsim.studies import predict

pytestmark = pytest.mark.promise("command line equals library")


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
    found = invoke("study walkthrough", *arguments.split(), "--csv")
    assert found.stdout == table.csv()


def test_walkthroughs_are_listed_and_unknown_ones_refused():
    assert [row["name"] for row in rows("study walkthrough")] == list(walkthrough.NAMES)
    assert "did you mean 'tiles'" in invoke("study walkthrough", "tile").output


def test_banks_prints_every_layout_and_draws_one_pattern(tmp_path):
    assert rows("study banks") == banks.table().records()
    out = tmp_path / "banks.svg"
    found = rows("study banks", "column", "--columns", 64, "--plot", out)
    assert found == banks.table(pattern="column", columns=64).records()
    assert "xor: 1 wavefront" in out.read_text()


LAYER = Problem(512, head_dim=64, heads=4, dtype="bfloat16", causal=True)
BACK = ("--direction", "backward")
ASKED = ("-n", 512, "-d", 64, "--batch", 1, "--heads", 4, "--causal")


def test_blocks_prints_stages_and_draws_one(tmp_path):
    out = tmp_path / "blocks.svg"
    found = rows("study blocks", *ASKED, "--sides", "64,128", *BACK, "--plot", out, "--stage", "dq")
    assert found == blocks.sizes(LAYER, (64, 128), direction="backward").table().records()
    assert "stage dq" in out.read_text()
    found = rows("study blocks", *ASKED, "--stages", "dkdv=64x128,dq=128x64")
    tiles = {"dkdv": Tiling(64, 128), "dq": Tiling(128, 64)}
    assert found == blocks.mixed(LAYER, tiles).table().records()
    assert "STAGE=QUERIESxKEYS" in invoke("study blocks", "--stages", "dq=fit").output


def test_when_and_versions_print_predictions():
    found = rows("study when", *ASKED[2:], "-n", "512,1024", *BACK, "--device", "A100")
    expected = predict.when(LAYER, (512, 1024), direction="backward", device="A100")
    assert found == expected.records()
    assert rows("study versions", *ASKED) == predict.versions(LAYER).records()


SMALL = ("study softmax-matmul", "--batch", 2, "--d1", 40, "--d2", 70, "--d3", 8, "--block", 16)


@pytest.mark.parametrize("more", [(), ("--run",)])
def test_softmax_matmul_prints_one_kernel_and_two(more):
    found = rows(*SMALL, *more)
    for kernels, fused in (("fused", True), ("two", False)):
        (row,) = (r for r in found if (r["kernels"], r["tensor"]) == (kernels, "all"))
        expected = softmax_matmul.count(2, 40, 70, 8, block=16, fused=fused)
        assert (row["load B"], row["store B"]) == (expected.bytes("load"), expected.bytes("store"))
    assert ("on chip per block" in invoke(*SMALL, *more).stdout) == bool(more)


def test_softmax_matmul_says_where_the_simulator_and_the_form_differ(monkeypatch):
    monkeypatch.setattr(softmax_matmul, "run", lambda *_, **__: softmax_matmul.count(1, 1, 1, 1))
    assert "disagree about the bytes moved" in invoke(*SMALL, "--run").output


def test_a_quiz_on_a_shape_of_ones_own():
    problem = Problem(64, head_dim=16, causal=True)
    counted = flashsim.count(problem, tiling=Tiling(64, 64))
    words = ("exercise predict", "-n", 64, "-d", 16, "--causal")
    said = f"{counted.bytes('load'):,}", f"{counted.bytes('store'):_}"
    done = invoke(*words, "--loaded", said[0], "--stored", said[1])
    assert done.exit_code == 0, done.output
    assert "How many bytes does FlashAttention-2 forward load from HBM" in done.stdout
    assert "tiles of 64 x 64" in done.stdout
    assert "to the byte!" in done.stdout
    wrong = invoke(*words, "--loaded", "30,000", "--stored", 1).stdout
    assert "to the byte!" not in wrong
    assert "30,000" in wrong


def test_an_exercise_has_its_own_shape():
    done = invoke("exercise predict", "delta", "-n", 64)
    assert done.exit_code == 2
    assert "--n-q has no effect with an exercise, which sets the shape" in done.stderr
    done = invoke("exercise predict", "delta", "--loaded", "3x", "--stored", 1)
    assert "must be a number of bytes in digits, e.g. 30,000; got '3x'" in done.stderr
