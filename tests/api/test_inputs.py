"""Bad input: the kind of error, and a text that says what was wrong, was given and is possible."""

import re

import numpy as np
import pytest

import flashsim
from flashsim import (
    BlockMask,
    Device,
    DTypeError,
    MaskError,
    OptionError,
    Problem,
    Schedule,
    ShapeError,
    SramOverflow,
    Tiling,
    TilingError,
    UnknownArgumentError,
)
from flashsim.api.arrays import check_finite, check_like
from flashsim.api.inputs import AXES, Request, prepare
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


#: By the kind of error: what is called, and parts of the message, with "..." between them.
BAD = {
    (DTypeError, TypeError): {
        "list": (lambda: run([[1.0]]), "q must be an array ... got list"),
        "mixed dtype": (
            lambda: run(X, X.astype(np.float64), X),
            "one dtype ... q float32, k float64, v float32",
        ),
        "integer": (
            lambda: run(*[X.astype(int)] * 3),
            "'int64' is not supported ... float64, float32, float16, bfloat16",
        ),
        "bias dtype": (
            lambda: run(bias=np.zeros((8, 8))),
            "bias must have the same dtype as q, which is float32, got float64",
        ),
        "grid ragged": (
            lambda: BlockMask([[True], [True, False]], 4, 4),
            "a block mask's grid cannot be read as a NumPy array",
        ),
        "grid in a problem": (
            lambda: Problem(8, block_mask=np.ones((1, 1), bool)),
            "must be a flashsim.BlockMask(grid, block_q, block_k), got ndarray",
        ),
        "cu_seqlens ragged": (
            lambda: run(cu_seqlens_q=[[0], [1, 8]], cu_seqlens_k=[0, 8]),
            "cu_seqlens_q cannot be read as a NumPy array",
        ),
        "n_q float": (lambda: Problem(8.0), "n_q must be an integer, got 8.0 (float)"),
        "n_q bool": (lambda: Problem(True), "got True (bool)"),
        "dtype typo": (
            lambda: Problem(8, dtype="bfloat61"),
            "'bfloat61' is not supported ... did you mean 'bfloat16'?",
        ),
        "dtype object": (lambda: Problem(8, dtype=[1, 2]), "dtype [1, 2] is not supported"),
        "dtype None": (lambda: Problem(8, dtype=None), "dtype None is not"),
        "causal": (lambda: run(causal="yes"), "causal must be True or False, got 'yes'"),
        "window int": (
            lambda: run(window=4),
            "window= must be a pair (left, right) ... -1 for no limit, got 4",
        ),
        "window floats": (
            lambda: run(window=(1.5, 2)),
            "window= must be a pair of integers (left, right), got (1.5, 2)",
        ),
        "softcap text": (lambda: run(softcap="30"), "softcap must be a number, got '30' (str)"),
        "scale bool": (lambda: run(scale=True), "got True (bool)"),
        "tiling float": (lambda: Tiling(64, 64.0), "block_k must be an integer, got 64.0 (float)"),
        "tiling of count": (lambda: count(tiling=64), "tiling must be"),
        "problem of count": (
            lambda: flashsim.count(4096),
            "count() takes a flashsim.Problem, got int",
        ),
        "tiling pair": (
            lambda: run(tiling=(64, 64)),
            "tiling must be a flashsim.Tiling(block_q, block_k), got (64, 64)",
        ),
        "schedule problem": (
            lambda: Schedule("problem", Tiling(4, 4)),
            "Schedule.problem must be a flashsim.Problem, got 'problem'",
        ),
        "schedule tiling": (
            lambda: Schedule(Problem(8), (4, 4)),
            "Schedule.tiling must be a flashsim.Tiling, got (4, 4)",
        ),
    },
    (SramOverflow, ValueError): {
        "tiling too large": (
            lambda: run(*[np.zeros((600, 64), np.float32)] * 3, tiling=Tiling(512, 512)),
            "the largest tiling that fits is",
        ),
    },
    (ShapeError, ValueError): {
        "mixed ndim": (
            lambda: run(X, X3, X),
            f"{' ... '.join(AXES.values())} ... q (8, 16), k (2, 8, 16), v (8, 16)",
        ),
        "1-D": (lambda: run(X[0], X[0], X[0]), "got q (16,)"),
        "empty": (
            lambda: run(X[:, :0], X[:, :0], X),
            "must have at least one head and one column ... q (8, 0)",
        ),
        "batch": (
            lambda: run(X4, X4[:1], X4),
            "same batch size ... q (2, 4, 8, 16), k (1, 4, 8, 16)",
        ),
        "k and v heads": (
            lambda: run(heads(4), heads(2), heads(1)),
            "k and v must have the same number of heads ... v (1, 1, 8, 16)",
        ),
        "k and v rows": (
            lambda: run(X, X, X[:5]),
            "k and v must have the same number of rows ... v (1, 1, 5, 16)",
        ),
        "q and k width": (
            lambda: run(X, X[:, :8].copy(), X),
            "q and k must have the same head_dim ... k (1, 1, 8, 8)",
        ),
        "group": (
            lambda: run(heads(4), heads(3), heads(3)),
            "multiple of the number of KV heads ... heads=4, kv_heads=3",
        ),
        "strided": (
            lambda: run(X[:, ::2], X[:, ::2], X[:, ::2]),
            "q's last axis must be contiguous ... strides (64, 8) B ... np.ascontiguousarray(q)",
        ),
        "head_dim": (
            lambda: run(*[np.zeros((2, 600), np.float32)] * 3),
            "head_dim must be between 1 and 576, got 600",
        ),
        "bias shape": (lambda: run(bias=X), "bias must have shape (1, 1, 8, 8) ... got (8, 16)"),
        "bias lead": (
            lambda: run(heads(4), heads(4), heads(4), bias=np.zeros((1, 3, 8, 8), np.float32)),
            "sides of the bias's shape, (1 or 1, 1 or 4), got (1, 3)",
        ),
        "bias array in a problem": (
            lambda: Problem(8, bias=X),
            "bias= must be the first two sides of the bias's shape, (1 or 1, 1 or 1)",
        ),
        "bias number": (lambda: Problem(8, bias=5), "got 5"),
        "grid cells": (
            lambda: BlockMask([[True]], 0, 4),
            "block_mask block_q must be at least 1, got 0",
        ),
        "grid size": (
            lambda: Problem(8, block_mask=BlockMask([[True]], 4, 4)),
            "must have shape (2, 2) to cover 8 x 8 scores, got (1, 1)",
        ),
        "only one cu_seqlens": (
            lambda: run(cu_seqlens_q=[0, 8]),
            "cu_seqlens_q and cu_seqlens_k must be passed together",
        ),
        "cu_seqlens and batch": (
            lambda: run(X4, X4, X4, cu_seqlens_q=[0, 8], cu_seqlens_k=[0, 8]),
            "batch must be 1, got 2",
        ),
        "cu_seqlens end": (
            lambda: run(cu_seqlens_q=[0, 7], cu_seqlens_k=[0, 8]),
            "cu_seqlens_q must start at 0, never decrease, and end at the packed length 8, "
            "got [0, 7]",
        ),
        "cu_seqlens start": (
            lambda: run(cu_seqlens_q=[1, 8], cu_seqlens_k=[0, 8]),
            "must start at 0 ... got [1, 8]",
        ),
        "cu_seqlens fall": (
            lambda: run(cu_seqlens_q=[0, 8], cu_seqlens_k=[0, 6, 4, 8]),
            "cu_seqlens_k must start at 0, never decrease ... got [0, 6, 4, 8]",
        ),
        "cu_seqlens count": (
            lambda: run(cu_seqlens_q=[0, 8], cu_seqlens_k=[0, 4, 8]),
            "same number of sequences, got 1 and 2",
        ),
        "cu_seqlens floats": (
            lambda: run(cu_seqlens_q=[0.0, 8.0], cu_seqlens_k=[0, 8]),
            "1-D list of at least two integer offsets, got [0.0, 8.0]",
        ),
        "cu_seqlens number": (
            lambda: run(cu_seqlens_q=8, cu_seqlens_k=8),
            "cu_seqlens_q must be a 1-D list of at least two integer offsets, got 8",
        ),
        "n_q zero": (lambda: Problem(0), "n_q must be at least 1, got 0"),
        "heads negative": (lambda: Problem(8, heads=-2), "heads must be at least 1, got -2"),
    },
    (OptionError, ValueError): {
        "algorithm": (
            lambda: run(algorithm="flash3"),
            "unknown algorithm 'flash3' ... did you mean 'flash",
        ),
        "backend": (
            lambda: run(backend="simulater"),
            "unknown backend 'simulater' ... did you mean 'simulator'",
        ),
        "trace": (
            lambda: run(trace="yes"),
            "trace must be True, False or 'timeline', got 'yes'",
        ),
        "key order of run": (
            lambda: run(key_order="down"),
            "unknown key_order 'down'; choose from ascending, desc",
        ),
        "algorithm of count": (lambda: count(algorithm="flash"), "unknown algorithm 'flash'"),
        "direction": (
            lambda: count(direction="back"),
            "unknown direction 'back' ... mean 'backward'",
        ),
        "key order of count": (lambda: count(key_order="up"), "unknown key_order"),
        "NaN refused": (
            lambda: run(X, np.full_like(X, np.nan), X, nan_policy="raise"),
            "k contains 128 NaN or infinite values ... nan_policy='propagate'",
        ),
        "window below -1": (
            lambda: run(window=(-2, 0)),
            "at least 0, or -1 for no limit, got (-2, 0)",
        ),
        "softcap negative": (
            lambda: run(softcap=-1),
            "softcap must be finite and at least 0, got -1",
        ),
        "scale infinite": (lambda: run(scale=np.inf), "scale must be finite, got inf"),
        "nan_policy": (
            lambda: run(nan_policy="rise"),
            "unknown nan_policy 'rise' ... choose from propagate, raise; did you mean 'raise'?",
        ),
        "preset name": (
            lambda: Tiling.preset("fa2-foward", 64),
            "unknown tiling preset 'fa2-foward' ... did you mean 'fa2-forward'?",
        ),
        "preset head_dim": (
            lambda: Tiling.preset("fa3-forward", 257),
            "preset 'fa3-forward' has no tile size for head_dim=257; pass "
            "tiling=flashsim.Tiling(block_q, block_k), or a head_dim of at most 256",
        ),
        "loop order": (
            lambda: Schedule(Problem(8), Tiling(4, 4), outer="rows"),
            "unknown outer 'rows' ... choose from queries, keys",
        ),
        "key order": (
            lambda: Schedule(Problem(8), Tiling(4, 4), key_order="decending"),
            "unknown key_order 'decending' ... did you mean 'descending'?",
        ),
        "device name": (
            lambda: run(device="H10"),
            "unknown device 'H10' ... did you mean 'H100'? ... flashsim.Device(...)",
        ),
        "device capacity": (
            lambda: Device("mine", sram_bytes=0, sram_per_sm=1),
            "Device.sram_bytes must be a positive integer, got 0",
        ),
        "device bandwidth": (
            lambda: Device("mine", sram_bytes=1, sram_per_sm=1, hbm_bandwidth=-1.0),
            "Device.hbm_bandwidth must be finite and at least 0, got -1.0",
        ),
        "device peak": (
            lambda: Device.get("T4").peak("bfloat16"),
            "T4 has no peak for dtype 'bfloat16' ... choose from float16, float32, float64",
        ),
    },
    (MaskError, ValueError): {
        "mask array": (
            lambda: run(mask=np.ones((8, 8), bool)),
            "mask must be a function mask(q_index, k_index), got ndarray ... block_mask ... bias",
        ),
        "mask not boolean": (
            lambda: run(mask=lambda q, k: q - k),
            "'<lambda>' must return booleans, got dtype int64",
        ),
        "mask shape": (
            lambda: run(mask=lambda q, k: np.ones(3, bool)),
            "array that broadcasts to (8, 8), got (3,)",
        ),
        "mask not vectorised": (
            lambda: run(mask=lambda q, k: bool(q > k)),
            "failed on index arrays of shapes (8, 1) and (1, 8) (ValueError ... "
            "operations on whole arrays",
        ),
        "bare grid": (
            lambda: run(block_mask=np.ones((1, 1), bool)),
            "one value per tile, so the tile size must be known ... "
            "BlockMask(grid, block_q, block_k)",
        ),
        "grid dtype": (
            lambda: BlockMask(np.ones((2, 2)), 4, 4),
            "non-empty 2-D array of booleans ... got dtype float64, shape (2, 2)",
        ),
        "grid ndim": (lambda: BlockMask([True], 4, 4), "got dtype bool, shape (1,)"),
    },
    (TilingError, ValueError): {
        "tiling side": (lambda: Tiling(0, 64), "block_q must be at least 1, got 0"),
    },
    (UnknownArgumentError, TypeError): {
        "typo": (
            lambda: run(casual=True),
            "run() has no argument 'casual' ... did you mean 'causal'?",
        ),
        "option of another backend": (
            lambda: run(threads=2),
            "run() has the argument 'threads' only with backend='numba' ... "
            "not with backend='simulator'",
        ),
        "option of other backends": (
            lambda: run(backend="numba", scales=(1, 1, 1)),
            "run() has the argument 'scales' only with backend='simulator'",
        ),
        "dropout": (
            lambda: run(dropout_p=0.1),
            "run() has no argument 'dropout_p'; dropout is not simulated",
        ),
    },
}


