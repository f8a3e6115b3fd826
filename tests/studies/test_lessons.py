"""Lessons: they run; skeletons fail gracefully, wrong answers get nothing, references all."""

import base64
import io
import re

import chromium
import deck
import lessons
import nbformat
import numpy as np
import pytest
from PIL import Image
from wrong_solutions import WRONG, seeded

from flashsim import OptionError, exercises
from flashsim.exercises import Lesson
from flashsim.report import Table

pytestmark = pytest.mark.promise("doc examples run")

QUICK = ("2_softmax_ladder", "4_flash1_to_flash2")
PATHS = [
    pytest.param(path, id=path.stem, marks=() if path.stem in QUICK else pytest.mark.thorough)
    for path in lessons.LESSONS
]
#: In a kernel: numbers, words and whole dicts that are not what was asked.
SPOIL = """
def spoilt(x):
    if isinstance(x, dict):
        return {key: spoilt(value) for key, value in x.items()}
    return "no such word" if isinstance(x, str) else 3 * x + 1
"""


def wrong(reference):
    """Code that gives wrong answers in place of a reference's right ones."""
    exercise = re.search(r'solution = exercises.get\("(.*)"\).reference', reference)
    if exercise is None:
        names = re.findall(r"^(\w+) = ", reference, re.M)
        return SPOIL + reference + "".join(f"\n{name} = spoilt({name})" for name in names)
    name = exercise[1]
    find, put = next(w[3:] for w in WRONG if w[0] == name and w[1] in ("result", "unstored"))
    return seeded(exercises.get(name).solution_source, find, put)


def tried(path):
    """A lesson run with each question answered three times: as it stands, wrongly, rightly.

    Returns all cells, and of each question its cell and the three runs of its check.
    """
    notebook = lessons.read(path)
    references, cells, asked = lessons.references(notebook), [], []
    for at, cell in enumerate(notebook.cells):
        cells.append(cell)
        if at - 1 in references:
            checks = [cell]
            for source in (wrong(references[at - 1]), references[at - 1]):
                checks.append(nbformat.v4.new_code_cell(cell.source, metadata=cell.metadata))
                answer = notebook.cells[at - 1].metadata
                cells += [nbformat.v4.new_code_cell(source, metadata=answer), checks[-1]]
            asked.append((notebook.cells[at - 1], checks))
    lessons.execute(nbformat.v4.new_notebook(cells=cells, metadata=notebook.metadata))
    return cells, asked


def printed(cell):
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")


FULL = r"\(10 of 10 points\)|100 of 100 points"


@pytest.mark.parametrize("path", PATHS)
def test_a_lesson(path):
    cells, asked = tried(path)
    assert 8 <= sum(cell.cell_type == "code" for cell in lessons.read(path).cells) <= 15
    assert len(asked) >= 3
    for question, (skeleton, spoilt, right) in asked:
        questions = len(re.findall(r"lesson\.(?:ask|solve)\(", skeleton.source))
        assert not re.search(FULL, printed(skeleton)), question.source
        assert not re.search(FULL, printed(spoilt)), question.source
        assert len(re.findall("✗", printed(spoilt))) >= questions
        assert len(re.findall(FULL, printed(right))) >= questions
        assert "✗" not in printed(right)
    points = re.search(r": (\d+) of (\d+) points", printed(cells[-2]))
    assert points[1] == points[2]
    shown_as_they_should(cells)
    for theme in ("light", "dark"):
        text = deck.write(nbformat.v4.new_notebook(cells=cells), theme)
        assert not re.search(r"""(?:src|href|url\()=?["']?(?:https?:)?//""", text)
        assert "@@" not in text
        assert text.count("<section>") >= 8
        assert not re.search(r"lesson\.(ask|solve)", text)  # neither checks nor answers to fill in


def shown_as_they_should(cells):
    """A plot is a picture as wide as a slide, a page a frame that needs no network."""
    drawn = 0
    for cell in (cell for cell in cells if cell.cell_type == "code"):
        for name in re.findall(r"^viz\.(\w+)\(", cell.source, re.M):
            data = cell.outputs[-1].data
            drawn += 1
            if name == "page":
                assert "<iframe srcdoc=" in data["text/html"]
            else:
                picture = Image.open(io.BytesIO(base64.b64decode(data["image/png"])))
                assert picture.width >= 900
                assert len(picture.convert("L").getcolors()) > 20  # something is drawn
    assert drawn


def test_there_are_nine_and_skeletons_are_the_courses():
    assert [path.name[0] for path in lessons.LESSONS] == list("123456789")
    graded = set()
    for path in lessons.LESSONS:
        notebook = lessons.read(path)
        assert lessons.THEME in next(c for c in notebook.cells if c.cell_type == "code").source
        for at, reference in lessons.references(notebook).items():
            name = re.search(r'exercises.get\("(.*)"\).reference', reference)
            if name:
                graded.add(name[1])
                skeleton = exercises.get(name[1]).skeleton.strip()
                skeleton = skeleton.removeprefix("import numpy as np\n\n\n")
                assert notebook.cells[at].source == skeleton
    assert len(graded) >= 5


