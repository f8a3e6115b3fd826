"""The tile lab: its numbers are `flashsim.count`'s, and it behaves in a real browser."""

import copy
import re
from functools import cache
from pathlib import Path

import chromium
import lab_cases as cases
import pytest
from chromium import until
from commands import ok, refused
from compiled import thorough

import flashsim
from flashsim import Problem, Tiling, viz
from flashsim.problem.hardware import PRESETS
from flashsim.schedule.schedule import Schedule
from flashsim.schedule.tables import FULL
from flashsim.viz.laboratory import lab_page
from flashsim.viz.laboratory.export import payload
from flashsim.viz.laboratory.polynomial import Polynomial
from flashsim.viz.player.page import embedded_json
from flashsim.viz.style import human

pytestmark = pytest.mark.promise("pictures show the counts")

#: All that is compared, of many states at once. BigInt does not pass to Python: numbers below 2**53
#: do, and the states stay below.
COUNT = """(states) => states.map((state) => {
  const whole = (table) => Object.fromEntries(
    Object.entries(table).map(([key, value]) => [key, Number(value)]));
  try {
    const r = count(state), w = r.walk;
    if (!r.fits) return { refused: "SramOverflow" };
    const moved = r.moved.map((x) => [`${x.stage} ${x.op} ${x.tensor}`, x.bytes]);
    return {
      tile: [r.tile.q, r.tile.k], moved: whole(Object.fromEntries(moved)), bytes: Number(r.bytes),
      curve: Number(bytes_of(state).bytes), compulsory: Number(r.compulsory),
      saved: Number(r.saved), flops: whole(r.flops), chip: whole(r.chip), peak: r.peak,
      visits: w.visits, full: w.full, sums: [w.visits, w.row_cols, w.col_rows, w.area],
      tiles: [w.t_r, w.t_c], splits: r.splits, per_sm: r.stages.map((x) => x.per_sm),
      blocks: r.stages[0].serial ? null : r.stages[0].blocks,
    };
  } catch (error) {
    if (!(error instanceof Refusal)) throw error;
    return { refused: error.message };
  }
})"""


@cache
def page():
    return viz.lab()


@pytest.fixture
def show(browser, tmp_path, request):
    """Open the lab."""
    with chromium.tabs(browser, tmp_path, request.node.name, "window.lab && lab.ms > 0") as opened:
        yield lambda at="", height=900, **more: opened(page().html, at, height=height, **more)


@cache
def answers(n=500):
    """Random states, and Python's answers."""
    states = cases.states(n)
    return states, [cases.expected(state) for state in states]


def differ(ours, theirs):
    """The states of which a number differs, or that only one of the two refuses."""
    wrong = []
    for n, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if "refused" in one or "refused" in other:
            if ("refused" in one) != ("refused" in other):
                wrong.append((n, one.get("refused"), other.get("refused")))
            continue
        # A KV-outer loop of FlashAttention-1 has one block per head in the lab.
        same = {**other, "blocks": one["blocks"] if other["blocks"] is None else other["blocks"]}
        if same != {**one, "curve": one["bytes"]}:
            wrong.append((n, one, other))
    return wrong


# -- its numbers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [500, thorough(5000)])
def test_random_problems_are_counted_as_python_counts_them(show, n):
    states, ours = answers(n)
    assert sum("refused" not in one for one in ours) > 0.8 * n
    wrong = differ(ours, show().evaluate(COUNT, states))
    assert not wrong, (len(wrong), states[wrong[0][0]], *wrong[0])


def script(name):
    return Path(lab_page.__file__).with_name(f"{name}.js").read_text(encoding="utf-8")


@pytest.fixture
def counts(browser, tmp_path, request):
    """What the model alone counts, without the page around it: of 250 states."""
    with chromium.tabs(browser, tmp_path, request.node.name, "true") as show:

        def counted(data, program=None):
            tab = show(
                f"<script type='application/json' id='data'>{embedded_json(data)}</script>"
                f"<script>{program or script('tiles')}\n{script('model')}</script>"
            )
            return tab.evaluate(COUNT, answers()[0][:250])

        yield counted


def test_the_model_alone_counts_the_same(counts):
    assert not differ(answers()[1][:250], counts(payload()))