@pytest.mark.parametrize(
    ("kinds", "case"), [(kinds, case) for kinds, cases in BAD.items() for case in cases]
)
def test_bad_input_says_what_was_wrong(kinds, case):
    (kind, built_in), (call, text) = kinds, BAD[kinds][case]

    with pytest.raises(flashsim.FlashSimError) as caught:
        call()

    assert type(caught.value) is kind
    assert isinstance(caught.value, built_in)
    for part in text.split(" ... "):
        assert part in str(caught.value)


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


def test_a_bare_grid_means_one_value_a_tile():
    grid = np.array([[True, False], [True, True]])

    p = prepare(X, X, X, Request(block_mask=grid, tiling=Tiling(4, 5))).problem

    assert p.block_mask == BlockMask(grid, 4, 5)


def test_strides_of_leading_axes_and_single_columns_do_not_matter():
    rows = np.zeros((16, 16), np.float32)[::2]
    column = np.zeros((8, 4), np.float32)[:, :1]

    assert prepare(rows, rows, rows).problem.n_q == 8
    assert prepare(column, column, column).problem.head_dim == 1


def test_nan_goes_through_unless_told_otherwise():
    bad = X.copy()
    bad[0, 0] = np.inf

    assert prepare(bad, X, X).problem.n_q == 8
    with pytest.raises(OptionError, match="q contains 1 NaN"):
        prepare(bad, X, X, Request(nan_policy="raise"))


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


