"""FLOPs by kind against what NumPy is seen to do while the simulator runs."""

from collections import Counter
from typing import ClassVar

import numpy as np
import pytest
from helpers import tensors

import flashsim
from flashsim import Tiling
from flashsim.algorithms.sram import Sram
from flashsim.counts.work import KINDS
from flashsim.schedule.plans import GENERAL as ALGORITHMS

pytestmark = pytest.mark.promise("three counts equal")

KIND_OF = {
    **dict.fromkeys(("add", "subtract"), "add"),
    **dict.fromkeys(("multiply", "square"), "multiply"),
    **dict.fromkeys(("exp", "log", "tanh"), "exp"),
    "divide": "divide",
    "maximum": "max",
    "matmul": "matmul",
}
NOT_ARITHMETIC = {"equal", "less_equal", "isinf", "signbit", "logical_and"}


class Counted(np.ndarray):
    """An on-chip tile that counts the operations NumPy performs on it, element by element.

    A matrix product counts 2 a multiply-add, and with that the addition of its result to an
    accumulator. A sum or maximum over n elements counts n. Conversions and comparisons that only
    guard against an empty row are not counted.
    """

    seen: ClassVar[Counter] = Counter()
    product = False  # whether this array is a matrix product that nothing has touched yet

    def __array_ufunc__(self, ufunc, method, *inputs, out=None, **kwargs):
        bare = [x.view(np.ndarray) if isinstance(x, Counted) else x for x in inputs]
        if out is not None:
            kwargs["out"] = tuple(x.view(np.ndarray) if isinstance(x, Counted) else x for x in out)
        result = getattr(ufunc, method)(*bare, **kwargs)
        name = ufunc.__name__
        if name not in NOT_ARITHMETIC:
            accumulates = name == "add" and any(getattr(x, "product", False) for x in inputs)
            size = np.size(bare[0]) if method == "reduce" else np.size(result)
            if name == "matmul":
                size *= 2 * np.shape(bare[0])[-1]
            self.seen[KIND_OF[name]] += 0 if accumulates else size
        counted = np.asarray(result).view(Counted)
        counted.product = name == "matmul"
        return counted

    def __array_function__(self, function, types, args, kwargs):
        result = super().__array_function__(function, types, args, kwargs)
        return result.view(Counted) if isinstance(result, np.ndarray) else result


@pytest.fixture
def seen(monkeypatch):
    """Counts of what runs on SRAM's tiles; adding a tile into HBM is no work of the chip's."""
    load, alloc, reduce = Sram.load, Sram.alloc, Sram.reduce
    monkeypatch.setattr(Sram, "load", lambda *a, **k: load(*a, **k).view(Counted))
    monkeypatch.setattr(Sram, "alloc", lambda *a, **k: alloc(*a, **k).view(Counted))
    monkeypatch.setattr(
        Sram,
        "reduce",
        lambda self, tensor, rows, tile, *a, **k: reduce(
            self, tensor, rows, tile.view(np.ndarray), *a, **k
        ),
    )
    Counted.seen = Counter()
    return lambda: Counted.seen


CASES = {
    "plain": ({}, {}),
    "causal": ({"heads": 4, "kv_heads": 2}, {"causal": True}),
    "softcap": ({}, {"softcap": 2.0}),
    "bias": ({"bias": (1, 1)}, {}),
    "bias-softcap-window": ({"bias": (1, 2), "dv": 3}, {"softcap": 2.0, "window": (9, 4)}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("algorithm", [*ALGORITHMS, "flash2-once"])
def test_flops_are_those_that_run(algorithm, case, seen):
    shape, options = CASES[case]
    x = tensors(37, 29, 6, **shape)
    tiling = Tiling(16, 29 if algorithm == "flash2-once" else 12)
    options = {"algorithm": algorithm, "tiling": tiling, "trace": True, **options}
    result = flashsim.run(x.q, x.k, x.v, bias=x.bias, **options)
    forward = Counter(seen())
    if algorithm == "standard":  # LSE is worked out for the caller; the algorithm has no use for it
        rows = x.q.shape[1] * 37
        forward -= Counter({"exp": rows, "add": rows})
    assert {kind: forward[kind] for kind in KINDS} == {k: result.trace.flops(k) for k in KINDS}
    seen().clear()
    gradients = result.backward(x.dout, tiling=tiling)
    expected = {kind: gradients.trace.flops(kind) for kind in KINDS}
    assert {kind: seen()[kind] for kind in KINDS} == expected
    assert set(seen()) <= set(KINDS)


@pytest.mark.parametrize("pack_gqa", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_flops_of_decoding_are_those_that_run(case, pack_gqa, seen):
    shape, options = CASES[case]
    x = tensors(37, 29, 6, **shape)
    result = flashsim.run(
        *(x.q, x.k, x.v), bias=x.bias, algorithm="flash-decode", splits=2, pack_gqa=pack_gqa,
        tiling=Tiling(16, 12), trace=True, **options,
    )  # fmt: skip
    assert {kind: seen()[kind] for kind in KINDS} == {k: result.trace.flops(k) for k in KINDS}
