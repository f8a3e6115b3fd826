"""Parts of the keys and pages of a cache, as pictures show them."""

import json

import numpy as np
import pytest
import viz_cases as cases

import flashsim
from flashsim import Tiling, viz
from flashsim.errors import UnsupportedError
from flashsim.trace.steps import Steps
from flashsim.trace.trace import Trace
from flashsim.viz.data.diagram import page_edges, part_edges, part_numbers
from flashsim.viz.film.animation import Film

pytestmark = pytest.mark.promise("pictures show the counts")


def decoded(splits=3, n_q=1, page=12, key_order="ascending", **options):
    """Two entries of 56 and 24 keys, tiles of 8: 7 and 3 of them; four query heads on two."""
    rng = np.random.default_rng(1)
    q = rng.standard_normal((2, 4, n_q, 8), np.float32)
    table = {}
    k, v = rng.standard_normal((2, 2, 2, 60, 8), np.float32)
    if page:
        k, v = (x.reshape(2, 2, 60 // page, page, 8).swapaxes(1, 2) for x in (k, v))
        k, v = (np.ascontiguousarray(x.reshape(-1, 2, page, 8)) for x in (k, v))
        table["block_table"] = np.arange(2 * 60 // page).reshape(2, -1)
    return flashsim.run(
        q, k, v, algorithm="flash-decode", splits=splits, tiling=Tiling(8, 8), trace=True,
        cache_seqlens=[56, 24], key_order=key_order, **table, **options,
    ).trace  # fmt: skip


def test_blocks_edges_and_pages_by_hand():
    s = decoded().schedule
    # Of 7 tiles in 3 parts: 2, 2 and 3; of the second entry's 3 tiles one each.
    expected = [[0, 0, 1, 1, 2, 2, 2, *[-1] * 3], [*[-1] * 7, 3, 4, 5]]
    assert part_numbers(s).tolist() == expected
    assert part_edges(s) == [(0, 2), (0, 4), (1, 8), (1, 9)]
    # Pages of 12 keys begin at keys 12, 24, 36, 48 of the first entry, 12 of the second.
    assert page_edges(s) == [1.5, 3.0, 4.5, 6.0, 7 + 1.5]
    down = part_numbers(decoded(key_order="descending").schedule)
    assert down[0, :7].tolist() == [2, 2, 2, 1, 1, 0, 0]
    assert page_edges(decoded(page=0).schedule) == page_edges(decoded(page=1).schedule) == []
    assert part_edges(decoded(splits=1).schedule) == []


def test_a_step_says_which_part_it_is_of():
    trace = decoded()
    walk = Steps(trace)
    parts = [f"part {p + 1} of 3" for p, visits in enumerate((2, 2, 3)) for _ in range(visits + 1)]
    parts += [f"part {p + 1} of 3" for p in range(3) for _ in range(2)]
    assert walk.notes == [*parts, "3 parts merged", "3 parts merged"]
    assert 2 * walk.flops[-1] == trace.flops()  # of two key heads
    assert set(Steps(decoded(splits=1)).notes) == set(Steps(cases.trace()).notes) == {""}


def test_tile_map():
    ax = viz.tile_map(decoded(), color="block")
    grid = np.ma.filled(ax.images[0].get_array(), -1)
    assert grid.tolist() == part_numbers(decoded().schedule).tolist()
    drawn = {c.get_label(): c for c in ax.collections}
    ends = [tuple(path.vertices[0]) for path in drawn["parts"].get_paths()]
    assert ends == [(1.5, -0.5), (3.5, -0.5), (7.5, 0.5), (8.5, 0.5)]
    ticks = [path.vertices[0][0] for path in drawn["pages"].get_paths()]
    assert ticks == [x - 0.5 for x in (1.5, 3.0, 4.5, 6.0, 8.5)]
    said = [t.get_text() for t in ax.get_legend().get_texts()]
    assert said[-2:] == ["6 blocks, one per split", "start of a page of 12 keys"]
    plain = {c.get_label(): c for c in viz.tile_map(cases.trace()).collections}
    assert not plain["parts"].get_paths()
    assert not plain["pages"].get_paths()


def test_animation_and_page_show_parts_and_pages(tmp_path):
    trace = decoded()
    film = Film(trace)
    scene = film.scenes[0]
    film.frame(4)
    assert scene.stage_text.get_text().startswith("stage split, part 2 of 3 ·")
    film.frame(len(film) - 1)
    assert scene.stage_text.get_text().startswith("stage combine, 3 parts merged ·")
    lines = [a for a in scene.artists if type(a).__name__ == "LineCollection"]
    parts, pages = (a for a in lines if a.get_zorder() > 1)  # above the lines between tiles
    assert len(parts.get_segments()) == 4
    assert len(pages.get_segments()) == 5 * 3  # on K, V and the table
    film.close()
    data = json.loads(viz.page(trace).html.split('id="data">')[1].split("</")[0])
    pane = data["panes"][0]
    assert pane["parts"] == [list(edge) for edge in part_edges(trace.schedule)]
    assert pane["pages"] == page_edges(trace.schedule)
    assert set(pane["notes"]) == set(Steps(trace).notes)
    trace.save(tmp_path / "t.npz")
    again = Trace.load(tmp_path / "t.npz")
    assert (Steps(again).notes, page_edges(again.schedule)) == (Steps(trace).notes, pane["pages"])
    trace.to_perfetto(tmp_path / "t.json")
    assert "combine" in (tmp_path / "t.json").read_text()


def test_m_and_l_begin_anew_with_each_part():
    q, k = np.zeros((2, 4, 1, 8), np.float32), np.zeros((2, 2, 60, 8), np.float32)
    with pytest.raises(UnsupportedError, match="flash-decode forward"):
        viz.row_statistics(decoded(page=0), q, k)