def a_byte_too_many(data):
    """One coefficient of one formula: of K's bytes in FlashAttention-2."""
    stage = data["passes"]["2.2.4"]["flash2 forward"]["stages"][0]
    number = next(size for op, tensor, size in stage["moves"] if (op, tensor) == ("load", "K"))
    term = data["polynomials"][number][0]
    term[0] = str(int(term[0]) + 1)


def another_sum(data):
    """Queries in the place of keys, wherever these are read."""
    first, other = (data["sizes"].index(name) for name in ("row_cols", "col_rows"))
    for terms in data["polynomials"]:
        for term in terms:
            term[1:] = [other if name == first else name for name in term[1:]]


def a_buffer_less(data):
    """FlashAttention-1 forward without its score tile."""
    stage = data["passes"]["4.4.4"]["flash1 forward"]["stages"][1]
    stage["buffers"] = [buffer for buffer in stage["buffers"] if buffer["name"] != "S"]


def another_device(data):
    data["devices"]["T4"]["sram_bytes"] += 16 * 1024


@pytest.mark.parametrize("fault", [a_byte_too_many, another_sum, a_buffer_less, another_device])
def test_a_fault_in_the_export_shows(counts, fault):
    data = copy.deepcopy(payload())
    fault(data)
    assert differ(answers()[1][:250], counts(data))


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("this.n - 1);\n    return begin", "this.n);\n    return begin"),
        ("from(top + shift - reach)", "from(top - reach)"),
        ("Math.floor(processors / blocks)", "Math.floor(processors / blocks + 1)"),
    ],
)
def test_a_fault_in_the_tiles_shows(counts, right, wrong):
    program = script("tiles")
    assert program.count(right) == 1
    assert differ(answers()[1][:250], counts(payload(), program.replace(right, wrong)))


def test_row_tiles_are_those_of_the_schedule(show):
    """A prefix and cells: the tiles, and which are full, of every row tile."""
    same = {"algorithm": "flash2", "direction": "forward", "pack": 0}
    states = cases.states(900, seed=3)
    states = [state | same for state in states if state["mask"] in ("prefix", "cells")]
    assert len(states) > 200
    found = show().evaluate(
        """(states) => states.map((s) => {
        const [grid] = grids(problem(s), { q: s.block_q, k: s.block_k });
        return Array.from({ length: grid.tiles }, (_, i) => grid.tile(i));
        })""",
        states,
    )
    for state, tiles in zip(states, found, strict=True):
        walk = Schedule(cases.problem(state), Tiling(state["block_q"], state["block_k"]))
        ptr, col, kind = walk.row_csr
        assert len(tiles) == walk.t_r
        for i, (height, head, lo, hi, full, from_, to) in enumerate(tiles):
            visited = [*range(head), *range(lo, hi)]
            whole = [*range(full), *range(from_, to)]
            mine = slice(ptr[i], ptr[i + 1])
            assert visited == col[mine].tolist(), state
            assert whole == col[mine][kind[mine] == FULL].tolist(), state
            assert height == walk.rows[i, 1] - walk.rows[i, 0]


def test_formulas_divide_without_a_remainder():
    n, d = Polynomial.named("n"), Polynomial.named("d")
    assert (6 * n * d + 4 * n) // (2 * n) == 3 * d + 2
    assert (n - 1) * (n + 1) == n * n - 1
    assert 1 - n == (n - 1) * -1
    assert repr(2 * n * n + 1) == "1 + 2 n n"
    assert n != "n"
    with pytest.raises(ValueError, match="the divisor 3 must divide 4"):
        (4 * n) // 3
    with pytest.raises(ValueError, match="x not in list"):
        (4 * n) // d
    with pytest.raises(TypeError):
        n < d  # noqa: B015


def test_every_device_and_kernel_tile_is_there():
    data = payload()
    assert set(data["devices"]) == set(PRESETS)
    for name, one in data["devices"].items():
        assert one["sram_bytes"] == PRESETS[name].sram_bytes
        assert all(peak == PRESETS[name].peak(dtype) for dtype, peak in one["peaks"].items())
    assert data["tiles"]["fa3-forward"][128] == ((128, 176), (128, 128))


def test_file_and_errors(tmp_path):
    assert viz.lab(tmp_path / "lab.html").html == (tmp_path / "lab.html").read_text("utf-8")
    assert len(page().html) < 1_000_000
    assert "http://" not in page().html.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in page().html


def test_the_page_of_the_guides_is_this_one():
    kept = Path(__file__).parents[2] / "docs/gallery/lab.html"
    assert kept.read_text("utf-8") == page().html, "run: python docs/gallery.py lab.html"


