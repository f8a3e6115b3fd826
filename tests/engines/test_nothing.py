"""No batch, no query or no key: zeros and an LSE of -inf on every engine, and nothing launched."""

import pickle

import numpy as np
import pytest
from helpers import tensors
from refusals import refuses

import flashsim
from flashsim import BlockMask, ShapeError, Tiling
from flashsim.api import inputs
from flashsim.problem import oracle
from flashsim.problem.problem import numpy_dtype

pytestmark = pytest.mark.promise("empty inputs")

#: q, k and v of (batch, heads, n, d): nothing of one kind each, and of several.
SHAPES = {
    "no batch": ((0, 4, 5, 8), (0, 2, 7, 8), (0, 2, 7, 6)),
    "no queries": ((2, 4, 0, 8), (2, 2, 7, 8), (2, 2, 7, 6)),
    "no keys": ((2, 4, 5, 8), (2, 2, 0, 8), (2, 2, 0, 6)),
    "nothing": ((0, 4, 0, 8), (0, 2, 0, 8), (0, 2, 0, 6)),
}
ALGORITHMS = [
    ("simulator", "flash2"),
    ("simulator", "flash2-fused"),
    ("simulator", "flash2-once"),
    ("simulator", "flash1"),
    ("simulator", "standard"),
    ("numba", "flash2"),
    ("numba", "flash2-fused"),
]


def arrays(name, dtype="float32"):
    return [np.ones(shape, numpy_dtype(dtype)) for shape in SHAPES[name]]


def check(x, shape, dtype, value):
    assert type(x) is np.ndarray
    assert x.shape == shape
    assert x.dtype == numpy_dtype(dtype)
    assert (x == value).all()


@pytest.mark.parametrize(("backend", "algorithm"), ALGORITHMS)
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", SHAPES)
def test_zeros_and_an_lse_of_minus_infinity(name, dtype, backend, algorithm):
    q, k, v = arrays(name, dtype)
    bias = np.zeros((1, 4, q.shape[2], k.shape[2]), q.dtype)
    how = {"backend": backend, "algorithm": algorithm, "bias": bias, "causal": True}
    r = flashsim.run(q, k, v, **how)
    wide = "float64" if dtype == "float64" else "float32"
    check(r.out, (*q.shape[:3], 6), dtype, 0)
    check(r.lse, q.shape[:3], wide, -np.inf)
    dout = np.ones_like(r.out)
    passes = [r.backward(dout)]
    if algorithm != "standard":
        passes.append(flashsim.backward(q, k, v, r.out, r.lse, dout, **how))
    for g in passes:
        for x, like in ((g.dq, q), (g.dk, k), (g.dv, v), (g.dbias, bias)):
            check(x, like.shape, dtype, 0)


def test_it_is_what_the_oracle_says_of_rows_that_see_no_key():
    """The same rows beside others, behind a mask that leaves them no key."""
    q, k, v = (np.ones((1, 2, 5, 8), np.float32) for _ in range(3))
    masked = flashsim.run(q, k, v, mask=lambda i, j: (i < 0) & (j < 0))
    r = flashsim.run(q, k[:, :, :0], v[:, :, :0])
    np.testing.assert_array_equal(r.out, masked.out)
    np.testing.assert_array_equal(r.lse, masked.lse)
    np.testing.assert_array_equal(r.backward(q).dq, masked.backward(q).dq)


@pytest.mark.parametrize("backend", ["simulator", "numba"])
@pytest.mark.parametrize("name", SHAPES)
def test_sinks_are_the_lse_and_have_its_gradient(name, backend):
    """As in rows whose keys are all masked: such a row's softmax has only the sink."""
    q, k, v = arrays(name)
    sinks = np.array([1.0, -2.0, 3.0, 0.5], np.float32)
    r = flashsim.run(q, k, v, sinks=sinks, backend=backend)
    check(r.out, (*q.shape[:3], 6), "float32", 0)
    check(r.lse, q.shape[:3], "float32", sinks[:, None])
    check(r.backward(r.out).dsinks, (4,), "float32", 0)
    dlse = np.arange(r.lse.size, dtype=np.float32).reshape(r.lse.shape)
    check(r.backward(r.out, dlse=dlse).dsinks, (4,), "float32", dlse.sum(axis=(0, 2)))
    masked = flashsim.run(
        *(np.ones((2, 4, 5, 8), np.float32), np.ones((2, 2, 7, 8), np.float32)),
        *(np.ones((2, 2, 7, 6), np.float32),),
        **{"sinks": sinks, "backend": backend, "mask": lambda i, j: (i < 0) & (j < 0)},
    )
    check(masked.lse, (2, 4, 5), "float32", sinks[:, None])


