"""Bad input: the kind of error, and a text that says what was wrong, was given and is possible."""

import re

import numpy as np
import pytest
from refusals import refusals, refused

import flashsim
from flashsim import OptionError, Problem, UnknownArgumentError
from flashsim.api.arrays import check_finite, check_like  # noqa: F401 - used in a table
from flashsim.api.inputs import Request, prepare
from flashsim.errors import SYNONYMS

pytestmark = pytest.mark.promise("refuses bad input")

X = np.zeros((8, 16), np.float32)
X3, X4 = np.zeros((2, 8, 16), np.float32), np.zeros((2, 4, 8, 16), np.float32)


def run(q=X, k=X, v=X, **options):
    return flashsim.run(q, k, v, **options)


def heads(n):
    return np.zeros((1, n, 8, 16), np.float32)


def count(**options):
    return flashsim.count(Problem(64), **options)


def masked(shape=(8, 16)):
    return np.ma.masked_array(np.zeros(shape, np.float32), mask=True)


class Band:
    """A mask function that has no hash."""

    __hash__ = None

    def __call__(self, q, k):
        return q >= k


REFUSED = refusals(r"""
run([[1.0]]) -> DTypeError: q must be an array ... got list
run(X, X.astype(np.float64), X) -> DTypeError: one dtype ... q float32, k float64, v float32
run(*[X.astype(int)] * 3)
    -> DTypeError: 'int64' is not supported ... float64, float32, float16, bfloat16
run(bias=np.zeros((8, 8)))
    -> DTypeError: bias must have the same dtype as q, which is float32, got float64
BlockMask([[True], [True, False]], 4, 4)
    -> DTypeError: a block mask's grid cannot be read as a NumPy array
Problem(8, block_mask=np.ones((1, 1), bool))
    -> DTypeError: must be a flashsim.BlockMask(grid, block_q, block_k), got ndarray
run(cu_seqlens_q=[[0], [1, 8]], cu_seqlens_k=[0, 8])
    -> DTypeError: cu_seqlens_q cannot be read as a NumPy array
Problem(8.0) -> DTypeError: n_q must be an integer, got 8.0 (float)
Problem(True) -> DTypeError: got True (bool)
Problem(8, dtype='bfloat61') -> DTypeError: 'bfloat61' is not supported ... did you mean 'bfloat16'?
Problem(8, dtype=[1, 2]) -> DTypeError: dtype [1, 2] is not supported
Problem(8, dtype=None) -> DTypeError: dtype None is not
run(causal='yes') -> DTypeError: causal must be True or False, got 'yes'
run(window=4) -> DTypeError: window= must be a pair (left, right) ... -1 for no limit, got 4
run(window=(1.5, 2)) -> DTypeError: window= must be a pair of integers (left, right), got (1.5, 2)
run(softcap='30') -> DTypeError: softcap must be a number, got '30' (str)
run(scale=True) -> DTypeError: got True (bool)
Tiling(64, 64.0) -> DTypeError: block_k must be an integer, got 64.0 (float)
count(tiling=64) -> DTypeError: tiling must be
flashsim.count(4096) -> DTypeError: count() takes a flashsim.Problem, got int
run(tiling=(64, 64)) -> DTypeError: tiling must be a flashsim.Tiling(block_q, block_k), got (64, 64)
Schedule('problem', Tiling(4, 4))
    -> DTypeError: Schedule.problem must be a flashsim.Problem, got 'problem'
Schedule(Problem(8), (4, 4)) -> DTypeError: Schedule.tiling must be a flashsim.Tiling, got (4, 4)
run(*[np.zeros((600, 64), np.float32)] * 3, tiling=Tiling(512, 512))
    -> SramOverflow: the largest tiling that fits is
run(X, X3, X)
    -> ShapeError: (n, d) ... (heads, n, d) ... (batch, heads, n, d) ... q (8, 16), k (2, 8, 16), v
    (8, 16)
run(X[0], X[0], X[0]) -> ShapeError: got q (16,)
run(X[:, :0], X[:, :0], X) -> ShapeError: must have at least one head and one column ... q (8, 0)
run(X4, X4[:1], X4) -> ShapeError: same batch size ... q (2, 4, 8, 16), k (1, 4, 8, 16)
run(heads(4), heads(2), heads(1))
    -> ShapeError: k and v must have the same number of heads ... v (1, 1, 8, 16)
run(X, X, X[:5]) -> ShapeError: k and v must have the same number of rows ... v (1, 1, 5, 16)
run(X, X[:, :8].copy(), X) -> ShapeError: q and k must have the same head_dim ... k (1, 1, 8, 8)
run(heads(4), heads(3), heads(3))
    -> ShapeError: multiple of the number of KV heads ... heads=4, kv_heads=3
run(X[:, ::2], X[:, ::2], X[:, ::2])
    -> ShapeError: q's last axis must be contiguous ... strides (64, 8) B ...
    np.ascontiguousarray(q)
run(*[np.zeros((2, 600), np.float32)] * 3)
    -> ShapeError: head_dim must be between 1 and 576, got 600
run(bias=X) -> ShapeError: bias must have shape (1, 1, 8, 8) ... got (8, 16)
run(heads(4), heads(4), heads(4), bias=np.zeros((1, 3, 8, 8), np.float32))
    -> ShapeError: sides of the bias's shape, (1 or 1, 1 or 4), got (1, 3)
Problem(8, bias=X)
    -> ShapeError: bias= must be the first two sides of the bias's shape, (1 or 1, 1 or 1)
Problem(8, bias=5) -> ShapeError: got 5
BlockMask([[True]], 0, 4) -> ShapeError: block_mask block_q must be at least 1, got 0
Problem(8, block_mask=BlockMask([[True]], 4, 4))
    -> ShapeError: must have shape (2, 2) to cover 8 x 8 scores, got (1, 1)
run(cu_seqlens_q=[0, 8]) -> ShapeError: cu_seqlens_q and cu_seqlens_k must be passed together
run(X4, X4, X4, cu_seqlens_q=[0, 8], cu_seqlens_k=[0, 8]) -> ShapeError: batch must be 1, got 2
run(cu_seqlens_q=[0, 7], cu_seqlens_k=[0, 8])
    -> ShapeError: cu_seqlens_q must start at 0, never decrease, and end at the packed length 8, got
    [0, 7]
run(cu_seqlens_q=[1, 8], cu_seqlens_k=[0, 8]) -> ShapeError: must start at 0 ... got [1, 8]
run(cu_seqlens_q=[0, 8], cu_seqlens_k=[0, 6, 4, 8])
    -> ShapeError: cu_seqlens_k must start at 0, never decrease ... got [0, 6, 4, 8]
run(cu_seqlens_q=[0, 8], cu_seqlens_k=[0, 4, 8])
    -> ShapeError: same number of sequences, got 1 and 2
run(cu_seqlens_q=[0.0, 8.0], cu_seqlens_k=[0, 8])
    -> ShapeError: 1-D list of at least two integer offsets, got [0.0, 8.0]
run(cu_seqlens_q=8, cu_seqlens_k=8)
    -> ShapeError: cu_seqlens_q must be a 1-D list of at least two integer offsets, got 8
Problem(0) -> ShapeError: n_q must be at least 1, got 0
Problem(8, heads=-2) -> ShapeError: heads must be at least 1, got -2
run(algorithm='flash3') -> OptionError: unknown algorithm 'flash3' ... did you mean 'flash
run(backend='simulater') -> OptionError: unknown backend 'simulater' ... did you mean 'simulator'
run(trace='yes') -> OptionError: trace must be True, False or 'timeline', got 'yes'
run(key_order='down') -> OptionError: unknown key_order 'down'; choose from ascending, desc
count(algorithm='flash') -> OptionError: unknown algorithm 'flash'
count(direction='back') -> OptionError: unknown direction 'back' ... mean 'backward'
count(key_order='up') -> OptionError: unknown key_order
run(X, np.full_like(X, np.nan), X, nan_policy='raise')
    -> OptionError: k contains 128 NaN or infinite values ... nan_policy='propagate'
run(np.full_like(X, -np.inf), nan_policy='raise') -> OptionError: q contains 128 NaN or infinite
run(window=(-2, 0)) -> OptionError: at least 0, or -1 for no limit, got (-2, 0)
run(softcap=-1) -> OptionError: softcap must be finite and at least 0, got -1
run(scale=np.inf) -> OptionError: scale must be finite, got inf
run(nan_policy='rise')
    -> OptionError: unknown nan_policy 'rise' ... choose from propagate, raise; did you mean
    'raise'?
Tiling.preset('fa2-foward', 64)
    -> OptionError: unknown tiling preset 'fa2-foward' ... did you mean 'fa2-forward'?
Tiling.preset('fa3-forward', 257)
    -> OptionError: preset 'fa3-forward' has no tile size for head_dim=257; pass
    tiling=flashsim.Tiling(block_q, block_k), or a head_dim of at most 256
Schedule(Problem(8), Tiling(4, 4), outer='rows')
    -> OptionError: unknown outer 'rows' ... choose from queries, keys
Schedule(Problem(8), Tiling(4, 4), key_order='decending')
    -> OptionError: unknown key_order 'decending' ... did you mean 'descending'?
run(device='H10')
    -> OptionError: unknown device 'H10' ... did you mean 'H100'? ... flashsim.Device(...)
Device('mine', sram_bytes=0, sram_per_sm=1)
    -> OptionError: Device.sram_bytes must be a positive integer, got 0
Device('mine', sram_bytes=1, sram_per_sm=1, hbm_bandwidth=-1.0)
    -> OptionError: Device.hbm_bandwidth must be finite and at least 0, got -1.0
Device.get('T4').peak('bfloat16')
    -> OptionError: T4 has no peak for dtype 'bfloat16' ... choose from float16, float32, float64
Device('mine', 9999, 9999).peak('float32')
    -> OptionError: mine has no peak for dtype 'float32'; pass tensor_flops= or cuda_flops=
run(mask=np.ones((8, 8), bool))
    -> MaskError: mask must be a function mask(q_index, k_index), got ndarray ... block_mask ...
    bias
run(mask=lambda q, k: q - k) -> MaskError: '<lambda>' must return booleans, got dtype int64
run(mask=lambda q, k: np.ones(3, bool)) -> MaskError: array that broadcasts to (8, 8), got (3,)
run(mask=lambda q, k: bool(q > k))
    -> MaskError: failed on index arrays of shapes (8, 1) and (1, 8) (ValueError ... operations on
    whole arrays
run(block_mask=np.ones((1, 1), bool))
    -> MaskError: one value per tile, so the tile size must be known; pass tiling= ...
    BlockMask(grid, block_q, block_k)
BlockMask(np.ones((2, 2)), 4, 4)
    -> MaskError: non-empty 2-D array of booleans ... got dtype float64, shape (2, 2)
BlockMask([True], 4, 4) -> MaskError: got dtype bool, shape (1,)
Tiling(0, 64) -> TilingError: block_q must be at least 1, got 0
run(casual=True) -> UnknownArgumentError: run() has no argument 'casual' ... did you mean 'causal'?
run(threads=2)
    -> UnknownArgumentError: run() has the argument 'threads' only with backend='numba' ... not with
    backend='simulator'
run(backend='numba', scales=(1, 1, 1))
    -> UnknownArgumentError: run() has the argument 'scales' only with backend='simulator'
run(dropout_p=0.1)
    -> UnknownArgumentError: run() has no argument 'dropout_p'; dropout is not simulated
Problem(8, softcap=1e-46) -> OptionError: softcap must be within the range of float32
run(mask=Band()) -> MaskError: mask= must be hashable ... got an unhashable Band
run(masked()) -> DTypeError: q is a masked array ... q.filled
run(X, masked()) -> DTypeError: k is a masked array ... k.filled
run(X, X, masked()) -> DTypeError: v is a masked array ... v.filled
run(bias=masked((8, 8))) -> DTypeError: bias is a masked array ... bias.filled
run().backward(masked()) -> DTypeError: dout is a masked array ... dout.filled
run(cu_seqlens_q=masked((2,)), cu_seqlens_k=[0, 8]) -> DTypeError: cu_seqlens_q is a masked array
BlockMask(np.ma.masked_array([[True]], mask=True), 8, 8) -> DTypeError: grid is a masked array
run(mask=lambda q, k: np.ma.masked_array(q > k, mask=True))
    -> MaskError: returned a masked array
run(X, X.T, X) -> ShapeError: k of shape (16, 8) looks transposed ... k without .T
run(X, X.T.copy(), X)
    -> ShapeError: same head_dim ... k looks transposed: its rows are keys
run(X, X, X.T.copy())
    -> ShapeError: same number of rows ... v looks transposed: its rows are values
run(X[:, :8], X[:, :8].T, X) -> ShapeError: k of shape (8, 8) looks transposed
run(bias=np.zeros((8, 8), np.float32).T)
    -> ShapeError: bias of ... transposed ... axes must be (n_q, n_kv)
flashsim.backward(X, X, X, X, np.zeros(8, np.float32), X, captured=3)
    -> DTypeError: ^backward(): captured must be bool | Sequence[str] | None, got 3
run().backward(X, captured=3) -> DTypeError: ^Result.backward(): captured must be bool | Sequence
flashsim.backward(X3, X3, X3, X3, np.zeros((8, 2), np.float32).T, X3)
    -> ShapeError: lse of ... transposed ... axes must be (heads, n_q)
merge(X3, X3[:, :, 0].copy(), X3, np.zeros((8, 2), np.float32).T)
    -> ShapeError: lse_b of ... transposed ... axes must be (heads, n_q)
check_like("dout", X[:4], X, "out")
    -> ShapeError: dout must have the same shape as out, which is (8, 16), got (4, 16)
check_like("dout", X.astype(np.float16), X, "out")
    -> DTypeError: same dtype as out, which is float32, got float16; ... astype
""")

