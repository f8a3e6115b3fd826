"""TMA maps of captured arrays, with a driver that only notes what it is asked for."""

import ctypes

import numpy as np
import pytest

pytest.importorskip("cupy")
from test_hopper_kernels import driver  # noqa: F401

from flashsim import Problem
from flashsim.backends.cupy_gpu import tensor_maps
from flashsim.backends.launch.functions import tile_of
from flashsim.backends.launch.kernel import Box
from flashsim.errors import UnsupportedError

pytestmark = pytest.mark.promise("failures end in words")


def encoded(**more):
    """The map of a bias (heads, queries, keys)."""
    bias = np.zeros((4, 32, 64), np.float32)
    problem = Problem(
        *(32, 64, 16), heads=4, dtype="bfloat16", score_mod=lambda s, b, h, q, k: s + bias[h, q, k]
    )
    return tensor_maps.encode_tile(tile_of(problem), Box("tile", 8, 32, **more), 256)


def test_a_bias_is_planes_of_queries_and_keys(driver):  # noqa: F811
    made = encoded()
    assert driver.asked[2:] == ([64, 32, 4, 1], [256, 8192, 32768], [32, 8, 1, 1])
    assert made.nbytes == 128
    assert made.ctypes.data % ctypes.sizeof(ctypes.c_uint64) == 0


def test_rows_are_interleaved_with_those_four_below(driver):  # noqa: F811
    encoded(interleaved=True)
    assert driver.asked[2:] == ([64, 2, 4, 4, 4], [1024, 256, 2048, 8192], [32, 2, 4, 1, 1])


def test_an_array_that_the_driver_refuses_is_named(driver, monkeypatch):  # noqa: F811
    monkeypatch.setattr(type(driver), "cuTensorMapEncodeTiled", lambda *_: 7)
    with pytest.raises(UnsupportedError, match=r"bias.*shape \(4, 32, 64\).*error 7.*portable"):
        encoded()


def test_without_a_driver_the_remedy_is_said(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: (_ for _ in ()).throw(OSError(name)))
    with pytest.raises(UnsupportedError, match=r"libcuda.*not found.*portable"):
        tensor_maps.driver.__wrapped__()
