"""Every family of GPU kernels on flash-attention's kind of grid, against the float64 oracle."""

import pytest
from compiled import star
from cupy_checks import MARKS, check, families, poisoned  # noqa: F401

from flashsim import Problem

pytestmark = [*MARKS, pytest.mark.promise("twice plain attention's error")]

SHAPES = [
    *((1, 1), (1, 239), (3, 799), (64, 64), (97, 97), (113, 203), (128, 217), (127, 512)),
    *((256, 512), (512, 256), (1023, 1024), (1024, 1023), (2048, 2048)),
]
HEAD_DIMS = [128, 32, 40, 64, 80, 96, 160, 192, 256]
#: Query heads and key heads: as many, in groups, one for all.
HEADS = [(2, 2), (4, 2), (3, 1)]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}x{s[1]}")
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("family", families())
def test_shapes(family, head_dim, causal, shape):
    heads = 1 if shape == (2048, 2048) else 2  # its float64 reference takes a second a head
    check(Problem(*shape, head_dim, heads=heads, dtype="bfloat16", causal=causal), family)


@pytest.mark.parametrize(("head_dim", "dtype"), star(HEAD_DIMS, ["bfloat16", "float16"]))
@pytest.mark.parametrize("family", families())
def test_head_dims(family, head_dim, dtype):
    for heads, kv_heads in HEADS:  # a kernel is the same for all of them
        p = Problem(113, 203, head_dim, heads=heads, kv_heads=kv_heads, dtype=dtype, causal=True)
        check(p, family, kind="outliers")


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_head_dims_in_float32(head_dim, heads):
    check(
        Problem(
            *(113, 203, head_dim), heads=heads[0], kv_heads=heads[1], dtype="float32", causal=True
        ),
        kind="outliers",
    )
