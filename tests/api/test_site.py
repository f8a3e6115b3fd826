"""The site: everything has a page, and its checks find what is broken. `make site` builds it."""

import re
from pathlib import Path
from types import SimpleNamespace

import links
import pytest
import stage
from pygments.styles import get_style_by_name
from pygments.token import Token

import flashsim
from flashsim import exercises
from flashsim.viz import palette

pytestmark = pytest.mark.promise("doc examples run")

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def staged(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    (folder / "gone.md").write_text("# A page that there is no more")
    for _ in range(2):  # the second time, what the first wrote is there
        stage.stage(folder)
    return folder


def test_every_page_is_staged_and_in_the_sidebar(staged):
    pages = {
        p.relative_to(staged).as_posix() for p in staged.rglob("*") if p.suffix in (".md", ".rst")
    }
    assert "gone.md" not in pages
    written = {p.relative_to(ROOT).as_posix() for p in (ROOT / "docs").rglob("*.md")}
    assert written <= pages
    listed = {"index.md"}
    for name in ("index.md", "exercises/index.md", "api/index.md"):
        text = (staged / name).read_text(encoding="utf-8")
        for block in re.findall(r"^```\{toctree\}\n(.*?)^```", text, re.M | re.S):
            lines = [line for line in block.splitlines() if line and not line.startswith(":")]
            found = [re.sub(r".*<(.*)>", r"\1", line) for line in lines]
            listed |= {(Path(name).parent / one).as_posix() for one in found}
    assert listed == pages


def test_every_exercise_says_what_its_file_says(staged):
    for name in exercises.names():
        text = (staged / "exercises" / f"{name}.md").read_text(encoding="utf-8")
        one = exercises.get(name)
        assert one.skeleton.strip() in text
        assert one.sizes in text
        assert all(hint in text for hint in one.hints)
        assert one.solution_source.strip() not in text


def test_the_index_of_exercises_says_lesson_difficulty_and_time(staged):
    told = stage.effort()
    assert [*told] == list(exercises.names())
    index = (staged / "exercises" / "index.md").read_text(encoding="utf-8")
    for name, (lesson, difficulty, minutes) in told.items():
        page = re.search(r"\(\.\./lessons/(.*)\)", lesson)[1]
        assert name in (ROOT / "docs/lessons" / page).read_text(encoding="utf-8")
        assert difficulty in ("easy", "medium", "hard", "open")
        there = lesson.replace("](../", "](../docs/")
        assert f"({name}.md) | {there} | {difficulty} | {minutes} |" in index


@pytest.mark.parametrize("name", ["index.md", "README.md"])
def test_dark_pages_have_a_dark_picture(staged, name):
    text = (staged / name).read_text(encoding="utf-8")
    for theme, file in (("light", "traversal.gif"), ("dark", "traversal-dark.gif")):
        assert f"```{{image}} docs/gallery/{file}\n:class: only-{theme}\n" in text
        assert (staged / "docs/gallery" / file).is_file()
    assert "](docs/gallery/traversal" not in text


#: Backgrounds of code: Furo's, of this site, and the lessons' slides'.
BACKGROUNDS = {"light": ("#f8f9fb", "#f3f5f8"), "dark": ("#202020", "#1c212a")}


def styles():
    """Each style of code that a page or a slide uses, and whether it is for light or dark."""
    conf = (ROOT / "docs/site/conf.py").read_text(encoding="utf-8")
    deck = (ROOT / "docs/lessons/deck.py").read_text(encoding="utf-8")
    yield re.search(r'^pygments_style = "([\w-]+)"', conf, re.M)[1], "light"
    yield re.search(r'^pygments_dark_style = "([\w-]+)"', conf, re.M)[1], "dark"
    yield from ((re.search(rf'"{theme}": "([\w-]+)"', deck)[1], theme) for theme in BACKGROUNDS)


@pytest.mark.parametrize(("style", "theme"), [*styles()])
def test_code_can_be_read(style, theme):
    """Comments, numbers and all other tokens have a contrast of 4.5; spaces need none."""
    for token, look in get_style_by_name(style):
        if look["color"] and token not in (Token.Text.Whitespace, Token.Error):
            for background in BACKGROUNDS[theme]:
                behind = f"#{look['bgcolor']}" if look["bgcolor"] else background
                found = palette.contrast(f"#{look['color']}", behind)
                assert found >= 4.5, (style, token, background, round(found, 2))


def test_the_api_has_every_public_name(staged):
    for module in stage.MODULES:
        text = (staged / "api" / f"{module}.rst").read_text(encoding="utf-8")
        told = set(re.findall(rf"^\.\. auto\w+:: {re.escape(module)}\.(\w+)$", text, re.M))
        assert told == set(stage.public(module))
    for module in ("viz", "distributed", "l2", "exercises"):
        assert stage.public(f"flashsim.{module}") == sorted(getattr(flashsim, module).__all__)
    assert stage.public("flashsim") == [n for n in flashsim.__all__ if not n.startswith("__")]


# -- links ----------------------------------------------------------------------------------------

GOOD = """<h1 id="top">x</h1><a href="#top">x</a><a href="b.html#there">x</a><img src="a%20b.png">
<a href="https://arxiv.org/abs/2205.14135">x</a><img src="data:image/png;base64,AA">
<script src="s.js?v=1"></script>"""


@pytest.fixture
def site(tmp_path):
    root = tmp_path / "site"
    (root / "sub").mkdir(parents=True)
    (root / "index.html").write_text(GOOD)
    (root / "b.html").write_text('<p id="there">x</p>')
    (root / "sub/index.html").write_text('<a href="../index.html#top">x</a>')
    for name in ("a b.png", "s.js"):
        (root / name).touch()
    return root


def test_a_whole_site(site):
    wrong, followed, outside = links.check(site)
    assert wrong == []
    assert followed == 5
    assert outside == {"https://arxiv.org/abs/2205.14135": ["index.html"]}


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ('<a href="c.html">', "c.html is no file"),
        ('<a href="b.html#here">', "b.html#here: no such anchor"),
        ('<a href="#here">', "#here: no such anchor"),
        ('<a href="/b.html">', "/b.html leads out"),
        ('<a href="../../b.html">', "leads out"),
        ('<a href="sub">', "sub is no file"),
        ('<img srcset="a%20b.png 1x, c.png 2x">', "c.png is no file"),
        ('<iframe src="c.html">', "c.html is no file"),
        ('<script src="https://x.org/m.js">', "loads https://x.org/m.js from another site"),
        ('<link rel="stylesheet" href="//x.org/m.css">', "loads //x.org/m.css"),
        ('<p style="background: url(c.png)">', "c.png is no file"),
    ],
)
def test_what_is_broken_is_found(site, broken, said):
    (site / "index.html").write_text(GOOD + broken)
    wrong, *_ = links.check(site)
    assert len(wrong) == 1
    assert said in wrong[0]


def test_a_font_from_elsewhere_is_found(site):
    (site / "m.css").write_text("@font-face { src: url('https://x.org/f.woff') }")
    assert links.check(site)[0] == ["m.css: loads https://x.org/f.woff from another site"]


def test_links_to_players_and_folders(tmp_path):
    players = pytest.importorskip("players", reason="Sphinx is not installed")
    (tmp_path / "docs").mkdir()
    (tmp_path / "scripts").mkdir()
    for name in ("docs/p.html", "scripts/index.md"):
        (tmp_path / name).touch()
    source = [
        "[a](p.html) [b](p.html#n=1&b.m=x) [c](q.html) [d](../scripts) [e](../docs) [f](x.md#y)"
    ]
    players.lead(SimpleNamespace(srcdir=tmp_path), "docs/page", source)
    assert source == [
        "[a](player:p.html) [b](player:p.html#n=1&b.m=x) [c](q.html) [d](../scripts/index.md) "
        "[e](../docs) [f](x.md#y)"
    ]
