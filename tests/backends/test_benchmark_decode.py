"""benchmarks/decode.py, but for what needs a GPU."""

import csv
import sys

import pytest
from repository import script

bench = script("decode")


def row(name, us, keys=32768, **more):
    return {
        **{"gpu": "a GPU", "head_dim": 128, "n_q": 1, "batch": 8, "keys": keys, "cache_MB": 1074},
        **{"implementation": name, "splits": 2, "us": us, "tb_per_s": 1074 / us},
        **{"copy_tb_per_s": 4.3, "of_copy": 1074 / us / 4.3, "of_best_rival": 1.0},
        **{"difference": ""},
    } | more


GOOD = [
    *(row("flashsim", 245.0), row("cuDNN", 246.0), row("flashsim, pages of 16", 260.0)),
    *(row(bench.AUTO, 245.0), row("flashsim, splits=2", 244.0), row("flashsim, splits=9", 260.0)),
]


def test_the_table_fits_in_memory_and_has_every_other_shape():
    table = bench.shapes()
    assert max(s.cache_bytes for s in table) <= bench.MOST_BYTES
    assert len(table) == len(set(table)) == 2 * 2 * 16 - 2 * 2
    assert bench.Shape(128, 1, 8, 32768).cache_bytes == 2 * 8 * 8 * 32768 * 128 * 2


@pytest.mark.parametrize(
    ("place", "more", "message"),
    [
        (0, {"of_best_rival": 0.98}, "8 x 32768 d128 n_q 1: 0.980 x the best rival"),
        (0, {"of_copy": 0.92}, "0.920 of the copy bandwidth"),
        (2, {"us": 270.0}, "pages of 16 1.10 x"),
        (4, {"us": 200.0}, "1.225 x the time of flashsim, splits=2"),
    ],
)
def test_what_falls_short_is_named(place, more, message):
    assert bench.verdict(GOOD) == []
    rows = [r | more if n == place else r for n, r in enumerate(GOOD)]
    (found,) = bench.verdict(rows)
    assert message in found


def test_a_table_is_read_judged_and_drawn(tmp_path, monkeypatch, capsys):
    table, drawn = tmp_path / "t.csv", tmp_path / "t.svg"
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, bench.COLUMNS)
        writer.writeheader()
        writer.writerows([*GOOD, row("flashsim", 45.0, 1024, cache_MB=33)])
    given = ["decode.py", "--read", str(table), "--plot", str(drawn)]
    monkeypatch.setattr(sys, "argv", given)
    bench.main()
    assert capsys.readouterr().out == "All aims met.\n"
    # texts are comments beside the glyphs
    assert "1 query per head, d = 128" in drawn.read_text()
