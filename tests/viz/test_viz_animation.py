"""Animations: the figure's artists step by step, and files that open."""

import base64
import hashlib
import html
import re
import shutil
import subprocess
from itertools import pairwise

import chromium
import numpy as np
import pytest
import viz_cases as cases
from overlaps import overlaps
from PIL import Image

import flashsim
from flashsim import viz
from flashsim.errors import BackendUnavailable, OptionError
from flashsim.trace.steps import Steps
from flashsim.viz import palette
from flashsim.viz.film.animation import Film, frame_steps

pytestmark = pytest.mark.promise("pictures show the counts")


#: The endings of animations; a video needs ffmpeg.
FFMPEG = pytest.mark.skipif(shutil.which("ffmpeg") is None, reason="no ffmpeg")
ENDINGS = ("gif", pytest.param("mp4", marks=FFMPEG), "html")


def statistics():
    q, k, _ = cases.arrays()
    return viz.row_statistics(cases.trace(), q, k, row=95)


def bytes_of(color):
    return tuple(int(color[n : n + 2], 16) for n in (1, 3, 5))


def test_frames_move_the_same_artists():
    film = Film(cases.trace(), statistics=statistics())
    scene = film.scenes[0]
    before = [id(a) for panels in film.panels for panel in panels for a in panel.artists]
    children = len(film.figure.findobj())
    film.frame(0)
    boxes = [scene.current.get_bbox().bounds]
    film.frame(5)
    boxes.append(scene.current.get_bbox().bounds)
    assert boxes[0] != boxes[1]
    assert before == [id(a) for panels in film.panels for panel in panels for a in panel.artists]
    assert children == len(film.figure.findobj())


@pytest.mark.parametrize(("algorithm", "direction"), cases.PASSES)
def test_each_algorithm_walks_to_its_end(algorithm, direction):
    trace = cases.trace(algorithm, direction)
    film = Film(trace, max_frames=4)
    pictures = [film.frame(n) for n in range(len(film))]
    assert len(film) == 4
    assert pictures[0].shape == (540, 960, 3)
    assert all((a != b).any() for a, b in pairwise(pictures))
    counters = [text.get_text() for text in film.panels[0][1].values]
    scale = {"kB": 1e3, "MB": 1e6}
    number, unit = counters[0].split()
    assert float(number) * scale[unit] == pytest.approx(trace.bytes("load"), rel=0.01)


def test_the_grid_fills_in():
    film = Film(cases.trace())
    grid = film.scenes[0].grid
    panel, walk = bytes_of(palette.THEMES["light"].panel), film.scenes[0].walk
    film.frame(0)
    empty = (grid.get_array() == panel).all(axis=2)
    assert not empty[0, 0]
    assert empty[np.tril_indices(6)].sum() == 20  # of 21 tiles
    film.frame(len(film) - 1)
    assert not (grid.get_array() == panel).all(axis=2).any()
    assert len(walk) == len(film)


def test_tiles_in_flight_carry_their_tensors_colour():
    film = Film(cases.trace())
    film.frame(0)
    shown = [t for t in film.scenes[0].tiles if t.get_width() > 0]
    colors = {tuple(round(c * 255) for c in t.get_facecolor()[:3]) for t in shown}
    assert colors == {bytes_of(palette.color(name)) for name in "QKV"}


def test_sram_bar_holds_what_the_walk_says():
    film = Film(cases.trace())
    film.frame(3)
    scene = film.scenes[0]
    widths = dict(zip(scene.walk.buffers, (b.get_width() for b in scene.bars), strict=True))
    assert widths == dict(zip(scene.walk.buffers, scene.walk.on_chip[3].tolist(), strict=True))


@pytest.mark.parametrize("capacity", [6_000, 14_000, 30_000])  # of which 4,672 B are held
def test_the_sram_bar_is_a_share_of_the_device(capacity):
    device = flashsim.Device.get("H100").with_sram(capacity)
    run = flashsim.run(*cases.arrays(), tiling=cases.TILING, device=device, trace=True)
    film = Film(run)
    (scene,) = film.scenes
    scene.update(3)
    held = int(scene.walk.on_chip[3].sum())
    assert scene.bars[0].axes.get_xlim() == (0, capacity)
    assert max(bar.get_x() + bar.get_width() for bar in scene.bars) == held
    said = f"SRAM of {run.trace.device.name}: {held:,} B, {held / capacity:.0%}"
    assert scene.sram_text.get_text() == said


def test_registers_come_on_top_of_shared_memory():
    trace = flashsim.load_sample_trace("h200-backward")
    film = Film(trace, max_frames=1)
    (scene,) = film.scenes
    held = scene.walk.on_chip.sum(axis=1)
    scene.update(int(held.argmax()))
    assert held.max() == trace.peak_sram() == scene.full > trace.device.sram_bytes
    assert scene.sram_text.get_text() == "SRAM 232,448 B + registers 95,744 B"
    last = scene.bars[-1]
    assert last.get_x() + last.get_width() <= scene.bars[0].axes.get_xlim()[1]