def test_check_like_wants_shape_and_dtype():
    assert check_like("dout", X, X, "out") is X
    with pytest.raises(
        ShapeError,
        match=r"dout must have the same shape as out, which is \(8, 16\), got \(4, 16\)",
    ):
        check_like("dout", X[:4], X, "out")
    with pytest.raises(
        DTypeError, match=r"same dtype as out, which is float32, got float16; .*astype"
    ):
        check_like("dout", X.astype(np.float16), X, "out")


# -- arrays that are not what they seem -----------------------------------------------------------


@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "dout"])
def test_a_masked_array_is_refused(name):
    masked = np.ma.masked_array(np.zeros((8, 8), np.float32), mask=np.eye(8, dtype=bool))
    x = np.zeros((8, 8), np.float32)

    def call():
        if name == "dout":
            return flashsim.run(x, x, x).backward(masked)
        return flashsim.run(**{"q": x, "k": x, "v": x, name: masked})

    with pytest.raises(DTypeError, match=f"{name} is a masked array.*{name}.filled"):
        call()


def test_masked_arrays_are_refused_where_masks_and_offsets_are_said():
    masked = np.ma.masked_array([0, 8], mask=[False, True])
    with pytest.raises(DTypeError, match="cu_seqlens_q is a masked array"):
        run(cu_seqlens_q=masked, cu_seqlens_k=[0, 8])
    with pytest.raises(DTypeError, match="grid is a masked array"):
        BlockMask(np.ma.masked_array([[True]], mask=True), 8, 8)
    with pytest.raises(MaskError, match="returned a masked array"):
        run(mask=lambda q, k: np.ma.masked_array(q > k, mask=True))


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ((X, X.T, X), r"k of shape \(16, 8\) looks transposed.*k without \.T"),
        ((X, X.T.copy(), X), r"same head_dim.*k looks transposed: its rows are keys"),
        ((X, X, X.T.copy()), r"same number of rows.*v looks transposed: its rows are values"),
        ((X[:, :8], X[:, :8].T, X), r"k of shape \(8, 8\) looks transposed"),
    ],
    ids=["k.T", "k on its side", "v on its side", "square k.T"],
)
def test_a_transposed_array_is_called_one(arrays, message):
    with pytest.raises(ShapeError, match=message):
        flashsim.run(*arrays)


