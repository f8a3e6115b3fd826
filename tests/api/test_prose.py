"""The check of prose in `make lint`: it passes today, and each of its rules is seen failing."""

import prose
import pytest

TERM = {"wave": r"\b[wW]aves?\b"}
GOOD = """# A page

A [wave](glossary.md#machine) is as many work tiles as run at once. `by turns` in code is fine.

| by turns | a table is not read |

- Each wave ends with a list item of its own.
"""


@pytest.fixture
def found(tmp_path, monkeypatch):
    """The findings of a guide, or of a module, with a text."""
    monkeypatch.setattr(prose, "ROOT", tmp_path)

    def of(text, name="docs/guides/masks.md"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return [*prose.findings(path, TERM)]

    return of


def test_pages_pass_today(capsys):
    assert prose.main([]) == 0, capsys.readouterr().out
    assert " files, 0 findings" in capsys.readouterr().out


def test_exceptions_exist_and_are_needed():
    """A page that passes leaves the list."""
    terms = prose.glossary()
    for name in prose.NOT_YET:
        assert [*prose.findings(prose.ROOT / name, terms)], f"{name} passes: take it out of NOT_YET"


def test_terms_are_read_from_the_glossary():
    terms = prose.glossary()
    assert {"LSE", "compulsory", "thread block", "GQA"} <= set(terms)
    assert "MQA" not in terms  # in the table, not in bold


def test_a_good_page_passes(found):
    assert found(GOOD) == []


LONG = "Word " + "word " * 35


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (f"One. {LONG}end. Two.", "docs/guides/masks.md:9: 37 words: Word word"),
        ("Kernels run by turns.", "'by turns': write: interleaved"),
        ("What is chosen by a GPU is chosen as it runs.", "write: start with the subject"),
        ("What is chosen by a GPU?", ""),
        ("What a missing folder refuses is an error.", "write: start with the subject"),
        ("Two FLOPs a byte.", "write: per"),
        ("One number a row.", "write: per"),
        ("It makes 1.35 times the speed.", "write: reaches"),
        ("Some three of them.", "write: about"),
        ("All but for the last.", "write: except"),
        ("A visit takes 3 µs a tile.", "write: per"),
        ("It needs 40 registers a thread.", "write: per"),
        ("At 1,980 MHz it does 989 TFLOP/s a chip.", "write: per"),
        ("Use it in the place of K.", "write: instead of"),
        ("Three rounds of items follow.", "write: work tile"),
        ("A short walk ends first.", "write: loop"),
        ("The CPU waits for ever.", "write: forever"),
        ("A list:\n\n1. Runs by turns.", "masks.md:11: 'by turns'"),
    ],
)
def test_a_broken_rule_is_found(found, broken, said):
    findings = found(f"{GOOD}\n{broken}\n")
    assert len(findings) == bool(said)
    assert all(said in one for one in findings)


@pytest.mark.parametrize(
    ("text", "findings"),
    [
        (f"{LONG}end.", 0),
        ("The day before, FA-CuTe was faster.", 0),
        ("The day before, both ran by turns.", 1),
    ],
)
def test_a_notebook_may_be_long_and_tell_history_in_the_fields_words(found, text, findings):
    assert len(found(text, "docs/notebooks/hopper.md")) == findings


def test_a_sentence_of_the_longest_length_passes(found):
    assert found("word " * 35 + "\n") == []


@pytest.mark.parametrize(
    ("text", "findings"),
    [
        ("The last wave is partial.\n\nA [wave](glossary.md) is full.\n", 1),
        ("Waves are numbered.\n", 1),
        ("The last *wave* is partial. Two waves follow.\n", 0),
        ("```py\nwave = 1\n```\n", 0),
        ("# The wave\n", 0),
        ("See `wave`, and [this](wave.md).\n", 0),
    ],
)
def test_a_term_is_linked_where_it_is_first_used(found, text, findings):
    assert len(found(text)) == findings
    assert found(text, "README.md") == []  # which is no guide


def test_docstrings_are_read(found):
    text = '''"""Compute a sum."""

def f():
    """What the caller gets.

    Parameters
    ----------
    x : by turns
    """
    return "by turns"
'''
    (one,) = found(text, "flashsim/version.py")
    assert one.startswith("flashsim/version.py:4: ")
    assert "start with the subject" in one
