"""Masks and scores that are functions on a GPU, against attention in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from compiled import thorough  # noqa: E402
from cupy_checks import MARKS, ROOMY, families, gradients, make  # noqa: E402
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


#: The kernels of a GPU in C++, and Hopper's in Python, which compile longer.
CUPY = {"backend": "cupy"}
PYTHON = {"backend": "numba_cuda", "kernel": "hopper", "forms": (None, True, False)}
TENSOR = PYTHON | {"kernel": "tensor"}
(_MARKS,) = (one.marks for one in families("python-hopper"))


def in_python(*case, marks=(), told="python"):
    """A case of a test of several kernels that Hopper's in Python run."""
    return pytest.param(*case, marks=[*_MARKS, *marks], id="-".join(map(str, (told, *case[1:]))))


BOTH = pytest.mark.parametrize("how", [pytest.param(CUPY, id="cupy"), in_python(PYTHON)])


def sized(lengths):
    return 2, 4, 2, *lengths


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("d", [64, thorough(128), thorough(192), thorough(256)])
@BOTH
def test_masks(name, d, how):
    sizes = sized((430, 430))
    judge(masks(2, 4, 430, 430)[name], None, {}, sizes, d=d, **how)


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("d", [64, 128, thorough(32), thorough(96), thorough(192), thorough(256)])
@pytest.mark.parametrize("mask", [causal, thorough(None)])
@BOTH
def test_scores(name, d, mask, how):
    _, score, wanted = scores(2, 4, 300, 430)[name]
    judge(mask, score, wanted, sized((300, 430)), d=d, **how)


FEW = (1, 1), (799, 3), (1025, 1025)


@pytest.mark.parametrize(
    ("how", "lengths"),
    [
        *(pytest.param(CUPY, x, id=f"cupy-{x}") for x in LENGTHS),
        *(in_python(PYTHON, x, marks=() if x in FEW else [pytest.mark.thorough]) for x in LENGTHS),
    ],
)
def test_lengths(lengths, how):
    """A mask with captured documents, and a table of relative positions with its gradient."""
    _, score, wanted = scores(2, 4, *lengths)["relative"]
    judge(masks(2, 4, *lengths)["of_documents"], score, wanted, sized(lengths), d=128, **how)


@pytest.mark.parametrize(
    ("how", "lengths", "kind"),
    [
        *(
            pytest.param(CUPY, x, kind, id=f"cupy-{x}-{kind}")
            for x in LENGTHS[:12]
            for kind in ("float16", "bfloat16")
        ),
        in_python(PYTHON, (300, 200), "float16"),
    ],
)
def test_lengths_with_rows_without_keys(lengths, kind, how):
    _, score, wanted = scores(2, 4, *lengths)["biased"]
    dtype = getattr(torch, kind)
    judge(masks(2, 4, *lengths)["late"], score, wanted, sized(lengths), dtype=dtype, **how)


@pytest.mark.parametrize("lengths", [(200, 300), (1, 700)], ids=str)
@pytest.mark.parametrize("mask", ["causal", "late"])
@pytest.mark.parametrize(
    "how",
    [pytest.param(CUPY, id="cupy"), in_python(PYTHON), in_python(TENSOR, told="python-tensor")],
)
def test_sinks(lengths, mask, how):
    sinks = torch.tensor([0.5, -3.0, 2.0, 0.0], device="cuda")
    judge(masks(2, 4, *lengths)[mask], None, {}, sized(lengths), sinks=sinks, **how)


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


TRACED = families("portable", "hopper", "python-hopper", "python")


@pytest.mark.parametrize("family", TRACED)
@pytest.mark.parametrize(("name", "mask"), [("alibi", "of_documents"), ("curved", "late")])
@pytest.mark.promise("three counts equal")
def test_traces_are_the_simulators(family, name, mask):
    """The tiles and bytes of all stages, also the bytes that functions read."""
    _, score, wanted = scores(1, 4, 300, 430, "cpu")[name]
    how = {"mask_mod": masks(1, 4, 300, 430, "cpu")[mask], "score_mod": score}
    same_traces(family, how, tuple(wanted))


@pytest.mark.parametrize("family", TRACED[:3])
@pytest.mark.promise("three counts equal")
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


@pytest.mark.parametrize("family", families("hopper", "python-hopper"))
def test_a_causal_function_has_the_bits_of_the_named_mask(family):
    """The same tiles are visited, full ones by the same loop; in Python also back."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 1000, 128, device="cuda", dtype=HALF) for _ in range(3))
    given = {"backend": family.backend, "kernel": family.kernel}
    named = flashsim.run(q, k, v, causal=True, **given)
    mine = flashsim.run(q, k, v, mask_mod=causal, tiling=named.tiling, **given)
    assert torch.equal(named.out, mine.out)
    assert torch.equal(named.lse, mine.lse)
    grads = [r.backward(q) for r in (named, mine)] if family.backend == "numba_cuda" else []
    for name in ("dq", "dk", "dv") if grads else ():
        assert torch.equal(*(getattr(g, name) for g in grads))
