"""TMA maps of captured arrays, with a driver that only notes what it is asked for."""

import ctypes
import types

import numpy as np
import pytest

pytest.importorskip("cupy")

from flashsim import Problem
from flashsim.backends.cupy_gpu import tensor_maps
from flashsim.backends.launch.functions import tile_of
from flashsim.backends.launch.kernel import Box
from flashsim.errors import UnsupportedError

pytestmark = pytest.mark.promise("failures end in words")


def asked_of(monkeypatch, answer, **more):
    """The map of a bias (heads, queries, keys), and the sizes that the driver was asked for."""
    asked = []

    def encode(at, element, rank, pointer, shape, steps, box, *rest):
        asked.append(([*shape], [*steps], [*box]))
        return answer

    driver = types.SimpleNamespace(cuTensorMapEncodeTiled=encode)
    monkeypatch.setattr(tensor_maps, "driver", lambda: driver)
    bias = np.zeros((4, 32, 64), np.float32)
    problem = Problem(
        *(32, 64, 16), heads=4, dtype="bfloat16", score_mod=lambda s, b, h, q, k: s + bias[h, q, k]
    )
    made = tensor_maps.encode_tile(tile_of(problem), Box("tile", 8, 32, **more), 256)
    return made, asked[0]


def test_a_bias_is_planes_of_queries_and_keys(monkeypatch):
    made, (shape, steps, box) = asked_of(monkeypatch, 0)
    assert (shape, steps, box) == ([64, 32, 4, 1], [256, 8192, 32768], [32, 8, 1, 1])
    assert made.nbytes == 128
    assert made.ctypes.data % ctypes.sizeof(ctypes.c_uint64) == 0


def test_rows_are_interleaved_with_those_four_below(monkeypatch):
    _, (shape, steps, box) = asked_of(monkeypatch, 0, interleaved=True)
    assert (shape, steps, box) == ([64, 2, 4, 4, 4], [1024, 256, 2048, 8192], [32, 2, 4, 1, 1])


def test_an_array_that_the_driver_refuses_is_named(monkeypatch):
    with pytest.raises(UnsupportedError, match=r"bias.*shape \(4, 32, 64\).*error 7.*portable"):
        asked_of(monkeypatch, 7)


def test_without_a_driver_the_remedy_is_said(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: (_ for _ in ()).throw(OSError(name)))
    with pytest.raises(UnsupportedError, match=r"libcuda.*not found.*portable"):
        tensor_maps.driver.__wrapped__()
