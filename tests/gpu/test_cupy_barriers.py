"""The portable kernels' barriers on a GPU: with warps out of step results stay the same bits, and
without any one barrier they do not.
"""

import numpy as np
import pytest
from barriers import Jittered, backward_job, untried
from cupy_checks import MARKS

import flashsim
from flashsim import Problem, Tiling
from flashsim.problem.problem import numpy_dtype

pytestmark = [*MARKS, pytest.mark.promise("every barrier is needed")]

HALF, SINGLE = "float16", "float32"
#: Kernel, algorithm, dtype, head_dim, tiling, and the barriers that this form of it has and needs.
CASES = [
    ("portable/forward.cu", "", HALF, 64, (64, 64), "B0 B1 B3"),  # Q in registers
    (
        "portable/forward.cu",
        "",
        HALF,
        128,
        (128, 64),
        "B1 B2 B3",
    ),  # Q in shared memory, O staged over it
    ("portable/backward_dkdv.cu", "flash2", HALF, 64, (64, 128), "B1 B4"),
    (
        "portable/backward_dkdv.cu",
        "flash2-fused",
        HALF,
        64,
        (64, 128),
        "B1 B3",
    ),  # dS crosses warps at B1
    (
        "portable/backward_dkdv.cu",
        "flash2",
        HALF,
        128,
        (64, 128),
        "B1 B2 B4",
    ),  # so do scores, at B2
    ("portable/backward_dkdv.cu", "flash2-fused", HALF, 128, (64, 128), "B1 B2 B3"),
    ("portable/backward_dkdv.cu", "flash2", HALF, 256, (96, 64), "B0"),  # one stage
    ("portable/backward_dq.cu", "flash2", HALF, 64, (64, 64), "B1 B2 B3"),
    ("portable/backward_dq.cu", "flash2", HALF, 256, (128, 64), "B0"),  # one stage
    ("portable/forward_f32.cu", "", SINGLE, 64, (64, 64), "B0 B1 B2 B3"),
    ("portable/backward_dkdv_f32.cu", "flash2", SINGLE, 64, (64, 64), "B0 B1 B2"),
    ("portable/backward_dq_f32.cu", "flash2", SINGLE, 64, (64, 64), "B0 B1"),
]
RUNS = 6


def results(file, algorithm, dtype, head_dim, tiling, without=None):
    """Bits of RUNS runs; of the kernels as they are if `without` is None, jittered otherwise."""
    from flashsim.backends.cupy_gpu import engine as cupy_engine

    # The first row tiles see no key: their blocks end while copies of Q are still under way.
    p = Problem(700, 500, head_dim, heads=4, dtype=dtype, causal=True)
    rng = np.random.default_rng(0)
    given = [
        rng.standard_normal((1, 4, n, head_dim)).astype(numpy_dtype(dtype))
        for n in (p.n_q, p.n_kv, p.n_kv, p.n_q)
    ]
    *inputs, dout = given
    forward_tiling = None if algorithm else Tiling(*tiling)
    result = flashsim.run(
        *inputs, backend="cupy", kernel="portable", causal=True, tiling=forward_tiling
    )
    family = Jittered(file, without or "").of if without is not None else cupy_engine._family
    made = []
    for _ in range(RUNS):
        if algorithm:
            job = backward_job(result, Tiling(*tiling), algorithm)
            made.append(cupy_engine.backward_with(family, job, result._saved, dout).arrays)
        else:
            made.append(cupy_engine.forward_with(family, result._job).arrays)
    return made


def same(algorithm, one, other):
    """Whether all arrays are, bit for bit; of a fused dQ, whose sums' order varies, nearly."""
    rough = 0.02 if algorithm == "flash2-fused" else 0.0
    return all(
        np.allclose(
            one[name].astype(np.float32),
            other[name].astype(np.float32),
            rtol=0,
            atol=rough if name == "dq" else 0,
            equal_nan=True,
        )
        for name in one
    )


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-{c[1]}-{c[3]}")
def test_warps_out_of_step_change_nothing(case):
    expected = results(*case[:5])[0]
    assert all(same(case[1], one, expected) for one in results(*case[:5], without=""))


@pytest.mark.parametrize(
    ("case", "barrier"),
    [(case, barrier) for case in CASES for barrier in case[5].split()],
    ids=lambda x: x if isinstance(x, str) else f"{x[0]}-{x[1]}-{x[3]}",
)
def test_a_barrier_left_out_shows(case, barrier):
    expected = results(*case[:5])[0]
    assert not all(same(case[1], one, expected) for one in results(*case[:5], without=barrier))


def test_every_barrier_is_tried():
    assert not untried(CASES)
