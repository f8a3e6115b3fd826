"""X-ray: tiles inferred from counters, of kernels whose tiles are known."""

import json
import os
import re
import stat
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from commands import ok, refused, rows
from repository import recorded

import flashsim
from flashsim import Problem, Tiling
from flashsim.errors import BackendUnavailable, TraceError
from flashsim.studies.verify.ncu import METRICS
from flashsim.studies.xray import LaunchCounters, Profile, XRay, infer, measure, measure_kernels

pytestmark = pytest.mark.promise("predictions are judged")

DATA = Path(__file__).parents[2] / "docs/data"
SAVED, TRUTH = DATA / "xray-sdpa-h100.json", DATA / "xray-truth-h100.json"
#: What FlashAttention-2's kernels have in their names: head dimension, rows and keys of a tile.
TRAITS = re.compile(r"Flash_(?:fwd|bwd)_kernel_traits<\d+, (\d+), (\d+)")


def test_tiles_of_flash_attention_4_are_those_in_its_source():
    """A user's program at d = 128, causal: 128 x 128 forward, 64 x 128 backward."""
    record = Profile.load(DATA / "xray-cute-h100.json")
    assert record.calls[0]["api"] == "FlashAttention"  # found without an operator of torch
    kernels = [one for one in XRay(record).kernels if one.launch.seen.tensor_flops]
    forward, backward = (one.found for one in kernels)
    assert (forward.sides("block_q"), forward.sides("block_k")) == ((128,), (128,))
    assert backward.form == "fused"
    assert 64 in backward.sides("block_q")
    assert backward.sides("block_k") == (128,)


@pytest.fixture(scope="module")
def xray():
    return XRay(Profile.load(SAVED))


def test_tiles_of_flash_attention_2_are_those_in_its_kernels_names(xray):
    """LaunchCounters of an H100; nothing here has seen the names."""
    checked = unique = 0
    for one in xray.kernels:
        traits = TRAITS.search(one.launch.kernel)
        if traits is None or not one.found.fits:
            continue
        for name, side in zip(("block_q", "block_k"), map(int, traits.groups()), strict=True):
            extent = one.problem.n_q if name == "block_q" else one.problem.n_kv
            sides = one.found.sides(name)
            assert side in sides or (side > extent and max(sides) >= extent), one.launch.kernel
            checked += 1
            unique += len(sides) == 1
    assert checked >= 24
    assert unique >= 16


@pytest.mark.parametrize(
    "longest", [1200, pytest.param(10_000, marks=pytest.mark.thorough)], ids=["some", "all"]
)
def test_no_tile_of_known_kernels_is_wrong(longest):
    """Kernels of four origins on random shapes, measured on an H100 by benchmarks/xray.py."""
    known = {int(row["read B"]): row["true"] for row in recorded(TRUTH.with_suffix(".csv"))}
    record = Profile.load(TRUTH)
    short = {n for n, call in enumerate(record.calls) if call["problem"]["n_q"] <= longest}
    launches = tuple(x for x in record.launches if x.call in short and int(x.seen.read) in known)
    right, claimed = 0, 0
    for one in XRay(replace(record, launches=launches)).kernels:
        true = known[int(one.launch.seen.read)]
        if not one.found.fits:
            continue
        claimed += 1
        tile = tuple(map(int, true.split(" x ")))
        assert tile in {(fit.block_q, fit.block_k) for fit in one.found.fits}, one.launch.kernel
        outer = "block_k" if one.found.form in ("fused", "dkdv") else "block_q"
        right += len(one.found.sides(outer)) == 1
    assert len(launches) >= 12
    assert claimed >= 0.8 * len(launches)
    assert right >= 0.9 * claimed


