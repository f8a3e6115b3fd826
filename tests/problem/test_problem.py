"""`Problem`: defaults, what follows from the fields, and which scores are kept."""

import copy
import pickle

import numpy as np
import pytest
from refusals import refuses

from flashsim import BlockMask, Problem
from flashsim.problem.problem import numpy_dtype

pytestmark = pytest.mark.promise("right tiles")


def kept(problem):
    """Boolean (n_q, n_kv), one score at a time from the definitions in the docstring of Problem."""
    result = np.zeros((problem.n_q, problem.n_kv), bool)
    cu_q = problem.cu_seqlens_q or (0, problem.n_q)
    cu_k = problem.cu_seqlens_k or (0, problem.n_kv)
    for s in range(len(cu_q) - 1):
        n_q, n_kv = cu_q[s + 1] - cu_q[s], cu_k[s + 1] - cu_k[s]
        for q in range(n_q):
            for k in range(n_kv):
                diagonal = q + n_kv - n_q
                keep = not (problem.causal and k > diagonal)
                if problem.window is not None:
                    left, right = problem.window
                    keep &= left < 0 or k >= diagonal - left
                    keep &= right < 0 or k <= diagonal + right
                if (b := problem.block_mask) is not None:
                    keep &= bool(b.grid[q // b.block_q, k // b.block_k])
                if problem.mask is not None:
                    keep &= bool(problem.mask(np.array(q), np.array(k)))
                result[cu_q[s] + q, cu_k[s] + k] = keep
    return result


def evaluated(problem):
    """The same matrix from `Problem.keep`, sequence by sequence."""
    result = np.zeros((problem.n_q, problem.n_kv), bool)
    for s in problem.sequences:
        rows, cols = np.arange(s.q_start, s.q_stop), np.arange(s.k_start, s.k_stop)
        result[np.ix_(rows, cols)] = problem.keep(s, rows, cols)
    return result


def test_defaults_follow_from_the_query_side():
    p = Problem(128, head_dim=64, heads=4)

    assert (p.n_kv, p.head_dim_v, p.kv_heads, p.batch) == (128, 64, 4, 1)
    assert p.scale == 1 / 8
    assert p.dtype == "float32"
    assert (p.group, p.banded, p.softcap) == (1, True, 0.0)


def test_given_values_are_kept():
    p = Problem(
        5, 7, head_dim=16, head_dim_v=24, batch=2, heads=6, kv_heads=2, scale=0.5, softcap=30
    )

    assert (p.n_kv, p.head_dim_v, p.kv_heads, p.group) == (7, 24, 2, 3)
    assert (p.scale, p.softcap) == (0.5, 30.0)
    assert isinstance(p.softcap, float)


@pytest.mark.parametrize(
    ("dtype", "name", "size", "accumulator", "wide"),
    [
        ("float64", "float64", 8, "float64", 8),
        (np.float32, "float32", 4, "float32", 4),
        (np.dtype("float16"), "float16", 2, "float32", 4),
        (numpy_dtype("bfloat16"), "bfloat16", 2, "float32", 4),
    ],
)
def test_dtypes_by_name_type_or_dtype(dtype, name, size, accumulator, wide):
    p = Problem(4, dtype=dtype)

    assert (p.dtype, p.itemsize) == (name, size)
    assert (p.compute_dtype, p.compute_itemsize) == (accumulator, wide)


def test_rounded_goes_through_the_input_type():
    x = np.array([1.0, 1.0 + 2.0**-9, 1.0 + 2.0**-12], np.float32)

    assert Problem(1, dtype="float32").rounded(x) is x
    np.testing.assert_array_equal(Problem(1, dtype="float16").rounded(x), [1, 1 + 2.0**-9, 1])
    rounded = Problem(1, dtype="bfloat16").rounded(x)
    np.testing.assert_array_equal(rounded, [1, 1, 1])
    assert rounded.dtype == np.float32


def test_frozen_hashable_and_usable_as_a_key():
    grid = np.eye(2, dtype=bool)
    one = Problem(8, 8, window=(2, 0), block_mask=BlockMask(grid, 4, 4))
    two = Problem(8, 8, window=[2, 0], block_mask=BlockMask(grid.tolist(), 4, 4))

    assert one == two
    assert hash(one) == hash(two)
    assert one != Problem(8, 8, window=(2, 1), block_mask=BlockMask(grid, 4, 4))
    assert {one: "seen"}[two] == "seen"
    with pytest.raises(AttributeError):
        one.n_q = 9


def test_arrays_and_lists_become_hashable_tuples():
    p = Problem(5, 6, cu_seqlens_q=np.array([0, 2, 5]), cu_seqlens_k=[0, 6, 6], bias=[1, 1])

    assert p.cu_seqlens_q == (0, 2, 5)
    assert p.cu_seqlens_k == (0, 6, 6)
    assert p.bias == (1, 1)
    assert isinstance(hash(p), int)


def test_pickles():
    p = Problem(8, causal=True, block_mask=BlockMask(np.eye(2, dtype=bool), 4, 4))

    assert pickle.loads(pickle.dumps(p)) == copy.copy(p) == p


def test_block_mask_is_a_copy_and_read_only():
    grid = np.ones((2, 3), bool)
    mask = BlockMask(grid, 4, 8)
    grid[0, 0] = False

    assert mask.grid.all()
    with pytest.raises(ValueError, match="read-only"):
        mask.grid[0, 0] = False
    assert repr(mask) == "BlockMask(2 x 3 cells of 4 x 8, 100% kept)"
    assert mask != BlockMask(np.ones((2, 3), bool), 8, 4)
    assert mask != "a mask"


def test_causal_is_aligned_at_the_bottom_right():
    more_keys = evaluated(Problem(2, 4, causal=True))
    fewer_keys = evaluated(Problem(4, 2, causal=True))

    np.testing.assert_array_equal(more_keys, [[1, 1, 1, 0], [1, 1, 1, 1]])
    np.testing.assert_array_equal(fewer_keys, [[0, 0], [0, 0], [1, 0], [1, 1]])


def test_window_is_inclusive_on_both_sides():
    np.testing.assert_array_equal(
        evaluated(Problem(4, 4, window=(1, 1))),
        [[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1], [0, 0, 1, 1]],
    )
    np.testing.assert_array_equal(
        evaluated(Problem(3, 3, window=(0, -1))), [[1, 1, 1], [0, 1, 1], [0, 0, 1]]
    )
    np.testing.assert_array_equal(evaluated(Problem(3, 3, window=(0, 2), causal=True)), np.eye(3))


def odd(q, k):
    return (q + 2 * k) % 3 != 0


@pytest.mark.parametrize(
    "problem",
    [
        Problem(5, 9),
        Problem(9, 5, causal=True),
        Problem(7, 8, window=(3, -1)),
        Problem(7, 8, window=(-1, 0), causal=True),
        Problem(7, 8, window=(10**6, 2)),
        Problem(9, 11, mask=odd),
        Problem(9, 11, mask=odd, causal=True, window=(4, 4)),
        Problem(9, 11, block_mask=BlockMask(np.arange(12).reshape(3, 4) % 2 == 0, 3, 3)),
        Problem(9, 11, cu_seqlens_q=(0, 0, 4, 9), cu_seqlens_k=(0, 5, 5, 11), causal=True),
        Problem(
            9,
            11,
            cu_seqlens_q=(0, 6, 9),
            cu_seqlens_k=(0, 4, 11),
            mask=odd,
            block_mask=BlockMask([[True, False], [False, True]], 3, 4),
        ),
    ],
)
def test_keep_agrees_with_the_definition(problem):
    np.testing.assert_array_equal(evaluated(problem), kept(problem))


def test_packed_sequences():
    p = Problem(9, 11, cu_seqlens_q=(0, 0, 4, 9), cu_seqlens_k=(0, 5, 5, 11))

    assert [(s.q_start, s.q_stop, s.k_start, s.k_stop) for s in p.sequences] == [
        (0, 0, 0, 5),
        (0, 4, 5, 5),
        (4, 9, 5, 11),
    ]
    assert [s.offset for s in p.sequences] == [5, 1, 2]  # last key on the last query's diagonal


def test_a_mask_may_return_anything_that_broadcasts():
    p = Problem(3, 4, mask=lambda q, k: k < 2)  # shape (1, 4)

    np.testing.assert_array_equal(evaluated(p), [[1, 1, 0, 0]] * 3)


def test_the_largest_head_dim():
    assert Problem(1, head_dim=1, head_dim_v=512).head_dim_v == 512


test_what_makes_no_problem_says_why = refuses(r"""
Problem(n=5) -> UnknownArgumentError: Problem() has no argument 'n'; here it is called n_q
Problem(n_q=5, head=2) -> UnknownArgumentError: did you mean 'heads'
Problem(1, head_dim=577) -> ShapeError: head_dim must be between 1 and 576, got 577
""")