BUILT_IN = {
    **dict.fromkeys(("ShapeError", "OptionError", "MaskError", "TilingError"), ValueError),
    **{"SramOverflow": ValueError, "DTypeError": TypeError, "UnknownArgumentError": TypeError},
}


@pytest.mark.parametrize(("call", "said"), REFUSED)
def test_bad_input_says_what_was_wrong(call, said):
    error = refused(call, said, globals())
    assert isinstance(error, BUILT_IN[type(error).__name__])


@pytest.mark.parametrize("name", [n for n, ours in SYNONYMS.items() if ours])
def test_synonyms_are_pointed_to_our_name(name):
    called = Problem if SYNONYMS[name] in ("n_q", "head_dim") else run
    expected = f"{called.__name__}() has no argument {name!r}; here it is called {SYNONYMS[name]}"
    with pytest.raises(UnknownArgumentError, match=re.escape(expected)):
        called(**{name: 1})


def test_every_plain_synonym_names_an_argument_that_run_or_a_problem_takes():
    known = {*flashsim.run.__kwdefaults__, "n_q", "head_dim"}
    plain = {ours for ours in SYNONYMS.values() if ours and ours.isidentifier()}

    assert plain <= known
    assert not set(SYNONYMS) & known


@pytest.mark.parametrize("ndim", [2, 3, 4])
def test_leading_axes_are_added_without_a_copy(ndim):
    x = np.zeros((2, 3, 8, 16)[4 - ndim :], np.float32)

    given = prepare(x, x, x)

    assert given.q.shape == (1,) * (4 - ndim) + x.shape
    assert np.shares_memory(given.q, x)
    assert given.ndim == ndim
    assert (given.problem.batch, given.problem.heads) == given.q.shape[:2]


