"""The CUDA C++ kernels without a GPU: they compile for every architecture, in registers; the launch
arithmetic is theirs (the kernels static_assert its sizes); what cannot run says so.
"""

import re
from dataclasses import replace
from functools import cache
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
from compiled import compiled, costs_nothing_when_off, errors, kernels_only, source, thorough
from gpus import GPUS, H200, KIB, ODD, passes_of

import flashsim
from flashsim import Problem, Tiling
from flashsim.backends.launch.device_tables import lower
from flashsim.backends.launch_policy.portable import PORTABLE, TF32
from flashsim.engines.protocol import Job
from flashsim.errors import OptionError, TilingError, UnsupportedError
from flashsim.problem.masks import BlockMask
from flashsim.schedule.schedule import Schedule

pytestmark = pytest.mark.promise("kernels compile")

#: Bytes a thread may spill: registers hold everything but a few rarely used values.
SPILL_BYTES = 128
#: The same where it counts or stamps as well: addresses and counters are live throughout.
REPORT_SPILL_BYTES = 256

PROBLEMS = {
    "bf16 128 causal": Problem(512, 512, 128, heads=2, dtype="bfloat16", causal=True),
    "bf16 64": Problem(512, 512, 64, heads=2, dtype="bfloat16"),
    "fp16 256": Problem(512, 512, 256, heads=2, dtype="float16", causal=True),
    "fp16 odd": Problem(500, 500, 80, 40, **ODD),
    "blocks": Problem(
        *(256, 256, 96), dtype="bfloat16", block_mask=BlockMask(np.eye(2, dtype=bool), 128, 128)
    ),
    "fp32 64": Problem(512, 512, 64, heads=2, dtype="float32", causal=True, softcap=1.0),
    "fp32 256": Problem(512, 512, 256, heads=2, dtype="float32"),
    "tf32 64": Problem(512, 512, 64, heads=2, dtype="float32", causal=True),
    "tf32 128": Problem(512, 512, 128, heads=2, dtype="float32"),
}


def passes(problem, gpu, report="", family=PORTABLE):
    """Every pass of the forward and of both backwards."""
    yield from passes_of(family, problem, gpu=gpu, report=report)
    for algorithm in ("flash2", "flash2-fused"):
        yield from passes_of(family, problem, algorithm, gpu=gpu, report=report)


@cache
def compile_kernel(kernel, arch):
    """{function: (stack bytes, spilled bytes, registers)}, from NVRTC."""
    log, cubin = compiled(kernel, (*kernel.options, f"-arch={arch}"))
    assert cubin, log
    assert "warning" not in log
    found = re.findall(
        r"entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores"
        r".*?Used (\d+) registers",
        log,
        re.DOTALL,
    )
    return {name: tuple(map(int, numbers)) for name, *numbers in found}


#: Both sources; the others are read to their end, which is quick, but not made into code.
ALWAYS = {("bf16 128 causal", "sm_90"), ("fp32 64", "sm_90")}
OFTEN = {("fp16 odd", "sm_80")}
#: These two have all the kernels there are; what the others vary is tried on the two main targets,
#: and each on one GPU or two of the rest: a small shared memory (smaller tiles), the newest.
EVERYWHERE = ("bf16 128 causal", "fp32 64")
ELSEWHERE = [
    *(("bf16 64", "sm_89"), ("bf16 64", "sm_120"), ("fp16 256", "sm_100"), ("fp16 odd", "sm_100")),
    *(("blocks", "sm_89"), ("fp32 256", "sm_120"), ("tf32 64", "sm_120"), ("tf32 128", "sm_86")),
]
TARGETS = [
    case if case in ALWAYS else kernels_only(*case) if case in OFTEN else thorough(*case)
    for case in [
        *ELSEWHERE,
        *(
            (name, arch)
            for name in PROBLEMS
            for arch in (GPUS if name in EVERYWHERE else ("sm_80", "sm_90"))
        ),
    ]
]


