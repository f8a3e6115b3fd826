"""Bank conflicts and sectors: counts that follow by hand, and what cannot be asked."""

import numpy as np
import pytest
from repository import recorded, script

from flashsim import banks

pytestmark = pytest.mark.promise("predictions are judged")


@pytest.mark.parametrize(
    ("pattern", "layout", "options", "wavefronts", "sectors"),
    [
        ("row", "row-major", {}, 1, 4),  # 32 words of a row: 128 B
        ("row", "row-major", {"dtype": "bfloat16"}, 1, 2),  # two lanes share a word
        ("row", "xor", {}, 1, 4),  # row 0 lies as it is
        ("column", "row-major", {}, 32, 32),  # 32 words of bank 0; a sector each
        ("column", "row-major", {"columns": 64}, 32, 32),
        ("column", "row-major", {"columns": 33}, 1, 32),  # odd rows are as good as padding
        ("column", "padded", {}, 1, 32),
        ("column", "padded", {"pad": 2}, 2, 32),  # 34 words: lanes 16 apart meet
        ("column", "padded", {"pad": 4}, 4, 32),
        ("column", "padded", {"dtype": "bfloat16"}, 2, 32),  # rows of 32.5 words: two to a bank
        ("column", "xor", {}, 1, 32),
        ("column", "swizzle", {}, 4, 32),  # eight pieces: rows 8 apart meet
        ("row-16B", "row-major", {}, 4, 16),  # 512 B
        ("column-16B", "row-major", {}, 32, 32),
        ("column-16B", "swizzle", {}, 4, 32),
        ("ldmatrix", "row-major", {}, 32, 16),  # four parts, eight rows in the same four banks
        ("ldmatrix", "padded", {}, 4, 16),
        ("ldmatrix", "swizzle", {}, 4, 16),
    ],
)
def test_wavefronts_and_sectors(pattern, layout, options, wavefronts, sectors):
    found = banks.access(pattern, layout, **options)
    assert (found.wavefronts, found.sectors) == (wavefronts, sectors)
    assert found.conflicts == found.wavefronts - found.ideal >= 0


def test_a_wavefront_serves_one_word_of_a_bank():
    for pattern in banks.PATTERNS:
        fronts = banks.access(pattern, "row-major").fronts()
        served = np.unique(fronts[:, [0, 2]], axis=0)
        assert len(np.unique(np.c_[served[:, 0] % 32, served[:, 1]], axis=0)) == len(served)
        assert len(np.unique(served[:, 0])) == len(served), "a word is served once"


def test_no_layout_puts_two_elements_in_one_place():
    for layout in banks.LAYOUTS:
        column = banks.access("column", layout).addresses
        row = banks.access("row", layout).addresses
        assert len(set(column)) == len(set(row)) == 32


def test_the_table_leaves_out_what_would_tear_a_read_apart():
    rows = banks.table().records()
    assert {row["layout"] for row in rows if row["pattern"] == "ldmatrix"} == {
        *("row-major", "padded", "swizzle")
    }
    assert [row["pattern"] for row in banks.table(pattern="row").records()] == ["row"] * 4


# -- benchmarks/banks.py, without a GPU ----------------------------------------------------------


@pytest.fixture
def bench():
    return script("banks")


def test_counters_are_held_against_the_prediction(bench):
    """A launch without loads costs 7 of everything; the others what is predicted, and once more."""
    lines = ["==PROF== noise", '"ID","Metric Name","Metric Value"']
    for n, request in enumerate(bench.requests()):
        for part in range(4):
            for name, counter in bench.METRICS.items():
                value = 7
                if part % 2:
                    value += bench.TIMES * (getattr(request, name) + (n == 3))
                lines.append(f'"{4 * n + part}","{counter}","{value:,}"')
    table = bench.compared(bench.counters("\n".join(lines)))
    for n, row in enumerate(table.rows):
        for at in (3, 5, 7):
            assert row[at + 1] - row[at] == (n == 3)
    with pytest.raises(SystemExit, match="no Nsight Compute table"):
        bench.counters("nothing")


def test_an_h200_counted_what_is_predicted():
    counted = recorded("banks-h200.csv")
    assert len(counted) >= 28
    for row in counted:
        dtype = "bfloat16" if row["B a lane"] == "2" or row["pattern"] == "ldmatrix" else "float32"
        request = banks.access(row["pattern"], row["layout"], dtype=dtype)
        for name in ("wavefronts", "conflicts", "sectors"):
            assert float(row[f"{name} seen"]) == getattr(request, name) == int(row[name])


@pytest.mark.parametrize("arch", ["sm_80", pytest.param("sm_90", marks=pytest.mark.thorough)])
def test_its_probes_compile(bench, arch):
    from compiled import _compiled

    log, cubin = _compiled(bench.SOURCE, "banks.cu", ("-std=c++17", f"-arch={arch}"))
    assert cubin, log
    assert "warning" not in log
    for request in bench.requests():
        for name in bench.kernels(request):
            assert f"PROBE({name}," in bench.SOURCE