def test_a_transposed_bias_or_lse_is_told_its_own_axes():
    bias = np.zeros((16, 8), np.float32).T
    with pytest.raises(ShapeError, match=r"bias of .* transposed .* axes must be \(n_q, n_kv\)"):
        flashsim.run(X, np.zeros((16, 16), np.float32), np.zeros((16, 16), np.float32), bias=bias)
    r = flashsim.run(X3, X3, X3)
    aside = np.asfortranarray(r.lse)
    message = r"lse\w* of .* transposed .* axes must be \(heads, n_q\)"
    with pytest.raises(ShapeError, match=message):
        flashsim.backward(X3, X3, X3, r.out, aside, X3)
    with pytest.raises(ShapeError, match=message):
        flashsim.merge(r.out, r.lse, r.out, aside)


@pytest.mark.parametrize("backend", ["simulator", "numba"])
def test_a_matrix_is_an_array(backend):
    matrix = X.view(np.matrix)

    result = flashsim.run(matrix, matrix, matrix, backend=backend)

    np.testing.assert_array_equal(result.out, flashsim.run(X, X, X, backend=backend).out)
    assert type(result.backward(matrix).dq) is np.ndarray


@pytest.mark.parametrize("backend", ["simulator", "numba"])
def test_what_a_cpu_cannot_read_is_refused_in_backward_too(backend):
    class Tensor:
        shape, dtype = (8, 16), "torch.float32"

        def reshape(self, *_):
            return self

    with pytest.raises(
        DTypeError, match=f"'{backend}' takes arrays in the CPU's memory, but dout is a"
    ):
        flashsim.run(X, X, X, backend=backend).backward(Tensor())


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


def test_a_softcap_that_rounds_to_zero_is_refused():
    with pytest.raises(OptionError, match="softcap must be within the range of float32"):
        Problem(8, softcap=1e-46)


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


def test_a_mask_that_cannot_be_hashed_is_refused_at_once():
    class Band:
        __hash__ = None

        def __call__(self, q, k):
            return q >= k

    with pytest.raises(MaskError, match=r"mask= must be hashable.*got an unhashable Band"):
        run(mask=Band())
