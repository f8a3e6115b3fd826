"""Models of transformers on CUDA, with random weights: flashsim is as good as "eager"."""

from __future__ import annotations

import logging

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from cupy_checks import MARKS  # noqa: E402
from model_cases import CASES, NEVER_PADDED, check, made  # noqa: E402

import flashsim.torch  # noqa: E402

#: torch's, at the first matrix product of a thread.
_FIRST = pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")
pytestmark = [*MARKS, _FIRST, pytest.mark.promise("bridges equal their library")]


@pytest.fixture(scope="module", autouse=True)
def installed():
    logging.getLogger("transformers").setLevel(logging.ERROR)
    assert "transformers" in flashsim.torch.install()


@pytest.mark.parametrize("padding", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("name", CASES, ids=lambda name: name.partition(":")[0])
def test_logits_and_gradients_are_as_good_as_eagers(name, padding):
    """150 tokens, so that windows and chunks leave out whole tiles."""
    if padding and name.startswith(NEVER_PADDED):
        pytest.skip("its inputs are no tokens")
    try:
        model, inputs, reference = made(name, 150, padding=padding)
    except AttributeError as error:
        pytest.skip(f"transformers {transformers.__version__} lacks it: {error}")
    model, inputs = model.cuda(), {n: x.cuda() for n, x in inputs.items()}
    check(model, inputs, torch.bfloat16, reference=reference)
