"""Random problems, good and spoilt, for some seconds; `benchmarks/soak.py` goes on for longer."""

from collections import Counter

import fuzz
import numpy as np
import pytest
from compiled import thorough

pytestmark = pytest.mark.promise("twice plain attention's error", "refuses bad input")

SEED = 7


@pytest.mark.parametrize(
    ("backend", "first", "last"),
    [
        *(("simulator", 0, 150), ("numba", 0, 150)),
        *(thorough("simulator", 150, 350), thorough("numba", 150, 250)),
    ],
)
def test_random_problems_are_right_to_the_byte_and_to_a_rounding(backend, first, last):
    for number in range(first, last):
        case = fuzz.draw(np.random.default_rng([SEED, number]), backend)
        try:
            fuzz.check(case)
        except Exception as error:
            raise AssertionError(f"{error!r}\n\n{fuzz.code(case)}") from error


#: Arguments whose odd values are all refused in flashsim's words.
CHECKED = (
    *("q", "k", "v", "bias", "causal", "window", "softcap", "mask", "block_mask"),
    *("cu_seqlens_q", "cu_seqlens_k", "tiling", "device", "threads", "micro_kernel"),
    *("no such argument", "tiling (backward)"),
)


def test_bad_arguments_are_refused_in_flashsims_words():
    refused = 0
    for number in range(500):
        case, argument, value = fuzz.draw_spoilt(np.random.default_rng([SEED, number]), "simulator")
        if argument not in CHECKED:
            continue
        try:
            refused += fuzz.spoil(case, argument, value)
        except AssertionError as error:
            raise AssertionError(f"{error}\n\n{fuzz.code(case, argument, value)}") from error
    assert refused > 150


def test_a_wrong_byte_and_a_wrong_digit_are_found(monkeypatch):
    """The judge must be able to fail."""
    case = fuzz.Case(seed=1, n_q=17, n_kv=23, heads=2, causal=True, tiling=(8, 8))
    fuzz.check(case)
    counted = fuzz.count

    def off(*args):
        moved, products = counted(*args)
        return moved + Counter({("load", "K"): 4}), products

    with monkeypatch.context() as patch:
        patch.setattr(fuzz, "count", off)
        with pytest.raises(AssertionError, match="trace"):
            fuzz.check(case)
    run = fuzz.flashsim.run

    def wrong(*args, **options):
        result = run(*args, **options)
        result.out[0, 0, 3] *= 1 + 1e-4
        return result

    monkeypatch.setattr(fuzz.flashsim, "run", wrong)
    with pytest.raises(AssertionError, match="out: error"):
        fuzz.check(case)


def test_a_case_prints_as_code_that_runs_it():
    case = fuzz.draw(np.random.default_rng(5), "simulator")
    scope = {}
    exec(fuzz.code(case).replace("check(", "again = ("), scope)
    assert scope["again"] == case