@pytest.mark.parametrize(("name", "arch"), TARGETS)
def test_kernels_compile_and_stay_in_registers(name, arch):
    family = TF32 if "tf32" in name else PORTABLE
    check_registers(passes(PROBLEMS[name], GPUS[arch], family=family), arch, SPILL_BYTES)


@pytest.mark.parametrize("name", PROBLEMS)
def test_kernels_are_sound_to_the_compilers_front_end(name):
    family = TF32 if "tf32" in name else PORTABLE
    every = {one.kernel for one in passes(PROBLEMS[name], H200, "counts", family)}
    assert len(every) >= 6
    for kernel in every:
        assert not errors(kernel, (*kernel.options, "-arch=sm_90"))


@pytest.mark.parametrize(
    ("name", "report"),
    [
        *(kernels_only("bf16 128 causal", "counts"), kernels_only("fp32 64", "timeline")),
        *(thorough("bf16 128 causal", "timeline"), thorough("fp16 odd", "timeline")),
        thorough("fp16 odd", "counts"),
        *(thorough("fp32 64", "counts"), thorough("tf32 64", "timeline")),
    ],
)
def test_kernels_that_report_compile_and_stay_in_registers(name, report):
    family = TF32 if "tf32" in name else PORTABLE
    check_registers(passes(PROBLEMS[name], H200, report, family), "sm_90", REPORT_SPILL_BYTES)


@pytest.mark.parametrize("arch", GPUS)
@pytest.mark.parametrize("name", ["bf16 64", "fp32 64"])
def test_only_the_kernel_of_delta_knows_of_a_gradient_of_the_lse(name, arch):
    problem, changed = PROBLEMS[name], []
    for algorithm, report in (("flash2", ""), ("flash2-fused", "counts")):
        without, given = (
            passes_of(PORTABLE, p, algorithm, gpu=GPUS[arch], report=report)
            for p in (problem, replace(problem, dlse=True))
        )
        for one, other in zip(without, given, strict=True):
            if one.kernel != other.kernel:
                assert one.stage.name == "delta"
                changed.append(other)
    assert len(changed) == 2
    for one in changed if arch in ("sm_80", "sm_90") else ():  # for each it takes 0.2 s
        stack, spilled, _ = compile_kernel(one.kernel, arch)["flash_delta"]
        assert (stack, spilled) == (0, 0)


@pytest.mark.kernels
@pytest.mark.parametrize("causal", [False, True])
def test_counting_finds_registers_where_the_forward_fills_them(causal):
    """Spilled addresses came with a loop that recomputed others and hid fewer exponentials."""
    p = Problem(512, 512, 64, heads=2, dtype="bfloat16", causal=causal)
    plain, counts = (
        compile_kernel(one.kernel, "sm_90")[one.kernel.name]
        for report in ("", "counts")
        for one in passes_of(PORTABLE, p, report=report)
    )
    assert counts[1] <= plain[1], "bytes spilled"


def check_registers(passes, arch, limit):
    compiled = 0
    for one in passes:
        stack, spilled, registers = compile_kernel(one.kernel, arch)[one.kernel.name]
        assert spilled <= limit, (one.stage.name, one.kernel)
        assert stack <= limit, "an array lives in local memory"
        assert registers * one.kernel.threads <= 64 * KIB
        compiled += 1
    assert compiled >= 6


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        *(("bf16 128 causal", "forward"), ("fp32 64", "delta")),  # compiled above
        *(kernels_only("bf16 128 causal", "fused"), kernels_only("fp32 64", "dq")),
        *(thorough("fp32 64", "forward"), thorough("fp32 64", "fused")),
        *(thorough("bf16 64", "dq"), thorough("bf16 64", "delta")),
    ],
)
def test_reporting_costs_nothing_when_it_is_off(name, stage):
    one = next(x for x in passes(PROBLEMS[name], H200) if x.stage.name == stage)
    assert costs_nothing_when_off(one.kernel, "-arch=sm_90")


