"""The page: what is embedded, and how it behaves in a real browser."""

import base64
import json
import re
import time
import tracemalloc
from functools import cache

import chromium
import numpy as np
import pytest
import viz_cases as cases
from chromium import until

import flashsim
from flashsim import viz
from flashsim.errors import OptionError
from flashsim.trace.steps import Steps
from flashsim.trace.trace import Trace
from flashsim.viz import palette
from flashsim.viz.data.diagram import tile_kinds
from flashsim.viz.player.page import embedded_json
from flashsim.viz.style import human

pytestmark = pytest.mark.promise("pictures show the counts")

NASTY = "</script><script>window.bad=1</script><img src=x onerror=window.bad=1>"


def payload(page):
    text = re.search(r'id="data">(.*?)</script>', page.html, re.S).group(1)
    return json.loads(text)


def column(packed):
    kinds = {"u1": "<u1", "u2": "<u2", "u4": "<u4", "i1": "<i1", "i2": "<i2", "i4": "<i4"}
    return np.frombuffer(base64.b64decode(packed["data"]), kinds[packed["type"]])


def page_with_statistics():
    q, k, _ = cases.arrays()
    stats = viz.row_statistics(cases.trace(), q, k, row=95)
    return viz.page(cases.trace(), statistics=stats)


# -- what is embedded ------------------------------------------------------------------------------


@pytest.mark.parametrize(("algorithm", "direction"), cases.PASSES)
def test_embedded_events_are_the_walk(algorithm, direction):
    walk = Steps(cases.trace(algorithm, direction))
    pane = payload(viz.page(walk.trace))["panes"][0]
    for name in ("stage", "op", "tensor", "i", "j"):
        assert np.array_equal(column(pane["events"][name]), walk.events[name])
    sizes = np.array(pane["sizes"])[column(pane["events"]["size"])]
    assert np.array_equal(sizes, walk.events["bytes"])
    flops = np.array(pane["flops"])[column(pane["price"])]
    assert flops.sum() == walk.trace.flops()


def test_kinds_of_tiles():
    pane = payload(viz.page(cases.trace()))["panes"][0]
    kinds = column(pane["stages"][0]["kinds"]).reshape(6, 6)
    assert np.array_equal(kinds, np.tril(np.ones((6, 6)), -1) + 2 * np.eye(6))


def test_nothing_comes_from_elsewhere():
    html = viz.page(cases.trace()).html
    assert "default-src 'none'" in html
    assert not re.search(r"(?:src|href)=\"(?!data:)", html)
    assert "http://" not in html
    assert "https://" not in html


def test_strings_cannot_end_the_script():
    text = embedded_json({"label": NASTY + "<!--\u2028"})
    assert not set(text) & set("<>&\u2028")
    assert json.loads(text) == {"label": NASTY + "<!--\u2028"}


def test_file_and_notebook(tmp_path):
    page = viz.page(cases.result(), tmp_path / "walk.html", max_mb=1)
    assert (tmp_path / "walk.html").read_text(encoding="utf-8") == page.html
    frame = page._repr_html_()
    assert frame.startswith('<iframe srcdoc="&lt;!DOCTYPE html&gt;')
    assert 'sandbox="allow-scripts"' in frame


def test_plays_in_a_notebook(browser, tmp_path):
    host = tmp_path / "cell.html"
    # JupyterLab shows a cell's frame only after its page has run.
    cell = viz.page(cases.result())._repr_html_()
    host.write_text(f"<!DOCTYPE html><div id='cell' style='display:none'>{cell}</div>")
    tab = browser.new_page(viewport={"width": 900, "height": 900})
    problems = []
    tab.on("console", lambda message: problems.append(message.text))
    tab.on("pageerror", lambda error: problems.append(str(error)))
    tab.goto(host.as_uri())
    inside = tab.frames[-1]
    until(inside, "window.player")
    tab.evaluate("document.getElementById('cell').style.display = 'block'")
    frame = tab.frame_locator("iframe")
    frame.get_by_label("Step forward").click()
    expect = f"step 2 of {len(Steps(cases.trace()))}"
    frame.get_by_text(expect).wait_for(timeout=5000)
    until(inside, "player.panes[0].diagram.box.w > 300")
    inside.evaluate("document.getElementById('panes').style.width = '280px'")  # no resize event
    until(inside, "player.panes[0].canvas.width === 280")
    tab.close()
    assert not problems


