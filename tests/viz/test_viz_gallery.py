"""Every plot of the gallery: no text on another, none cut off, and no line through one."""

import runpy
from pathlib import Path

import pytest
from matplotlib import pyplot as plt
from overlaps import crossings, overlaps

from flashsim import viz
from flashsim.viz.style import SLIDE

pytestmark = pytest.mark.promise("pictures show the counts")

GALLERY = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "gallery.py"))
PLOTS = GALLERY["PLOTS"]
#: Those with most texts in every run, the others in the thorough one: drawing takes a second.
QUICK = {"traffic-backward-dark.png", "cumulative.png", "roofline.png", "block-sizes.png"}


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.thorough) for n in PLOTS]
)
def test_no_text_of_the_gallery_overlaps(name):
    figure = PLOTS[name]().figure
    assert overlaps(figure) + crossings(figure) == []


@pytest.mark.parametrize("name", ["heads.png", "block-sizes.png", "roofline.png"])
def test_slides_are_16_to_9_with_larger_type_that_does_not_overlap(name, tmp_path):
    ax = PLOTS[name]()
    written = viz.save_figure(ax, tmp_path / "one.pdf", slides=True)
    assert written == tmp_path / "one.png"
    assert {path.name for path in tmp_path.iterdir()} == {"one.png", "one.svg"}
    assert plt.imread(written).shape[:2] == (1080, 1920)
    assert ax.figure.get_size_inches()[0] < SLIDE[0]  # of the same points of type
    assert overlaps(ax.figure) == []


def test_overlaps_and_crossings_are_found():
    figure, ax = plt.subplots()
    ax.set(xlim=(0, 1), ylim=(0, 1))
    ax.text(0.5, 0.5, "one")
    assert overlaps(figure) + crossings(figure) == []
    ax.text(0.52, 0.51, "two")
    ax.plot([0, 1], [0.51, 0.51])
    ax.text(0.98, 0.9, "a text that is cut off")
    assert overlaps(figure) == ["'a text that is cut off' leaves the figure", "'one' on 'two'"]
    assert crossings(figure) == ["a line through 'one'", "a line through 'two'"]