def test_flops_tell_tiles_that_read_the_same():
    p = Problem(n_q=1000, head_dim=64, heads=4, dtype="bfloat16")
    exact = flashsim.count(p, tiling=Tiling(128, 96)).bytes("load")
    products = 4.0 * 64 * 4 * 1024 * 1056  # 8 tiles of 128 rows, 11 of 96 keys
    (found,) = infer(p, "forward", [LaunchCounters(exact, blocks=32, tensor_flops=products)])
    assert (found.block_q, found.by_flops) == (128, True)
    assert 96 in found.sides("block_k")
    assert not {64, 80, 112, 128} & set(found.sides("block_k"))
    (found,) = infer(p, "forward", [LaunchCounters(exact, blocks=32, tensor_flops=0.9 * products)])
    assert not found.fits


def test_the_pass_structure_of_torchs_kernels_is_seen(xray):
    forms = [(one.launch.direction, one.found.form) for one in xray.kernels]
    assert ("backward", "fused") in forms
    assert ("forward", "split keys") in forms
    assert {one.found.splits for one in xray.kernels if one.found.form == "combine"} >= {3, 4, 32}


def counters(problem, tiling, algorithm, direction, names, blocks=0):
    """What a kernel without overheads would count, from the simulator's own events."""
    rng = np.random.default_rng(0)
    shape = lambda heads, n: (problem.batch, heads, n, problem.head_dim)  # noqa: E731
    q, k, v = (
        rng.standard_normal(shape(*of)).astype(problem.dtype)
        for of in ((problem.heads, problem.n_q), *[(problem.kv_heads, problem.n_kv)] * 2)
    )
    how = {"causal": problem.causal, "algorithm": algorithm, "tiling": tiling}
    found = flashsim.run(q, k, v, **how, trace=True)
    trace = found.trace
    if direction == "backward":
        trace = found.backward(np.ones_like(q), tiling=tiling, trace=True).trace
    total = dict.fromkeys(("load", "store", "reduce"), 0)
    for (stage, op, _), nbytes in trace.transfers.items():
        if stage in names:
            total[op] += nbytes
    return LaunchCounters(total["load"], total["store"], total["reduce"], blocks)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tile", [(32, 48), (64, 16), (48, 32)], ids=str)
def test_a_simulated_kernels_tile_fits(tile, causal):
    p = Problem(n_q=200, head_dim=16, heads=2, dtype="float16", causal=causal)
    for algorithm, direction, stage in (
        ("flash2", "forward", "forward"),
        ("flash2-fused", "backward", "fused"),
        ("flash2", "backward", "dq"),
        ("flash2", "backward", "dkdv"),
    ):
        seen = counters(p, Tiling(*tile), algorithm, direction, (stage,))
        (found,) = infer(p, direction, [seen])
        assert found.form == stage
        assert tile in {(fit.block_q, fit.block_k) for fit in found.fits}
        if not causal:
            side = "block_k" if stage in ("fused", "dkdv") else "block_q"
            assert getattr(found, side) == tile[side == "block_k"]


def test_both_passes_in_one_launch_are_told_from_either():
    p = Problem(n_q=256, head_dim=16, heads=2, dtype="float16")
    seen = counters(p, Tiling(64, 32), "flash2", "backward", ("dkdv", "dq"))
    (found,) = infer(p, "backward", [seen])
    assert found.form == "dkdv and dq"
    assert (64, 32) in {(fit.block_q, fit.block_k) for fit in found.fits}


def test_keys_divided_into_parts_are_seen_by_the_kernel_that_combines_them():
    p = Problem(n_q=1, n_kv=4096, head_dim=64, heads=8, dtype="float16")
    parts, rows = 4, 8
    kv = 2 * p.heads * p.n_kv * p.head_dim * 2
    products = 4.0 * 64 * p.head_dim * p.n_kv * p.heads  # rows are padded to 64
    split = LaunchCounters(kv + parts * rows * p.head_dim * 2, 0, 0, parts * p.heads, products)
    combine = LaunchCounters(parts * rows * (p.head_dim + 1) * 4, 0, 0, 8, 0.0)
    first, second = infer(p, "forward", [split, combine])
    assert (first.form, first.splits) == ("split keys", parts)
    assert first.block_q == 64
    assert (second.form, second.splits) == ("combine", parts)