@cache
def long_run():
    """One of a hundred thousand events."""
    return flashsim.run(*cases.arrays(n=2112, d=2), tiling=flashsim.Tiling(16, 16), trace=True)


def test_size_of_a_hundred_thousand_events():
    run = long_run()
    assert run.trace.n_events > 100_000
    assert len(viz.page(run).html) < 5_000_000


# -- in a browser ----------------------------------------------------------------------------------


def fine_grid():
    """A file of a few events on a grid of 400 million tiles."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((20_000, 1), dtype=np.float32) for _ in range(3))

    def corner(machine):
        with machine.stage("corner") as sram, sram.step(0), sram.visit(0, 0):
            everything = slice(0, 20_000)
            sram.store(machine.hbm.O, everything, sram.load(machine.hbm.Q, everything))

    return flashsim.simulate(corner, q, k, v, tiling=flashsim.Tiling(1, 1)).trace


def test_a_player_that_would_be_too_large_is_refused_before_it_is_built():
    trace = fine_grid()
    tracemalloc.start()
    try:
        with pytest.raises(OptionError, match=r"about 533 MB .*over 32 MB: .*max_mb=534"):
            viz.page(trace)
        with pytest.raises(OptionError, match=r"20,000 x 20,000 tiles is too fine to draw"):
            viz.tile_map(trace)
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


@pytest.fixture
def show(browser, tmp_path, request):
    ready = "window.player && !player.dirty"
    with chromium.tabs(browser, tmp_path, request.node.name, ready) as opened:
        yield lambda page, **more: opened(page.html, **more)


def settled(tab):
    until(tab, "!player.dirty")
    return tab


def status(tab):
    return settled(tab).inner_text("#status")


def cell(tab, i, j):
    """Where the middle of a score tile is drawn."""
    box = tab.evaluate("([i, j]) => player.panes[0].diagram.cell(i, j)", [i, j])
    return {"x": box["x"] + box["w"] / 2, "y": box["y"] + box["h"] / 2}


def counter(tab, name):
    return settled(tab).locator(".counters div", has_text=name).locator("b").inner_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_buttons_scrub_and_keys(show, scheme):
    tab = show(page_with_statistics(), scheme=scheme)
    assert tab.evaluate("player.theme") == scheme
    total = len(Steps(cases.trace()))
    assert status(tab) == f"step 1 of {total}, stage forward, tile (0, 0)"
    tab.click("#next")
    assert status(tab).startswith("step 2 of")
    assert "end of row 0" in status(tab)
    tab.click("#back")
    assert status(tab).startswith("step 1 of")
    tab.click("#last")
    assert status(tab).startswith(f"step {total} of")
    assert counter(tab, "loaded") == human(cases.trace().bytes("load"))
    tab.fill("#scrub", "9")
    assert status(tab).startswith("step 10 of")
    tab.keyboard.press("Home")
    steps = {"ArrowRight": 2, "Shift+ArrowRight": 12, "ArrowLeft": 11, "End": total}
    for key, step in steps.items():
        tab.keyboard.press(key)
        assert status(tab).startswith(f"step {step} of"), key
    tab.keyboard.press("t")
    assert tab.evaluate("player.theme") != scheme
    tab.keyboard.press("End")
    label = settled(tab).evaluate("player.panes[0].statisticsLabel.textContent")
    stats = viz.row_statistics(cases.trace(), *cases.arrays()[:2], row=95)
    m, alpha, l = stats.m[-1], stats.alpha[-1], stats.l[-1]
    assert label.endswith(f"row 95: m = {m:.2f}, α = {alpha:.2f}, l = {l:.2f}")


def test_a_link_opens_the_page_at_a_step(show):
    total = len(Steps(cases.trace()))
    tab = show(viz.page(cases.trace()), at="#step=14")
    assert status(tab).startswith("step 14 of")
    tab.click("#next")
    until(tab, "location.hash === '#step=15'")
    tab.evaluate("location.hash = '#step=3'")  # as a reader changes it
    until(tab, "player.time === 2")
    assert status(tab).startswith("step 3 of")
    for asked, step in ((9999, total), (0, 1)):  # the nearest; the address says so
        tab.evaluate(f"location.hash = '#step={asked}'")
        until(tab, f"location.hash === '#step={step}'")
        assert status(tab).startswith(f"step {step} of")
    plain = show(viz.page(cases.trace()), at="#elsewhere")
    assert status(plain).startswith("step 1 of")
    assert plain.evaluate("location.hash") == "#elsewhere"


def test_the_first_step_says_that_nothing_was_loaded_yet(show):
    """FlashAttention-1 begins by writing O, l and m: 0 B loaded, nothing on chip."""
    tab = show(viz.page(cases.trace("flash1")))
    assert counter(tab, "loaded") == counter(tab, "computed") == "none yet"
    assert counter(tab, "FLOP per byte") == "–"
    assert "SRAM is empty in this step" in tab.evaluate("player.panes[0].sramLabel.textContent")


ROW_AT = r"Number(/row (\d+)/.exec(player.panes[0].statisticsLabel.textContent)[1])"


@pytest.mark.parametrize("algorithm", ["flash1", "flash2"])
def test_the_statistics_follow_the_row_at_hand_or_the_one_clicked(show, algorithm):
    trace = cases.trace(algorithm, causal=False)
    stats = viz.row_statistics(trace, *cases.arrays()[:2])
    walk, tab = Steps(trace), show(viz.page(trace, statistics=stats))
    rows = {tile: one.row for tile, one in stats.by_tile.items()}
    assert len(rows) == trace.schedule.t_r
    for step in walk.visits[::5].tolist():
        tab.evaluate(f"player.go({step})")
        assert settled(tab).evaluate(ROW_AT) == rows[int(walk.i[step])]
        assert "not reached yet" not in tab.evaluate("player.panes[0].statisticsLabel.textContent")
    tab.click("canvas.diagram", position=cell(tab, 2, 4))
    for step in (0, len(walk) - 1):
        tab.evaluate(f"player.go({step})")
        assert settled(tab).evaluate(ROW_AT) == rows[2]
    tab.click("canvas.diagram", position=cell(tab, 2, 4))
    assert settled(tab).evaluate(ROW_AT) != rows[2]


@pytest.mark.parametrize("height", [720, 800])
@pytest.mark.parametrize("panes", [1, 2])
def test_nothing_lies_under_the_bar(show, panes, height):
    """Of what can be seen without scrolling nothing is cut: no text, chart or diagram."""
    trace = cases.trace(n=512)
    stats = viz.row_statistics(trace, *cases.arrays(512)[:2])
    data = {"one": trace, "two": cases.trace("flash1", n=512)} if panes == 2 else trace
    tab = show(viz.page(data, statistics=stats if panes == 1 else None), height=height)
    cut = tab.evaluate("""() => {
        const bar = document.querySelector("footer").getBoundingClientRect().top, found = [];
        for (const x of document.querySelectorAll(".facts *, canvas, .about, #title")) {
            const box = x.getBoundingClientRect();
            if (box.top < bar && box.bottom > bar) found.push(x.className || x.tagName);
        }
        return [found, document.elementFromPoint(5, bar + 5).closest("footer") !== null]; }""")
    assert cut == [[], True]


def test_two_traces_on_a_slide_show_their_sram(show):
    tab = show(viz.page([cases.trace("flash1"), cases.trace()]), width=1168, height=545)
    bottom = "document.querySelectorAll('.sram')[1].getBoundingClientRect().bottom"
    assert tab.evaluate(f"{bottom} <= document.querySelector('footer').offsetTop")


@pytest.mark.parametrize(("width", "height"), [(360, 740), (768, 700), (1366, 768)])
@pytest.mark.parametrize("how", ["button", "key", "summary"])
def test_help_opens_clear_of_the_bar(show, width, height, how):
    tab = show(page_with_statistics(), width=width, height=height)
    tab.evaluate("document.querySelector('main').scrollTo(0, 0)")
    if how == "button":
        tab.click("#help")
    elif how == "key":
        tab.keyboard.press("?")
    else:
        tab.evaluate("document.querySelector('#how summary').click()")
    until(tab, "by('how').open && document.querySelector('main').scrollTop > 0")
    seen = tab.evaluate(
        """() => { const box = by("how").getBoundingClientRect(), bar = document.querySelector(
        "footer").getBoundingClientRect(), main = document.querySelector("main"); return [
        box.top, box.bottom, bar.top, box.height, main.getBoundingClientRect().top]; }"""
    )
    top, bottom, bar, high, begin = seen  # all of it, or its beginning
    assert bottom <= bar or (high > bar - begin and -1 <= top - begin < 20)


def test_corners_of_a_window(show):
    run = flashsim.run(*cases.arrays(), window=(40, 20), tiling=cases.TILING, trace=True)
    tab = show(viz.page(run))
    kinds = tile_kinds(run.trace.schedule)
    assert {1, 2, 3} <= set(kinds.ravel())
    # Of each tile: what stands just inside its upper right and its lower left corner.
    inside = """() => {
        const d = player.panes[0].diagram, w = d.canvas.width, r = w / d.canvas.clientWidth;
        const pixels = d.context.getImageData(0, 0, w, d.canvas.height).data;
        const at = (x, y) => {
            const n = 4 * (Math.round(y * r) * w + Math.round(x * r));
            return [...pixels.slice(n, n + 3)]; };
        return [0, 1, 2, 3, 4, 5].map((i) => [0, 1, 2, 3, 4, 5].map((j) => {
            const c = d.cell(i, j);
            return [at(c.x + c.w - 3, c.y + 2), at(c.x + 2, c.y + c.h - 3)];
        })); }"""
    accent = [int(palette.THEMES["light"].accent[n : n + 2], 16) for n in (1, 3, 5)]
    tab.evaluate("player.go(player.length - 1)")
    settled(tab)
    colors = tab.evaluate(inside)
    for (i, j), kind in np.ndenumerate(kinds[:5]):  # the last row is outlined
        marked = [color == accent for color in colors[i][j]]
        assert marked == [kind in (2, 4), kind in (3, 4)], (i, j, kind)


def test_play_pause_and_speed(show):
    trace = cases.trace(n=512)  # long enough not to end before it is paused, however slow we are
    tab = show(viz.page(trace))
    tab.select_option("#speed", "10")
    tab.click("#play")
    assert tab.get_attribute("#play", "aria-pressed") == "true"
    until(tab, "player.time > 0")
    tab.keyboard.press("Space")  # the button has the focus: Space presses it
    here = tab.evaluate("player.time")
    assert tab.evaluate("player.playing") is False
    time.sleep(0.15)
    assert tab.evaluate("player.time") == here
    tab.keyboard.press("+")
    assert tab.input_value("#speed") == "20"
    tab.evaluate("player.setSpeed(1200); player.play(true)")
    until(tab, "!player.playing")
    assert tab.evaluate("player.time") == len(Steps(trace)) - 1


@pytest.mark.parametrize(("algorithm", "direction"), cases.PASSES)
def test_every_step_shows_the_walks_numbers(show, algorithm, direction):
    walk = Steps(cases.trace(algorithm, direction))
    tab = show(viz.page(walk.trace))
    js = tab.evaluate(
        """() => { const w = player.panes[0].walk, n = w.buffers.length; return {
        moved: [...Array(w.steps).keys()].map((s) => w.moved.map((m) => m[s])),
        flops: [...w.flops], buffers: w.buffers, order: [...w.order],
        held: [...Array(w.steps).keys()].map((s) => [...w.held.slice(s * n, s * n + n)])}; }"""
    )
    assert js["moved"] == walk.hbm_bytes.tolist()
    assert js["flops"] == walk.flops.tolist()
    assert js["buffers"] == walk.buffers
    assert js["held"] == walk.on_chip.tolist()
    assert js["order"] == walk.order.tolist()


def test_playing_and_scrubbing_paint_the_same(show):
    tab = show(viz.page(cases.trace("flash2-fused", "backward")))
    # In one call each: a frame drawn in between would paint everything afresh.
    paint = """(times) => {
        for (const t of times) { player.move(t); player.draw(); }
        return [...player.panes[0].diagram.grid.data.data];
    }"""
    assert tab.evaluate(paint, list(range(26))) == tab.evaluate(paint, [3, 25])


def test_click_a_tile(show):
    tab = show(viz.page(cases.trace(causal=False)))
    tab.click("canvas.diagram", position=cell(tab, 2, 4))
    text = settled(tab).inner_text("#selected")
    assert "Tile (2, 4), full; stage forward: visited at step 19" in text
    assert "load K" in text
    assert "512 B" in text
    strip = tab.evaluate("""() => {
        const s = player.panes[0].diagram.strips.find((s) => s.name === "K");
        return {x: s.box.x + s.box.w * 0.75, y: s.box.y + 3}; }""")
    tab.click("canvas.diagram", position=strip)
    text = settled(tab).inner_text("#selected")
    assert "K, tile 4" in text
    assert "load K × 6" in text
    assert "3,072 B" in text
    tab.keyboard.press("Enter")
    assert "Tile (0, 0)" in settled(tab).inner_text("#selected")


def test_compare_two(show):
    pair = {"standard": cases.trace("standard"), "flash": cases.trace("flash2")}
    tab = show(viz.page(pair))
    assert tab.locator("canvas.diagram").count() == 2
    tab.evaluate("player.go(10)")
    assert tab.evaluate("player.panes.map((p) => p.step)") == [10, 10]
    tab.select_option("#clock", "bytes")
    tab.evaluate("player.go(player.length - 1)")
    ends = [len(Steps(t)) - 1 for t in pair.values()]
    assert tab.evaluate("player.panes.map((p) => p.step)") == ends
    tab.evaluate("player.go(12)")
    moved = tab.evaluate("player.panes.map((p) => p.walk.bytes(p.step))")
    target = tab.evaluate("13 / player.length * player.most")
    assert all(m <= target for m in moved)
    tab.keyboard.press("]")
    assert "standard: " in status(tab)
    assert "stage softmax" in status(tab)


def test_numbers_are_written_as_in_the_plots(show):
    tab = show(viz.page(cases.trace()))
    values = [0, 999, 1000, 999_499, 999_500, 999_999, 9_996_000, 17_000_000, 4_456_448, 10**15]
    shown = tab.evaluate("(values) => values.map((n) => human(n))", values)
    assert shown == [human(value) for value in values]


BARS = """(step) => { player.go(step); player.draw(); return player.panes.map((p) => ({
    width: p.sram.clientWidth, held: p.walk.held[p.step * p.walk.buffers.length],
    first: p.blocks[0].getBoundingClientRect().width, label: p.sramLabel.textContent,
    left: p.sram.getBoundingClientRect().left,
    end: Math.max(...p.blocks.map((b) => b.getBoundingClientRect().right)),
    right: p.sram.getBoundingClientRect().right,
    mark: p.mark.hidden ? null : p.mark.offsetLeft / p.sram.clientWidth })); }"""


def test_sram_bars_of_two_traces_share_one_scale(show):
    device = flashsim.Device.get("H100").with_sram(15_000)  # three times one peak, not the other
    how = {"tiling": cases.TILING, "device": device, "trace": True}
    runs = [flashsim.run(*cases.arrays(), algorithm=x, **how) for x in ("flash2", "standard")]
    peaks = [run.trace.peak_sram() for run in runs]
    assert peaks[0] < 5000 < peaks[1]
    bars = show(viz.page(runs)).evaluate(BARS, 3)
    scales = [bar["held"] / (bar["first"] / bar["width"]) for bar in bars]
    assert scales == pytest.approx([15_000, 15_000], rel=0.02)


@pytest.mark.parametrize("capacity", [6_000, 14_000, 30_000])
def test_the_sram_bar_is_a_share_of_the_device(show, capacity):
    device = flashsim.Device.get("H100").with_sram(capacity)
    run = flashsim.run(*cases.arrays(), tiling=cases.TILING, device=device, trace=True)
    tab = show(viz.page(run))
    (bar,) = tab.evaluate(BARS, 3)
    share = Steps(run.trace).on_chip[3].sum() / capacity
    assert (bar["end"] - bar["left"]) / bar["width"] == pytest.approx(share, abs=0.01)
    assert f"{100 * share:.1f} % of a block's {capacity:,} B" in bar["label"]
    assert tab.inner_text(".names").split() == Steps(run.trace).buffers


def test_registers_come_on_top_of_shared_memory(show):
    trace = flashsim.load_sample_trace("h200-backward")
    held = Steps(trace).on_chip.sum(axis=1)
    assert held.max() == trace.peak_sram() == 328_192
    (bar,) = show(viz.page(trace)).evaluate(BARS, int(held.argmax()))
    said = "SRAM holds 328,192 B: a block's 232,448 B of shared memory, and registers (H200)"
    assert bar["label"] == said
    assert bar["end"] <= bar["right"]  # nothing is cut off
    assert bar["mark"] == pytest.approx(232_448 / 328_192, abs=0.01)
    (plain,) = show(viz.page(cases.trace())).evaluate(BARS, 0)
    assert plain["mark"] is None


@pytest.mark.parametrize("width", [360, 1920])
def test_narrow_and_wide(show, width):
    tab = show(viz.page(cases.trace(direction="backward")), width=width, height=800)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.evaluate("player.panes[0].diagram.box.w") > 80
    small = tab.evaluate(
        "[...document.querySelectorAll('button, select')].filter((b) => b.offsetParent)"
        ".map((b) => Math.min(b.offsetWidth, b.offsetHeight))"
    )
    assert min(small) >= 36  # large enough for a finger


def test_injected_strings_do_nothing(show):
    source = cases.trace()
    trace = Trace(
        source.problem, source.device, source.algorithm, source.direction, NASTY, source.stages,
        {NASTY: NASTY},
    )  # fmt: skip
    tab = show(viz.page({NASTY: trace}, title=NASTY))
    assert tab.evaluate("window.bad") is None
    assert tab.inner_text("#title") == NASTY
    assert tab.title() == NASTY
    assert NASTY in tab.text_content("#provenance")


def test_controls_have_names(show):
    tab = show(viz.page([cases.trace("flash1"), cases.trace()]))
    unnamed = tab.evaluate(
        """() => [...document.querySelectorAll('button, select, input, canvas, [role=img]')]
        .filter((e) => !e.getAttribute('aria-label') && !e.closest('label'))
        .map((e) => e.outerHTML)"""
    )
    assert unnamed == []
    assert tab.get_attribute("html", "lang") == "en"


def test_a_hundred_thousand_events_open_and_step(show):
    run = long_run()
    tab = show(viz.page(run))
    tab.evaluate("player.go(9000)")
    settled(tab)
    tab.evaluate(
        """() => { for (let k = 0; k < 50; k++) {
            player.move(player.time + 1);
            player.draw();
        } }"""
    )
    assert tab.evaluate("player.time") == 9050
    assert tab.evaluate("player.panes[0].walk.op.length") == len(Steps(run.trace).events)