# -- its page --------------------------------------------------------------------------------------


CARDS = """[...document.querySelectorAll("#A .cards div")].map((x) => [
    x.querySelector("dt").textContent, x.querySelector("dd").firstChild.textContent])"""


def cards(tab):
    return dict(tab.evaluate(CARDS))


def go(tab, at):
    """Follow a link on the page, at once."""
    tab.evaluate(f"location.hash = '#{at}'; read_address(); update()")


def counted(n=4096, tiling=(128, 64), **more):
    algorithm = more.pop("algorithm", "flash2")
    problem = Problem(n, **{"head_dim": 64, "heads": 16, "dtype": "bfloat16", **more})
    return flashsim.count(problem, algorithm=algorithm, tiling=Tiling(*tiling))


def test_controls_change_the_numbers(show):
    tab = show()
    assert cards(tab)["requested"] == human(counted().bytes())
    tab.select_option("#c-mask", "causal")
    tab.fill("#c-n_q", "1000")
    tab.keyboard.press("Enter")
    tab.locator("[aria-label='block_q: queries, slider']").fill("3")  # 64
    now = counted(1000, (64, 64), causal=True)
    assert cards(tab)["requested"] == human(now.bytes())
    assert cards(tab)["tiles visited"] == f"{now.schedule(now.stages[0]).n_visits}"
    assert tab.evaluate("lab.states.A.block_q") == 64
    until(tab, "location.hash === '#n_q=1000&mask=causal&block_q=64'")
    tab.select_option("#c-algorithm", "standard")
    now = counted(1000, (64, 64), causal=True, algorithm="standard")
    assert cards(tab)["requested"] == human(now.bytes())
    tab.select_option("#c-device", "your own …")
    tab.fill("#c-own_sram", "4")
    tab.keyboard.press("Enter")
    assert "does not fit" in tab.inner_text("#notice")
    tab.fill("#c-n_q", "0")
    tab.keyboard.press("Enter")
    assert "n_q must be an integer from 1" in tab.inner_text("#notice")
    assert not tab.is_visible("#A")
    tab.fill("#c-n_q", "100")
    tab.fill("#c-heads", "5e9")  # more than an array of JavaScript holds
    tab.keyboard.press("Enter")
    assert "heads must be an integer from 1 to 1,024" in tab.inner_text("#notice")


def test_the_sentence_says_what_a_lecturer_would(show):
    tab = show("#n_q=2048")
    said = tab.inner_text("#A .sentence")
    assert said.startswith("K and V are read 16 times: once per query tile; doubling block_q")
    assert "halves that" in said
    assert "doubling block_k changes nothing" in said
    tab.evaluate("location.hash = '#algorithm=standard'")
    until(tab, "document.querySelector('#A .sentence').textContent.startsWith('S and P')")
    whole, all_bytes = 4096**2 * 16 * 2, counted(algorithm="standard").bytes()
    assert f"{human(whole)} each" in tab.inner_text("#A .sentence")
    assert f"{100 * 4 * whole / all_bytes:.0f} %" in tab.inner_text("#A .sentence")
    tab.evaluate("location.hash = '#algorithm=flash-decode&n_q=1&n_kv=65536&heads=32'")
    until(tab, "document.querySelector('#A .sentence').textContent.startsWith('Without splits')")
    assert tab.inner_text("#A .sentence").endswith("kB, less than 0.1 % of all bytes.")
    names = tab.evaluate("[...document.querySelectorAll('#A svg text')].map((x) => x.textContent)")
    assert {"Q", "K", "V", "O", "O′"} <= set(names)  # one O is of the parts


ALL = [
    f"algorithm={name}&direction={direction}&mask={mask}&n_q=300&block_q=64&block_k={block_k}"
    for name, direction, block_k in (
        *((name, "forward", 64) for name in ("standard", "flash1", "flash2", "flash-decode")),
        *((name, "backward", 64) for name in ("standard", "flash1", "flash2", "flash2-fused")),
        ("flash2-once", "backward", 300),
    )
    for mask in cases.MASKS
]
#: Every algorithm with two masks, every mask with three algorithms.
SOME = [ALL[6 * n + (n + k) % 6] for n in range(9) for k in (0, 3)]


