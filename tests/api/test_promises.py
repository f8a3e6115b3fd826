"""The map of promises: every mark names one, each has tests, and its page is of today."""

import ast

import promises
import pytest


def test_every_promise_has_tests_and_every_mark_a_promise():
    assert set(promises.marks()) == set(promises.PROMISES)


def test_the_page_is_of_today():
    written = promises.PAGE.read_text(encoding="utf-8")
    assert written == promises.page(), "run: python tests/tools/promises.py"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("pytestmark = pytest.mark.promise('a', 'b')", [(None, "a"), (None, "b")]),
        ("pytestmark = [SKIP, pytest.mark.promise('a')]", [(None, "a")]),
        ("@pytest.mark.promise('a')\ndef test_x(): pass", [("test_x", "a")]),
        ("class TestX:\n @pytest.mark.promise('a')\n def test_y(self): pass", [("test_y", "a")]),
        ("other = pytest.mark.promise('a')", []),
    ],
)
def test_marks_are_read(text, found):
    assert [*promises._marked(ast.parse(text))] == found


class Item:
    """As much of a test as `keep` asks for."""

    def __init__(self, *names):
        self.names = names

    def iter_markers(self, name):
        return [getattr(pytest.mark, name)(*self.names).mark]


def test_one_promise_can_be_asked_for():
    one, other, neither = items = [Item("deterministic"), Item("right tiles"), Item()]
    assert promises.keep(items, None) == []
    assert promises.keep(items, "right tiles") == [one, neither]
    assert items == [other]


def test_a_mark_that_names_no_promise_ends_the_run():
    with pytest.raises(pytest.UsageError, match="no promise 'right tile'; did you mean 'right ti"):
        promises.keep([Item("right tile")], None)