@pytest.mark.parametrize("more", [0.97, 1.02, 2.5])
def test_bytes_that_no_tile_reads_lead_to_no_claim(more):
    p = Problem(n_q=4096, head_dim=64, heads=8, dtype="float16")
    exact = flashsim.count(p, tiling=Tiling(128, 64)).bytes("load")
    assert infer(p, "forward", [LaunchCounters(exact, blocks=256)])[0].block_q == 128
    (found,) = infer(p, "forward", [LaunchCounters(exact * more, blocks=256)])
    assert not found.fits
    assert found.form == "other"


def test_a_causal_kernel_that_skips_nothing_is_seen():
    p = Problem(n_q=4096, head_dim=64, heads=8, dtype="float16", causal=True)
    dense = flashsim.count(replace(p, causal=False), tiling=Tiling(128, 64)).bytes("load")
    (found,) = infer(p, "forward", [LaunchCounters(dense, blocks=256)])
    assert found.block_q == 128
    assert all(fit.dense for fit in found.fits)


def test_whole_boxes_past_the_end_tell_the_key_tile():
    """TMA delivers whole tiles, so a ragged length tells the key tile without a mask."""
    p = Problem(n_q=1000, head_dim=64, heads=4, dtype="bfloat16")
    rows, keys = 1024, 1056  # of tiles of 128 and of 96
    read = 4 * 64 * 2 * (rows + 8 * 2 * keys)
    (found,) = infer(p, "forward", [LaunchCounters(read, blocks=32)])
    assert found.block_q == 128
    assert 96 in found.sides("block_k")
    assert 64 not in found.sides("block_k")


# -- the record, the command ----------------------------------------------------------------------


def test_the_command_reads_a_record_and_writes_page_and_plot(tmp_path):
    page, plot, few = tmp_path / "x.html", tmp_path / "x.png", tmp_path / "few.json"
    whole = Profile.load(SAVED)
    launches = tuple(one for one in whole.launches if one.call == 0)
    replace(whole, launches=launches).save(few)
    assert "Query tile 128" in ok("xray", "--from", few, "--page", page, "--plot", plot)
    text = page.read_text()
    assert "<svg" in text
    assert "<script" not in text
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert any(row["query tile"] == "128" for row in rows("xray", "--from", few))


def test_a_record_is_what_was_saved(tmp_path):
    record = Profile.load(SAVED)
    record.save(tmp_path / "again.json")
    assert Profile.load(tmp_path / "again.json") == record


@pytest.mark.parametrize(
    "damage",
    [
        lambda values: values.pop("launches"),
        lambda values: values["launches"][0].pop("call"),
        lambda values: values["launches"][0].update(call=99),
        lambda values: values["launches"][0]["counters"].pop("bytes into SMs"),
        lambda values: values["calls"][0]["problem"].update(n_q=-1),
    ],
)
def test_a_damaged_record_is_refused(tmp_path, damage):
    values = json.loads(SAVED.read_text())
    damage(values)
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(values))
    with pytest.raises(TraceError, match="xray --save"):
        Profile.load(path)


#: Stands for Nsight Compute: prints a table of one launch, and describes the call if asked to.
NCU = """#!{python}
import json, sys
words = sys.argv[1:]
out = next((x for x in words if x.endswith("calls.json")), None)
if "broken.py" in " ".join(words):
    sys.exit("the program's last words")
if out:
    problem = dict(n_q=1100, head_dim=64, heads=4, dtype="bfloat16")
    calls = [dict(name="attn", api="sdpa", note="", problem=problem)]
    told = dict(calls=calls, ranges={{"flashsim.watch 1": [0, "forward"]}})
    told["gpu"] = ["NVIDIA H100 80GB HBM3", [9, 0], 132, 85_000_000_000]
    open(out, "w").write(json.dumps(told))
print('"ID","a Domain:Push/Pop_Range:b","Kernel Name","Grid Size","Metric Name",'
      '"Metric Unit","Metric Value"')
for metric, unit, value in (({read!r}, "byte", "10,700,800"), ({time!r}, "ns", "5,000")):
    print(f'"0","1 <default>:flashsim.watch 1:none","my_kernel","(9, 4, 1)",'
          f'"{{metric}}","{{unit}}","{{value}}"')
"""