def test_an_answer_without_a_check_is_found():
    answer = nbformat.v4.new_code_cell("x = ...", metadata={"tags": ["answer"]})
    prose = (nbformat.v4.new_markdown_cell(text) for text in ("no check", "nothing folded"))
    notebook = nbformat.v4.new_notebook(cells=[answer, *prose])
    with pytest.raises(ValueError, match="followed by its check cell and a folded answer"):
        lessons.references(notebook)


@pytest.mark.thorough
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_slides_in_a_browser(theme, tmp_path, request):
    """From file://: nothing is asked of a network, nothing is cut off, keys turn the pages."""
    path = next(path for path in lessons.LESSONS if path.name.startswith("3"))
    html = deck.write(lessons.execute(lessons.dressed(path, theme)), theme)
    ready = "document.readyState == 'complete'"
    with (
        chromium.started() as browser,
        chromium.tabs(browser, tmp_path, request.node.name, ready) as show,
    ):
        tab = show(html, at="#2", height=720)
        slides = tab.locator("section").count()
        assert tab.locator("#at").inner_text() == f"2 / {slides}"
        tab.keyboard.press("a")
        assert tab.locator("section.now details").get_attribute("open") is not None
        tab.keyboard.press("Home")
        for _ in range(slides):
            box = tab.locator("section.now .body").bounding_box()
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= 1280
            assert box["y"] + box["height"] <= 690, tab.url  # above the buttons
            assert float(tab.locator("section.now").get_attribute("data-scale")) >= 0.7
            tab.keyboard.press("ArrowRight")
        assert tab.locator("#at").inner_text() == f"{slides} / {slides}"
        player = tab.frame_locator("iframe").first
        assert player.locator("button").count() >= 5
        shade = tab.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", shade))) > 380) == (theme == "light")


# -- the questions of a lesson --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (..., "· K: no answer yet; replace ... with a number"),
        (64, "✓ K: 64   (10 of 10 points)"),
        (np.int64(64), "✓ K: 64   (10 of 10 points)"),
        (16, "✗ K: 16 is wrong: elements"),
        (128, "✗ K: 128 is wrong: it is too large"),
        (0, "✗ K: 0 is wrong: it is too small"),
        (float("nan"), "✗ K: nan is wrong; answer with a finite number"),
        (float("inf"), "✗ K: inf is wrong; answer with a finite number"),
        (64j, "✗ K: the answer must be a number, got 64j"),
        (-5, "✗ K: -5 is wrong: it is too small"),
        ("64", "✗ K: the answer must be a number, got '64'"),
        (True, "✗ K: the answer must be a number, got True"),
    ],
)
def test_a_number(said, words, capsys):
    lesson = Lesson("tiles")
    lesson.ask("K", said, 64, slips={16: "elements"})
    assert capsys.readouterr().out == words + "\n"
    assert lesson.marks().points == (10 if "✓" in words else 0)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (..., "· who: no answer yet; replace ... with one of 'a', 'b'"),
        ("a", "✓ who: a   (10 of 10 points)"),
        ("b", "✗ who: 'b' is wrong; think again, then run the cell again"),
        ("c", "✗ who: the answer must be one of 'a', 'b', got 'c'"),
        (1, "✗ who: the answer must be one of 'a', 'b', got 1"),
    ],
)
def test_a_word(said, words, capsys):
    Lesson("tiles").ask("who", said, "a", choices=("a", "b"))
    assert capsys.readouterr().out == words + "\n"


def test_a_share_that_it_may_be_off_by(capsys):
    lesson = Lesson("tiles")
    for said, points in ((103, 0), (102, 10), (98, 10), (97, 0)):
        lesson.ask("ridge", said, 100.0, within=0.02)
        assert lesson.marks().points == points  # the last answer counts
    assert lesson.marks().most == 10


def test_a_solution(capsys):
    lesson, one = Lesson("backward"), exercises.get("delta")
    assert lesson.solve("delta", ...) is None
    assert (lesson.marks().points, lesson.marks().most) == (0, 50)

    def solution(machine):
        raise ValueError("nothing yet")

    assert lesson.solve("delta", solution) is None
    assert "nothing yet" in lesson.marks().marks[0].words
    trace = lesson.solve("delta", one.reference)
    assert trace.bytes() == one.full_marks_bytes
    lesson.solve("count-a-product", {"bytes of Q loaded": 40 * 16 * 4})
    assert (lesson.marks().points, lesson.marks().most) == (50 + 50 // 4, 100)
    assert "no solution yet" in capsys.readouterr().out
    with pytest.raises(OptionError, match="no exercise 'deltas'"):
        lesson.solve("deltas", solution)


def test_a_table_is_printed_in_a_notebook_too(monkeypatch):
    """Rich would show it as HTML there, and print nothing."""
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert "42" in str(Table("t", ("n",), [(42,)]))
