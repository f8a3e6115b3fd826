"""backend="numba_cuda" without a GPU: kernels compile, in registers; what cannot run says so."""

import operator
import os
import re
import shutil
import subprocess
import sys
import tempfile
import types
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from compiled import (
    between_scores_and_output,
    kernels_only,
    loads_under_the_last_products,
    thorough,
    usage,
)
from gpus import A100, H200, ODD, kernel_of, passes_of

import flashsim
from flashsim import Problem, Tiling
from flashsim.backends.launch import kernel as launch
from flashsim.backends.launch.kernel import Kernel
from flashsim.backends.launch_policy import cost_model
from flashsim.backends.launch_policy.hopper import HOPPER as CPP
from flashsim.engines.protocol import Job
from flashsim.errors import BackendUnavailable, OptionError, TilingError, UnsupportedError
from flashsim.problem.masks import BlockMask

pytestmark = pytest.mark.promise("kernels compile")

try:
    from flashsim.backends.numba_gpu import compiler
    from flashsim.backends.numba_gpu.hopper.smem_layout import KeysOutside
    from flashsim.backends.numba_gpu.launch_policy import HOPPER, TENSOR, PythonHopper
    from flashsim.backends.numba_gpu.teaching import run as teaching_run
    from flashsim.backends.numba_gpu import engine as numba_engine  # isort: skip
except BackendUnavailable as error:
    pytest.skip(str(error), allow_module_level=True)
except ImportError as error:
    pytest.skip(f"no numba-cuda: {error}", allow_module_level=True)


GPUS = {"sm_80": A100, "sm_90a": H200}
ALGORITHMS = "", "flash2", "flash2-fused"
#: Bytes a thread may spill: registers hold everything but some rarely used values.
SPILL_BYTES = 224
#: The same where it counts or stamps as well: addresses and counters are live throughout.
REPORT_SPILL_BYTES = 256
PROBLEMS = {
    "bf16 128 causal": Problem(512, 512, 128, heads=2, dtype="bfloat16", causal=True),
    "fp16 odd": Problem(500, 500, 40, 24, **ODD),
}


def kernels(problem, gpu, report=""):
    """Every kernel of the forward and of both backwards, once, in an order that stays."""
    every = [passes_of(TENSOR, problem, x, gpu=gpu, report=report) for x in ALGORITHMS]
    return sorted({one.kernel for some in every for one in some}, key=repr)


#: Head dimensions make the kernels differ most: one more GPU each, as compiling takes long.
WIDTHS = {
    ("bf16 64", "sm_90a"): Problem(512, 512, 64, heads=2, dtype="bfloat16"),
    ("bf16 64", "sm_80"): Problem(512, 512, 64, heads=2, dtype="bfloat16"),
    ("fp16 192", "sm_90a"): Problem(512, 512, 192, dtype="float16"),
    ("bf16 256 causal", "sm_80"): Problem(512, 512, 256, dtype="bfloat16", causal=True),
}


def check(kernel, arch, limit, report=""):
    text = compiled(kernel, GPUS[arch].compute_capability)
    assert f".target {arch}" in text
    assert ".local" not in text  # no array that the compiler could not keep in registers
    assert ("mma.sync" in text) == (kernel.shared_bytes > 0)
    assert ("red.global.add.u32" in text) == bool(report)  # compiled in only where asked for
    assert ("%clock64" in text) == (report == "timeline")
    _, log = compiler.assemble(text, GPUS[arch].compute_capability)
    registers, stack, spilled = usage(log)
    assert registers <= 65536 // kernel.threads
    assert spilled <= limit, (kernel, log)
    assert stack <= -(-spilled // 8) * 8  # nothing but spills; a frame is a multiple of 8


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        kernels_only("fp16 odd", "sm_80"),  # test_kernels_that_report_... has the other
        *(thorough("bf16 128 causal", "sm_80"), thorough("bf16 128 causal", "sm_90a")),
        thorough("fp16 odd", "sm_90a"),
    ],
)
def test_tensor_core_kernels_assemble_in_registers(name, arch):
    for kernel in kernels(PROBLEMS[name], GPUS[arch]):
        check(kernel, arch, SPILL_BYTES)


def test_a_kernel_of_each_kind_assembles_in_registers():
    """But dQ's, whose parts the fused one has."""
    found = [passes_of(TENSOR, PROBLEMS["fp16 odd"], x, gpu=A100) for x in ("", "flash2-fused")]
    made = [one.kernel for some in found for one in some]
    assert len(made) == 4
    for kernel in made:
        check(kernel, "sm_80", SPILL_BYTES)


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "arch"), WIDTHS)
def test_other_head_dims_assemble_in_registers(name, arch):
    for kernel in kernels(WIDTHS[name, arch], GPUS[arch]):
        if kernel.shared_bytes:  # row-wise kernels hardly depend on it
            check(kernel, arch, SPILL_BYTES)


@pytest.mark.parametrize(
    ("stage", "report"),
    [kernels_only("fused", "counts"), thorough("forward", "counts"), thorough("fused", "timeline")],
)
def test_kernels_that_report_assemble_in_registers(stage, report):
    kernel = kernel_of(TENSOR, PROBLEMS["bf16 128 causal"], stage, report=report)
    check(kernel, "sm_90a", REPORT_SPILL_BYTES, report)


