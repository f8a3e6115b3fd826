"""The kernel that merges partial attention compiles for every pair of types, in registers."""

import pytest

pytest.importorskip("cupy")
from test_cuda_kernels import SPILL_BYTES, compile_kernel

from flashsim.backends.cupy_gpu.merge import THREADS, kernel

pytestmark = pytest.mark.promise("kernels compile")


@pytest.mark.parametrize(
    ("width", "total", "part", "lanes", "vector"),
    [
        (128, "float32", "bfloat16", 32, 4),
        (128, "bfloat16", "bfloat16", 16, 8),
        (64, "float16", "float16", 8, 8),
        (64, "float32", "float32", 16, 4),
        (7, "float32", "float16", 4, 1),
        (512, "bfloat16", "bfloat16", 32, 8),
    ],
)
def test_it_compiles_in_registers(width, total, part, lanes, vector):
    made = kernel(width, total, part)
    constants = dict(made.constants)
    assert (constants["FS_LANES"], constants["FS_VECTOR"]) == (lanes, vector)
    ((stack, spilled, registers),) = compile_kernel(made, "sm_90").values()
    assert (stack, spilled) <= (SPILL_BYTES, 0)
    assert registers * THREADS <= 65536 // 4
