"""`flashsim verify`: reading Nsight Compute's CSV and setting it against predictions."""

import csv
import io
import json
import stat
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from commands import invoke, ok, refused, rows

import flashsim
from flashsim import Device, Problem, Tiling, errors, l2
from flashsim.backends.launch_policy.hopper_kernels import product_columns
from flashsim.problem.hardware import PRESETS, reported
from flashsim.problem.masks import BlockMask
from flashsim.schedule.plans import FUSED
from flashsim.studies.verify import (
    METRICS,
    Case,
    Counted,
    MeasuredLaunch,
    MeasuredPass,
    Record,
    assign,
    cases,
    command,
    counts_beside,
    measure,
    parse,
    passes_of,
    record,
    verify,
    workload,
)
from flashsim.studies.verify.crossing import StageKernel
from flashsim.studies.verify.sectors import sectors_written
from flashsim.studies.verify.soak import compare, draw
from flashsim.studies.verify.soak import table as table_of_worst

pytestmark = pytest.mark.promise("predictions are judged")

PROBLEM = Problem(256, head_dim=32, heads=2, dtype="bfloat16", causal=True)
#: Words that measure one small launch.
ON_H200 = ("-n", 64, "-d", 16, "--heads", 1, "--batch", 1)
ON_H200 += ("--backend", "simulator", "--device", "H200")
HEADER = ["ID", "Process ID", "Kernel Name", "Grid Size", "Section Name"]


def predictions(algorithm="flash2"):
    return [
        flashsim.count(PROBLEM, algorithm=algorithm, direction=d, tiling=Tiling(64, 64))
        for d in ("forward", "backward")
    ]


def kernel(p, stage, tiling, device="H200", *, form="flash2-fused", hopper=True, python=False):
    """A stage's kernel, by its name: of the fused backward, of three passes or of the forward."""
    form = form if stage in ("fused", "convert") else "flash2"
    direction = "forward" if stage == "forward" else "backward"
    traffic = cases.predict(p, form, direction, tiling, device)
    found = next(one for one in traffic.stages if one.name == stage)
    return StageKernel(traffic, found, hopper, python)


def compared(traffic, stage, name, counters, *, threads=0, **how):
    """The rows of one launch, by quantity."""
    launch = MeasuredLaunch(name, 0, counters, threads=threads)
    rows = verify([MeasuredPass(traffic, {stage: [launch]}, **how)], "title").rows
    return {row.quantity: row for row in rows}


def table(rows):
    text = io.StringIO()
    csv.writer(text, quoting=csv.QUOTE_ALL).writerows(rows)
    return text.getvalue()


def long_csv(launches):
    """One counter a row, as `ncu --csv` prints it: ``{kernel: {counter: (text, unit)}}``."""
    rows = [[*HEADER, "Metric Name", "Metric Unit", "Metric Value"]]
    for number, (kernel, counters) in enumerate(launches):
        for counter, (text, unit) in counters.items():
            rows.append([number, 77, kernel, "(4, 2, 1)", "Command line", counter, unit, text])
    return "==PROF== Connected to process 77\nprinted by the program\n" + table(rows)


def reads_of(*kernels):
    """Launches that read ten sectors each."""
    return long_csv([(kernel, {READ: ("10", "sector")}) for kernel in kernels])


READ, DRAM = METRICS["reads at L2"], METRICS["DRAM read"]
FLOPS = "tensor FLOPs, bf16"


def test_one_counter_a_row():
    first = {READ: ("1,234", "sector"), DRAM: ("2.5", "Mbyte")}
    second = {READ: ("7", "Ksector"), "some__other.sum": ("1", "weird")}
    launches = parse(long_csv([("flash_forward", first), ("flash_dq", second)]))
    assert launches == [
        MeasuredLaunch("flash_forward", 0, {"reads at L2": 1234 * 32, "DRAM read": 2_500_000}),
        MeasuredLaunch("flash_dq", 1, {"reads at L2": 7000 * 32}),
    ]


def test_one_launch_a_row():
    header = [*HEADER, "Block Size", READ, DRAM]
    units = ["", "", "", "", "", "", "sector", "Kbyte"]
    values = [0, 77, "flash_forward", "(4, 2, 1)", "", "(128, 1, 1)", "10", "1.5"]
    (launch,) = parse("==PROF== Disconnected\n" + table([header, units, values]))
    assert launch == MeasuredLaunch("flash_forward", 0, {"reads at L2": 320, "DRAM read": 1500})
    assert (launch.blocks, launch.threads) == (8, 128)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no table here\n", "no Nsight Compute table found"),
        (table([["ID", "Metric Name"], ["0", "x"]]), "no column 'Kernel Name'"),
        (table([["ID", "Kernel Name", "Metric Name"]]), "no column 'Metric Unit'"),
        (table([["ID", "Kernel Name", READ], ["", "", "sector"]]), "none of the counters"),
        (table([["ID", "Kernel Name", READ], ["", "", ""], ["x", "k", "1"]]), "got 'x'"),
        (long_csv([("flash_dq", {"other": ("1", "")})]), "none of the counters"),
        (long_csv([("flash_dq", {READ: ("n/a", "sector")})]), "must be a number, got 'n/a'"),
        (long_csv([("flash_dq", {DRAM: ("1", "furlong")})]), "has the unknown unit 'furlong'"),
        (long_csv([("flash_dq", {READ: ("1", "sector")})])[:-16], "the file is cut off"),
    ],
)
def test_bad_tables_are_refused(text, message):
    with pytest.raises(errors.TraceError, match=message):
        parse(text)


COUNTERS = {"bytes into SMs": "load", "writes at L2": "store", "reductions at L2": "reduce"}


def moved(traffic, stage, op):
    """Bytes of a stage's transfers of one kind."""
    return sum(n for (s, o, _), n in traffic.transfers.items() if (s, o) == (stage, op))