HOPPER_PROBLEMS = {
    "128": Problem(4096, 4096, 128, heads=64, dtype="bfloat16"),
    "80": Problem(4096, 4096, 80, heads=64, dtype="bfloat16"),
    "64 causal": Problem(4096, 4096, 64, heads=64, dtype="bfloat16", causal=True),
    "256": Problem(4096, 4096, 256, heads=64, dtype="bfloat16", causal=True),
    "odd": PROBLEMS["fp16 odd"],
    "64 softcap": Problem(512, 512, 64, dtype="float16", softcap=3.0, causal=True),
    "128 softcap": Problem(512, 512, 128, dtype="bfloat16", softcap=3.0, causal=True),
    "negative": Problem(512, 512, 128, dtype="bfloat16", scale=-0.2),
    "128 blocks": Problem(
        *(512, 512, 128), dtype="bfloat16", block_mask=BlockMask(np.eye(4, dtype=bool), 128, 128)
    ),
}


@dataclass(frozen=True)
class Deferring(PythonHopper):
    """Defers dQ, or does not, whether walks are long or short."""

    deferred: bool = True

    def defers(self, walk, cluster):
        return self.deferred and walk.stage.name == "fused"


def hopper_kernel(problem, report="", stage="forward"):
    """The kernel of a stage; "in order" is the fused one that adds to dQ so, "deferred" the one
    that computes it a visit later."""
    family = Deferring(**vars(HOPPER), deferred=stage in ("deferred", "in order"))
    ordered = {"ordered": True} if stage == "in order" else {}
    name = "fused" if stage in FUSED else stage
    kernel = kernel_of(family, problem, name, report=report, **ordered)
    assert dict(kernel.constants).get("FS_DEFERRED", 0) == (stage == "deferred")
    return kernel


#: Stages with a dQ that is added up.
FUSED = ("fused", "deferred", "in order")


@cache
def compiled(kernel, capability=(9, 0)):
    """A kernel's PTX.

    Where a function is inlined, numba-cuda copies it block by block, each with all names of the
    function's scope, which nothing changes. Without these copies the PTX is the same, in two thirds
    of the time.
    """
    from numba.cuda.core import ir

    itself = lambda this, memo: this  # noqa: E731
    with (
        patch.object(ir.Scope, "__deepcopy__", itself, create=True),
        patch.object(ir.Loc, "__deepcopy__", itself, create=True),
    ):
        return compiler.ptx(kernel, capability)


