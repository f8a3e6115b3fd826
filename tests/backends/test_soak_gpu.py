"""benchmarks/soak_gpu.py without a GPU: the simulator stands in for kernels, honest or not."""

import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from repository import script

import flashsim
from flashsim import Trace
from flashsim.errors import UnsupportedError

pytestmark = pytest.mark.promise("failures end in words")


@pytest.fixture
def soak(monkeypatch):
    module = script("soak_gpu")
    monkeypatch.setattr(module, "LENGTHS", (1, 7, 16, 33))
    simulate = flashsim.run

    def run(q, k, v, *, backend, kernel=None, allow_tf32=None, **asked):
        if kernel == "hopper" and backend == "numba_cuda":
            raise UnsupportedError("none of that")
        return simulate(q, k, v, backend="simulator", **asked)

    monkeypatch.setattr(flashsim, "run", run)
    return module


def checked(soak, turns):
    done = Counter()
    for turn in range(turns):
        rng = np.random.default_rng([3, turn])
        variant = soak.draw_variant(rng, soak.TURNS[turn % len(soak.TURNS)])
        done.update(soak.check(variant, soak.draw_sizes(rng, variant), rng))
    return done


def test_every_kind_is_drawn_and_counts_its_passes(soak):
    done = checked(soak, 2 * len(soak.TURNS))
    assert {kind for kind, _, _ in done} == set(soak.KINDS)
    assert {name for _, _, name in done} == {"forward", *soak.PASSES.values(), "refused"}
    refused = sum(n for (_, _, name), n in done.items() if name == "refused")
    assert soak.cases(done) == done.total() - refused > 60
    rows = [row for row in soak.table(done).records() if row["kernels"] == "decode"]
    assert sum(row["forward"] for row in rows) == 2


def test_one_byte_too_many_is_a_failure(soak, monkeypatch):
    honest = Trace.transfers.func
    wrong = property(lambda self: {key: n + 2 for key, n in honest(self).items()})
    monkeypatch.setattr(Trace, "transfers", wrong)
    with pytest.raises(AssertionError, match=r"forward, tiles .* counted and predicted \{"):
        checked(soak, 1)


def test_what_fails_is_a_row_and_an_exit_status(soak, monkeypatch, capsys):
    threads = lambda jobs, mp_context: ThreadPoolExecutor(1)  # noqa: E731
    monkeypatch.setattr(soak, "ProcessPoolExecutor", threads)
    asked = ["soak_gpu.py", "--jobs", "2", "--seconds", "0.2", "--kinds", "portable,tf32"]
    monkeypatch.setattr(sys, "argv", asked)
    assert soak.main() == 0
    assert "0 failed" in capsys.readouterr().out

    def broken(*_, **__):
        raise ValueError("a kernel that does not compile")

    monkeypatch.setattr(flashsim, "run", broken)
    assert soak.main() == 1
    said = capsys.readouterr().out
    assert "ValueError (test_soak_gpu.py" in said
    assert "a kernel that does not compile" in said
    assert "10 failed" in said  # each process gives up after five