@pytest.mark.kernels
def test_reporting_changes_the_code_when_it_is_on():
    (one,) = passes_of(PORTABLE, PROBLEMS["bf16 128 causal"])
    text, options = source(one.kernel), (*one.kernel.options, "-arch=sm_90")
    assert (
        compiled(one.kernel, options, text)[1]
        != (compiled(one.kernel, options, text.replace("FS_TRACE", "1"))[1])
    )


def test_lines_are_as_short_as_in_python():
    folder = Path(str(resources.files("flashsim.backends") / "kernels"))
    files = [f for f in folder.rglob("*.cu*") if f.suffix in (".cu", ".cuh")]
    lines = {(f.name, line) for f in files for line in f.read_text("utf-8").split("\n")}
    assert len(lines) > 1000
    assert not {x for x in lines if len(x[1]) > 100}


def test_a_wrong_size_does_not_compile():
    (one,) = passes_of(PORTABLE, PROBLEMS["bf16 64"])
    for name in ("FS_SMEM_BYTES", "FS_ARGS_BYTES"):
        options = [
            f"-D{name}={dict(one.kernel.constants)[name] + 16}" if name in o else o
            for o in one.kernel.options
        ]
        log, cubin = compiled(one.kernel, (*options, "-arch=sm_90"))
        assert not cubin
        assert "must agree" in log


def test_shared_memory_is_the_tiles_that_lie_there():
    p = Problem(512, 512, 128, dtype="bfloat16")
    (one,) = passes_of(PORTABLE, p, tiling=Tiling(128, 64))
    sums = 128 * 2 * 2 * 4  # of 128 threads, each with two 16-row blocks
    assert one.kernel.shared_bytes == 2 * (128 * 128 + 2 * 64 * 128 + 2 * 64 * 128) + sums
    _, fused, _ = passes_of(PORTABLE, p, "flash2-fused", tiling=Tiling(64, 128))
    tiles = 2 * 128 * 128 + 2 * 2 * 64 * 128 + 3 * 128 * 64  # K, V; Q, dO twice; P, dS twice
    assert fused.kernel.shared_bytes == 2 * tiles + 2 * 2 * 64 * 4  # LSE, delta twice


def test_grids_have_a_block_for_every_tile_and_head():
    p = Problem(300, 500, 64, batch=3, heads=8, kv_heads=2, dtype="float16")
    (forward,) = passes_of(PORTABLE, p, tiling=Tiling(128, 64))
    assert forward.grid == (3 * 3 * 8,)
    assert forward.walks == 24
    assert forward.clump % p.group == 0
    delta, dkdv, dq = passes_of(PORTABLE, p, "flash2", tiling=Tiling(64, 128))
    assert delta.grid == (5, 24)
    assert dkdv.grid == (4 * 3 * 2,)
    assert dq.grid == (5 * 24,)


def test_longest_walks_start_first():
    p = Problem(512, 512, 64, dtype="float16", causal=True)
    tables = lower(Schedule(p, Tiling(128, 64)), "row")
    assert tables.order.tolist() == [3, 2, 1, 0]
    assert lower(Schedule(p, Tiling(128, 64)), "col").order.tolist() == list(range(8))