@pytest.mark.parametrize("backend", ["simulator", "numba"])
@pytest.mark.parametrize("name", SHAPES)
def test_arrays_of_a_score_function_have_gradients(name, backend):
    q, k, v = arrays(name)
    per_row, other = np.ones(5, np.float64), np.ones((4, 1), np.float32)
    add = lambda s, b, h, i, j: s + per_row[i] + other[h, 0]  # noqa: E731
    r = flashsim.run(q, k, v, score_mod=add, backend=backend)
    r = pickle.loads(pickle.dumps(r))
    captured = r.backward(r.out, captured=True).captured
    assert captured.keys() == {"per_row", "other"}
    check(captured["per_row"], (5,), "float64", 0)
    check(captured["other"], (4, 1), "float32", 0)
    assert r.backward(r.out, captured="other").captured.keys() == {"other"}
    assert r.backward(r.out).captured == {}


@pytest.mark.parametrize("backend", ["simulator", "numba"])
def test_a_sink_of_minus_infinity_is_no_sink(backend):
    """Under the causal mask, the first two of five queries see none of the three keys."""
    x = tensors(n_q=5, n_kv=3, d=8)
    q, k, v, found = x.q, x.k, x.v, []
    for sinks in (None, np.full(q.shape[1], -np.inf)):
        r = flashsim.run(q, k, v, sinks=sinks, backend=backend, causal=True)
        g = r.backward(r.out)
        found.append((r.out, r.lse, g.dq, g.dk, g.dv))
    np.testing.assert_equal(*found)
    np.testing.assert_array_equal(g.dsinks, 0)
    p = r.problem
    np.testing.assert_array_equal(oracle.gradients(q, k, v, r.out, p, sinks=sinks)["dsinks"], 0)


@pytest.mark.parametrize("sinks", [np.ones(3, np.float32), [1.0, 2.0, 3.0]])
def test_sinks_of_the_wrong_shape_are_refused_on_a_gpu_too(sinks):
    """Where they are not converted."""
    request = inputs.Request(sinks=sinks)
    with pytest.raises(ShapeError, match=r"sinks must be floats of shape \(4,\), one per"):
        inputs.prepare(*arrays("no keys"), request, may_be_empty=True, on_cpu=False)


def test_with_fewer_axes_and_again():
    q, k = np.ones((5, 8), np.float32), np.ones((0, 8), np.float32)
    for _ in range(2):  # the second is known from the first
        r = flashsim.run(q, k, k)
        check(r.out, (5, 8), "float32", 0)
        check(r.lse, (5,), "float32", -np.inf)
        check(r.backward(q).dk, (0, 8), "float32", 0)
    again = pickle.loads(pickle.dumps(r))
    check(again.backward(q).dq, (5, 8), "float32", 0)
    r = flashsim.run(q[None, :0], q[None], q[None], nan_policy="raise", softcap=2.0, window=(3, 0))
    check(r.lse, (1, 0), "float32", -np.inf)


def test_packed_sequences_without_a_token():
    q, k = np.ones((4, 5, 8), np.float32), np.ones((4, 7, 8), np.float32)
    nothing = (0, 0, 0)
    r = flashsim.run(q[:, :0], k, k, cu_seqlens_q=nothing, cu_seqlens_k=(0, 3, 7))
    check(r.out, (4, 0, 8), "float32", 0)
    r = flashsim.run(q, k[:, :0], k[:, :0], cu_seqlens_q=(0, 5, 5), cu_seqlens_k=nothing)
    check(r.out, (4, 5, 8), "float32", 0)


def test_a_mask_of_nothing():
    q, k = np.ones((4, 5, 8), np.float32), np.ones((4, 0, 8), np.float32)
    never = lambda i, j: 1 / 0  # noqa: E731  # nor is it asked
    cells = BlockMask([[True]], 8, 8)
    for how in ({"mask": never}, {"block_mask": cells}, {"tiling": Tiling(4, 4)}):
        check(flashsim.run(q, k, k, **how).out, (4, 5, 8), "float32", 0)