def measured(traffic, factor=1.0):
    """Launches whose L2 counters are the prediction times a factor."""
    found = []
    for number, stage in enumerate(traffic.stages):
        counters = {name: moved(traffic, stage.name, op) for name, op in COUNTERS.items()}
        counters["bytes into SMs"] += StageKernel(traffic, stage).table_reads()
        counters = {name: factor * n for name, n in counters.items()}
        name = {"fused": "dkdv"}.get(stage.name, stage.name)
        found.append(MeasuredLaunch(f"flash_{name}(Args)", number, counters))
    return found


@pytest.mark.parametrize("algorithm", ["flash2", "flash2-fused"])
def test_counters_meet_their_predictions_kernel_by_kernel(algorithm):
    forward, backward = predictions(algorithm)
    launches = [*measured(forward), *measured(backward), *measured(backward, factor=1.02)]
    found = verify(assign([forward, backward], launches), "title")
    assert found.worst("requested read") == pytest.approx(0.01)  # the mean of 1 and 1.02
    stages = [*forward.stages, *backward.stages]
    assert {row.stage for row in found.rows} == {stage.name for stage in stages}
    ratios = [row.ratio for row in found.rows if row.stage == "forward" and row.ratio]
    assert ratios == [1, 1, 1]  # read, written, sectors written
    assert "docs/guides/truth.md" in str(found.table().note)


def test_other_kernels_are_left_alone():
    forward, _ = predictions()
    launches = [*measured(forward), MeasuredLaunch("ampere_sgemm", 9, {"bytes into SMs": 1.0})]
    assert verify(assign([forward], launches), "title").launches == 1
    with pytest.raises(errors.TraceError, match="none of the measured kernels"):
        assign([forward], launches[1:])
    with pytest.raises(errors.TraceError, match="no kernel has both a predicted"):
        verify(assign([forward], launches), "title").worst("DRAM read")


def rows_of(counters, **how):
    return compared(predictions()[0], "forward", "flash_forward", counters, **how)


def test_dram_is_predicted_for_the_blocks_that_ran():
    forward, _ = predictions()
    limits = {"blocks an SM by registers": 3.0, "blocks an SM by shared memory": 2.0}
    found = rows_of({"DRAM read": 3.0, **limits})["DRAM read"]
    model = l2.L2Model("grouped", blocks_per_sm=2)
    assert found.predicted == l2.dram(forward, model).bytes("read")
    assert list(rows_of({"DRAM read": 3.0, **limits})) == ["DRAM read"]


def dram_read(p, algorithm, stage, kernel, *, in_turns=False):
    """Predicted for a stage of the backward, and (traffic, stage)."""
    made = flashsim.count(
        p, algorithm=algorithm, direction="backward", tiling=Tiling(64, 64), device=SMALL_L2
    )
    counters = {"DRAM read": 1.0, "blocks an SM by registers": 1.0}
    rows = compared(made, stage, kernel, counters, in_turns=in_turns)
    return rows["DRAM read"].predicted, made


SMALL_L2 = replace(Device.get("H200"), l2_bytes=2 << 20, sm_count=20)


def test_dram_is_predicted_of_rows_as_they_lie_in_it():
    """59 elements of bfloat16 are filled up to 64, 33 of the values to 40."""
    p = Problem(512, head_dim=59, head_dim_v=33, heads=2, dtype="bfloat16")
    found, _ = dram_read(p, "flash2", "dkdv", "flash_dkdv")
    asked = 512 * ((59 + 59 + 33 + 33) * 2 + 8) * 2  # Q, K, V, dO, LSE and delta, once
    assert found == asked + 512 * 2 * (5 + 7) * 2 * 2
    assert dram_read(replace(p, head_dim=64), "flash2", "dkdv", "flash_dkdv")[0] == found


def test_dram_is_predicted_for_the_heads_that_ran_together():
    """Hopper kernels work on one head after the other where all items are as long."""
    p = Problem(512, head_dim=64, heads=8, dtype="bfloat16")
    found, made = dram_read(p, "flash2", "dkdv", "hopper_dkdv")
    portable, _ = dram_read(p, "flash2", "dkdv", "flash_dkdv")
    one_head, all_heads = (
        l2.dram(made, l2.L2Model("grouped", blocks_per_sm=1, heads_in_group=heads))
        for heads in (1, None)
    )
    assert found == one_head.bytes("read", stage="dkdv")
    assert portable == all_heads.bytes("read", stage="dkdv") != found


def test_dram_is_predicted_for_blocks_that_wait_for_their_turns():
    p = Problem(1024, head_dim=64, heads=6, dtype="bfloat16", causal=True)
    found, made = dram_read(p, "flash2-fused", "fused", "hopper_backward", in_turns=True)
    at_once, _ = dram_read(p, "flash2-fused", "fused", "hopper_backward")
    expected = l2.dram(made, l2.L2Model("in-turns", blocks_per_sm=1))
    assert found == expected.bytes("read", stage="fused") != at_once


def test_spills_are_no_requested_writes():
    found = rows_of({"writes at L2": 100.0, "local memory writes": 30.0})
    assert found["requested write"].measured == 70
    assert (found["local memory writes"].predicted, found["local memory writes"].ratio) == (0, None)


def test_requested_reads_have_what_l1_answers_and_no_spilled_registers():
    reads = {"bytes into SMs": 1000.0, "local memory reads": 96.0}
    assert rows_of(reads)["requested read"].measured == 904
    assert rows_of(reads)["local memory reads"].predicted == 0
    found = rows_of(reads | {"reads from L1": 64.0}, threads=128)["requested read"]
    assert found.measured == 968
    # All four warps of eight blocks read a block's two entries in tables; L1 answers three.
    fewer = rows_of(reads, threads=128)["requested read"]
    assert found.predicted - fewer.predicted == 8 * 3 * 2 * 32
    both = reads | {"reads from L1": 64.0}
    row = rows_of(both, threads=128, python=True)["requested read"]
    assert (row.measured, row.predicted) == (904, fewer.predicted)
    # Row by row, L1 answers every sector's second half.
    rows = compared(predictions()[1], "delta", "flash_delta", both, threads=128)
    assert rows["requested read"].measured == 904