def test_every_algorithm_and_mask_is_drawn_said_and_played(show):
    tab = show("#" + SOME[0])
    for at in SOME:
        go(tab, at)
        assert tab.is_visible("#A"), (at, tab.inner_text("#notice"))
        said = tab.evaluate("[lab.found.A.stages.length, sentence(lab.found.A)]")
        assert said[1].endswith(".")
        assert not re.search(r"NaN|undefined|Infinity|null", tab.inner_html("main")), at
        for stage in range(said[0]):
            tab.evaluate(f"lab.stage.A = {stage}; lab.step = 0; draw_maps(); go(3)")
            words = tab.inner_text("#A .step")
            assert words.startswith(tab.evaluate(f"lab.found.A.stages[{stage}].name + ':'")), words
        tab.evaluate("lab.stage.A = null; lab.step = 0")


def test_the_map_plays_the_schedule(show):
    tab = show("#n_q=512&block_q=128&block_k=64&mask=causal")
    schedule = Schedule(Problem(512, causal=True), Tiling(128, 64))
    order = [[visit.i, visit.j] for visit in schedule]
    steps = "map_of('A').steps()"
    assert tab.evaluate(steps) == order
    kinds = {(visit.i, visit.j): 1 if visit.kind == FULL else 2 for visit in schedule}
    drawn = tab.evaluate("map_of('A').map.kinds")
    assert drawn == [[kinds.get((i, j), 0) for j in range(8)] for i in range(4)]
    tab.keyboard.press("ArrowRight")
    first = "forward: query tile 0, key tile 0: load Q; allocate O l m; load K V; allocate S"
    assert tab.inner_text("#A .step") == first
    tab.keyboard.press("ArrowRight")
    second = "forward: query tile 0, key tile 1: load K V; allocate S; store O L"
    assert tab.inner_text("#A .step") == second
    tab.evaluate("document.activeElement.blur()")
    tab.keyboard.press("Space")
    until(tab, "lab.step > 4")
    tab.keyboard.press("Space")
    assert tab.evaluate("lab.playing") is False
    tab.fill("#scrub", str(len(order)))
    assert tab.evaluate("lab.step") == len(order)
    tab.evaluate("location.hash = '#algorithm=flash1&n_q=512&block_q=128&block_k=64'")
    until(tab, "lab.found.A.state.algorithm === 'flash1'")
    flash1 = Schedule(Problem(512), Tiling(128, 64), outer="keys")
    assert tab.evaluate(steps) == [[visit.i, visit.j] for visit in flash1]


def test_a_link_holds_two_states_and_says_what_it_does_not_know(show):
    tab = show("#n_q=1024&mask=causal&ab=1&b.block_q=64&b.n_q=2048")
    tiles = tab.evaluate("[lab.found.A.tile.q, lab.found.B.tile.q, lab.states.B.n_q]")
    assert tiles == [128, 64, 2048]
    a, b = counted(1024, causal=True).bytes(), counted(2048, (64, 64), causal=True).bytes()
    row = tab.locator("#difference tr", has_text="requested bytes").inner_text().split("\t")
    assert row == ["requested bytes", f"{a:,}", f"{b:,}", f"+{human(b - a)}", f"{b / a:.3g}×"]
    assert tab.evaluate("address()") == "n_q=1024&mask=causal&b.n_q=2048&b.block_q=64&ab=1"
    tab.keyboard.press("2")
    tab.select_option("#c-mask", "none")
    assert tab.evaluate("[lab.states.A.mask, lab.states.B.mask]") == ["causal", "none"]
    wrong = show("#n_q=many&colour=red&mask=causal")
    notice = wrong.inner_text("#notice")
    assert "n_q cannot be many" in notice
    assert "unknown setting colour" in notice
    assert wrong.evaluate("lab.states.A.mask") == "causal"


def test_every_link_of_the_guides_is_understood(show):
    tab, followed = show(), 0
    for path in (Path(__file__).parents[2] / "docs").rglob("*.md"):
        for state in re.findall(r"lab\.html#([^)\s]+)\)", path.read_text(encoding="utf-8")):
            go(tab, state)
            assert not tab.is_visible("#notice"), (path, tab.inner_text("#notice"))
            assert tab.evaluate("address().split('&').sort()") == sorted(state.split("&")), path
            followed += 1
    assert followed >= 8