@pytest.mark.parametrize("arch", GPUS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("head_dim", [8, 64, 96, 128, 160, 256])
def test_every_gpu_has_a_default_tiling_that_fits(head_dim, dtype, arch):
    p = Problem(64, 64, head_dim, dtype=dtype)
    for one in passes(p, GPUS[arch]):
        assert one.kernel.shared_bytes <= GPUS[arch].shared_bytes
        assert one.kernel.threads <= 1024


def test_tilings_that_no_kernel_has_are_refused_with_those_that_run():
    p = Problem(64, 64, 128, dtype="float16")
    with pytest.raises(
        TilingError, match=r"24 x 64 tile has no compiled kernel .*multiples of 16.*128 x 64"
    ):
        passes_of(PORTABLE, p, tiling=Tiling(24, 64))
    with pytest.raises(
        TilingError, match=r"needs [\d,]+ B of shared memory.*possible tiles: 16 x 16"
    ):
        passes_of(PORTABLE, p, tiling=Tiling(128, 128), gpu=GPUS["sm_86"])
    for tiling in PORTABLE.tilings(p, GPUS["sm_86"], "forward"):
        (one,) = passes_of(PORTABLE, p, tiling=tiling, gpu=GPUS["sm_86"])
        assert one.tables.schedule.tiling == tiling


def test_masks_that_a_kernel_cannot_evaluate_are_refused():
    plain = dict(n_q=64, n_kv=64, head_dim=16)
    tiling = Tiling(32, 32)
    for problem, why in (
        (Problem(**plain, mask=lambda q, k: q >= k), "cannot call a Python mask function"),
        (Problem(**plain, bias=(1, 1)), "do not support a bias"),
        (
            Problem(**plain, block_mask=BlockMask(np.ones((2, 2), bool), 48, 48)),
            "32 x 32 tiles and 48 x 48 blocks",
        ),
    ):
        with pytest.raises(UnsupportedError, match=why):
            lower(Schedule(problem, tiling), "row")


def test_default_tilings_divide_a_block_masks_cells():
    mask = BlockMask(np.ones((8, 8), bool), 32, 32)
    p = Problem(256, 256, 128, dtype="bfloat16", block_mask=mask)
    (one,) = passes_of(PORTABLE, p)
    assert one.tables.schedule.tiling == Tiling(32, 32)
    odd = Problem(256, 256, dtype="float16", block_mask=BlockMask(np.ones((11, 11), bool), 24, 24))
    with pytest.raises(
        TilingError, match=r"no default tiling .* must divide the cells of the block mask"
    ):
        passes_of(PORTABLE, odd)


@pytest.mark.parametrize(("wrong", "meant"), [("portabel", "portable"), ("hoper", "hopper")])
def test_an_unknown_kernel_family_is_an_option_error(wrong, meant):
    pytest.importorskip("cupy")
    x = np.zeros((8, 16), np.float16)
    with pytest.raises(OptionError, match=f"unknown kernel '{wrong}'.*did you mean '{meant}'"):
        flashsim.run(x, x, x, backend="cupy", kernel=wrong)


def test_tf32_is_for_float32_and_says_so():
    pytest.importorskip("cupy")
    from flashsim.backends.cupy_gpu import engine as cupy_engine

    for dtype, allowed, name in (
        ("float32", True, "portable, tf32"),
        ("float32", False, "portable"),
        ("float16", True, "portable"),
    ):
        p = Problem(64, 64, 64, dtype=dtype)
        job = Job(p, None, None, None, options={"allow_tf32": allowed})
        family = cupy_engine._family(job, GPUS["sm_80"], "forward")
        assert name == family.name
    x = np.zeros((8, 16), np.float32)
    with pytest.raises(OptionError, match="allow_tf32 must be True or False, got 'yes'"):
        flashsim.run(x, x, x, backend="cupy", allow_tf32="yes")


@pytest.mark.parametrize("arch", GPUS)
@pytest.mark.parametrize("head_dim", [8, 64, 128, 256])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_tf32_runs_wherever_its_tiles_fit(head_dim, arch, direction):
    pytest.importorskip("cupy")
    from flashsim.backends.cupy_gpu import engine as cupy_engine

    p, gpu = Problem(64, 64, head_dim, dtype="float32"), GPUS[arch]
    job = Job(p, None, None, None, options={"allow_tf32": True})
    family = cupy_engine._family(job, gpu, direction)
    small = head_dim == 256 and direction == "backward" and gpu.shared_bytes < 100 * KIB
    assert family is (PORTABLE if small else TF32)  # a row of K, V, Q, dO has 4 KiB
    for one in passes_of(family, p, "flash2" if direction == "backward" else "", gpu=gpu):
        assert one.kernel.shared_bytes <= gpu.shared_bytes