def test_tensor_flops_are_those_of_whole_tiles():
    found = rows_of({"tensor FLOPs, bf16": 10.0, "tensor FLOPs, fp16": 1.0})["tensor FLOPs"]
    tiles = 4 + 3 + 2 + 1  # of 64 x 64, causal
    assert found.predicted == 2 * tiles * 2 * (2 * 64 * 64 * 32)
    assert found.measured == 11
    assert rows_of({"shared bank conflicts": 5.0})["shared bank conflicts"].predicted == 0


def beyond(p, stage):
    """Bytes loaded by a Hopper kernel past those that the problem has."""
    one = kernel(p, stage, Tiling(64, 64))
    return one.crossing("load") - moved(one.traffic, stage, "load")


def test_boxes_hang_over_the_ends():
    """n = 100 in tiles of 64: 28 rows of the second tile's box are no rows of the tensor."""
    p = Problem(100, head_dim=64, heads=4, kv_heads=2, dtype="bfloat16")
    row = 64 * 2
    once = 4 * 28 * row  # Q of four heads
    visits = 4 * 2 * 28 * row * 2  # K and V: four heads, two row tiles
    assert beyond(p, "forward") == once + visits
    once = 2 * 28 * row * 2  # K and V of two key heads
    visits = 2 * 2 * 2 * 28 * row * 2  # Q and dO: two key heads, two query heads each, two tiles
    sectors = 4 * 2 * 2 * 16  # LSE and delta: 400 bytes of a head in 13 sectors, twice
    assert beyond(p, "dkdv") == once + visits + sectors
    forward = kernel(p, "forward", Tiling(64, 64))
    hopper, portable = (
        compared(forward.traffic, "forward", name, {"bytes into SMs": 1.0})["requested read"]
        for name in ("hopper_forward", "flash_forward")
    )
    assert hopper.predicted - portable.predicted == beyond(p, "forward")
    assert forward.tensor_flops() == 4 * 4 * 2 * (2 * 64 * 64 * 64)


def test_boxes_hang_over_the_sides():
    """Boxes are 64 columns wide; the backward's tiles of V are as wide as those of K."""
    p = Problem(128, head_dim=48, head_dim_v=96, dtype="bfloat16")
    tiles = 128 * 2  # rows of Q, or of K in both visits of two row tiles, bytes
    assert beyond(p, "forward") == tiles * (16 + 2 * (16 + 32))
    statistics = 2 * 128 * 4  # LSE and delta once more: both warpgroups have a tile's 64 rows
    assert beyond(p, "dq") == tiles * (80 + 32 + 2 * (80 + 32)) + statistics


def test_rows_that_begin_in_the_middle_of_a_sector():
    """Counters of an H200, d = 40, 72 and 200, 2,048 queries and keys, eight heads.

    Of 80 bytes, a pair of pieces in one sector or, in every other row, in two: 3 and 5 sectors.
    """
    rows = 8 * (2048 + 2 * 16 * 2048)  # Q once, K and V for 16 row tiles
    for d, portable, boxes in ((40, 4, 5), (72, 7, 9.5), (200, 19, 18.5)):
        p = Problem(2048, head_dim=d, heads=8, dtype="bfloat16")
        one = kernel(p, "forward", Tiling(128, 32), "B200")
        assert one.crossing("load") == rows * boxes * 32
        assert replace(one, hopper=False).crossing("load") == rows * portable * 32
    whole = kernel(Problem(64, head_dim=72, dtype="bfloat16"), "delta", None, hopper=False)
    assert whole.crossing("load") == 2 * 64 * 144  # delta: rows


def written(p, stage, tiling, *, hopper):
    """Sectors that a stage's stores touch."""
    return sectors_written(kernel(p, stage, tiling, hopper=hopper)) / 32


def test_sectors_that_two_store_instructions_touch():
    """Rows of 80 B begin in the middle of a sector every other time.

    Hopper stores 64 B of a row at once: 2 and 1 sectors of an even row, 3 and 1 of an odd one. A
    portable warp stores 32 pieces of tiles whose rows have 6 in shared memory, so every third one
    ends in the middle of a sector.
    """
    p, tiles = Problem(192, head_dim=40, heads=2, dtype="bfloat16"), Tiling(64, 64)
    statistics = 2 * 192 // 8  # eight floats each
    assert written(p, "forward", tiles, hopper=True) == 192 * 7 + statistics
    assert written(p, "dkdv", tiles, hopper=True) == 2 * 192 * 7
    split = 192 * 6 // 32 // 3
    assert written(p, "forward", tiles, hopper=False) == 2 * (192 * 5 / 2 + split) + statistics
    assert written(p, "convert", tiles, hopper=False) == 192 * 5
    whole = replace(p, head_dim=64, head_dim_v=64)
    assert written(whole, "dkdv", tiles, hopper=True) == 2 * 2 * 192 * 4


@pytest.mark.parametrize(("d", "rows"), [(64, 4), (128, 2), (136, 1)])
def test_sectors_of_delta(d, rows):
    """A warp stores as many rows' delta, 4 B each, at a time; eight would fill a sector."""
    p = Problem(64, head_dim=d, dtype="bfloat16")
    assert written(p, "delta", Tiling(64, 64), hopper=True) == 64 // rows


