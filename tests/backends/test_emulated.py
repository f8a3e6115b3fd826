"""The portable kernels' own source, run on a CPU (emulator.py): results are attention's, and the
bytes that they count are the simulator's.
"""

from dataclasses import replace

import numpy as np
import pytest

import flashsim
from flashsim import Problem, Tiling
from flashsim.backends.kernels import nvrtc
from flashsim.backends.launch_policy.portable import PORTABLE, TF32
from flashsim.errors import TraceError
from flashsim.problem import oracle

pytest.importorskip("cupy")  # cupy_checks wants it; nothing here does
import emulator
from compiled import thorough
from cupy_checks import FEATURES, budget, check_lse, hardware_tanh, make, options
from test_cuda_kernels import H200

pytestmark = pytest.mark.promise("three counts equal", "twice plain attention's error")
FORWARD = Tiling(32, 64)
TILINGS = FORWARD, Tiling(64, 32)
SMALL = replace(H200, l2_bytes=28 << 10, multiprocessors=1)


#: An emulator of each architecture that the kernels tell apart.
AMPERE, HOPPER = emulator.Emulator(800), emulator.Emulator(900)


def emulated(machine, family, problem, x, algorithm, key_order, gpu, tilings):
    """[(arrays, stages)] of the forward and the backward pass."""
    given = (gpu, key_order, "counts")
    passes = family.forward_passes(problem, tilings[0], *given)
    forward = emulator.run_forward(machine, passes, problem, x)
    passes = family.backward_passes(problem, tilings[1], *given, algorithm)
    fused = algorithm == "flash2-fused"
    backward = emulator.run_backward(machine, passes, problem, forward[0], x, fused=fused)
    return [forward, backward]


def compare(
    machine, family, problem, algorithm="flash2", key_order="ascending", gpu=H200, tilings=TILINGS
):
    """Every result within the budget of its type, every event the simulator's."""
    p, x = problem, make(problem)
    runs = emulated(machine, family, p, x, algorithm, key_order, gpu, tilings)
    arrays = runs[1][0]
    dlse = x.get("dlse")
    rounded = {name: oracle.tf32(a) if family is TF32 else a for name, a in x.items()}
    kind = "tf32" if family is TF32 else p.dtype
    inputs = [[given[name] for name in "qkv"] for given in (x, rounded)]
    exact, plain = oracle.attention(*inputs[0], p), oracle.attention(*inputs[1], p, dtype=kind)
    true = {"o": exact[0], **oracle.gradients(*inputs[0], x["dout"], p, dlse=dlse)}
    grads = oracle.gradients(*inputs[1], rounded["dout"], p, dlse=dlse, dtype=kind)
    rough = {"o": plain[0], **grads}
    for name in ("o", "dq", "dk", "dv"):
        got = arrays[name][..., : true[name].shape[-1]].astype(np.float64)
        assert np.abs(got - true[name]).max() <= budget(true[name], rough[name], p), name
        assert not arrays[name][..., true[name].shape[-1] :].astype(bool).any(), "padding"
    coarse = family is TF32 or hardware_tanh(p)
    check_lse(arrays["lse"], exact[1], plain[1] if coarse else exact[1])
    result = flashsim.run(
        *inputs[0],
        algorithm=algorithm,
        tiling=tilings[0],
        key_order=key_order,
        trace=True,
        **options(p),
    )
    traces = (result.trace, result.backward(x["dout"], dlse=dlse, tiling=tilings[1]).trace)
    for (_, stages), simulated in zip(runs, traces, strict=True):
        for stage, expected in zip(stages, simulated.stages, strict=True):
            np.testing.assert_array_equal(stage.events, expected.events, stage.name)


@pytest.mark.parametrize(
    ("family", "dtype", "sides", "name", "algorithm", "machine"),
    [
        (PORTABLE, "bfloat16", (37, 61), "gqa", "flash2", HOPPER),  # padded rows
        thorough(PORTABLE, "bfloat16", (37, 61), "gqa", "flash2-fused", HOPPER),
        (PORTABLE, "bfloat16", (37, 61), "gqa", "flash2-fused", AMPERE),  # dQ added one by one
        (PORTABLE, "float16", (40, 24), "varlen", "flash2-fused", HOPPER),  # padded tiles
        (PORTABLE, "bfloat16", (96, 128), "softcap", "flash2-fused", HOPPER),  # scores cross warps
        thorough(PORTABLE, "float16", (96, 96), "gqa", "flash2", HOPPER),  # here, too
        thorough(PORTABLE, "float32", (37, 61), "gqa", "flash2", HOPPER),
        (PORTABLE, "float32", (37, 61), "no keys", "flash2-fused", HOPPER),
        (TF32, "float32", (37, 61), "blocks", "flash2", HOPPER),
        thorough(TF32, "float32", (37, 61), "gqa", "flash2-fused", HOPPER),
    ],
)
def test_results_and_counted_bytes(family, dtype, sides, name, algorithm, machine):
    p = Problem(head_dim=sides[0], head_dim_v=sides[1], dtype=dtype, **FEATURES[name])
    compare(machine, family, p, algorithm)