@pytest.mark.parametrize("name", SHAPES)
def test_decoding_without_keys(name):
    q, k, v = arrays(name)
    how = {"algorithm": "flash-decode"}
    check(flashsim.run(q, k, v, **how).out, (*q.shape[:3], 6), "float32", 0)
    check(flashsim.run(q, k, None, head_dim_v=6, **how).lse, q.shape[:3], "float32", -np.inf)
    lengths = np.full(q.shape[0], k.shape[2])
    check(flashsim.run(q, k, v, cache_seqlens=lengths, **how).lse, q.shape[:3], "float32", -np.inf)


def test_a_cache_of_which_no_key_is_live():
    q, k = np.ones((2, 4, 3, 8), np.float32), np.ones((2, 2, 7, 8), np.float32)
    how = {"algorithm": "flash-decode", "cache_seqlens": [0, 0]}
    r = flashsim.run(q, k, k, **how)
    check(r.out, q.shape, "float32", 0)
    check(r.lse, q.shape[:3], "float32", -np.inf)
    pages, table = np.ones((6, 2, 4, 8), np.float32), np.arange(6).reshape(2, 3)
    check(flashsim.run(q, pages, pages, block_table=table, **how).out, q.shape, "float32", 0)
    none = {"block_table": table[:0], "algorithm": "flash-decode"}
    check(flashsim.run(q[:0], pages[:0], pages[:0], **none).out, (0, 4, 3, 8), "float32", 0)


def test_fp8():
    e4m3 = numpy_dtype("float8_e4m3fn")
    q, k, v = (np.ones(shape, e4m3) for shape in SHAPES["no keys"])
    one = np.ones((2, 4), np.float32), np.ones((2, 2), np.float32), np.ones((2, 2), np.float32)
    for scales in ("unscaled", one, (1.0, 2.0, 3.0)):
        r = flashsim.run(q, k, v, scales=scales)
        check(r.out, (2, 4, 5, 6), "bfloat16", 0)
        check(r.backward(r.out).dq, (2, 4, 5, 8), "bfloat16", 0)


Q, K, V = arrays("no keys")
PACKED = np.ones((4, 5, 8), np.float32), *[np.ones((4, 0, 8), np.float32)] * 2


def run(q=Q, k=K, v=V, **how):
    return flashsim.run(q, k, v, **how)


def captured():
    per_row = np.ones(5)
    return run(score_mod=lambda s, b, h, i, j: s + per_row[i])


test_what_is_wrong_is_refused_all_the_same = refuses(r"""
run(Q[:, :3]) -> ShapeError: multiple of the number of KV heads
run(Q[:0]) -> ShapeError: same batch size
run(bias=np.zeros((5, 7), np.float32)) -> ShapeError: bias must have ... , 5, 0)
run(Q[:, :0], K[:, :0], V[:, :0]) -> ShapeError: must have at least one head and one column
run(Q[..., :0], K[..., :0], V[..., :0]) -> ShapeError: must have at least one head and one column
run(backend="numba", algorithm="standard") -> UnsupportedError: backend 'numba' runs flash2
run(sinks=np.ones(3, np.float32))
    -> ShapeError: sinks must be floats of shape (4,), ... shape (3,)
run(trace=True).trace -> TraceError: and arrays whose axes all have a length of at least 1
run().problem -> UnsupportedError: no flashsim.Problem describes this call
run().backward(np.ones((2, 4, 5, 8), np.float32))
    -> ShapeError: dout must have the same shape as out
captured().backward(np.ones((2, 4, 5, 6)), captured=["x"])
    -> OptionError: unknown captured 'x'; choose from
run(algorithm="flash-decode").backward(np.ones((2, 4, 5, 6), np.float32))
    -> UnsupportedError: no backward pass
run(*PACKED, cu_seqlens_q=(0, 5), cu_seqlens_k=(0, 0, 0))
    -> ShapeError: same number of sequences, got 1 and 2
run(*PACKED, cu_seqlens_q=(0, 4), cu_seqlens_k=(0, 0))
    -> ShapeError: must start at 0, ... length 5
run(*PACKED, cu_seqlens_q=(0, 5)) -> ShapeError: must be passed together
run(*[np.ones((0, 4, 5, 8), np.float32)] * 3, cu_seqlens_q=(0, 5), cu_seqlens_k=(0, 5))
    -> ShapeError: batch must be 1, got 0
count(Problem(3, 7, 8, batch=2), algorithm="flash-decode", cache_seqlens=[0, 0])
    -> OptionError: cache_seqlens are all 0
quantize(Q, K, V) -> ShapeError: must not be empty
flashsim.distributed.run(Q, K, V, ranks=1) -> ShapeError: must not be empty
simulate(lambda machine: None, Q, K, V) -> ShapeError: must not be empty
""")