def test_sectors_of_heads_that_begin_inside_one():
    """Nine rows' LSE: the second head's first eight lie in two sectors, the last in one."""
    p = Problem(9, head_dim=64, heads=2, dtype="bfloat16")
    out = 2 * 9 * 4
    assert written(p, "forward", Tiling(64, 64), hopper=True) == out + (1 + 1) + (2 + 1)


def test_entries_in_tables_that_blocks_read():
    """A work tile's two entries, a sector each, and on Hopper the answer of a counter."""
    p = Problem(2048, head_dim=64, heads=8, dtype="bfloat16")
    one, tiles = kernel(p, "forward", Tiling(128, 128)), 8 * 16
    portable = replace(one, hopper=False)
    assert portable.table_reads() == tiles * 2 * 32  # fewer tiles than SMs
    assert one.table_reads() == tiles * 2 * 32  # so no counter is asked
    assert portable.table_reads(warps=4) == 4 * tiles * 2 * 32
    many = kernel(replace(p, heads=8000), "forward", Tiling(128, 128))
    assert replace(many, hopper=False).table_reads() == 8000 * 16 * 2 * 32
    assert many.table_reads() == 8000 * 16 * 3 * 32
    assert kernel(p, "delta", Tiling(64, 64)).table_reads() == 0


def test_statistics_of_heads_that_begin_inside_a_sector():
    """Two heads of 100 rows: the second begins at byte 400, in the middle of a sector."""
    p = Problem(100, head_dim=64, heads=2, dtype="bfloat16")

    def beyond_rows(stage, hopper, *, with_l1=False):
        moved = kernel(p, stage, Tiling(64, 64), hopper=hopper).crossing("load", with_l1=with_l1)
        times = (1, 1, 2, 2) if stage == "dq" else (2, 2, 1, 1)  # Q, dO, K and V
        return moved - sum(2 * (128 if hopper else 100) * n * 128 for n in times)

    walks = 2 * 2 * 2 * 13 * 32  # vectors, key tiles, heads: 100 rows touch 13 sectors
    assert beyond_rows("dkdv", False) == beyond_rows("dkdv", True) == walks
    # With L1: 32 rows at a time, the last four in one sector; in the second head, five for each 32.
    by_warps = 2 * 2 * (3 * 4 + 1 + 3 * 5 + 1) * 32
    assert beyond_rows("dkdv", False, with_l1=True) == by_warps
    assert beyond_rows("dkdv", True, with_l1=True) == by_warps
    # A row tile alone: 8 and 5 sectors, in the second head 9 and 5.
    assert beyond_rows("dq", False) == 2 * (8 + 5 + 9 + 5) * 32
    # Eight rows at a time, by both warpgroups: in the second head two sectors each but the last.
    assert beyond_rows("dq", True) == 2 * 2 * (13 + 2 * 12 + 1) * 32


def test_sectors_that_are_not_worked_out():
    packed = {"cu_seqlens_q": (0, 5, 64), "cu_seqlens_k": (0, 5, 64)}
    for how in ({"dtype": "float32"}, {"dtype": "bfloat16"} | packed):
        one = kernel(Problem(64, head_dim=40, **how), "forward", Tiling(64, 64), hopper=False)
        assert sectors_written(one) is None


def test_rows_are_filled_up_to_16_bytes():
    """59 of 64 elements exist: the others are in HBM, and cross; 16 a step make 64 of 50."""
    p = Problem(64, head_dim=59, head_dim_v=64, dtype="bfloat16")
    one = kernel(p, "forward", Tiling(64, 64), hopper=False)
    assert one.crossing("load") == 64 * 2 * 3 * 64
    assert one.crossing("store") == 64 * (64 * 2 + 4)
    assert one.crossing("reduce") == 0
    narrow = kernel(replace(p, head_dim_v=50), "forward", Tiling(64, 64), hopper=False)
    assert narrow.tensor_flops() == 2 * 64 * 64 * (64 + 64)
    # 16 more columns twice: log-sum-exp and delta
    assert kernel(p, "dkdv", Tiling(64, 64)).tensor_flops() == 2 * 64 * 64 * (4 * 64 + 2 * 16)


