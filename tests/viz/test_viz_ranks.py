"""Pictures of many ranks: artists against accounts."""

import numpy as np
import pytest
from PIL import Image

from flashsim import Problem, Tiling, predict, viz
from flashsim.distributed import count
from flashsim.viz.film.rank_film import RanksFilm, lit

pytestmark = pytest.mark.promise("pictures show the counts")

CAUSAL = Problem(256, heads=2, causal=True)


def account(scheme="zigzag", ranks=4, direction="forward"):
    return count(CAUSAL, ranks=ranks, scheme=scheme, direction=direction, tiling=Tiling(16, 16))


def test_the_timeline_shows_work_and_waiting():
    ring, zigzag = account("ring"), account("zigzag")
    ax = viz.rank_timeline([ring, zigzag])
    bars = [bar for bar in ax.patches if bar.get_fill()]
    unit = ring.flops.max(axis=0).sum()
    drawn = sum(bar.get_width() for bar in bars)
    assert drawn == pytest.approx((ring.flops.sum() + zigzag.flops.sum()) / unit)
    texts = [text.get_text() for text in ax.texts]
    assert f"ring: idle {100 * ring.idle_share:.0f} %" in texts
    assert "zigzag: idle 0 %" in texts
    assert len(ax.get_yticks()) == 8
    assert (
        viz.rank_timeline(ring).get_title(loc="left")
        == "When each rank computes and waits, forward"
    )


def test_scaling_draws_every_group():
    problem = Problem(8192, head_dim=128, heads=8, dtype="bfloat16")
    times = [predict.spread(problem, ranks=ranks) for ranks in (2, 4)]
    ax = viz.scaling({"zigzag": times})
    (line,) = ax.lines
    np.testing.assert_allclose(line.get_ydata(), [100 * t.efficiency for t in times])
    assert list(line.get_xdata()) == [2, 4]


def test_lit_tiles_are_those_of_the_block():
    group = account().group
    assert lit(group, group.blocks[0], 4).tolist() == np.tri(4, dtype=bool).tolist()
    assert lit(group, group.blocks[1], 4).tolist() == [[True, True, False, False]] * 4
    assert lit(group, group.blocks[2], 4).sum(axis=1).tolist() == [0, 0, 4, 4]
    assert not lit(group, None, 4).any()


@pytest.mark.parametrize(("scheme", "each"), [("ring", 2), ("usp", 1)])
def test_a_film_lights_every_tile_once(scheme, each):
    film = RanksFilm(account(scheme, 4 if scheme == "usp" else 2), 4, each, "light")
    frames = list(film.frames())
    assert frames[0].shape == (540, 960, 3)
    assert len(frames) == len(film) == 2 * each
    ground = np.array(film.pixels[0, -1])  # no query of the first member's early rows sees it
    assert (film.pixels != ground).any(axis=2).sum() == film.lit.sum()
    assert film.told.get_text().startswith("step 2 of 2")
    if scheme == "ring":
        assert film.says[0].get_text() == ""  # the last frame of a step
        film.frame(2)
        assert film.says[0].get_text() == "waits"
    film.close()


def test_an_animation_and_a_page_are_written(tmp_path):
    gif = viz.animate_ranks(account("zigzag", 2), tmp_path / "a.gif", cells=2, frames_a_step=2)
    with Image.open(gif) as image:
        assert image.n_frames == 4
    backward = account("zigzag", 2, "backward")
    page = viz.animate_ranks(backward, tmp_path / "a.html", cells=2, frames_a_step=1, theme="dark")
    assert "flashsim: Zigzag: 2 GPUs" in page.read_text()