def test_the_problem_follows_from_the_shapes():
    q = np.zeros((2, 6, 5, 16), np.float16)
    k, v = np.zeros((2, 3, 9, 16), np.float16), np.zeros((2, 3, 9, 24), np.float16)
    bias = np.zeros((6, 5, 9), np.float16)

    p = prepare(q, k, v, Request(causal=True), bias=bias).problem

    assert p == Problem(
        5,
        9,
        head_dim=16,
        head_dim_v=24,
        batch=2,
        heads=6,
        kv_heads=3,
        dtype="float16",
        causal=True,
        bias=(1, 6),
    )


def test_strides_of_leading_axes_and_single_columns_do_not_matter():
    rows = np.zeros((16, 16), np.float32)[::2]
    column = np.zeros((8, 4), np.float32)[:, :1]

    assert prepare(rows, rows, rows).problem.n_q == 8
    assert prepare(column, column, column).problem.head_dim == 1


def test_nan_in_bfloat16_and_in_a_bias_is_seen():
    import ml_dtypes

    bits = np.arange(1 << 16, dtype=np.uint16)
    every = bits.view(ml_dtypes.bfloat16)
    numbers = (bits & 0x7FFF) < 0x7F80
    check_finite("x", every[numbers].reshape(2, -1))
    for x in every[~numbers]:
        with pytest.raises(OptionError, match="x contains 1 NaN"):
            check_finite("x", np.array([[1, x], [-1, 2]], ml_dtypes.bfloat16))
    bias = np.full((8, 8), np.nan, np.float32)
    with pytest.raises(OptionError, match="bias contains 64 NaN"):
        prepare(X, X, X, Request(nan_policy="raise"), bias=bias)