def test_predict_first_hides_the_answer_until_there_is_a_guess(show):
    tab = show("#ask=K&n_q=2048")
    answer = counted(2048).bytes("load", "K")
    assert not tab.is_visible("#answers")
    assert not tab.is_visible("#bar")
    tab.click("#reveal")
    assert "Type a number" in tab.inner_text("#verdict")
    tab.fill("#guess", "16 * 2048 * 64 * 2 * 8")
    tab.keyboard.press("Enter")
    assert tab.is_visible("#answers")
    assert tab.inner_text("#verdict") == f"The answer is {answer:,} B. The guess is 0.5× of it."
    assert "guess" in tab.text_content("#A-bytes svg")
    assert "answer" in tab.text_content("#beside svg")
    tab.fill("#guess", f"{answer}")
    assert not tab.is_visible("#answers")
    tab.click("#reveal")
    assert tab.inner_text("#verdict") == f"Right: {answer:,} B."
    tab.select_option("#c-mask", "causal")  # another question
    assert not tab.is_visible("#answers")
    for said, number in (
        ("2^20", 2**20), ("1.5 GB", 1.5e9), ("512 KiB", 2**19), ("1,000", 1000), ("3 × 4 / 2", 6),
        ("1e6", 1e6),
    ):  # fmt: skip
        assert tab.evaluate("(said) => number_of(said)", said) == number
    assert tab.evaluate("Number.isNaN(number_of('many'))")


def test_the_copied_python_gives_the_same_numbers(show):
    tab = show()
    for at in (*SOME[::2], "dtype=float8_e4m3fn&n_q=64", "mask=cells&n_q=300&block_q=64"):
        small = f"{at}&heads=4&kv_heads=2&d=16&n_kv=280"
        go(tab, small)
        text, said = tab.evaluate("[python(lab.found.A), Number(lab.found.A.bytes)]")
        names = {}
        exec(compile(text, "lab", "exec"), names)  # it asserts that run and count agree
        assert names["counted"].bytes() == said
        assert names["result"].trace.bytes() == said


def test_the_copied_python_of_a_device_of_ones_own_and_of_what_is_too_large(show):
    tab = show("#device=own&own_sram=128&n_q=1048576&mask=window")
    names = {}
    text = tab.evaluate("python(lab.found.A)")
    exec(compile(text, "lab", "exec"), names)
    assert names["counted"].bytes() == tab.evaluate("Number(lab.found.A.bytes)")
    assert "result" not in names
    assert "# result = flashsim.run(q, k, k, **mask" in text


def test_copies(show):
    tab = show(permissions=["clipboard-read", "clipboard-write"])
    tab.click("#code")
    until(tab, "document.getElementById('said').textContent === 'Python copied'")
    copied = tab.evaluate("navigator.clipboard.readText()")
    assert copied == tab.evaluate("python(lab.found.A)")
    tab.click("#A-chip [data-copy=svg]")
    until(tab, "document.getElementById('said').textContent === 'SVG copied'")
    assert tab.evaluate("navigator.clipboard.readText()").startswith("<svg xmlns=")
    tab.click("#A-map [data-copy=png]")
    until(tab, "/^PNG copied|is saved$/.test(document.getElementById('said').textContent)")
    size = """async () => (await png(document.querySelector("#A-map svg").outerHTML)).size"""
    assert tab.evaluate(size) > 5000
    refused = show()
    refused.evaluate("() => { navigator.clipboard.writeText = () => Promise.reject(); }")
    refused.click("#link")
    until(refused, "document.querySelector('dialog').open")
    assert refused.input_value("dialog textarea").startswith("file:")


def test_keys_theme_and_help(show):
    tab = show(scheme="dark")
    assert tab.evaluate("lab.theme") == "dark"
    tab.keyboard.press("t")
    assert tab.evaluate("lab.theme") == "light"
    tab.keyboard.press("b")
    assert tab.is_visible("#difference")
    tab.keyboard.press("1")
    assert tab.evaluate("lab.side") == "A"
    tab.keyboard.press("b")
    tab.keyboard.press("p")
    assert tab.is_visible("#question")
    tab.keyboard.press("Shift+Tab")
    tab.evaluate("document.activeElement.blur()")
    tab.keyboard.press("?")
    assert "compare two settings side by side" in tab.inner_text("dialog")
    tab.keyboard.press("Escape")
    assert not tab.is_visible("dialog")


