"""Repeated calls of `run`: an engine that can repeat a pass is asked for q, k and v alone."""

import gc
import weakref

import numpy as np
import pytest

import flashsim
import flashsim.engines.simulator as engine
from flashsim.api import repeats
from flashsim.errors import OptionError


class Repeats:
    """Repeats of an engine, whose results are -1."""

    def __init__(self):
        self.asked, self.able = 0, True

    def __call__(self, job):
        self.asked += 1
        return lambda q, k, v: (-1, -1, {"arrays": (q, k, v)}) if self.able else None


@pytest.fixture
def made(monkeypatch):
    monkeypatch.setattr(repeats, "_KNOWN", {})
    monkeypatch.setattr(engine, "repeat", Repeats(), raising=False)
    return engine.repeat


def arrays(n=8):
    return np.random.default_rng(n).standard_normal((3, 1, 2, n, 4), np.float32)


def repeated(*given, **question):
    return isinstance(flashsim.run(*given, **question).out, int)


def test_the_second_call_is_repeated(made):
    q, k, v = arrays()
    first = flashsim.run(q, k, v, causal=True)
    second = flashsim.run(k, q, v, causal=True)
    assert made.asked == 1
    assert (second.out, second.lse, second._saved) == (-1, -1, {"arrays": (k, q, v)})
    assert second._job.q is k
    assert second._job.k is q
    assert second.problem == first.problem
    assert (second.kernel, second.tiling, second.split) == (first.kernel, first.tiling, first.split)
    assert not second.traced


def test_a_call_that_cannot_be_repeated_is_checked(made):
    q, k, v = arrays()
    first = flashsim.run(q, k, v)
    made.able = False
    np.testing.assert_array_equal(flashsim.run(q, k, v).out, first.out)
    assert made.asked == 1


@pytest.mark.parametrize(
    "question",
    [
        {"causal": True},
        {"causal": 0},
        {"window": (3, 0)},
        {"scale": 1.0},
        {"softcap": 1.0},
        {"tiling": flashsim.Tiling(4, 4)},
        {"key_order": "descending"},
        {"device": "T4"},
    ],
)
def test_other_arguments_are_another_call(made, question):
    q, k, v = arrays()
    flashsim.run(q, k, v)
    assert repeated(q, k, v)
    try:
        assert not repeated(q, k, v, **question)
    except flashsim.FlashSimError:
        assert question == {"causal": 0}


def test_other_arrays_are_another_call(made):
    q, k, v = arrays()
    flashsim.run(q, k, v)
    assert repeated(q, k, v)
    assert not repeated(*arrays(9))
    assert not repeated(*arrays().astype(np.float64))
    with pytest.raises(flashsim.ShapeError):
        flashsim.run(q, k, v[:, :1])


@pytest.mark.parametrize(
    "question",
    [
        {"mask": lambda q, k: q >= k},
        {"mask_mod": lambda b, h, q, k: q >= k},
        {"score_mod": lambda s, b, h, q, k: s * 2},
        {"sinks": np.zeros(2, np.float32)},
        {"bias": np.zeros((8, 8), np.float32)},
        {"cu_seqlens_q": (0, 8), "cu_seqlens_k": (0, 8)},
        {"block_mask": flashsim.BlockMask(np.ones((2, 2), bool), 4, 4)},
        {"nan_policy": "raise"},
        {"pack_gqa": True},
    ],
)
def test_arguments_whose_content_may_change_are_read_each_time(made, question):
    q, k, v = arrays()
    assert not repeated(q, k, v, **question)
    assert not repeated(q, k, v, **question)
    assert made.asked == 0


def test_new_content_is_checked_if_it_must_be_finite(made):
    q, k, v = arrays()
    flashsim.run(q, k, v)
    q[0, 0, 0, 0] = np.nan
    with pytest.raises(OptionError, match="q contains 1 NaN"):
        flashsim.run(q, k, v, nan_policy="raise")


def test_axes_that_are_left_out_are_checked(made):
    q, k, v = arrays()
    assert not repeated(q[0], k[0], v[0])
    assert not repeated(q[0], k[0], v[0])


def test_no_array_is_kept_alive(made):
    q, k, v = (x.copy() for x in arrays(11))  # of a shape that no other call has checked
    flashsim.run(q, k, v)
    assert repeated(q, k, v)
    kept = [weakref.ref(x) for x in (q, k, v)]
    del q, k, v
    gc.collect()
    assert [x() for x in kept] == [None] * 3
    assert repeats._KNOWN
