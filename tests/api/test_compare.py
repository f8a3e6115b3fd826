"""Side by side: one row an algorithm and direction, each on the same inputs."""

import json

import numpy as np
import pytest
from refusals import refusals, refused

import flashsim
from flashsim import Tiling

Q, K, V, DOUT = np.random.default_rng(0).standard_normal((4, 2, 40, 8), dtype=np.float32)
RNG = np.random.default_rng(1)
QUERY = RNG.standard_normal((2, 4, 1, 8), dtype=np.float32)
POOLS = RNG.standard_normal((2, 9, 2, 5, 8), dtype=np.float32)
TABLE = np.array([[3, 8, 1], [0, 7, 5]])
CACHE = {"block_table": TABLE, "cache_seqlens": (12, 12), "splits": 2}
BOTH = ["flash2", "flash-decode"]


def test_rows_are_the_runs_own_figures():
    tiling = Tiling(16, 16)
    algorithms = ["standard", "flash1", "flash2", "flash2-fused"]

    comparison = flashsim.compare(
        Q, K, V, algorithms=algorithms, dout=DOUT, tiling=tiling, backward_tiling=Tiling(8, 20)
    )

    table = comparison.table()
    records = table.records()
    assert json.loads(table.json()) == records
    assert [(r["algorithm"], r["direction"]) for r in records] == [
        *((name, "forward") for name in algorithms),
        *((name, "backward") for name in algorithms),
    ]
    for record in records:
        name = record["algorithm"]
        alone = flashsim.run(Q, K, V, algorithm=name, tiling=tiling, trace=True)
        trace = alone.trace
        if record["direction"] == "backward":
            trace = alone.backward(DOUT, tiling=Tiling(8, 20)).trace
        for op in ("load", "store", "reduce"):
            assert record[f"{op} B"] == trace.bytes(op)
        assert 0 <= record["max |diff|"] < 1e-4
        assert record["requested B"] == trace.bytes()
        assert record["peak SRAM B"] == trace.peak_sram()
        assert record["x compulsory"] == round(trace.bytes() / trace.compulsory(), 2)
    assert "1 x 2 heads, 40 x 40, d=8, float32 on H100" in str(comparison)
    assert "<caption>1 x 2 heads" in comparison._repr_html_()


def test_the_difference_is_from_the_first_algorithm():
    comparison = flashsim.compare(Q, K, V, algorithms=["flash2", "standard"], dout=DOUT)
    worse = comparison.results["standard"].out
    worse[0, 0, 0] += 7
    comparison.gradients["standard"].dv[1, 3, 2] -= 9

    differences = [record["max |diff|"] for record in comparison.table().records()]

    assert list(comparison.results) == list(comparison.gradients)
    assert list(flashsim.compare(Q, K, V).results) == ["standard", "flash1", "flash2"]
    assert flashsim.compare(Q, K, V).gradients == {}
    assert differences[0] == differences[2] == 0
    assert differences[1] == pytest.approx(7, abs=1e-4)
    assert differences[3] == pytest.approx(9, abs=1e-4)


def test_a_cache_is_laid_out_for_those_that_know_none():
    for algorithms in (BOTH, ["flash-decode", "standard"]):
        compared = flashsim.compare(QUERY, *POOLS, algorithms=algorithms, **CACHE)
        assert list(compared.results) == algorithms
        first, second = compared.results.values()
        np.testing.assert_allclose(first.out, second.out, atol=1e-6)


REFUSED = refusals(r"""
flashsim.compare(Q, K, V, algorithms=[])
    -> OptionError: algorithms must be a non-empty list of names, got []; choose from standard
flashsim.compare(Q, K, V, algorithms=()) -> OptionError: algorithms must be a non-empty list
flashsim.compare(Q, K, V, algorithms="flash2") -> OptionError: non-empty list of names, got 'flash2'
flashsim.compare(Q, K, V, algorithms=["flash3"]) -> OptionError: unknown algorithm 'flash3'
flashsim.compare(Q, K, V, algorithm="flash2")
    -> UnknownArgumentError: takes a list of algorithms, algorithms=[...]
flashsim.compare(Q, K, V, trace=False) -> OptionError: always records traces
flashsim.compare(QUERY, *POOLS, algorithms=BOTH, **CACHE | {"cache_seqlens": (12, 11)})
    -> OptionError: 2 different lengths, which only algorithm 'flash-decode' supports
flashsim.compare(QUERY, *POOLS, algorithms=BOTH, **CACHE | {"block_table": TABLE + 1})
    -> OptionError: block_table[0, 1] must be a page of the pool, ... , got 9
""")


@pytest.mark.promise("refuses bad input")
@pytest.mark.parametrize(("call", "said"), REFUSED)
def test_what_cannot_be_compared(call, said):
    refused(call, said, globals())
