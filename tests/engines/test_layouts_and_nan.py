"""What a result must not depend on: how arrays lie in memory, and keys that nobody may read."""

import numpy as np
import pytest

import flashsim
from flashsim import Tiling

pytestmark = pytest.mark.promise("layout changes nothing")

TILE = Tiling(32, 32)


def inputs(n=128, d=16):
    return np.random.default_rng(0).standard_normal((4, 2, n, d)).astype(np.float32)


def rows_first(array):
    """The same numbers, with the heads of a row side by side."""
    return np.ascontiguousarray(array.transpose(1, 0, 2)).transpose(1, 0, 2)


@pytest.mark.parametrize("algorithm", ["standard", "flash1", "flash2", "flash2-fused"])
def test_gradients_do_not_depend_on_the_layout_of_dout(algorithm):
    """The gradient of a sum over rows is one row, broadcast: its rows lie in one place."""
    rng = np.random.default_rng(0)
    q, dout = rng.standard_normal((2, 2, 4, 33, 8), dtype=np.float32)
    k, v = rng.standard_normal((2, 2, 1, 33, 8), dtype=np.float32)
    small = Tiling(16, 8)
    result = flashsim.run(q, k, v, algorithm=algorithm, tiling=small)
    row = np.broadcast_to(dout[:, :, :1], dout.shape)
    for one, two in ((row, row.copy()), (dout[0], rows_first(dout[0]))):
        if one.ndim == 3:
            result = flashsim.run(q[0], k[0], v[0], algorithm=algorithm, tiling=small)
        a, b = (result.backward(x, tiling=small) for x in (one, two))
        for name in ("dq", "dk", "dv"):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)


LAYOUTS = {
    "rows first": rows_first,
    "every second head": lambda x: np.repeat(x, 2, axis=0)[::2],
    "first columns": lambda x: np.concatenate([x, x], axis=-1)[..., : x.shape[-1]],
}


@pytest.mark.parametrize("backend", ["simulator", "numba"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_do_not_depend_on_the_layout_of_the_inputs(layout, backend):
    """Of arrays that are read-only. Of V's one column NumPy makes a flat view without a copy."""
    q, k, *wide = inputs()
    v, dout = (np.ascontiguousarray(x[..., :1]) for x in wide)
    moved = [LAYOUTS[layout](x) for x in (q, k, v)]
    for x in moved:
        x.setflags(write=False)
    one, two = (flashsim.run(*x, tiling=TILE, backend=backend) for x in ((q, k, v), moved))
    of_one, of_two = one.backward(dout), two.backward(dout)
    for name in ("out", "lse"):
        np.testing.assert_array_equal(getattr(one, name), getattr(two, name), err_msg=name)
    for name in ("dq", "dk", "dv"):
        np.testing.assert_array_equal(getattr(of_one, name), getattr(of_two, name), err_msg=name)


def rows_with_nan(result):
    return set(np.flatnonzero(np.isnan(result.out).any(axis=(0, 2))).tolist())


@pytest.mark.parametrize(
    ("algorithm", "backend"),
    [
        ("flash1", "simulator"),
        ("flash2", "simulator"),
        ("flash-decode", "simulator"),
        ("flash2", "numba"),
    ],
)
def test_a_hidden_nan_reaches_the_rows_of_visited_tiles(algorithm, backend):
    """As docs/reference/model.md says: 0 times NaN is NaN, and skipped tiles are not read."""
    q, k, v, _ = inputs()
    v[:, 100] = np.nan
    result = flashsim.run(q, k, v, causal=True, tiling=TILE, algorithm=algorithm, backend=backend)
    assert rows_with_nan(result) == set(range(96, 128))  # row tile 3 visits key tile 3


def test_standard_attention_multiplies_every_key():
    q, k, v, _ = inputs()
    v[:, 100] = np.nan
    result = flashsim.run(q, k, v, causal=True, tiling=TILE, algorithm="standard")
    assert rows_with_nan(result) == set(range(128))


@pytest.mark.parametrize("which", ["k", "v"])
def test_what_lies_past_a_sequences_keys_in_a_cache_is_never_used(which):
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, 4, 1, 16), np.float32)
    cache = dict(zip("kv", rng.standard_normal((2, 1, 1, 128, 16), np.float32), strict=True))
    options = {"algorithm": "flash-decode", "cache_seqlens": np.array([100]), "tiling": TILE}
    clean = flashsim.run(q, cache["k"], cache["v"], **options).out
    cache[which][..., 100:, :] = np.nan
    np.testing.assert_array_equal(flashsim.run(q, cache["k"], cache["v"], **options).out, clean)