@cache
def ptxas(text):
    """What ptxas says of a whole program, as the driver compiles it, and its code.

    nvJitLink cannot.
    """
    finder = pytest.importorskip("cuda.pathfinder")
    program = finder.find_nvidia_binary_utility("ptxas") or shutil.which("ptxas")
    if program is None:
        pytest.skip("no ptxas: pip install nvidia-cuda-nvcc (cu12: nvidia-cuda-nvcc-cu12)")
    with tempfile.TemporaryDirectory() as folder:
        source, code = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(text)
        command = [program, "-arch=sm_90a", "-v", str(source), "-o", str(code)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        log = done.stdout + done.stderr
        assert done.returncode == 0, log
        return log, code.read_bytes()


def check_groups(text, count):
    """No register move may come between the fence and a product, nor between two products."""
    groups = re.findall(r"wgmma\.fence.*?wgmma\.commit_group[^;]*;", text, re.DOTALL)
    assert len(groups) == count
    for group in groups:
        lines = {line.split()[0] for line in re.split(r"[;\n]\s*", group) if line.strip()}
        assert {name.split(".")[0] for name in lines} == {"wgmma", "add"}  # to descriptors


@pytest.mark.parametrize(
    ("name", "report"),
    [
        ("64 causal", ""),
        *(thorough(name, "") for name in ("128", "256", "odd", "128 blocks")),
        *(thorough("64 causal", "timeline"), thorough("odd", "timeline")),
    ],
)
def test_hopper_kernels_assemble_in_registers_and_asynchronously(name, report):
    kernel = hopper_kernel(HOPPER_PROBLEMS[name], report)
    text = compiled(kernel)
    assert text.startswith(".version 8.0") or "\n.version 8.0\n" in text
    for number in range(3):  # the copy engine reads tensor maps at multiples of 64
        assert f".param .align 64 .b8 hopper_forward_param_{number}[128]" in text
    assert ".local" not in text
    check_overlap(kernel, text, lets=False)
    # Scores and output, of the first (last) visit and of the others.
    check_hopper(kernel, text, 4, 32 if report else 0)


#: A kernel of Hopper's may begin while the one before it ends: all of them wait, these let others.
LETS_OTHERS_START = {"delta", "dkdv"}


def check_overlap(kernel, text, *, lets):
    """Of launches: a kernel waits once, and lets the next one start behind that, or not at all."""
    assert kernel.overlaps
    waits, starts = "griddepcontrol.wait", "griddepcontrol.launch_dependents"
    assert (text.count(waits), text.count(starts)) == (1, lets)
    assert not lets or text.index(waits) < text.index(starts)


@pytest.mark.parametrize("stage", ["delta", "convert"])
def test_row_wise_kernels_wait_before_they_touch_anything(stage):
    for family, overlaps in ((HOPPER, True), (TENSOR, False)):
        kernel = kernel_of(family, PROBLEMS["bf16 128 causal"], stage)
        text = compiled(kernel)
        if overlaps:
            check_overlap(kernel, text, lets=stage in LETS_OTHERS_START)
            first = re.search(r"(ld|st|red)\.global", text)
            assert text.index("griddepcontrol.wait") < first.start()
        else:
            assert not kernel.overlaps
            assert "griddepcontrol" not in text


@pytest.mark.parametrize("report", ["", "counts"])
def test_delta_less_a_gradient_of_the_lse(report):
    """A load a row more than without, in registers; the other kernels are the same."""
    from flashsim.backends.numba_gpu.tensor.backward_rows import DEEP

    problem = PROBLEMS["bf16 128 causal"]
    without, found = (
        [one.kernel for one in passes_of(TENSOR, p, "flash2-fused", gpu=A100, report=report)]
        for p in (problem, replace(problem, dlse=True))
    )
    assert found[1:] == without[1:]
    loads = [compiled(x[0], (8, 0)).count("ld.global.cg.f32") for x in (without, found)]
    assert loads == [0, DEEP]
    check(found[0], "sm_80", 0, report)


def check_hopper(kernel, text, groups, limit):
    """Products stay asynchronous, and `limit` bytes a thread are spilled at most."""
    check_groups(text, groups)
    log, _ = ptxas(text)
    assert "C75" not in log, log  # C7504: setmaxnreg is ignored; C7509 ...: wgmma is serialised
    registers, stack, spilled = usage(log)
    assert registers * kernel.threads <= 65536
    # Stamps take more registers than the producer has; what they cost is theirs.
    assert max(stack, spilled) <= limit


@pytest.mark.parametrize(
    ("name", "stage", "report"),
    [
        # `make test` has "deferred" in a cluster: test_a_deferred_launch_of_clusters_...
        *(kernels_only("64 causal", stage, "") for stage in ("deferred", "dq")),
        *(kernels_only("128", "fused", ""), kernels_only("128", "deferred", "")),
        *(
            thorough(name, stage, "")
            for name in ("128", "80", "64 causal", "odd", "negative", "64 softcap", "128 softcap")
            for stage in (*FUSED, "dkdv", "dq")
            if (name, stage) not in (("128", "fused"), ("64 causal", "dq"))
            and (name, stage) not in (("128", "deferred"), ("64 causal", "deferred"))
            # 80 rows and statistics outside the accumulators: too few registers, in C++ as well.
            and (name, stage) != ("negative", "in order")
        ),
        *(thorough("64 causal", stage, "timeline") for stage in (*FUSED, "dkdv")),
        *(thorough("128", stage, "timeline") for stage in (*FUSED, "dq")),
    ],
)
def test_hoppers_backward_assembles_in_registers_and_asynchronously(name, stage, report):
    kernel = hopper_kernel(HOPPER_PROBLEMS[name], report, stage)
    text = compiled(kernel)
    assert ".local" not in text
    fused, deferred = stage in FUSED, stage == "deferred"
    assert ("cp.reduce.async.bulk.tensor" in text) == fused
    assert ("red.release" in text) == (stage == "in order")
    # S, dP, dK and dV, this one in slices of queries; and dQ, deferred an item's last one, too.
    # Alone, it takes S and dP as well.
    slices = 5 if dict(kernel.constants)["FS_BLOCK_Q"] == 80 else 4
    groups = 3 if stage == "dq" else 3 + slices + fused + deferred
    check_hopper(kernel, text, groups, 144 if report else 0)
    check_overlap(kernel, text, lets=stage in LETS_OTHERS_START)


#: Of the backwards beyond 128 columns: head_dim, algorithm, stage, tile and groups of products.
#: Where a warpgroup has 64 and 32 columns, each product for them is two groups.
WIDE = {
    "roles": (192, "flash2-fused", "fused", Tiling(64, 96), 2 + 1 + 3 + 3),
    "192": (192, "flash2", "dkdv", Tiling(64, 64), 2 + 2 * 2),
    "192 fused": (192, "flash2-fused", "fused", Tiling(64, 64), 2 + 2 * 3),
    "256": (256, "flash2", "dkdv", Tiling(64, 64), 2 + 2),
    "256 fused": (256, "flash2-fused", "fused", Tiling(64, 64), 2 + 3),
}
#: Bytes a thread may spill: the scores' warpgroup with roles has few registers, in C++ as well.
WIDE_SPILLS = {"roles": 16}


@pytest.mark.parametrize(
    ("name", "softcap"),
    [
        *(("192", 0.0), kernels_only("roles", 0.0), kernels_only("256", 0.0)),
        *(thorough("192 fused", 0.0), thorough("256 fused", 0.0)),
        *(thorough(name, 3.0) for name in WIDE),
    ],
)
def test_the_wide_backwards_assemble_in_registers_and_asynchronously(name, softcap):
    d, algorithm, stage, tiling, groups = WIDE[name]
    p = Problem(4096, 4096, d, heads=64, dtype="bfloat16", causal=True, softcap=softcap)
    mine, other = (
        next(x.kernel for x in passes_of(f, p, algorithm, tiling=tiling) if x.stage.name == stage)
        for f in (HOPPER, CPP)
    )
    assert (mine.name, mine.threads, mine.boxes) == (other.name, other.threads, other.boxes)
    assert mine.shared_bytes <= other.shared_bytes
    text = compiled(mine)
    assert ".local" not in text
    assert ("cp.reduce.async.bulk.tensor" in text) == (stage == "fused" and d < 256)
    assert ("red.global.add.v2.f32" in text) == (stage == "fused" and d == 256)
    check_hopper(mine, text, groups, WIDE_SPILLS.get(name, 0))
    check_overlap(mine, text, lets=stage in LETS_OTHERS_START)


@pytest.mark.parametrize(
    ("name", "loads"),
    [kernels_only(*x) for x in (("64 causal", 128 // 8), ("128", 0), ("64 softcap", 0))],
)
def test_statistics_of_the_next_visit_are_loaded_under_the_last_products(name, loads):
    """At 128 rows those of the scores, unless a softcap needs these without them."""
    _, code = ptxas(compiled(hopper_kernel(HOPPER_PROBLEMS[name], "", "deferred")))
    assert loads_under_the_last_products(code) == loads


def test_a_ds_that_is_waited_for_later_has_barriers_of_its_own():
    """Every warp writes and reads it; without them the layout is as it was."""
    now, later = (KeysOutside(128, 128, 64, fused=True, deferred=x) for x in (False, True))
    assert later.nbytes == now.nbytes + 2 * 2 * 8
    assert later.regions == now.regions
    more = {kind: later.arrivals[kind] for kind in later.arrivals.keys() - now.arrivals.keys()}
    assert more == {"ds_full": (2, 8), "ds_free": (2, 8)}
    assert len(later.barrier_arrivals) == len(now.barrier_arrivals) + 4  # none on another


@pytest.mark.parametrize(("block_q", "d"), [(64, 64), (128, 64), (64, 128), (80, 128)])
@pytest.mark.promise("twice plain attention's error")
def test_each_warpgroup_reads_and_sends_the_queries_of_its_piece_of_dq(block_q, d, monkeypatch):
    """Runs the code for shared-memory addresses on integers, thread by thread."""
    from flashsim.backends.numba_gpu import ptx
    from flashsim.backends.numba_gpu.hopper import gradients
    from flashsim.backends.numba_gpu.hopper import ptx as ptx_hopper

    at = KeysOutside(block_q, 128, d, fused=True, deferred=False)
    rows, wide, memory, staged, products = at.dq_rows, at.ds_wide, {}, {}, []
    names = "add", "mul", "xor", "and_"
    b = types.SimpleNamespace(**{name: getattr(operator, name) for name in names})
    b.shl, b.lshr = operator.lshift, operator.rshift
    thread = 0

    def swizzled(address, bytes_per_row):
        return address ^ (address >> 7 & bytes_per_row // 16 - 1) << 4

    def store_matrices(b, to, four):
        """Lane l has the address of row l % 8 of matrix l / 8."""
        lane, (first, *_) = thread % 32, four
        key = thread // 32 * 16 + lane % 16
        query = first // 4 * 16 + lane // 16 * 8
        memory.update({to + 2 * x: (key, query + x) for x in range(8)})

    def wgmma(b, bf16, n, c, left, right, left_at, right_at, **how):
        products.append((n, right, right_at))

    monkeypatch.setattr(gradients, "i32", int)
    monkeypatch.setattr(gradients, "lane_of", lambda b: thread % 32)
    monkeypatch.setattr(ptx, "special", lambda b, name: thread)
    monkeypatch.setattr(ptx, "again", lambda b, x: x)
    monkeypatch.setattr(ptx_hopper, "store_matrices", store_matrices)
    monkeypatch.setattr(ptx_hopper, "store_float", lambda b, to, e: staged.update({to: e}))
    monkeypatch.setattr(ptx_hopper, "descriptor", lambda b, address, leading: (address, leading))
    monkeypatch.setattr(ptx_hopper, "wgmma", wgmma)

    def emitted(function, *args):
        return function.__wrapped__(b, *args)

    for thread in range(256):
        to = emitted(gradients.ds_place(wide), 0, thread // 128)
        emitted(gradients.store_ds(128, wide), to, list(range(block_q // 4)))
    assert len(memory) == 128 * block_q

    for group in range(2):
        first = 0 if at.split_columns else group * rows
        emitted(gradients.queue_dq(True, rows, 128, wide), 0, group * at.ds_part)
        n, (start, leading), steps = products.pop()
        assert n == rows
        assert first % wide == 0 or first % wide + n <= wide  # inside a chunk
        for x, step in enumerate(steps):
            for key in range(16):
                for query in range(n):
                    chunk, column = divmod(query, wide)
                    place = start + 16 * step + chunk * leading + (key * wide + column) * 2
                    assert memory[swizzled(place, 2 * wide)] == (16 * x + key, first + query)

    for thread in range(128):
        staged.clear()
        to = emitted(gradients.dq_place(rows), 0)
        emitted(gradients.stage_dq, to, list(range(rows // 2)))
        for e in range(rows // 2):
            column = thread // 32 * 16 + thread % 32 // 4 + e % 4 // 2 * 8
            query = e // 4 * 8 + thread % 4 * 2 + e % 2
            box = column // 32 * rows * 128
            assert staged[swizzled(box + query * 128 + column % 32 * 4, 128)] == e


def test_the_backwards_shared_memory_is_no_larger_than_in_cpp():
    """The layouts are the same but for item slots."""
    for problem in (HOPPER_PROBLEMS["128"], HOPPER_PROBLEMS["64 causal"]):
        for name, ordered in (("flash2", False), ("flash2-fused", False), ("flash2-fused", True)):
            found = passes_of(HOPPER, problem, name, ordered=ordered)
            tiling = found[0].tables.schedule.tiling  # of all passes
            others = passes_of(CPP, problem, name, ordered=ordered, tiling=tiling)
            for mine, other in zip(found, others, strict=True):
                assert mine.kernel.shared_bytes <= other.kernel.shared_bytes
                assert mine.kernel.boxes == other.kernel.boxes
                assert mine.kernel.threads == other.kernel.threads or not mine.kernel.boxes
                assert (mine.grid, mine.clump) == (other.grid, other.clump)
                assert mine.tables.schedule == other.tables.schedule


def test_products_of_80_columns_are_no_shorter_than_of_128():
    """Those of three passes are, in the C++ kernels."""
    narrow = Problem(330, 330, 80, heads=52, dtype="bfloat16")
    wide = replace(narrow, head_dim=128, head_dim_v=128)

    def took(family, problem):
        passes = passes_of(family, problem, "flash2", tiling=Tiling(64, 128))
        return cost_model.backward_microseconds(passes, H200)

    assert took(HOPPER, narrow) == took(HOPPER, wide) == took(CPP, wide)
    assert took(CPP, narrow) < took(CPP, wide)


def test_the_backward_is_fused_where_three_passes_have_no_tile():
    cells = BlockMask(np.ones((2, 2), bool), 80, 128)
    p = Problem(160, 160, 128, dtype="bfloat16", block_mask=cells)
    assert not HOPPER.fuses(replace(p, block_mask=None), GPUS["sm_90a"])  # short
    assert HOPPER.fuses(p, GPUS["sm_90a"])


#: Of the pass with keys outside: blocks of a cluster, items and blocks of each of its launches.
LAUNCHES = {
    "few": (
        Problem(512, head_dim=64, heads=12, dtype="bfloat16", causal=True),
        [(2, 48, 96)],  # tiles of 128 keys of 12 heads
    ),
    "64": (
        Problem(4096, head_dim=64, heads=32, batch=4, dtype="bfloat16"),
        [(8, 4, 32), (1, 4092, 132)],  # 31 rounds, and 4
    ),
    "128": (
        Problem(16_384, head_dim=128, heads=16, dtype="bfloat16"),
        [(8, 2, 16), (2, 66, 132), (1, 1980, 132)],  # 15 rounds, and 68
    ),
    "short": (Problem(512, head_dim=128, heads=16, batch=32, dtype="bfloat16"), [(1, 2048, 132)]),
    "whole": (Problem(4096, head_dim=128, heads=33, batch=4, dtype="bfloat16"), [(1, 4224, 132)]),
    "causal": (
        Problem(4096, head_dim=64, heads=32, batch=4, dtype="bfloat16", causal=True),
        [(1, 4096, 132)],
    ),
}


def launches(family, problem, report="", *, algorithm="flash2-fused", ordered=False):
    """Of the backward's pass with keys outside."""
    one = passes_of(family, problem, algorithm, report=report, ordered=ordered)[1]
    return (*one.before, one)


@pytest.mark.parametrize("name", LAUNCHES)
def test_clusters_share_what_they_share_in_cpp(name):
    """Few items; and of items that are all alike what whole rounds leave, in launches that come
    first, but where anything is reported or added in order. Tiles are the same here."""
    problem, expected = LAUNCHES[name]
    for family in (HOPPER, CPP):
        found = launches(family, problem)
        assert [(x.kernel.cluster, len(x.items), x.grid[0]) for x in found] == expected
        assert [x.items.stop for x in found[:-1]] == [x.items.start for x in found[1:]]
        constants, last = [dict(x.kernel.constants) for x in found], len(found) - 1
        assert [x["FS_AFTER"] for x in constants] == [0] + [1] * last
        assert [x["FS_MORE"] for x in constants] == [1] * last + [0]
        assert {x.tables for x in found} == {found[0].tables}
        assert len(launches(family, problem, "counts")) == 1
        (timed,) = launches(family, problem, "timeline")
        (ordered,) = launches(family, problem, ordered=True)
        assert timed.kernel.cluster == ordered.kernel.cluster == 1
        assert dict(ordered.kernel.constants)["FS_DEFERRED"] == 0
        (alone,) = launches(family, problem, algorithm="flash2")
        assert dict(alone.kernel.constants)["FS_CLUSTER"] == alone.kernel.cluster
    for mine, other in zip(launches(HOPPER, problem), launches(CPP, problem), strict=True):
        assert mine.kernel.shared_bytes <= other.kernel.shared_bytes
        assert mine.clump == other.clump
        late = "FS_DEFERRED"
        assert dict(mine.kernel.constants)[late] == dict(other.kernel.constants)[late]


def check_cluster(kernel):
    """A launch of a pass in several, or one whose items clusters share."""
    text, c = compiled(kernel), dict(kernel.constants)
    assert ".local" not in text
    blocks, late = kernel.cluster, c["FS_DEFERRED"]
    directives = f"\n.explicitcluster\n.reqnctapercluster {blocks}, 1, 1\n"
    assert (directives in text) == ("explicitcluster" in text) == (blocks > 1)
    # Barriers exist, all dK and dV are laid down, and read.
    for way in ("arrive.release", "wait.acquire"):
        assert text.count(f"barrier.cluster.{way}.aligned") == 3 * (blocks > 1)
    boxes = 2 * c["FS_D"] // 64  # of K and V
    assert text.count("multicast::cluster") == boxes * (blocks > 1)
    assert text.count("ld.shared::cluster.f32") == 32 // 2 * (blocks > 1)  # 64 rows, 128 threads
    check_hopper(kernel, text, 3 + 4 + c["FS_FUSED"] + late, 0)
    waits, lets = "griddepcontrol.wait", "griddepcontrol.launch_dependents"
    assert (text.count(waits), text.count(lets)) == (1, c["FS_MORE"] or not c["FS_FUSED"])
    if lets in text:  # after another launch a kernel waits when it ends
        assert (text.index(waits) > text.index(lets)) == c["FS_AFTER"]


@pytest.mark.parametrize(
    ("name", "number"),
    [
        *(kernels_only(*x) for x in (("64", 0), ("64", 1), ("128", 1), ("few", 0))),
        *(thorough("128", 0), thorough("128", 2)),
    ],
)
def test_the_launches_of_a_pass_assemble_in_registers_and_asynchronously(name, number):
    check_cluster(launches(HOPPER, LAUNCHES[name][0])[number].kernel)


def test_a_deferred_launch_of_clusters_assembles_in_registers_and_asynchronously():
    """One kernel with a cluster, another launch behind it and a deferred dQ.

    `make kernels` compiles kernels that have only some of them.
    """
    kernel = launches(Deferring(**vars(HOPPER)), LAUNCHES["64"][0])[0].kernel
    constants = dict(kernel.constants)
    assert (kernel.cluster, constants["FS_DEFERRED"], constants["FS_MORE"]) == (8, 1, 1)
    check_cluster(kernel)
    text = compiled(kernel)
    assert "cp.reduce.async.bulk.tensor" in text
    assert "red.release" not in text
    assert loads_under_the_last_products(ptxas(text)[1]) == 128 // 8


@dataclass(frozen=True)
class Sharing(Deferring):
    """Clusters of so many blocks share every item, however many there are."""

    blocks: int = 2

    def launches(self, walk):
        return ((self.blocks if walk.stage.outer == "keys" else 1, walk.items),)


@pytest.mark.parametrize("blocks", [2, 4, 8])
@pytest.mark.parametrize("stage", ["fused", "deferred", "dkdv"])
@pytest.mark.parametrize(
    "name", ["128", "80", "64 causal", "odd", "negative", "64 softcap", "128 softcap"]
)
@pytest.mark.thorough
def test_every_cluster_assembles_in_registers_and_asynchronously(name, stage, blocks):
    family = Sharing(**vars(HOPPER), deferred=stage == "deferred", blocks=blocks)
    algorithm = "flash2" if stage == "dkdv" else "flash2-fused"
    (one,) = launches(family, HOPPER_PROBLEMS[name], algorithm=algorithm)
    assert one.kernel.cluster == blocks
    check_cluster(one.kernel)


def test_an_item_that_is_timed_has_one_block():
    kernel = launches(HOPPER, LAUNCHES["few"][0])[0].kernel
    timed = replace(kernel, constants=(*kernel.constants, ("FS_TIMELINE", 1)))
    with pytest.raises(AssertionError, match="items have one block there"):
        compiler.python_kernel(timed, (9, 0))


@pytest.mark.parametrize(
    ("name", "stages", "turns"), [("128", 2, 0), ("64 causal", 3, 1), ("256", 2, 1)]
)
def test_rings_and_turns_of_the_forward_are_cpps(name, stages, turns):
    for family in (CPP, HOPPER):
        (one,) = passes_of(family, HOPPER_PROBLEMS[name])
        made = dict(one.kernel.constants)
        assert (made["FS_STAGES"], made["FS_TURNS"]) == (stages, turns)
        assert one.kernel.shared_bytes <= GPUS["sm_90a"].shared_bytes


@pytest.mark.parametrize("name", [kernels_only("128"), kernels_only("64 causal")])
def test_output_is_waited_for_between_the_maxima_and_the_exponentials(name):
    """Of a visit, as in C++."""
    kernel = hopper_kernel(HOPPER_PROBLEMS[name])
    _, code = ptxas(compiled(kernel))
    maxima, exponentials = between_scores_and_output(code)
    scores_a_thread = dict(kernel.constants)["FS_BLOCK_K"] // 2
    assert maxima > 0.9 * scores_a_thread / 2  # each takes in two more
    assert 0 < exponentials < scores_a_thread / 2


@pytest.mark.kernels
def test_ptxas_says_where_an_output_is_not_waited_for(monkeypatch):
    """Results would not show it: where O is used, ptxas adds a wait, and serialises products."""
    from flashsim.backends.numba_gpu.emit import FRAGMENT, Like, emitted
    from flashsim.backends.numba_gpu.hopper import ptx, wgmma_tiles

    kernel = hopper_kernel(HOPPER_PROBLEMS["64 causal"])
    dv = dict(kernel.constants)["FS_DV"]

    def faulty(pending):
        @emitted(Like(0), FRAGMENT)
        def wait(b, c):
            return ptx.wgmma_wait(b, c, pending=2 if len(c) == dv // 2 else pending)

        return wait

    monkeypatch.setattr(wgmma_tiles, "product_wait", faulty)
    log, _ = ptxas(compiler.ptx(kernel, (9, 0)))
    assert "C7514" in log, log


@pytest.mark.parametrize(
    ("change", "tiling", "gpu", "why"),
    [
        ({}, None, "sm_80", "they need compute capability 9.0, and A100 has 8.0"),
        ({}, Tiling(64, 64), "sm_90a", "they have no 64 x 64 tiles"),
        (
            {"block_mask": BlockMask(np.ones((8, 8), bool), 64, 64)},
            *(None, "sm_90a", "do not divide the block mask"),
        ),
    ],
)
def test_what_hoppers_kernels_do_not_take_is_refused_with_a_reason(change, tiling, gpu, why):
    p = Problem(512, 512, 128, dtype="bfloat16", **change)
    assert HOPPER.refusal(PROBLEMS["bf16 128 causal"], None, GPUS["sm_90a"], "forward") is None
    assert why in HOPPER.refusal(p, tiling, GPUS[gpu], "forward")
    with pytest.raises(UnsupportedError, match=f"{why}.*try kernel='tensor'"):
        passes_of(HOPPER, p, tiling=tiling, gpu=GPUS[gpu])


def test_hoppers_kernels_are_taken_where_they_run():
    job = Job(PROBLEMS["bf16 128 causal"], None, None, None)
    chosen = numba_engine._family
    h200 = GPUS["sm_90a"]
    assert chosen(job, h200, "forward") is HOPPER
    assert chosen(job, h200, "backward") is HOPPER
    assert chosen(job, GPUS["sm_80"], "forward") is TENSOR
    assert chosen(job, GPUS["sm_80"], "backward") is TENSOR
    assert chosen(replace(job, tiling=Tiling(64, 64)), h200, "backward") is TENSOR
    in_rows_of_80 = replace(job, tiling=Tiling(80, 128))  # which the fused form alone has
    assert chosen(in_rows_of_80, h200, "backward") is TENSOR
    assert chosen(replace(in_rows_of_80, algorithm="flash2-fused"), h200, "backward") is HOPPER
    assert chosen(replace(job, tiling=Tiling(64, 64)), h200, "forward") is TENSOR
    assert chosen(replace(job, options={"kernel": "tensor"}), h200, "forward") is TENSOR
    asked = replace(job, options={"kernel": "hopper"})
    assert chosen(asked, GPUS["sm_80"], "forward") is HOPPER
    assert chosen(asked, h200, "backward") is HOPPER
    wide = replace(asked, problem=replace(job.problem, head_dim=192, head_dim_v=192))
    assert chosen(wide, h200, "forward") is HOPPER
    assert chosen(wide, h200, "backward") is HOPPER


@pytest.mark.kernels
def test_stamps_are_compiled_in_where_asked_for():
    (one,) = passes_of(TENSOR, PROBLEMS["fp16 odd"], gpu=A100, report="timeline")
    text = compiler.ptx(one.kernel, (8, 0))
    assert "red.global.add.u32" in text
    assert "%clock64" in text


def small_kernel():
    """The kernel that compiles fastest."""
    one = passes_of(TENSOR, PROBLEMS["fp16 odd"], "flash2-fused", gpu=A100)[-1]
    assert one.kernel.name == "flash_convert"
    return one.kernel


def test_compiled_kernels_are_kept_on_disk(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FLASHSIM_CACHE_DIR", str(tmp_path))
    kernel = small_kernel()
    made = compiler.image(kernel, (8, 0))
    assert made[:4] == b"\x7fELF"
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    assert whole.endswith(made)
    said = capsys.readouterr().err
    assert re.fullmatch(
        rf"flashsim: compiling flash_convert \(Python\) \.\.\. compiled in .* s; .*{tmp_path}\n",
        said,
    )
    compiled = []
    monkeypatch.setattr(compiler, "ptx", lambda *_: compiled.append(1) or "text")
    monkeypatch.setattr(compiler, "assemble", lambda *_: (made, ""))
    assert compiler.image(kernel, (8, 0)) == made
    assert (compiled, capsys.readouterr().err) == ([], "")
    for damaged in (b"", whole[:20], whole[:-1], whole[:-9] + b"x" + whole[-8:]):
        path.write_bytes(damaged)  # a disk that was full, a process that was killed
        compiled.clear()
        assert [compiler.image(kernel, (8, 0)) for _ in range(2)] == [made, made]
        assert compiled == [1]
        assert path.read_bytes() == whole
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("fault", ["a file in the way", "full"])
def test_kernels_that_cannot_be_kept_are_compiled_in_memory(fault, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "cache"
    monkeypatch.setenv("FLASHSIM_CACHE_DIR", str(folder))
    monkeypatch.setattr(compiler, "ptx", lambda *_: "text")
    monkeypatch.setattr(compiler, "assemble", lambda *_: (b"image", ""))
    if fault == "full":

        def full(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(compiler.os, "replace", full)
    else:
        folder.write_text("")
    assert compiler.image(small_kernel(), (8, 0)) == b"image"
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"not cached: {folder} cannot be written (" in said
    assert not folder.is_dir() or not list(folder.iterdir())


def test_cuda_kernels_compile_in_memory_where_cupys_cache_cannot_be_written(monkeypatch, capsys):
    """With a stand-in for CuPy, which needs a GPU: it reads the variable whenever it compiles."""
    from flashsim.backends.kernels import nvrtc

    class Module:
        def __init__(self, **_):
            self.kernel = "compiled"

        def get_function(self, _):
            return self

        def compile(self):
            if os.environ.get("CUPY_CACHE_IN_MEMORY") != "1":
                raise PermissionError(13, "Permission denied")

    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(RawModule=Module))
    monkeypatch.delenv("CUPY_CACHE_IN_MEMORY", raising=False)
    nvrtc._say_uncached.cache_clear()
    kernel = Kernel("portable/backward_rows.cu", "flash_delta", 128, 0, ())
    for device in (90, 91):
        assert nvrtc.load(kernel, device) == "compiled"
    assert "CUPY_CACHE_IN_MEMORY" not in os.environ
    said = capsys.readouterr().err
    assert said.count("CuPy's disk cache cannot be written ([Errno 13] Permission denied)") == 1


@pytest.mark.parametrize(
    ("softcap", "cc"),
    [
        kernels_only(True, (9, 0)),  # `make test` has them in the simulator
        *(thorough(False, (8, 0)), thorough(False, (9, 0)), thorough(True, (8, 0))),
    ],
)
def test_teaching_kernels_compile_with_the_shared_memory_said(cc, softcap):
    from numba import cuda, types

    from flashsim.backends.numba_gpu.teaching import kernels as teaching

    problem = Problem(64, 64, 64, 32, heads=2, kv_heads=1, dtype="float32")
    shape = teaching.TeachingShape(16, 8, 64, 32, 2, softcap, 4, counts=True, fused=True)
    x4, x3 = (types.Array(types.float32, n, "C") for n in (4, 3))
    i2, i1 = (types.Array(types.int32, n, "C") for n in (2, 1))
    floats, wholes, sums = types.float32[::1], types.int64[::1], types.float32[::1]
    counts = types.Array(types.uint32, 3, "C")
    tables = (i2, i2, i1, i1, i1)
    numbers = (types.int64, types.int64, types.float32, types.float32)
    signatures = {
        "forward_kernel": (
            *(x4, x4, x4, x4, x3, floats, wholes, sums, *tables, *numbers, counts, counts),
        ),
        "delta_kernel": (x4, x4, x3, x4, x3, i2, counts),
        "dkdv_kernel": (
            *(x4, x4, x4, x4, x3, x3, x4, x4, x4, floats, wholes, sums),
            *(*tables, *numbers, counts, counts),
        ),
        "dq_kernel": (
            *(x4, x4, x4, x4, x3, x3, x4, floats, wholes, sums),
            *(*tables, *numbers, counts, counts),
        ),
        "convert_kernel": (x4, x4, i2, counts),
    }
    used = {}
    for name, signature in signatures.items():
        function = getattr(teaching, name)(shape).py_func
        text, _ = cuda.compile(
            *(function, types.void(*signature)), device=False, abi="numba", cc=cc, output="ptx"
        )
        _, log = compiler.assemble(text, cc)
        _, stack, spilled = usage(log)
        assert (stack, spilled) == (0, 0), name
        used[name] = sum(map(int, re.findall(r"\.shared .*\[(\d+)\];", text)))
    tiling = Tiling(16, 8)
    assert used["forward_kernel"] == teaching_run.shared_bytes(problem, tiling, "forward")
    backward = max(used["dkdv_kernel"], used["dq_kernel"])
    assert backward == teaching_run.shared_bytes(problem, tiling, "backward")


#: Runs pytest on one core: the simulator's threads take turns, and on two cores they need twice the
#: CPU time.
PYTEST_ON_ONE_CORE = """
import os, sys, pytest
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
sys.exit(pytest.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("cases", ["not thorough", thorough("thorough")])
def test_teaching_kernels_are_right_in_the_simulator(cases):
    """Runs tests/gpu/test_numba_teaching.py in a process where Numba simulates the GPU."""
    tests = Path(__file__).parents[1] / "gpu" / "test_numba_teaching.py"
    done = subprocess.run(
        [
            *(sys.executable, "-c", PYTEST_ON_ONE_CORE),
            *("-q", "-p", "no:cacheprovider", "-m", cases, str(tests)),
        ],
        env={**os.environ, "NUMBA_ENABLE_CUDASIM": "1"},
        cwd=tests.parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout
    assert "skipped" not in done.stdout


# -- what cannot run ------------------------------------------------------------------------------


def arrays(dtype):
    return [np.ones((1, 1, 8, 16), dtype) for _ in range(3)]


@pytest.mark.parametrize(
    ("dtype", "options", "error", "text"),
    [
        ("float32", {"algorithm": "standard"}, UnsupportedError, "not 'standard'"),
        ("float64", {}, UnsupportedError, "'teaching' supports float16 and float32, not float64"),
        (
            "float32",
            {"kernel": "tensor"},
            UnsupportedError,
            "supports float16 and bfloat16, not fl",
        ),
        ("float16", {"kernel": "tensors"}, OptionError, "did you mean 'tensor'"),
        ("float32", {"trace": "timeline"}, UnsupportedError, "record no time stamps"),
        ("float32", {"tiling": Tiling(128, 128)}, TilingError, "needs .* choose from .*32 x 32"),
    ],
)
def test_what_it_cannot_do_is_refused(dtype, options, error, text):
    with pytest.raises(error, match=text):
        flashsim.run(*arrays(dtype), backend="numba_cuda", **options)


def test_head_dims_beyond_the_kernels_are_refused():
    given = [np.ones((1, 1, 8, launch.MAX_HEAD_DIM + 8), "float16") for _ in range(3)]
    with pytest.raises(UnsupportedError, match="supports a head_dim of at most 256, got 264"):
        flashsim.run(*given, backend="numba_cuda")


@pytest.mark.parametrize(
    ("broken", "text"),
    [
        ("numba_cuda", "needs NVIDIA's numba-cuda"),
        ("numba.cuda", "pip install --upgrade numba-cuda numba"),
    ],
)
def test_a_numba_cuda_that_does_not_import_says_what_to_install(broken, text, monkeypatch):
    monkeypatch.setitem(sys.modules, broken, None)
    import numba

    monkeypatch.delattr(numba, "cuda", raising=False)
    with pytest.raises(BackendUnavailable, match=text):
        numba_engine._require_numba_cuda()


#: A NumPy as 2.5 is for numba-cuda 0.30.4: the import succeeds, the first compile would not.
LATER_NUMPY = """
import numpy, warnings
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    if hasattr(numpy, "row_stack"):
        del numpy.row_stack
numpy.__version__ = "2.5.0"
from numba import cuda
import flashsim
x = numpy.ones((1, 1, 8, 16), "float32")
for _ in range(2):
    try:
        flashsim.run(x, x, x, backend="numba_cuda")
    except flashsim.BackendUnavailable as error:
        print(error)
"""


def test_a_numpy_that_numba_cuda_cannot_use_is_found_before_the_first_compile():
    done = subprocess.run(
        [sys.executable, "-c", LATER_NUMPY], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    for said in (first, second):  # asking again finds it again
        assert re.search(r"numba-cuda \S+ does not work with NumPy 2\.5\.0 .*row_stack", said)
        assert "pip install 'numpy<2.5'" in said
