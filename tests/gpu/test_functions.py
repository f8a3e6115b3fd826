"""Masks and scores that are functions on `backend="cupy"`, against attention in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from compiled import thorough  # noqa: E402
from cupy_checks import MARKS, ON_HOPPER, ROOMY, families, gradients, make  # noqa: E402
from function_cases import causal, judge, masks, scores  # noqa: E402

import flashsim  # noqa: E402
from flashsim import Problem  # noqa: E402

#: torch's, at the first matrix product of a thread.
_FIRST = pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")
pytestmark = [*MARKS, _FIRST, pytest.mark.promise("twice plain attention's error")]
HALF = torch.bfloat16
MASKS = tuple(masks(1, 1, 1, 1, "cpu"))
SCORES = tuple(scores(1, 1, 1, 1, "cpu"))
#: Lengths of flash-attention's tests of score_mod and mask_mod, and 1,025.
LENGTHS = (
    *((1, 1), (64, 128), (128, 192), (256, 256), (239, 1), (799, 3), (113, 203), (113, 128)),
    *((128, 217), (113, 211), (108, 256), (256, 512), (384, 256), (640, 128), (512, 256)),
    *((1024, 1024), (1023, 1024), (1024, 1023), (1025, 1025), (4096, 4096), (4224, 4224)),
)


def sized(lengths):
    return 2, 4, 2, *lengths


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("d", [64, thorough(128), thorough(192)])
def test_masks(name, d):
    sizes = sized((430, 430))
    judge(masks(2, 4, 430, 430)[name], None, {}, sizes, d=d)


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("d", [64, 128, thorough(32), thorough(96), thorough(192), thorough(256)])
@pytest.mark.parametrize("mask", [causal, thorough(None)])
def test_scores(name, d, mask):
    _, score, wanted = scores(2, 4, 300, 430)[name]
    judge(mask, score, wanted, sized((300, 430)), d=d)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_lengths(lengths):
    """A mask with captured documents, and a table of relative positions with its gradient."""
    _, score, wanted = scores(2, 4, *lengths)["relative"]
    judge(masks(2, 4, *lengths)["of_documents"], score, wanted, sized(lengths), d=128)


@pytest.mark.parametrize("lengths", LENGTHS[:12], ids=str)
@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_lengths_with_rows_without_keys(lengths, kind):
    _, score, wanted = scores(2, 4, *lengths)["biased"]
    dtype = getattr(torch, kind)
    judge(masks(2, 4, *lengths)["late"], score, wanted, sized(lengths), dtype=dtype)


@pytest.mark.parametrize("lengths", [(200, 300), (1, 700)], ids=str)
def test_sinks(lengths):
    sinks = torch.tensor([0.5, -3.0, 2.0, 0.0], device="cuda")
    judge(causal, None, {}, sized(lengths), sinks=sinks)


@pytest.mark.parametrize("name", ["alibi", "biased", "curved"])
@pytest.mark.parametrize("mask", ["of_documents", "dilated"])
def test_portable_kernels(name, mask):
    _, score, wanted = scores(2, 4, 300, 430)[name]
    judge(masks(2, 4, 300, 430)[mask], score, wanted, sized((300, 430)), kernel="portable")


@pytest.mark.parametrize(
    ("name", "mask", "dtype"),
    [
        ("alibi", "causal", "bfloat16"),
        thorough("biased", "dilated", "float16"),
        thorough("relative", "of_documents", "bfloat16"),
        thorough("capped", "late", "float16"),
    ],
)
def test_python_tensor_core_kernels(name, mask, dtype):
    pytest.importorskip("numba_cuda")
    _, score, wanted = scores(2, 4, 150, 200)[name]
    given = masks(2, 4, 150, 200)[mask], score, wanted, sized((150, 200))
    judge(*given, dtype=getattr(torch, dtype), backend="numba_cuda", kernel="tensor")


TRACED = families("portable", "hopper", "python")


@pytest.mark.parametrize("family", TRACED)
@pytest.mark.parametrize(("name", "mask"), [("alibi", "of_documents"), ("curved", "late")])
def test_traces_are_the_simulators(family, name, mask):
    """The tiles and bytes of all stages, also the bytes that functions read."""
    _, score, wanted = scores(1, 4, 300, 430, "cpu")[name]
    how = {"mask_mod": masks(1, 4, 300, 430, "cpu")[mask], "score_mod": score}
    same_traces(family, how, tuple(wanted))


@pytest.mark.parametrize("family", TRACED[:2])
def test_traces_with_sinks(family):
    same_traces(family, {"mask_mod": causal, "sinks": np.array([0.5, -3, 2, 0], np.float32)})


def same_traces(family, how, captured=()):
    x = make(Problem(300, 430, 64, heads=4, kv_heads=2, dtype="float16"))
    inputs = [x[name] for name in "qkv"]
    given = {"backend": family.backend, "kernel": family.kernel, "trace": True}
    result = flashsim.run(*inputs, **how, **given)
    simulated = flashsim.run(
        *inputs, **how, tiling=result.tiling, device=ROOMY, trace=True, algorithm="flash2"
    )
    assert result.trace.same_events(simulated.trace)
    for form in (None, False):
        got = gradients(result, x["dout"], form, captured=captured).trace
        again = replace(simulated, _job=replace(simulated._job, algorithm=got.algorithm))
        exact = again.backward(x["dout"], tiling=got.tiling, captured=captured).trace
        assert got.same_events(exact)


class TestHopper:
    pytestmark = ON_HOPPER

    def test_a_causal_function_has_the_bits_of_the_named_mask(self):
        """The same tiles are visited, full ones by the same loop."""
        torch.manual_seed(0)
        q, k, v = (torch.randn(2, 4, 1000, 128, device="cuda", dtype=HALF) for _ in range(3))
        given = {"backend": "cupy", "kernel": "hopper"}
        named = flashsim.run(q, k, v, causal=True, **given)
        mine = flashsim.run(q, k, v, mask_mod=causal, tiling=named.tiling, **given)
        assert torch.equal(named.out, mine.out)
        assert torch.equal(named.lse, mine.lse)