@pytest.mark.parametrize(
    ("d", "dv", "stage", "columns"),
    [
        *((32, 32, "fused", 5 * 32), (40, 40, "dkdv", 4 * 48), (40, 40, "fused", 4 * 48 + 64)),
        *((40, 96, "fused", 4 * 96 + 128), (72, 72, "fused", 4 * 80 + 128)),
        *((160, 160, "dkdv", 2 * 160 + 2 * 192), (160, 160, "dq", 3 * 160)),
        *((160, 160, "fused", 2 * 160 + 3 * 192), (200, 200, "dkdv", 2 * 208 + 2 * 256)),
    ],
)
def test_hoppers_backwards_multiply_whole_sixteens(d, dv, stage, columns):
    """dQ^T, and wide dK and dV, are whole chunks of 64. C++ adds LSE and delta up to d = 128."""
    p = Problem(64, head_dim=d, head_dim_v=dv, dtype="bfloat16")
    one = kernel(p, stage, Tiling(64, 64))
    more = 2 * 16 if max(d, dv) <= 128 else 0
    assert one.tensor_flops() == 2 * 64 * 64 * (columns + more)
    products, chunks = {"fused": 5, "dkdv": 4, "dq": 3}[stage], -(-max(d, dv) // 64)
    in_python = replace(one, python=True).tensor_flops()
    alike = max(d, dv) > 128 and stage != "dq"  # both languages divide the columns there
    assert in_python == 2 * 64 * 64 * (columns if alike else products * 64 * chunks)


@pytest.mark.parametrize(
    ("n", "d", "batch", "causal", "products"),
    [
        (16_384, 128, 1, True, 2048),  # one for each of its items
        # Clusters of two share 66, and of eight two, whose walks are too short.
        (4096, 128, 4, False, 2048 - 2 - 66 + 2 * 66),
        (16_384, 64, 1, False, 4096 - 4 + 8 * 4),  # clusters of eight share 4
        (4096, 64, 4, False, 4096 - 4),  # likewise, with too few visits each to defer dQ
        (1024, 64, 16, True, 0),
    ],
)
def test_where_dq_is_deferred_an_item_has_one_product_more(n, d, batch, causal, products):
    """As an H200's tensor cores count them; of dQ, whose product in the first visit is not used."""
    p = Problem(n, head_dim=d, batch=batch, heads=2048 // d, dtype="bfloat16", causal=causal)
    tiling = Tiling(128 if d == 64 else 64, 128)
    fused = kernel(p, "fused", tiling)
    shared = fused.shared().launches
    assert sum(one.unused for one in shared) == products
    assert replace(fused, python=True).shared().launches == shared
    free, ordered = (
        compared(fused.traffic, "fused", "hopper_backward", {FLOPS: 1.0}, in_turns=turns)
        for turns in (False, True)  # in a fixed order it is never deferred
    )
    more = free["tensor FLOPs"].predicted - ordered["tensor FLOPs"].predicted
    assert more == products * 2 * tiling.block_q * tiling.block_k * d


def in_both_languages(p):
    """A fused kernel, and how its blocks share key tiles in C++ and in Python."""
    fused = kernel(p, "fused", Tiling(64, 128))
    return fused, {x: replace(fused, python=x).shared().launches for x in (False, True)}


def test_an_item_without_visits_has_an_unused_product_in_cpp_alone():
    """Keys that no query sees; in Python what follows the last visit stands behind a branch."""
    p = Problem(4096, 8192, head_dim=128, heads=16, dtype="bfloat16", window=(3000, 0))
    fused, found = in_both_languages(p)
    unseen = int((np.diff(fused.traffic.schedule(fused.stage).col_csr[0]) == 0).sum())
    unused = {python: sum(one.unused for one in each) for python, each in found.items()}
    assert unseen > 0
    assert unused == {False: 16 * 64, True: 16 * (64 - unseen)}


def test_a_clusters_block_without_visits_has_an_unused_product_in_cpp_alone():
    """Of the last tile's two visits, four blocks share them."""
    p = Problem(8192, head_dim=128, dtype="bfloat16", causal=True)
    fused, found = in_both_languages(p)
    visits = np.diff(fused.traffic.schedule(fused.stage).col_csr[0])
    assert (visits.min(), np.sum(visits < 4)) == (2, 1)
    assert found == {False: ((64, 4, 64 * 4),), True: ((64, 4, 63 * 4 + 2),)}


def test_reads_where_clusters_share_what_whole_rounds_leave():
    """An H200's counter says 0.004 and 0.007 % more: docs/data/verify-h200.csv."""
    for p, tiling, blocks_more in (
        (Problem(4096, head_dim=128, batch=4, heads=16, dtype="bfloat16"), Tiling(64, 128), 80),
        (Problem(4096, head_dim=64, batch=4, heads=32, dtype="bfloat16"), Tiling(128, 128), 28),
    ):
        fused = kernel(p, "fused", tiling)
        shared = fused.shared()
        assert sum((one.blocks - 1) * one.items for one in shared.launches) == blocks_more
        more = shared.crossing("load") - fused.crossing("load")
        assert more == blocks_more * 128 * p.head_dim * (2 * 2 + 2 * 4)  # K, V; parts of dK, dV


@pytest.mark.parametrize(
    ("sizes", "tiling", "stage", "measured"),
    [
        # Rows of 224 bytes in clusters of two; heads that begin inside a sector, twice; both.
        ({"n_q": 1024, "batch": 4, "causal": True}, (64, 128), "dkdv", 39100416),
        ({"n_q": 2500, "n_kv": 2048}, (64, 128), "dkdv", 44763136),
        (
            {"n_q": 2500, "head_dim": 80, "batch": 3, "heads": 14, "kv_heads": 7, "causal": True},
            *((80, 128), "fused", 629526560),
        ),
        ({"n_q": 2500, "n_kv": 2048}, (64, 128), "fused", 52629504),
    ],
)
def test_reads_of_the_judging_run(sizes, tiling, stage, measured):
    """An H100's counter plus the sectors that L1 answers: docs/data/soak-judged-h100.csv."""
    p = Problem(**{"head_dim": 112, "heads": 2} | sizes, dtype="bfloat16")
    one = kernel(p, stage, Tiling(*tiling), "H100").shared()
    found = one.crossing("load", with_l1=True) + one.table_reads()
    assert found == pytest.approx(measured, rel=1e-5)


@pytest.mark.parametrize(
    ("sizes", "device", "measured"),
    [
        # Rows of 320 bytes in clusters of two and four; of 400 bytes in clusters of two.
        ({"n_q": 1024, "batch": 4, "heads": 2, "causal": True}, "H200", 67_149_824),
        ({"n_q": 1000, "batch": 2, "heads": 8, "window": (1573, 137)}, "H200", 157_642_752),
        (
            {"n_q": 4096, "n_kv": 1024, "head_dim": 200, "heads": 3, "kv_heads": 3},
            *("H100", 248_911_872),
        ),
    ],
)
def test_reads_of_dk_and_dv_in_clusters(sizes, device, measured):
    """The counters: docs/data/soak-judged-h200.csv and soak-judged-eight-h100.csv."""
    p = Problem(**{"head_dim": 160, "kv_heads": 1} | sizes, dtype="bfloat16")
    one = kernel(p, "dkdv", Tiling(64, 64), device).shared()
    assert one.crossing("load", with_l1=True) + one.table_reads() == measured


@pytest.mark.parametrize(
    ("sizes", "tiling", "reads", "converted", "reduced"),
    [
        ((160, 4, 4, "float16"), (64, 96), 89_346_464, 10_493_952, 52_428_800),  # on an H100
        ((72, 4, 8, "bfloat16"), (80, 128), 117_509_856, 9_450_496, 35_094_528),
    ],
)
def test_flags_and_stores_of_the_first_visit(sizes, tiling, reads, converted, reduced):
    """Counters; those of the fused kernel include the reads of blocks that wait."""
    d, batch, heads, dtype = sizes
    p = Problem(1024, head_dim=d, batch=batch, heads=heads, causal=True, dtype=dtype)
    for name, measured, slack in (("fused", reads, 1e-3), ("convert", converted, 0.0)):
        one = kernel(p, name, Tiling(*tiling), form="flash2-fused-first")
        found = one.crossing("load", with_l1=True) + one.table_reads() + one.flag_reads()
        assert found == pytest.approx(measured, rel=slack)
    first, adds = (kernel(p, "fused", Tiling(*tiling), form=form) for form in reversed(FUSED))
    assert first.crossing("reduce") == reduced
    moved = [sum(map(one.crossing, ("store", "reduce"))) for one in (first, adds)]
    assert moved[0] == moved[1]


def test_flops_of_items_that_clusters_share_are_of_whole_thirty_twos():
    p = Problem(4096, head_dim=80, batch=4, heads=16, dtype="bfloat16")
    fused = kernel(p, "fused", Tiling(64, 128)).shared()
    launches = fused.launches
    columns = {n: sum(one.items for one in launches if (one.blocks > 1) == n) for n in (0, 1)}
    assert columns[1] > 0
    more = 2 * 16  # of S and dP, for log-sum-exp and delta
    visits = columns[0] * 64 * (4 * 80 + 128 + more) + columns[1] * 64 * (4 * 96 + 128 + more)
    unused = sum(one.unused for one in launches) * 128
    assert fused.tensor_flops() == 2 * 64 * 128 * (visits + unused)


def test_what_the_blocks_of_a_cluster_send_each_other():
    """Two share a tile of keys: K and V arrive at both, and a float32 half of dK and of dV."""
    p = Problem(2048, head_dim=40, head_dim_v=96, heads=8, dtype="bfloat16", causal=True)
    fused = kernel(p, "fused", Tiling(64, 128))
    shared, alone = (  # in a fixed order no tile is shared
        fused.shared(in_turns=turns).crossing("load") for turns in (False, True)
    )
    # At each block: K's row of 80 bytes in 6.5 sectors and an empty box, V's of 192 in 9. Alone K's
    # is in 9, and V's in 8.
    keys, more = 8 * 2048, 2 * (6.5 + 4 + 9) - (9 + 8)
    assert shared - alone == keys * (more * 32 + 2 * 96 * 4)
    narrow = replace(p, head_dim=72, head_dim_v=72)
    assert product_columns("dkdv", narrow, Tiling(64, 128)) == (80, 0)
    assert product_columns("dkdv", narrow, Tiling(64, 128), cluster=2) == (96, 0)  # pieces of 32
    wide = replace(p, head_dim=72, head_dim_v=144)  # dK and dV: 192; dQ: 192, or 160
    assert product_columns("fused", wide, Tiling(64, 64)) == (144, 3 * 48)
    assert product_columns("fused", wide, Tiling(64, 64), cluster=2) == (144, 3 * 48)
    assert product_columns("fused", wide, Tiling(64, 96)) == (144, 2 * 48 + 16)


@pytest.mark.parametrize(
    ("d", "dv", "columns"), [(40, 40, 64), (80, 80, 96), (40, 96, 48), (200, 200, 224)]
)
def test_warps_share_dq_out_by_sixteen_columns(d, dv, columns):
    """As an H200's tensor cores count them: 48 by two warps, 80 and 48 by four."""
    p = Problem(128, head_dim=d, head_dim_v=dv, dtype="bfloat16")
    keys = 64 if d == 200 else 128
    fused = kernel(p, "fused", Tiling(64, keys), hopper=False)
    padded = {40: 48, 200: 224}
    rest = 2 * padded.get(d, d) + 2 * padded.get(dv, dv)
    assert fused.tensor_flops() == 2 * 2 * 64 * 128 * (rest + columns)


@pytest.mark.parametrize(("dtype", "more"), [("bfloat16", 2 * 16), ("float16", 0)])
def test_products_that_add_statistics(dtype, more):
    """S, dP, dV, dK and dQ^T (64 rows) of one pair of tiles; bfloat16 adds 16 columns twice."""
    p = Problem(128, head_dim=48, dtype=dtype)
    fused = kernel(p, "fused", Tiling(128, 128))
    assert fused.tensor_flops() == 2 * 128 * 128 * (4 * 48 + 64 + more)
    assert replace(fused, python=True).tensor_flops() == 2 * 128 * 128 * 5 * 64


def test_without_ncu_the_error_says_what_to_do(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(errors.BackendUnavailable, match="--from FILE"):
        command(["program"])


TILES = (Tiling(16, 16), Tiling(16, 16))
SIMULATED = {"backend": "simulator", "device": "H200"}
CASES = [
    Case(Problem(32, head_dim=8, causal=True), tilings=TILES, backward=(None,), **SIMULATED),
    Case(Problem(48, head_dim=8, heads=2, kv_heads=1, window=(9, 0)), "flash2", **SIMULATED),
    Case(Problem(40, 24, 8, 16, softcap=2.5), backward=(True, False), **SIMULATED),
]


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ({"scale": 0.5}, "scale"),
        ({"cu_seqlens_q": (0, 9, 32), "cu_seqlens_k": (0, 9, 32)}, "cu_seqlens_q"),
        ({"block_mask": BlockMask(np.eye(2, dtype=bool), 16, 16)}, "block_mask"),
        ({"mask": np.greater_equal}, "mask"),
        ({"bias": (1, 1)}, "bias"),
    ],
)
def test_what_a_case_cannot_carry_is_refused(more, name):
    message = rf"^the problem sets {name}, which a case cannot have; set only n_q, .*softcap"
    with pytest.raises(errors.UnsupportedError, match=message):
        Case(Problem(32, head_dim=8, **more))


def test_a_case_runs_with_its_softcap_and_its_widths(monkeypatch):
    asked = []
    plain = workload.run
    monkeypatch.setattr(workload, "run", lambda *x, **more: asked.append(more) or plain(*x, **more))
    (counted,) = workload.run_case(replace(CASES[2], backward=()), counting=True)
    assert asked[0]["softcap"] == 2.5
    assert Case.from_dict(json.loads(json.dumps(CASES[2].to_dict()))) == CASES[2]
    traffic = counted.predicted(CASES[2])
    assert counted.transfers == traffic.transfers
    assert traffic.bytes(tensor="V") == 2 * traffic.bytes(tensor="K")


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Make a program called ncu: no profiler, but the same way of being called."""
    path = tmp_path / "ncu"
    monkeypatch.setenv("PATH", str(tmp_path))

    def make(body):
        path.write_text(f"#!{sys.executable}\nimport sys\n{body}\n")
        path.chmod(path.stat().st_mode | stat.S_IEXEC)

    return make


def test_cases_are_run_twice_and_their_table_read(stand_in):
    kernels = ["flash_forward", "flash_delta", "hopper_backward", "flash_dq", "flash_forward"]
    wanted = CASES[:2]
    text = reads_of(*kernels)
    stand_in(
        f"assert '--clock-control' in sys.argv and 'flashsim.studies.verify.workload' in sys.argv\n"
        f"print({text!r})"
    )
    kept = record(wanted)
    assert parse(kept.text) == parse(text)
    cases = passes_of(kept)
    directions = [[one.traffic.direction for one in case] for case in cases]
    assert directions == [["forward", "backward"], ["forward"]]
    expected = flashsim.count(Problem(32, head_dim=8, causal=True), tiling=Tiling(16, 16))
    assert cases[0][0].counted == cases[0][0].traffic.transfers == expected.transfers
    assert [x.kernel for x in cases[0][1].launches["dkdv"]] == ["hopper_backward"]
    # A pass may be several launches in a row, whose counters add up.
    counters = {READ: ("10", "sector"), "launch__occupancy_limit_registers": ("1", "block")}
    several = long_csv([(kernel, counters) for kernel in [*kernels[:3], *kernels[2:]]])
    (one,) = passes_of(replace(kept, text=several))[0][1].launches["dkdv"]
    assert one.counters["reads at L2"] == 2 * 10 * 32
    assert one.blocks_per_sm == 1
    for wrong, message in (
        (kernels[:-1], "stage 'forward' of .*, got no kernel"),
        ([kernels[1], *kernels[1:]], "stage 'forward' of .*, got flash_delta"),
        ([*kernels, "flash_dq"], "more kernel launches than flashsim predicts; launch"),
    ):
        with pytest.raises(errors.TraceError, match=message):
            passes_of(replace(kept, text=reads_of(*wrong)))


GPUS = {
    "H100": ("NVIDIA H100 80GB HBM3", (9, 0), 132, 85_017_755_648),
    "H200": ("NVIDIA H200", (9, 0), 132, 150_109_880_320),
    "A100": ("NVIDIA A100-SXM4-40GB", (8, 0), 108, 42_297_786_368),
    "A100-80GB": ("NVIDIA A100-SXM4-80GB", (8, 0), 108, 84_987_740_160),
    "RTX 3090": ("NVIDIA GeForce RTX 3090", (8, 6), 82, 25_438_126_080),
    "RTX 4000 Ada": ("NVIDIA RTX 4000 Ada Generation", (8, 9), 48, 20_881_670_144),
    "T4": ("Tesla T4", (7, 5), 40, 15_828_320_256),
    "V100": ("Tesla V100-SXM2-32GB", (7, 0), 80, 34_089_730_048),
}
OTHERS = [
    ("NVIDIA H100 PCIe", (9, 0), 114, 85_021_163_520),
    ("NVIDIA H100 NVL", (9, 0), 132, 100_043_194_368),
    ("NVIDIA GH200 480GB", (9, 0), 132, 101_468_602_368),
    ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", (9, 0), 16, 10_468_982_784),
    ("NVIDIA GeForce RTX 3090 Ti", (8, 6), 84, 25_438_126_080),
    ("NVIDIA RTX 4000 SFF Ada Generation", (8, 9), 48, 20_881_670_144),
]


@pytest.mark.parametrize("name", GPUS)
def test_a_gpu_is_known_by_its_name_and_figures(name):
    assert reported(*GPUS[name]) is PRESETS[name]


@pytest.mark.parametrize("gpu", OTHERS, ids=lambda gpu: gpu[0])
def test_a_gpu_that_no_preset_describes_is_named(gpu):
    message = rf"'{gpu[0]}' \(compute .* {gpu[2]} SMs, .*choose a GPU with device="
    with pytest.raises(errors.OptionError, match=message):
        reported(*gpu)


def test_it_is_predicted_for_the_gpu_that_is_measured(stand_in, monkeypatch):
    """Also by the command; and where there is none to ask, that is said."""
    stand_in(f"print({reads_of('flash_forward')!r})")
    counted = [[Counted("flash2", "forward", Tiling(64, 64), {}).to_dict()]]
    real = measure.output_of

    def run(arguments):
        """What counts runs on a GPU, of which there is none here."""
        if arguments[0] != sys.executable:
            return real(arguments)
        Path(arguments[-1]).write_text(json.dumps(counted))
        return ""

    monkeypatch.setattr(measure, "output_of", run)
    unnamed = Case(PROBLEM)
    for gpu in ("H100", "H200"):
        monkeypatch.setattr(cases, "here", lambda gpu=gpu: gpu)
        kept = record([unnamed])
        assert [case.device for case in kept.cases] == [gpu]
        (one,) = passes_of(kept)[0]
        assert one.traffic.device.l2_bytes == PRESETS[gpu].l2_bytes
        shown = ok("verify", "-n", 64, "-d", 16, "--heads", 1)
        assert f"on {gpu}" in " ".join(shown.split())
        named = invoke("verify", "-n", 64, "--device", "A100", "--heads", 1)
        assert "on A100" in " ".join(named.output.split())
    message = "backend 'simulator' does not run on a GPU; choose a GPU with device="
    with pytest.raises(errors.OptionError, match=message):
        record([replace(unnamed, backend="simulator")])


def test_without_a_gpu_nothing_is_predicted_for_one_by_default(stand_in, monkeypatch):
    stand_in("pass")

    def fails(*_):
        raise errors.BackendUnavailable("no NVIDIA GPU is visible")

    monkeypatch.setattr(cases, "require_cupy", fails)
    with pytest.raises(errors.BackendUnavailable, match="no NVIDIA GPU"):
        record([Case(PROBLEM)])
    assert "no NVIDIA GPU" in refused("verify", "--soak", 1)


def test_the_workload_counts_only_where_it_is_told_to(tmp_path):
    wanted = json.dumps([case.to_dict() for case in CASES[:2]])
    workload.main([wanted])
    assert not list(tmp_path.iterdir())
    workload.main([wanted, str(tmp_path / "counted.json")])
    counted = json.loads((tmp_path / "counted.json").read_text())
    first = Counted.from_dict(counted[0][1])
    assert (first.direction, first.tiling) == ("backward", Tiling(16, 16))
    assert first.predicted(CASES[0]).transfers == first.transfers
    assert [len(case) for case in counted] == [2, 1]


def test_what_was_saved_says_what_ran_and_what_was_counted(tmp_path, stand_in):
    """The second table is the first, counts and all, with no option that says what ran."""
    counter = METRICS["bytes into SMs"]
    stand_in(f"print({long_csv([('flash_forward', {counter: ('10', 'byte')})])!r})")
    kept = tmp_path / "kept.csv"
    first = ok("verify", *ON_H200, "--causal", "--save", kept)
    assert ok("verify", "--from", kept) == first
    (row,) = rows("verify", "--from", kept)
    assert (row["quantity"], row["measured"]) == ("requested read", 10)
    assert row["counted"] + 2 * 32 == row["predicted"]  # one block: two entries in tables
    counts_beside(kept).write_text('{"cases": [{}]}')
    message = r"kept.counts.json does not have the format .*to read only kept.csv, rem"
    with pytest.raises(errors.TraceError, match=message):
        Record.load(kept)


def test_a_profiler_that_fails_is_quoted(stand_in):
    stand_in("print('ERR_NVGPUCTRPERM'); sys.exit(1)")
    with pytest.raises(errors.BackendUnavailable, match="exit code 1: ERR_NVGPUCTRPERM"):
        record(CASES)


# -- random shapes ---------------------------------------------------------------------------------


def test_random_cases_are_the_seeds():
    first, again, other = (draw(6, seed=n, kernels=("hopper",)) for n in (1, 1, 2))
    assert first == again != other
    assert {case.kernel for case in first} == {"hopper"}
    assert all(case.backward == (None, False) for case in first)
    assert len({case.problem for case in first}) > 3


def soaked(read, flops, counted):
    """A forward pass of `PROBLEM` whose counters and counts are as given, beside the predicted."""
    case = Case(PROBLEM, kernel="portable", device="H200")
    traffic = predictions()[0]
    # Two heads, four tiles: two entries in tables, each in a sector.
    loads = traffic.bytes("load") + 2 * 4 * 2 * 32
    tiles = 2 * 10 * 2 * (2 * 64 * 64 * 32)  # as in test_tensor_flops_are_those_of_whole_tiles
    counters = {"bytes into SMs": loads * read, "tensor FLOPs, bf16": tiles * flops}
    launch = MeasuredLaunch("flash_forward", 0, counters)
    theirs = {key: n + counted for key, n in traffic.transfers.items()}
    return [case], [[MeasuredPass(traffic, {"forward": [launch]}, theirs)]]


def test_what_is_furthest_beyond_its_target_stands_first():
    found = compare(*soaked(1.0009, 1.0, 0))
    assert not any(one.misses for one in found)
    assert found[0].quantity == "requested read"
    assert found[0].difference == pytest.approx(0.0009)
    found = compare(*soaked(1.003, 1.0005, 0))
    assert [one.quantity for one in found if one.misses] == ["requested read", "tensor FLOPs"]
    text = str(table_of_worst(found, 2))
    assert "requested read: 0 of 1" in text
    assert "counted by the kernels: 5 of 5" in text
    assert "+0.300" in text
    found = [x for x in compare(*soaked(1.0, 1.0, 16)) if x.quantity == "counted by the kernels"]
    assert all(one.misses for one in found)


@pytest.mark.parametrize(("counted", "status"), [(0, 0), (16, 1)])
def test_a_soak_that_misses_a_target_fails(counted, status, monkeypatch, tmp_path):
    drawn, (measured,) = soaked(1.0, 1.0, counted)
    kept = Record(tuple(drawn), "", ())
    monkeypatch.setattr("flashsim.studies.verify.record", lambda cases: kept)
    monkeypatch.setattr("flashsim.studies.verify.passes_of", lambda record: [measured])
    path = tmp_path / "kept.csv"
    result = invoke("verify", "--soak", 1, "--save", path)
    assert result.exit_code == status, result.output
    assert "1 random cases" in result.output
    again = invoke("verify", "--soak", 1, "--from", path)
    assert again.exit_code == status, again.output
