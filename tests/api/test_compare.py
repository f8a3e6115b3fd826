"""Side by side: one row an algorithm and direction, each on the same inputs."""

import numpy as np
import pytest

import flashsim
from flashsim import FlashSimError, Tiling
from flashsim.errors import UnknownArgumentError

Q, K, V, DOUT = np.random.default_rng(0).standard_normal((4, 2, 40, 8), dtype=np.float32)


def test_rows_are_the_runs_own_figures():
    tiling = Tiling(16, 16)
    algorithms = ["standard", "flash1", "flash2", "flash2-fused"]

    comparison = flashsim.compare(
        Q, K, V, algorithms=algorithms, dout=DOUT, tiling=tiling, backward_tiling=Tiling(8, 20)
    )

    table = comparison.table()
    records = table.records()
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
        assert record["load B"] == trace.bytes("load")
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

    assert differences[0] == differences[2] == 0
    assert differences[1] == pytest.approx(7, abs=1e-4)
    assert differences[3] == pytest.approx(9, abs=1e-4)


def test_a_cache_is_laid_out_for_those_that_know_none():
    rng = np.random.default_rng(1)
    q = rng.standard_normal((2, 4, 1, 8), dtype=np.float32)
    pools = rng.standard_normal((2, 9, 2, 5, 8), dtype=np.float32)
    table = np.array([[3, 8, 1], [0, 7, 5]])
    given = {"block_table": table, "cache_seqlens": (12, 12), "splits": 2}

    for algorithms in (["flash2", "flash-decode"], ["flash-decode", "standard"]):
        compared = flashsim.compare(q, *pools, algorithms=algorithms, **given)
        assert list(compared.results) == algorithms
        first, second = compared.results.values()
        np.testing.assert_allclose(first.out, second.out, atol=1e-6)
    with pytest.raises(
        FlashSimError, match="2 different lengths, which only algorithm 'flash-decode' supports"
    ):
        flashsim.compare(q, *pools, algorithms=algorithms, **given | {"cache_seqlens": (12, 11)})
    wrong = given | {"block_table": np.array([[3, 8, 9], [0, 7, 5]])}
    with pytest.raises(
        FlashSimError, match=r"block_table\[0, 2\] must be a page of the pool, .*, got 9"
    ):
        flashsim.compare(q, *pools, algorithms=["flash2", "flash-decode"], **wrong)


@pytest.mark.promise("refuses bad input")
@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        (
            {"algorithms": []},
            ValueError,
            r"non-empty list of names, got \[\]; choose from standard",
        ),
        ({"algorithms": "flash2"}, ValueError, "non-empty list of names, got 'flash2'"),
        ({"algorithms": ["flash3"]}, ValueError, "unknown algorithm 'flash3'"),
        (
            {"algorithm": "flash2"},
            UnknownArgumentError,
            r"takes a list of algorithms, algorithms=\[...\]",
        ),
        ({"trace": False}, ValueError, "always records traces"),
    ],
)
def test_what_cannot_be_compared(arguments, kind, text):
    with pytest.raises(FlashSimError, match=text) as caught:
        flashsim.compare(Q, K, V, **arguments)
    assert isinstance(caught.value, kind)
