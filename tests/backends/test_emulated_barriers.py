"""The portable kernels' barriers, without a GPU: the emulator lets one warp run as far ahead as it
may; results are attention's, and without any one barrier they are not.
"""

from dataclasses import replace

import pytest
from barriers import left_out, untried
from compiled import thorough

from flashsim import Problem, Tiling
from flashsim.backends.launch_policy.portable import PORTABLE
from flashsim.errors import TraceError

pytest.importorskip("cupy")  # as test_emulated
import emulator
import test_emulated
from test_cuda_kernels import H200

pytestmark = pytest.mark.promise("every barrier is needed")

HALF, SINGLE = "bfloat16", "float32"
OTHER = Tiling(32, 32)
#: GPUs on which the tiles below have one stage.
SMALL, MEDIUM, LARGE = (replace(H200, shared_bytes=n) for n in (20_000, 33_000, 50_000))
#: Kernel, algorithm, dtype, head_dim, tiling, GPU, and the barriers that this form has and needs.
CASES = [
    ("portable/forward.cu", "flash2", HALF, 40, (64, 32), H200, "B0 B1 B3"),  # Q in registers
    ("portable/forward.cu", "flash2", HALF, 128, (128, 64), H200, "B1 B2 B3"),  # O staged over Q
    ("portable/backward_dkdv.cu", "flash2", HALF, 40, (32, 64), H200, "B1 B4"),
    ("portable/backward_dkdv.cu", "flash2", HALF, 40, (32, 64), SMALL, "B0 B1 B4"),
    ("portable/backward_dkdv.cu", "flash2-fused", HALF, 40, (32, 64), H200, "B1 B3 B4"),
    # 96: scores cross warps
    ("portable/backward_dkdv.cu", "flash2", HALF, 96, (32, 64), H200, "B1 B2 B4"),
    ("portable/backward_dkdv.cu", "flash2-fused", HALF, 96, (32, 64), H200, "B1 B2 B3 B4"),
    ("portable/backward_dkdv.cu", "flash2-fused", HALF, 96, (32, 64), LARGE, "B0 B1 B2 B3 B4"),
    # 64: in halves
    ("portable/backward_dkdv.cu", "flash2-fused", HALF, 64, (32, 64), H200, "B1 B3 B4"),
    ("portable/backward_dq.cu", "flash2", HALF, 40, (64, 32), H200, "B1 B2 B3"),
    ("portable/backward_dq.cu", "flash2", HALF, 40, (64, 64), MEDIUM, "B0 B1 B3"),
    ("portable/forward_f32.cu", "flash2", SINGLE, 40, (32, 32), H200, "B0 B1 B2 B3"),
    ("portable/backward_dkdv_f32.cu", "flash2", SINGLE, 40, (32, 32), H200, "B0 B1 B2"),
    ("portable/backward_dq_f32.cu", "flash2", SINGLE, 40, (32, 32), H200, "B0 B1"),
]


def compare(case, machine):
    """The kernels against the oracle and the simulator."""
    file, algorithm, dtype, head_dim, tiling, gpu, _ = case
    tilings = (Tiling(*tiling), OTHER)[:: 1 if "forward" in file else -1]
    # The first row tile sees no key: its block ends while copies of Q are still under way.
    p = Problem(86 + tiling[0], 70, head_dim, dtype=dtype, causal=True)
    test_emulated.compare(machine, PORTABLE, p, algorithm, gpu=gpu, tilings=tilings)


#: One of the widest form has each barrier of its kernel; the other forms are tried in CI.
OTHER_FORMS = [case for case in CASES if "dkdv.cu" in case[0] and case[5] is not LARGE]


@pytest.mark.parametrize(
    "case",
    [thorough(c) if c in OTHER_FORMS else c for c in CASES],
    ids=lambda c: f"{c[0]}-{c[1]}-{c[3]}",
)
def test_a_barrier_left_out_shows(case):
    machine = emulator.Faulty(900, left_out(case[0]), case[0])
    compare(case, machine)
    needed, shown = case[-1].split(), []
    for machine.seeded in needed:
        try:
            compare(case, machine)
        except (AssertionError, TraceError):
            shown.append(machine.seeded)
    assert shown == needed


def test_every_barrier_is_tried():
    assert not untried(case for case in CASES if case not in OTHER_FORMS)
