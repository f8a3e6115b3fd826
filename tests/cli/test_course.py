"""What is asked on the command line reaches the library: studies, models and a quiz."""

import pytest
from commands import invoke, ok, refused, rows

import flashsim
from flashsim import Problem, Tiling, banks, blocks, l2, softmax_matmul, walkthrough
from flashsim.studies import claims, ladder, predict, reproduce

pytestmark = pytest.mark.promise("command line equals library")

LAYER = Problem(512, head_dim=64, heads=4, dtype="bfloat16", causal=True)
ASKED = "-d 64 --batch 1 --heads 4 --causal"
WIDE = Problem(1024, head_dim=64, batch=2, heads=16, dtype="bfloat16")
TWO = Problem(512, head_dim=32, heads=2, dtype="bfloat16")
CACHE = Problem(1, 64, 64, batch=2, heads=4, kv_heads=2, dtype="bfloat16", page_size=8)
DECODE = "-a flash-decode -n 1 --n-kv 64 -b 2 --heads 4 --kv-heads 2 --dtype bfloat16 -d 64"
SPLIT = f"{DECODE} --device H200 --splits 2 --page-size 8"
STAGES = {"dkdv": Tiling(64, 128), "dq": Tiling(128, 64)}


def dram(problem, *model, **how):
    return l2.dram(flashsim.count(problem, **how), *model).table()


#: Command lines, and the table of the library.
PRINTED = {
    "study walkthrough softmax --logits -90,-95 --chunk 2": lambda: walkthrough.softmax(
        [-90, -95], chunk=2
    ),
    "study walkthrough tiles -n 40 -d 8 -t 16x8 --row 30 --causal --seed 3": lambda: (
        walkthrough.tiles(40, 8, tiling=Tiling(16, 8), row=30, causal=True, seed=3)
    ),
    "study walkthrough delta -n 16": lambda: walkthrough.delta(16),
    "study walkthrough corrections -t 32x32": lambda: walkthrough.corrections(
        tiling=Tiling(32, 32)
    ),
    "study walkthrough reread --dtype float16": lambda: walkthrough.reread(dtype="float16"),
    "study banks": banks.table,
    f"study blocks -n 512 {ASKED} --stages dkdv=64x128,dq=128x64": lambda: blocks.mixed(
        LAYER, STAGES
    ).table(),
    f"study when {ASKED} -n 512,1024 --direction backward --device A100": lambda: predict.when(
        LAYER, (512, 1024), direction="backward", device="A100"
    ),
    f"study versions -n 512 {ASKED}": lambda: predict.versions(LAYER),
    "study dram -n 512 -d 32 --heads 2 --tiling 64x64 --device A100 --launch grouped --warm "
    "--direction backward": lambda: dram(
        TWO,
        l2.L2Model(launch="grouped", flush=False),
        **{"tiling": Tiling(64, 64), "device": "A100", "direction": "backward"},
    ),
    f"study dram {SPLIT}": lambda: dram(CACHE, algorithm="flash-decode", device="H200", splits=2),
    f"predict {SPLIT}": lambda: predict.predict(CACHE, algorithm="flash-decode", splits=2).table(),
    "predict -n 1024 -d 64 --batch 2 --kernel portable --direction backward": lambda: (
        predict.predict(WIDE, direction="backward", kernels="portable").table()
    ),
    "study ladder -n 64 --rungs naive,flash2 --seed 3": lambda: ladder.climb(
        64, 64, 64, tiling=Tiling(32, 64), rungs=["naive", "flash2"], seed=3
    ).table(),
    "study reproduce": lambda: reproduce.listing()[0],
    "study claims": claims.table,
}


@pytest.mark.parametrize("line", PRINTED)
def test_a_command_prints_what_the_library_gives(line):
    assert ok(line, "--csv") == PRINTED[line]().csv()


def test_walkthroughs_are_listed():
    assert [row["name"] for row in rows("study walkthrough")] == list(walkthrough.NAMES)


def test_banks_and_blocks_draw_what_they_print(tmp_path):
    out = tmp_path / "drawn.svg"
    found = rows("study banks", "column", "--columns", 64, "--plot", out)
    assert found == banks.table(pattern="column", columns=64).records()
    assert "xor: 1 wavefront" in out.read_text()
    words = (f"study blocks -n 512 {ASKED} --sides 64,128 --direction backward", "--stage", "dq")
    found = rows(*words, "--plot", out)
    assert found == blocks.sizes(LAYER, (64, 128), direction="backward").table().records()
    assert "stage dq" in out.read_text()
    assert "STAGE=QUERIESxKEYS" in refused("study blocks", "--stages", "dq=fit")


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
    right = ok(*words, "--loaded", said[0], "--stored", said[1])
    assert "How many bytes does FlashAttention-2 forward load from HBM" in right
    assert "tiles of 64 x 64" in right
    assert "to the byte!" in right
    wrong = ok(*words, "--loaded", "30,000", "--stored", 1)
    assert "to the byte!" not in wrong
    assert "30,000" in wrong