def test_long_labels_stay_in_their_half():
    pair = {f"{n} " + "a label too long for half a slide " * 2: cases.trace() for n in (1, 2)}
    film = Film(pair)
    for panels in film.panels:
        counters = panels[1]
        ax = counters.values[0].axes
        room = ax.get_window_extent()
        static = [text for text in ax.texts if text not in counters.values]
        assert max(text.get_window_extent().x1 for text in static[:2]) <= room.x1 + 1


@pytest.mark.parametrize("names", [["flash2"], ["flash1", "flash2"]])
@pytest.mark.parametrize("kv_heads", [2, 8])
def test_texts_of_a_backward_pass_do_not_touch(names, kv_heads):
    problem = flashsim.Problem(64, head_dim=8, heads=8, kv_heads=kv_heads)
    film = Film([flashsim.count(problem, algorithm=a, direction="backward") for a in names])
    film.frame(len(film) // 2)
    assert overlaps(film.figure) == []
    for scene in film.scenes:
        below = [t.get_window_extent() for t in scene.ax.texts if t.get_va() == "top"][:-1]
        edges = sorted((box.x0, box.x1) for box in below)
        assert all(left[1] < right[0] for left, right in pairwise(edges))


def test_a_label_that_is_no_math_is_written_as_it_stands():
    film = Film({r"$\frac$": cases.trace()})
    assert r"$\frac$" in [text.get_text() for text in film.panels[0][1].values[0].axes.texts]
    film.frame(0)


def test_says_what_lies_in_hbm():
    words = []
    for name in ("flash2", "standard"):
        film = Film(cases.trace(name))
        film.frame(0)
        words.append(film.scenes[0].stage_text.get_text())
    assert words == ["stage forward · HBM: the strips", "stage scores · HBM: the strips, S, P"]


def test_statistics_follow_the_row_tile_at_hand():
    stats = viz.row_statistics(cases.trace(), *cases.arrays()[:2])
    film, walk = Film(cases.trace(), statistics=stats), Steps(cases.trace())
    panel = film.panels[0][-1]
    for step in walk.visits[::3].tolist():
        panel.update(step)
        row = stats.by_tile[int(walk.i[step])]
        seen = int((row.steps <= step).sum())
        assert panel.text.get_text().startswith(f"row {row.row}: m = {row.m[seen - 1]:.2f}")
        assert panel.lines[0].get_ydata().tolist() == row.m[:seen].tolist()


def test_statistics_grow():
    film, stats = Film(cases.trace(), statistics=statistics()), statistics()
    panel = film.panels[0][2]
    film.frame(len(film) - 1)
    for line, values in zip(panel.lines, (stats.m, stats.alpha, stats.l), strict=True):
        assert list(line.get_ydata()) == values.tolist()
    assert f"α = {stats.alpha[-1]:.2g}" in panel.text.get_text()
    chart = panel.lines[2].axes  # numbered
    assert [text.get_text() for text in chart.get_xticklabels()] == [str(j) for j in stats.j]
    assert chart.get_xlabel() == "key tile j"
    film.frame(0)
    assert len(panel.lines[0].get_ydata()) == 0


def test_clocks():
    walks = [Steps(cases.trace("standard")), Steps(cases.trace("flash2"))]
    steps = frame_steps(walks, "steps", 10_000)
    assert (steps[:20, 0] == steps[:20, 1]).all()
    assert steps[-1].tolist() == [len(walks[0]) - 1, len(walks[1]) - 1]
    by_bytes = frame_steps(walks, "bytes", 10_000)
    moved = [walk.hbm_bytes.sum(axis=1) for walk in walks]
    middle = by_bytes[len(by_bytes) // 8]
    assert moved[0][middle[0]] == pytest.approx(moved[1][middle[1]], rel=0.2)
    assert by_bytes[-1].tolist() == steps[-1].tolist()


def test_every_frame_of_a_gif_is_whole(tmp_path):
    """Pixels that stay are left out of the file; what a viewer shows must not miss them."""
    path = viz.animate(cases.trace(), tmp_path / "walk.gif", max_frames=6, fps=10)
    film = Film(cases.trace(), max_frames=6)
    with Image.open(path) as gif:
        assert gif.n_frames == 6
        for number, expected in enumerate(film.frames()):
            gif.seek(number)
            assert gif.info["duration"] == (100 if number < 5 else 2500)
            off = np.abs(np.asarray(gif.convert("RGB")).astype(int) - expected).max(axis=2)
            assert np.mean(off > 40) < 0.002  # edges of text take the nearest colour
        colors = {c for _, c in gif.convert("RGB").getcolors(1 << 20)}
    assert {bytes_of(palette.color("O")), bytes_of(palette.THEMES["light"].accent)} <= colors


def test_what_is_in_flight_is_listed():
    film = Film(cases.trace(direction="backward"))
    moves = film.panels[0][2]
    step = next(n for n in range(len(film)) if len(film.scenes[0].walk.moves(n)) >= 4)
    film.frame(step)
    listed = [name.get_text() for _, name, _ in moves.rows if name.get_visible()]
    events = film.scenes[0].walk.moves(step)
    assert len(listed) == len(events)
    assert {text.split()[0] for text in listed} <= {"load", "store", "reduce"}


def test_two_side_by_side(tmp_path):
    film = Film([cases.trace("standard"), cases.trace("flash2")])
    assert film.scenes[0].full == film.scenes[1].full  # one scale of SRAM
    pair = {"a": cases.trace("flash1"), "b": cases.trace("flash2")}
    path = viz.animate(pair, tmp_path / "two.gif", max_frames=3, clock="bytes", theme="dark")
    with Image.open(path) as gif:
        assert gif.n_frames == 3


@pytest.mark.parametrize("ending", ENDINGS)
def test_an_animation_shows_itself(ending, tmp_path):
    path = viz.animate(cases.trace(), tmp_path / f"walk.{ending}", max_frames=5)
    assert path == tmp_path / f"walk.{ending}"
    cell = path._repr_html_()
    shown = {"gif": '<img src="data:image/gif;base64,', "mp4": "<video src="}
    assert cell.startswith(shown.get(ending, "<iframe srcdoc="))
    data = cell.split('"')[1]
    if ending == "html":
        assert html.unescape(data) == path.read_text()
    else:
        assert base64.b64decode(data.partition("base64,")[2]) == path.read_bytes()
    if ending == "mp4":
        probe = ["ffmpeg", "-v", "error", "-i", str(path), "-f", "null", "-"]
        assert subprocess.run(probe, capture_output=True, check=True).stderr == b""


def test_mp4_that_ffmpeg_refuses(tmp_path, monkeypatch):
    (tmp_path / "ffmpeg").write_text("#!/bin/sh\necho no such codec >&2\nexit 1\n")
    (tmp_path / "ffmpeg").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    with pytest.raises(BackendUnavailable, match="ffmpeg could not write the video: no such codec"):
        viz.animate(cases.trace(), tmp_path / "walk.mp4", max_frames=2)
    assert not list(tmp_path.glob("*walk*"))


def test_html_needs_no_network_and_runs_only_its_own_script(tmp_path):
    text = viz.animate(cases.trace(), tmp_path / "walk.html", max_frames=3).read_text()
    assert text.count('"iVBOR') == 3  # PNG frames
    assert "http" not in text.replace("http-equiv", "")
    policy = re.search(r'content="(default-src [^"]*)"', text)[1]
    assert "unsafe" not in policy
    for kind, tag in (("script", "script"), ("style", "style")):
        inside = re.search(f"<{tag}>(.*?)</{tag}>", text, re.S)[1]
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy


def test_an_arrow_key_moves_an_animation_by_one_frame(browser, tmp_path, request):
    file = viz.animate(cases.trace(), tmp_path / "film.html", max_frames=9)
    with chromium.tabs(browser, tmp_path, request.node.name, "frames.length") as show:
        tab = show(file.read_text(encoding="utf-8"))
        tab.focus("#scrub")
        for key, frame in (("Home", 0), ("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1)):
            tab.keyboard.press(key)
            assert tab.evaluate("at") == frame
        tab.keyboard.press("Space")
        chromium.until(tab, "playing")


@pytest.mark.parametrize("name", ["a$b", "$x_{1$", "100$ and $$"])
def test_a_name_may_hold_dollars(name, tmp_path):
    def mine(machine):
        with machine.stage(name) as sram, sram.step(0), sram.visit(0, 0):
            everything = slice(0, 16)
            sram.store(machine.hbm.O, everything, sram.load(machine.hbm.Q, everything))

    mine.__name__ = name
    q, k, v = np.zeros((3, 16, 4), np.float32)
    result = flashsim.simulate(mine, q, k, v, tiling=flashsim.Tiling(16, 16))
    assert viz.animate({name: result}, tmp_path / "walk.gif").stat().st_size


@pytest.mark.parametrize("ending", ["gif", "html"])
def test_what_was_there_stays_until_the_new_file_is_whole(ending, tmp_path, monkeypatch):
    path = tmp_path / f"walk.{ending}"
    path.write_text("before")
    frame, drawn = Film.frame, []

    def interrupted(film, number):
        drawn.append(number)
        if len(drawn) == 3:
            raise KeyboardInterrupt
        return frame(film, number)

    monkeypatch.setattr(Film, "frame", interrupted)
    with pytest.raises(KeyboardInterrupt):
        viz.animate(cases.trace(), path, max_frames=6)
    assert [p.read_text() for p in tmp_path.iterdir()] == ["before"]


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_folder_that_is_missing(ending, tmp_path):
    path = tmp_path / "nowhere" / f"walk.{ending}"
    with pytest.raises(OptionError, match=f"cannot write '.*nowhere/walk.{ending}'.*folder must"):
        viz.animate(cases.trace(), path, max_frames=2)


def test_mp4_without_ffmpeg(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BackendUnavailable, match=r"needs ffmpeg.*write a \.gif or \.html"):
        viz.animate(cases.trace(), tmp_path / "walk.mp4")