# -- arrays that are not what they seem -----------------------------------------------------------


@pytest.mark.parametrize("backend", ["simulator", "numba"])
def test_a_matrix_is_an_array(backend):
    matrix = X.view(np.matrix)

    result = flashsim.run(matrix, matrix, matrix, backend=backend)

    np.testing.assert_array_equal(result.out, flashsim.run(X, X, X, backend=backend).out)
    assert type(result.backward(matrix).dq) is np.ndarray


# -- what a type can hold -------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["scale", "softcap"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_factors_fit_the_type_of_the_scores(dtype, option):
    with pytest.raises(
        OptionError, match=f"{option} must be within the range of float32.*got 1e\\+39"
    ):
        Problem(8, dtype=dtype, **{option: 1e39})
    assert getattr(Problem(8, dtype="float64", **{option: 1e39}), option) == 1e39
    assert getattr(Problem(8, dtype=dtype, **{option: 3e38}), option) == 3e38


@pytest.mark.parametrize("backend", ["simulator", "numba"])
def test_float16_overflow_is_said(backend):
    x = np.full((4, 16), 200, np.float16)

    result = flashsim.run(x, x[:1], x[:1], backend=backend)  # one key: dv sums four rows of dout
    with pytest.warns(
        RuntimeWarning, match="^dv contains 16 NaN or infinite.*float16 ends at 65,504"
    ):
        result.backward(np.full_like(x, 65504))


@pytest.mark.parametrize("backend", ["simulator", "numba"])
def test_what_was_not_finite_to_begin_with_is_no_overflow(backend):
    x, bias = X.astype(np.float16), np.zeros((8, 8), np.float16)
    bias[0] = -np.inf
    flashsim.run(x, x, x, bias=bias, backend=backend).backward(x)
    result = flashsim.run(x, x, x, sinks=[np.inf], backend=backend)
    assert np.isnan(result.out.astype(np.float32)).all()
    x[0, 0] = np.inf
    result = flashsim.run(x, x, x, backend=backend)
    assert not np.isfinite(result.out.astype(np.float32)).all()


@pytest.mark.parametrize("backend", ["simulator", "numba"])
def test_a_timeline_is_a_gpus(backend):
    message = (
        r"one of the GPU backends \(cupy and numba_cuda\); pass one as backend=, or pass trace=True"
    )
    with pytest.raises(flashsim.UnsupportedError, match=message):
        run(backend=backend, trace="timeline")
    with pytest.raises(flashsim.UnsupportedError, match=message):
        run(backend=backend).backward(X, trace="timeline")