@pytest.mark.parametrize(
    ("family", "dtype", "name", "algorithm"),
    [
        (PORTABLE, "bfloat16", "gqa", "flash2"),
        (PORTABLE, "float16", "varlen", "flash2-fused"),
        (PORTABLE, "float32", "no keys", "flash2-fused"),
        thorough(TF32, "float32", "gqa", "flash2"),
    ],
)
def test_a_gradient_of_the_lse(family, dtype, name, algorithm):
    p = Problem(head_dim=37, head_dim_v=61, dtype=dtype, dlse=True, **FEATURES[name])
    compare(HOPPER, family, p, algorithm)


def test_descending_keys():
    p = Problem(head_dim=37, head_dim_v=61, dtype="bfloat16", **FEATURES["gqa"])
    compare(HOPPER, PORTABLE, p, key_order="descending")


def test_a_last_clump_of_fewer_heads():
    """On a GPU so small that seven heads are worked on four at a time."""
    p = Problem(45, 40, 16, heads=7, dtype="bfloat16", causal=True)
    (one,) = PORTABLE.forward_passes(p, FORWARD, SMALL, "ascending", "")
    assert (one.walks, one.clump) == (7, 4)
    compare(HOPPER, PORTABLE, p, gpu=SMALL)


@pytest.mark.parametrize("size", [2, 4])
def test_what_a_row_counts_adds_up_to_the_elements_that_exist(size):
    """`Row` of common.cuh, for every head_dim: in pieces of 16 bytes, and of 1, 2, 4 columns."""
    text = nvrtc.source("common.cuh").replace("using KeyRow", "//").replace("using ValueR", "//")
    check = """
        template <int D>
        int wrong() {
            using R = Row<(D + 7) / 8 * 8, D>;
            int sums[5] = {};
            for (int piece = 0; piece < R::WIDTH * FS_BYTES / 16; ++piece)
                sums[0] += R::bytes(piece);
            for (int n = 1, i = 1; n <= 4; n *= 2, ++i)
                for (int column = 0; column < R::WIDTH; column += n)
                    sums[i] += R::counted(R::WIDTH - column, n) * FS_BYTES;
            for (int column = 0; column < R::WIDTH; ++column)
                sums[4] += R::exists(column) * FS_BYTES;
            int bad = 0;
            for (int sum : sums) bad += sum != D * FS_BYTES;
            if constexpr (D > 1) bad += wrong<D - 1>();
            return bad;
        }
        extern "C" int all_wrong() { return wrong<256>(); }
        void kernel() {}
    """
    (one,) = PORTABLE.forward_passes(Problem(8, 8, 8), FORWARD, H200, "ascending", "counts")
    defines = [f"-D{n}={size if n == 'FS_BYTES' else v}" for n, v in one.kernel.constants]
    library = emulator.built(text + check, (*defines, "-D__CUDA_ARCH__=900"))
    assert library.all_wrong() == 0
    faulty = text.replace("left - (WIDTH - EXIST)", "left")
    few = check.replace("wrong<256>", "wrong<40>")
    library = emulator.built(faulty + few, (*defines, "-D__CUDA_ARCH__=900"))
    assert library.all_wrong() > 0


FAULTS = {
    "a load counted twice": (
        "load_async<KeyRow, THREADS>(t.Q",
        "(1 + FAULT) * load_async<KeyRow, THREADS>(t.Q",
    ),
    "tiles not awaited": (
        "cp_async_wait();\n        __syncthreads();  // B1: this visit's K, V are",
        "if (!FAULT) cp_async_wait();\n if (!FAULT) __syncthreads();  // B1: this visit's K, V are",
    ),
    "a barrier that hangs": (
        "__syncthreads();  // B3: dQ",
        "if (warp || !FAULT) __syncthreads();  // B3: dQ",
    ),
}
FAULTY = emulator.Faulty(900, FAULTS)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_kernel_shows(fault):
    p = Problem(70, 90, 40, dtype="bfloat16", causal=True)
    FAULTY.seeded = ""
    compare(FAULTY, PORTABLE, p)
    FAULTY.seeded = fault
    with pytest.raises((AssertionError, TraceError)):
        compare(FAULTY, PORTABLE, p)