def test_a_click_on_a_tile_takes_it_and_every_number_has_its_formula(show):
    tab = show()
    tab.locator("[data-tile='256,64']").click()
    assert tab.evaluate("[lab.found.A.tile.q, lab.found.A.tile.k]") == [256, 64]
    tab.click("details.table summary")
    row = tab.locator("#A details.table tr", has_text="load K").inner_text().split("\t")
    assert row[2] == f"{counted(tiling=(256, 64)).bytes('load', 'K'):,}"
    assert row[4] == "batch · heads · Σ keys · d · 2"


@pytest.mark.parametrize("width", [360, 500, 768, 1280, 1920])
def test_it_fits_the_screen_and_the_finger(show, width):
    tab = show("#ab=1&b.n_q=8192&mask=causal", width=width, has_touch=width < 800)
    wide = (
        "[...document.querySelectorAll('.cards dd')].filter((x) => x.scrollWidth > x.clientWidth)"
        ".map((x) => x.innerText)"
    )
    links = ("", "n_q=4096&heads=16", "ask=K", "device=own&mask=window")
    for at in (*links, "algorithm=flash2-fused&direction=backward"):
        tab.evaluate(f"location.hash = '{at}'")
        until(tab, "true")
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        assert tab.evaluate(wide) == []  # such as 68.7 GFLOP
    small = tab.evaluate(
        "[...document.querySelectorAll('button, select')].filter((x) => x.offsetParent)"
        ".map((x) => Math.min(x.offsetWidth, x.offsetHeight))"
    )
    assert min(small) >= (36 if width < 800 else 28)


ROOFLINE = """(() => {
    const figure = document.querySelector("svg[aria-label^=Roofline]");
    const [a, b] = ["requested", "compulsory"].map((name) => [...figure.querySelectorAll("text")]
        .find((x) => x.textContent === name).getBoundingClientRect());
    const { left, right } = figure.getBoundingClientRect();
    return {
        inside: [a, b].every((name) => name.left >= left && name.right <= right),
        apart: a.right <= b.left || b.right <= a.left || a.bottom <= b.top || b.bottom <= a.top,
        dots: [...figure.querySelectorAll("circle[stroke]")].map((x) => +x.getAttribute("cx")),
    };
})()"""


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("at", ["#n_q=1&d=1&dtype=float64", "#n_q=4096", "#n_q=1048576"])
def test_the_roofline_names_its_points_inside_the_figure(show, at, width):
    found = show(at, width=width).evaluate(ROOFLINE)
    assert found["inside"]
    assert found["apart"]


def test_the_roofline_has_room_for_every_intensity(show):
    tab = show("#n_q=200000")
    compulsory = tab.evaluate(ROOFLINE)["dots"][1]
    assert compulsory < tab.evaluate("wide()") - 13  # not at the edge, as if it were less


def test_controls_and_figures_have_names(show):
    tab = show("#ab=1&ask=K")
    tab.evaluate("by('answers').hidden = false")
    unnamed = tab.evaluate(
        """[...document.querySelectorAll('button, select, input, svg, [role=img]')].filter((x) =>
        !x.getAttribute('aria-label') && !x.closest('label') && !x.textContent.trim()
        && !(x.id && document.querySelector(`label[for='${x.id}']`))).map((x) => x.outerHTML)"""
    )
    assert unnamed == []
    assert tab.get_attribute("html", "lang") == "en"
    ids = tab.evaluate("[...document.querySelectorAll('[id]')].map((x) => x.id)")
    assert len(ids) == len(set(ids))


def test_it_prints_light_without_controls(show):
    tab = show(scheme="dark")
    tab.emulate_media(media="print")
    tab.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert tab.evaluate("lab.theme") == "light"
    assert not tab.is_visible("#controls")
    assert tab.is_visible("#A .sentence")
    tab.evaluate("window.dispatchEvent(new Event('afterprint'))")
    assert tab.evaluate("lab.theme") == "dark"


def test_a_million_causal_tokens_take_less_than_a_frame(show):
    """Everything: the count, all curves and figures. The best of twenty, on a busy machine."""
    tab = show("#n_q=1048576&mask=causal&block_q=16&block_k=16")
    took = tab.evaluate(
        """() => Array.from({ length: 20 }, (_, n) => {
        lab.states.A.n_q = 2 ** 20 - (n % 2);
        update();
        return lab.ms;
        })"""
    )
    assert min(took) < 16, sorted(took)


def test_the_command_writes_it(tmp_path):
    path = tmp_path / "lab.html"
    ok("lab", "-o", path)
    assert path.read_text("utf-8") == page().html
    refused("lab", "-o", tmp_path / "lab.png")
