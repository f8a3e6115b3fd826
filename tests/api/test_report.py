"""`Table`: one set of rows as text, HTML, JSON and CSV."""

import csv
import io
import json

import pytest

from flashsim.report import Table, format_cell

pytestmark = pytest.mark.promise("command line equals library")


@pytest.fixture
def table():
    return Table(
        "Bytes [moved]",
        ("tensor", "load B", "share", "main", "note"),
        [("K", 1_234_567, 0.5, True, None), ("<V>", 0, 1234.5, False, 'say "x", twice')],
        note="a note",
    )


def test_text_aligns_formats_and_keeps_brackets(table):
    text = table.text(width=120)
    head, first, second = (
        next(line for line in text.splitlines() if mark in line)
        for mark in ("tensor", "1,234,567", "<V>")
    )

    assert "Bytes [moved]" in text  # Rich would eat it as markup
    assert "a note" in text
    assert "0.5" in first
    assert "yes" in first
    assert "1,234" in second
    assert head.index("load B") + len("load B") == first.index("1,234,567") + len("1,234,567")
    assert str(table) == table.text()


def test_columns_that_want_most_share_the_room():
    words = "some words " * 8
    table = Table("", ("name", "first", "short", "second"), [("a", words, "so far", words)])
    head, rule, *_ = table.text(width=80).splitlines()
    first, short, second = (head.index(name) for name in table.columns[1:])
    assert second - short == len("so far") + 2
    assert abs((short - first) - (len(rule) + 2 - second)) <= 1
    assert len(rule) == 80


def test_json_and_csv_keep_values_exact(table):
    assert json.loads(table.json()) == table.records()
    assert table.records()[0] == {
        "tensor": "K",
        "load B": 1_234_567,
        "share": 0.5,
        "main": True,
        "note": None,
    }
    rows = list(csv.reader(io.StringIO(table.csv())))
    assert rows[0] == list(table.columns)
    assert rows[1][:3] == ["K", "1234567", "0.5"]
    assert rows[2][-1] == 'say "x", twice'


def test_html_escapes(table):
    page = table.html()

    assert page.startswith("<table><caption>Bytes [moved]</caption>")
    assert '<td style="text-align:left">&lt;V&gt;</td>' in page
    assert ">1,234,567</td>" in page
    assert page.count("<tr>") == 4  # head, two rows, note


def test_a_row_of_the_wrong_length_is_an_error(table):
    table.rows.append(("Q",))

    with pytest.raises(ValueError, match="zip"):
        table.records()


def test_an_empty_table_still_draws():
    table = Table("nothing", ("a", "b"))

    assert table.records() == []
    assert table.csv() == "a,b\n"
    assert "nothing" in table.text()


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        (None, ""),
        (True, "yes"),
        (False, "no"),
        (12345, "12,345"),
        (0.123456, "0.1235"),
        (-12.3456, "-12.35"),
        (123456.7, "123,457"),
        ("text", "text"),
    ],
)
def test_cells(cell, text):
    assert format_cell(cell) == text