@pytest.fixture
def profiler(tmp_path, monkeypatch):
    tool = tmp_path / "ncu"
    metrics = {"read": METRICS["bytes into SMs"], "time": METRICS["seconds"]}
    tool.write_text(NCU.format(python=sys.executable, **metrics))
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "program.py").write_text("")
    return tmp_path


def test_a_program_is_measured_by_the_ranges_of_its_calls(profiler):
    record = measure(profiler / "program.py")
    assert record.device == "H100"
    (one,) = XRay(record).kernels
    # Q once, K and V for each of 9 tiles of 128 rows: 4 heads * 1,100 rows * 128 B * (1 + 18).
    assert (one.found.form, one.found.block_q) == ("forward", 128)
    assert one.launch.counters["seconds"] == 5e-6


def test_kernels_are_measured_by_name_and_shape(profiler):
    p = Problem(n_q=1100, head_dim=64, heads=4, dtype="bfloat16")
    program = profiler / "program.py"
    record = measure_kernels(program, (), p, "forward", kernel="my", device="H100")
    assert XRay(record).kernels[0].found.block_q == 128
    saved = profiler / "kept.json"
    sizes = ("-n", 1100, "-d", 64, "--heads", 4, "--batch", 1, "--dtype", "bfloat16")
    ok("xray", "--kernel", "my", *sizes, "--device", "H100", "--save", saved, program)
    assert Profile.load(saved).launches == record.launches


def test_what_goes_wrong_is_said(profiler, monkeypatch):
    (profiler / "broken.py").write_text("")
    with pytest.raises(BackendUnavailable, match="the program's last words"):
        measure(profiler / "broken.py")
    for words, said in (
        (("--kernel", "my", profiler / "program.py"), "--kernel needs the kernel's shape"),
        ((), "pass either a program to run"),
        (("-n", 10, profiler / "program.py"), "leave it out"),
        ((profiler / "program.py", "-n", 10), "-n after the program could be an option"),
    ):
        assert said in refused("xray", *words)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(BackendUnavailable, match="Nsight Compute"):
        measure(profiler / "program.py")


def test_clusters_and_spills_are_told_and_their_tiles_right():
    """Kernels that read far more than their tiles: clusters' parts, registers that come back."""
    rows = {int(row["read B"]): row for row in recorded(TRUTH.with_suffix(".csv"))}
    record = Profile.load(TRUTH)
    reads = (39_117_568, 102_504_032, 63_371_008)
    calls = {x.call for x in record.launches if int(x.seen.read) in reads}
    chosen = replace(record, launches=tuple(x for x in record.launches if x.call in calls))
    found = {int(one.launch.seen.read): one for one in XRay(chosen).kernels}
    said = "Clusters of 2", "Clusters of 2", "spills registers"
    for read, says in zip(reads, said, strict=True):
        fits = {(fit.block_q, fit.block_k) for fit in found[read].found.fits}
        assert tuple(map(int, rows[read]["true"].split(" x "))) in fits
        assert says in " ".join(found[read].sentences())
    for path in (SAVED, TRUTH):
        told = [" ".join(one.sentences()) for one in XRay(Profile.load(path)).kernels]
        assert not [one for one in told if "reads -" in one]
        # Parts of split keys are no spilled registers.
        assert not [one for one in told if "spills" in one and "split into" in one]
    # Without the bytes stored, nothing says where those read come from: no claim.
    (launch,) = (x for x in chosen.launches if int(x.seen.read) == reads[-1])
    kept = replace(launch, counters=dict(launch.counters) | {"writes at L2": 0.0})
    (one,) = XRay(replace(record, launches=(kept,))).kernels
    assert not one.found.fits
    # Other numbers of blocks have no clusters.
    (launch,) = (x for x in chosen.launches if int(x.seen.read) == reads[1])
    (one,) = XRay(replace(record, launches=(replace(launch, blocks=255),))).kernels
    assert not one.found.fits
