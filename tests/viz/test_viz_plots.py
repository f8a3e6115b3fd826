"""Plots, looked at through their artists and data."""

import dataclasses
import io
import itertools
import re

import matplotlib as mpl
import numpy as np
import pytest
import viz_cases as cases
from matplotlib import pyplot as plt
from matplotlib.colors import to_hex
from overlaps import crossings, overlaps

import flashsim
from flashsim import Problem, Tiling, banks, blocks, functions, l2, precision, viz
from flashsim.counts import bounds, traffic
from flashsim.errors import OptionError
from flashsim.viz import palette
from flashsim.viz.film.animation import Film
from flashsim.viz.style import human, ink_on, unit_axis

pytestmark = pytest.mark.promise("pictures show the counts")


def comparison():
    q, k, v = cases.arrays()
    return flashsim.compare(q, k, v, causal=True, dout=q, tiling=cases.TILING)


def counts(**options):
    return [
        flashsim.count(Problem(n, head_dim=64, dtype="bfloat16"), algorithm=name, **options)
        for name in ("standard", "flash1", "flash2")
        for n in (512, 1024, 2048)
    ]


# -- every plot ------------------------------------------------------------------------------------

#: (predicted, measured), ms; seven series, for one more than there are colours.
AGREEMENT = {f"series {n}": [(1.0 + n / 100, 1.0), (9.0, 10.0)] for n in range(7)}
EVERY = {
    "traffic": lambda **o: viz.traffic([cases.trace("standard"), cases.trace()], **o),
    "tile_map": lambda **o: viz.tile_map(cases.trace(), **o),
    "mask": lambda **o: viz.mask(Problem(96, causal=True), **o),
    "cumulative": lambda **o: viz.cumulative(cases.result(), **o),
    "sram_timeline": lambda **o: viz.sram_timeline(cases.trace(), **o),
    "io_curve": lambda **o: viz.io_curve(counts(), **o),
    "roofline": lambda **o: viz.roofline(counts()[:1], **o),
    "banks": lambda **o: viz.banks(banks.access("column"), **o),
    "precision": lambda **o: viz.precision(
        precision.laboratory((32,), kinds=("normal",), points=("lse", "m")), **o
    ),
    "block_sizes": lambda **o: viz.block_sizes(blocks.sizes(Problem(512), (64, 128)), **o),
    "roofline_series": lambda **o: viz.roofline_series(
        {"a": [("N = 1", 1.0, 1e9), ("N = 2", 2.0, 2e9)]}, device="A100", **o
    ),
    "l2_curve": lambda **o: viz.l2_curve(l2.curves(counts()[0]), **o),
    "predicted_against_measured": lambda **o: viz.predicted_against_measured(AGREEMENT, **o),
    "memory_footprint": lambda **o: viz.memory_footprint(Problem(64), **o),
    "gpu_timeline": lambda **o: viz.gpu_timeline(cases.with_timeline(), **o),
    "diff": lambda **o: viz.diff(cases.trace("flash1"), cases.trace(), **o),
}


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_labels_theme_and_vector_output(name, theme, tmp_path):
    ax = EVERY[name](theme=theme)
    assert ax.get_xlabel() or name == "traffic"
    assert ax.get_title(loc="left")
    assert to_hex(ax.figure.get_facecolor()) == palette.THEMES[theme].background
    # Drawing takes longest, and is the same in all colours. The test of labels draws the others.
    if theme == "dark" and name not in LABELLED:
        ax.figure.savefig(tmp_path / "figure.svg")
        assert "</svg>" in (tmp_path / "figure.svg").read_text()


@pytest.mark.parametrize("name", EVERY)
def test_draws_into_the_axes_given(name):
    figure, (first, second) = plt.subplots(1, 2)
    second.set_facecolor(palette.THEMES["dark"].background)
    assert EVERY[name](ax=second) is second
    assert not first.has_data()
    assert plt.get_fignums() == [figure.number]
    assert second.xaxis.label.get_color() == "black" or second.xaxis.label.get_color()  # kept


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_saved_figures_are_whole_and_the_same_each_time(ending, tmp_path, monkeypatch):
    path = tmp_path / f"figure.{ending}"
    assert viz.save_figure(viz.traffic(cases.trace()), path) == path
    first = path.read_bytes()
    if ending == "svg":  # text is text
        assert b">FlashAttention-2 moves " in first
    elif ending == "pdf":
        assert b"/Subtype /Type3" not in first
        assert b"/FontFile2" in first  # TrueType
    viz.save_figure(viz.traffic(cases.trace()).figure, path)
    assert path.read_bytes() == first
    ax = viz.traffic(cases.trace())

    def break_off(part, **_):
        part.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(ax.figure, "savefig", break_off)
    with pytest.raises(KeyboardInterrupt):
        viz.save_figure(ax, path)
    assert [p.read_bytes() for p in tmp_path.iterdir()] == [first]


def test_save_sizes_and_errors(tmp_path):
    ax = viz.traffic(cases.trace())
    path = viz.save_figure(ax, tmp_path / "a.png", dpi=50, size=(8, 6))
    assert plt.imread(path).shape[:2] == (300, 400)
    with pytest.raises(OptionError, match=r"1 x 1 inches leaves no room.*pass a larger size"):
        viz.save_figure(ax, tmp_path / "a.png", size=(1, 1))
    with pytest.raises(OptionError, match=r"cannot write 'a\.doc'"):
        viz.save_figure(ax, tmp_path / "a.doc")
    for wrong in (
        {"dpi": 1},
        {"dpi": 1e5},
        {"dpi": float("inf")},
        {"size": (100, 100), "dpi": 700},
    ):
        with pytest.raises(OptionError, match=r"pixels at .* dpi; a picture needs at least 10"):
            viz.save_figure(ax, tmp_path / "b.png", **wrong)
    for wrong in ({"dpi": 0}, {"size": (4, -1)}, {"size": (4,)}):
        with pytest.raises(OptionError, match="dpi= and size= must be positive"):
            viz.save_figure(ax, tmp_path / "a.png", **wrong)


def test_latex_that_is_missing_is_said(tmp_path, monkeypatch):
    def no_latex(*_, **__):
        raise RuntimeError("'xelatex' not found")

    ax = viz.traffic(cases.trace())
    monkeypatch.setattr(ax.figure, "savefig", no_latex)
    with pytest.raises(flashsim.BackendUnavailable, match=r"cannot write 'a.pgf' here: 'xelatex'"):
        viz.save_figure(ax, tmp_path / "a.pgf")
    assert not list(tmp_path.iterdir())


def test_a_plot_shows_itself_in_a_notebook():
    ax = viz.tile_map(cases.trace())
    picture = plt.imread(io.BytesIO(ax._repr_png_()))
    assert picture.shape[:2] == (540, 960)
    assert plt.get_fignums() == [ax.figure.number]  # still there for plt.show()


LABELLED = {
    "traffic": lambda label: viz.traffic({label: cases.trace(), "b": cases.trace("standard")}),
    "cumulative": lambda label: viz.cumulative({label: cases.trace()}),
    "diff": lambda label: viz.diff({label: cases.trace("flash1"), "b": cases.trace()}),
    "roofline": lambda label: viz.roofline({label: counts()[0]}),
    "l2_curve": lambda label: viz.l2_curve({label: l2.curves(counts()[6])["forward"]}),
    "predicted_against_measured": lambda label: viz.predicted_against_measured({label: [(1, 2)]}),
}


#: Not math, though there is a dollar; a label of each plot is one of them.
DOLLARS = (r"$\frac$", "$", r"a $x_{$ b")


@pytest.mark.parametrize(
    ("name", "label"),
    [
        pytest.param(name, label, marks=[pytest.mark.thorough] if (n - m) % len(DOLLARS) else [])
        for n, name in enumerate(LABELLED)
        for m, label in enumerate(DOLLARS)
    ],
)
def test_labels_that_are_no_math_are_written_as_they_stand(name, label, tmp_path):
    text = viz.save_figure(LABELLED[name](label), tmp_path / "figure.svg").read_text()
    assert "</svg>" in text
    assert re.search(rf">[^<]*{re.escape(label)}[^<]*</text>", text), label
    math = viz.save_figure(LABELLED[name](r"$\alpha$"), tmp_path / "figure.svg").read_text()
    assert r"\alpha$</text>" not in math
    assert "α</tspan>" in math


@pytest.mark.parametrize("name", LABELLED)
def test_half_a_character_is_refused(name):
    with pytest.raises(OptionError, match=r"the label 'a.ud800' contains half of a character"):
        LABELLED[name]("a\ud800")


def test_settings_do_not_leak():
    before = dict(mpl.rcParams)
    viz.traffic(cases.trace(), theme="dark")
    assert dict(mpl.rcParams) == before


# -- traffic ---------------------------------------------------------------------------------------


def bars(ax):
    return {p.get_gid(): p for p in ax.patches if p.get_gid()}


def words(texts):
    return [text.get_text() for text in texts]


def masked_tiles(ax):
    """The paths of the triangles that mark a tile map's masked tiles."""
    return next(c for c in ax.collections if c.get_label() == "masked").get_paths()


def test_traffic_bars_are_the_bytes():
    found = comparison()
    ax = viz.traffic(found.results)
    for name, result in found.results.items():
        for tensor, by_op in result.trace.by_tensor().items():
            for op, nbytes in by_op.items():
                if nbytes:
                    bar = bars(ax)[f"{name}/{op}/{tensor}"]
                    assert bar.get_height() == nbytes
                    assert to_hex(bar.get_facecolor()) == palette.color(tensor)


def test_gradients_are_hatched():
    ax = viz.traffic({"x": cases.trace(direction="backward")})
    assert bars(ax)["x/store/dK"].get_hatch()
    assert not bars(ax)["x/load/K"].get_hatch()


def test_traffic_names_tensors_where_they_stand():
    ax = viz.traffic(cases.trace("standard", "backward"))
    ax.figure.canvas.draw()
    placed = [(gid.rsplit("/")[-1], bar.get_window_extent()) for gid, bar in bars(ax).items()]
    low = min(bar.height for _, bar in placed)
    named = [text for text in ax.texts if text.get_text() in dict(placed)]
    assert {"P", "dS"} <= {*words(named)}
    for text in named:
        box = text.get_window_extent()
        assert box.height > low  # the smallest have no room for one
        assert any(
            bar.x0 <= box.x0 <= box.x1 <= bar.x1 and bar.y0 <= box.y0 <= box.y1 <= bar.y1
            for tensor, bar in placed
            if tensor == text.get_text()
        )


def test_traffic_on_a_log_axis_shows_totals():
    ax = viz.traffic(cases.trace(), log=True)
    assert [p.get_height() for p in ax.patches] == [
        cases.trace().bytes("load"), cases.trace().bytes("store")
    ]  # fmt: skip
    assert ax.get_yscale() == "log"


def test_labels_say_what_differs():
    ax = viz.traffic(comparison())
    labels = words(ax.get_xticklabels())
    assert labels[0].startswith("standard\nforward")
    assert labels[-1].startswith("FlashAttention-2\nbackward")
    twice = viz.traffic([cases.trace(), cases.trace()])
    assert words(twice.get_xticklabels()) == ["FlashAttention-2", "FlashAttention-2 (2)"]


def test_traffic_shows_what_grouped_heads_change():
    problems = [Problem(512, head_dim=64, heads=16, kv_heads=n, dtype="float16") for n in (16, 4)]
    counted = [flashsim.count(problem, tiling=Tiling(64, 64)) for problem in problems]
    assert counted[0].bytes() == counted[1].bytes()  # so bars alone look alike
    ax = viz.traffic(counted, dram=True)
    labels = [label.split("\n") for label in words(ax.get_xticklabels())]
    for label, heads, count in zip(labels, ("16 heads", "16 / 4 heads"), counted, strict=True):
        assert heads in label
        assert label[label.index("compulsory") + 1] == human(count.compulsory())
        assert label[label.index("DRAM") + 1] == human(l2.dram(count).bytes())
    levels = [entry.get_ydata()[0] for entry in ax.lines]
    assert levels == [
        *(count.compulsory() for count in counted), *(l2.dram(count).bytes() for count in counted)
    ]  # fmt: skip
    alike = viz.traffic([cases.trace("standard"), cases.trace()])
    about = f"compulsory {human(cases.trace().compulsory())}"
    assert any(text.endswith(about) for text in words(alike.texts))


def test_grouped_heads_are_said_everywhere():
    problem = Problem(512, head_dim=32, heads=16, kv_heads=4)
    run = flashsim.run(*flashsim.random_inputs(problem)[:3], tiling=Tiling(128, 128), trace=True)
    sweep = flashsim.sweep([512, 1024], heads=16, kv_heads=4)
    drawn = [
        *(draw(run) for draw in (viz.tile_map, viz.cumulative, viz.sram_timeline, viz.traffic)),
        viz.io_curve(sweep),
        viz.roofline(flashsim.count(problem)),
        viz.memory_footprint(problem),
    ]
    for ax in drawn:
        assert "16 / 4 heads" in " ".join(words(ax.texts)), ax
    assert "16 / 4 heads" in viz.page(run).html
    assert Film(run).panels[0][1].about.get_text().startswith("one of 16 / 4 heads")
    several = viz.io_curve(flashsim.sweep([512, 1024], heads=16, kv_heads=[16, 4]))
    assert line(several, "FlashAttention-2, 16 / 4 heads")


def test_pictures_of_a_backward_pass_show_all_heads_of_a_group():
    problem = Problem(64, head_dim=8, heads=8, kv_heads=2)
    counted = [
        flashsim.count(problem, algorithm=name, direction="backward", tiling=Tiling(16, 16))
        for name in ("flash1", "flash2")
    ]
    order = viz.tile_map(counted[1]).images[0].get_array()  # 4 heads x 4 row tiles per key tile
    assert np.array_equal(order, np.arange(4)[:, None] + 16 * np.arange(4))
    totals = viz.cumulative(counted)
    ends = [entry.get_ydata()[-1] for entry in totals.lines[::2]]
    assert ends == [count.bytes() // 2 for count in counted]  # of one of two groups
    assert "4 of 8 / 2 heads" in " ".join(words(totals.texts))
    about = Film(counted[1]).panels[0][1].about.get_text()
    assert about.startswith("one of 8 / 2 heads, 4 in stage dkdv")
    assert "one of 8 / 2 heads, 4 in stage dkdv" in viz.page(counted[1]).html
    notes = Film(counted[1]).panels[0][1].walk.notes
    assert [notes.count(f"head {n} of 4") for n in (1, 2, 3, 4)] == [16] * 4


def test_labels_of_traffic_do_not_touch():
    ax = viz.traffic([cases.trace(name, "backward") for name in cases.ALGORITHMS])
    assert len(ax.get_xticklabels()) == len(cases.ALGORITHMS)
    assert overlaps(ax.figure) == []


# -- tile map --------------------------------------------------------------------------------------


def test_tile_map_order():
    ax = viz.tile_map(cases.trace())
    grid = np.ma.filled(ax.images[0].get_array(), np.nan)
    rows, cols = np.tril_indices(6)
    assert np.array_equal(grid[rows, cols], np.arange(21))  # queries outside, causal
    assert np.isnan(grid[0, 1])
    keys_outside = viz.tile_map(cases.trace("flash1")).images[0].get_array()
    assert list(keys_outside[:, 0]) == [0, 1, 2, 3, 4, 5]


def test_the_numbers_beside_a_map_of_one_tile_are_whole():
    ax = viz.tile_map(flashsim.count(Problem(8, head_dim=4), tiling=Tiling(8, 8)))
    ax.figure.draw_without_rendering()
    bar = ax.figure.axes[-1]
    low, high = bar.get_ylim()
    assert [y for y in bar.get_yticks() if low <= y <= high] == [0]
    one = viz.tile_map(flashsim.count(Problem(2), tiling=Tiling(2, 1)))
    assert one.get_xlabel() == "key tile j (1 key each)"
    (number,) = [text for text in ax.texts if text.get_text() == "0"]
    image = ax.images[0]
    assert number.get_color() == ink_on(image.cmap(image.norm(0)))


def test_tile_map_marks_masked_tiles():
    ax = viz.tile_map(cases.trace())
    corners = [path.get_extents().p1 for path in masked_tiles(ax)]
    assert [(round(x - 0.5), round(y)) for x, y in corners] == [(i, i) for i in range(6)]
    texts = words(ax.get_legend().get_texts())
    assert texts == ["full: 15", "masked (corner): 6", "skipped: 15"]


def test_the_marked_corner_is_the_one_that_the_mask_takes():
    run = flashsim.run(*cases.arrays(), window=(40, 20), tiling=cases.TILING, trace=True)
    upper, lower = set(), set()
    for i in range(6):
        for j in range(6):
            q, k = np.ogrid[16 * i : 16 * i + 16, 16 * j : 16 * j + 16]
            keep = (k <= q + 20) & (k >= q - 40)
            if keep.any() and not keep.all():
                upper |= {(i, j)} - ({(i, j)} if keep[0, -1] else set())
                lower |= {(i, j)} - ({(i, j)} if keep[-1, 0] else set())
    assert upper
    assert lower
    tips = {tuple(path.vertices[1]) for path in masked_tiles(viz.tile_map(run))}
    assert tips == {(j + 0.5, i - 0.5) for i, j in upper} | {(j - 0.5, i + 0.5) for i, j in lower}
    film = Film(run).scenes[0]
    drawn = {tuple(np.round(tip, 9)) for _, tip, _ in film._corner_polygons(0)}
    x, y, w, h = film.box
    expected = {(x + (j + 1) * w / 6, y + i * h / 6) for i, j in upper}
    expected |= {(x + j * w / 6, y + (i + 1) * h / 6) for i, j in lower}
    assert drawn == {tuple(np.round(tip, 9)) for tip in expected}


def test_a_mask_that_takes_neither_corner_is_marked_once():
    own = lambda q, k: (k % 16 != 7) | (q < 0)  # noqa: E731
    run = flashsim.run(*cases.arrays(n=32), mask=own, tiling=cases.TILING, trace=True)
    assert len(masked_tiles(viz.tile_map(run))) == 4


@pytest.mark.parametrize("color", ["bytes", "flops"])
def test_tile_map_sums(color):
    trace = cases.trace()
    grid = np.ma.filled(viz.tile_map(trace, color=color).images[0].get_array(), 0)
    if color == "bytes":
        assert np.array_equal(grid, trace.by_tile())
    else:
        assert grid[3, 1] == grid[0, 0] > 2 * 16 * 16 * 8 * 2  # both products, and the softmax


@pytest.mark.parametrize("color", ["order", "bytes", "flops"])
def test_numbers_stay_clear_of_the_marked_corner(color):
    run = flashsim.run(*cases.arrays(n=11 * 16, d=64), tiling=cases.TILING, causal=True, trace=True)
    ax = viz.tile_map(run, color=color)
    ax.figure.canvas.draw()
    corners = {}
    for path in masked_tiles(ax):  # the long side runs from top left to bottom right
        left, _, bottom = ax.transData.transform(path.vertices[:3])
        corners[round(path.vertices[1][1] + 0.5)] = left, bottom
    for text in ax.texts:
        j, i = text.get_position() if text.get_ha() == "center" else (-1, -2)
        if i == j:
            box = text.get_window_extent()
            left, bottom = corners[i]
            (along, down), (x, y) = bottom - left, np.array([box.x1, box.y1]) - left
            assert along * y - down * x < 0  # its upper right corner is below the long side


def test_tile_map_of_a_large_grid_has_no_numbers():
    big = flashsim.run(*cases.arrays(n=20), tiling=Tiling(1, 1), trace=True)
    ax = viz.tile_map(big)
    assert not [text for text in words(ax.texts) if text.isdigit()]
    assert ax.images[0].get_array().shape == (20, 20)


def test_a_thin_part_on_top_leaves_room_for_the_total():
    decode = Problem(1, 32_768, heads=32, dtype="bfloat16")  # its partial results: a ten-thousandth
    counted = flashsim.count(decode, algorithm="flash-decode", device="H100")
    low, high = viz.traffic(counted).get_ylim()
    assert low == 0
    assert high > 1.1 * counted.bytes("load")


def test_mask_shows_what_is_kept_wasted_and_skipped():
    problem = Problem(48, 64, window=(20, 4))
    ax = viz.mask(problem, Tiling(16, 16))
    picture = ax.images[0].get_array()
    kept = problem.keep(problem.sequences[0], np.arange(48), np.arange(64))
    drawn = {tuple(c) for c in picture[kept].tolist()}
    assert len(drawn) == 1
    tiles = kept.reshape(3, 16, 4, 16).any((1, 3)).repeat(16, 0).repeat(16, 1)
    assert np.array_equal(picture[..., 3] > 0, tiles)
    wasted = {tuple(c) for c in picture[tiles & ~kept].tolist()}
    assert len(wasted) == 1
    assert not wasted & drawn
    skipped = 12 - int(tiles[::16, ::16].sum())
    assert words(ax.get_legend().get_texts()) == [
        f"kept: {kept.sum():,} scores",
        f"computed and masked: {(tiles & ~kept).sum():,}",
        f"skipped: {skipped} of 12 tiles",
    ]
    assert len(viz.mask(Problem(32), Tiling(16, 16)).get_legend().get_texts()) == 1


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"mask_mod": functions.window(8) & functions.causal()}, "Window and causal"),
        ({"mask_mod": lambda b, h, q, k: q >= k}, "Own mask"),
        ({"causal": True}, "Causal"),
        ({}, "No mask"),
    ],
)
def test_a_masks_title_names_it(options, name):
    title = viz.mask(Problem(32, **options), Tiling(16, 16)).get_title("left")
    assert title.startswith(f"{name}: ")


@pytest.mark.parametrize(
    ("options", "share", "kept"),
    [
        ({"n_q": 1}, "100%", "kept: 1 score"),
        ({"n_q": 256, "window": (0, 0)}, "under 1%", "kept: 256 scores"),
        ({"n_q": 256, "window": (254, 255)}, "over 99%", "kept: 65,535 scores"),
    ],
)
def test_a_masks_title_rounds_to_all_or_none_only_if_true(options, share, kept):
    ax = viz.mask(Problem(**options))
    assert ax.get_title("left").endswith(f": {share} of the scores are kept")
    assert words(ax.get_legend().get_texts())[0] == kept


@pytest.mark.parametrize("shape", [(1999, 300), (20, 2000), (2000, 2000), (1, 1)])
def test_numbers_beside_a_mask_do_not_touch(shape):
    assert overlaps(viz.mask(Problem(*shape)).figure) == []


def test_mask_shades_a_bias():
    bias = np.arange(32 * 32).reshape(32, 32)
    light = viz.mask(Problem(32), bias=bias).images[0].get_array()[..., :3].sum(2)
    assert (np.diff(light.ravel()) <= 0).all()
    assert light[0, 0] > light[-1, -1]


# -- over the walk ---------------------------------------------------------------------------------


def test_cumulative_ends_at_the_totals():
    ax = viz.cumulative(comparison().results["flash2"])
    assert ax.lines[0].get_ydata()[-1] == cases.trace().bytes()
    flops = viz.cumulative(cases.trace(), quantity="flops", log=True)
    assert flops.lines[0].get_ydata()[-1] == cases.trace().flops()
    assert flops.get_xscale() == "log"
    counted = viz.cumulative(cases.trace().predicted())  # the same events, not executed
    for mine, theirs in zip(counted.lines, viz.cumulative(cases.trace()).lines, strict=True):
        assert mine.get_xydata().tolist() == theirs.get_xydata().tolist()


@pytest.mark.parametrize("quantity", ["bytes", "flops"])
@pytest.mark.parametrize("causal", [False, True])
def test_names_of_cumulative_lines_lie_on_no_line(quantity, causal):
    ax = viz.cumulative(flashsim.compare(*cases.arrays(), causal=causal), quantity=quantity)
    assert len(ax.texts) == 4  # three names, and what is shown
    assert overlaps(ax.figure) + crossings(ax.figure) == []


def test_eight_passes_have_names_apart():
    """With more than three lines, a legend names them."""
    passes = [
        flashsim.count(Problem(512, heads=heads), tiling=Tiling(rows, 64), algorithm=name)
        for heads in (1, 4)
        for rows in (16, 64)
        for name in ("flash1", "flash2")
    ]
    lines = viz.cumulative(passes)
    assert len(lines.get_legend().texts) == 8
    for ax in (lines, viz.traffic(passes)):
        assert overlaps(ax.figure) + crossings(lines.figure) == []


def test_each_tile_size_of_a_sweep_has_a_line():
    sweep = flashsim.sweep([64, 128], tiling=[Tiling(16, 16), Tiling(32, 32)])
    ax = viz.io_curve(sweep, x="n_q")
    for side in (16, 32):
        found = line(ax, f"FlashAttention-2, tiles {side} x {side}")
        assert found.get_xdata().tolist() == [64, 128]


def test_registers_come_on_top_of_shared_memory():
    trace = flashsim.load_sample_trace("h200-backward")
    assert trace.peak_sram() > trace.device.sram_bytes
    label = viz.sram_timeline(trace).texts[0]
    assert label.get_text() == "H200: 232,448 B per block, without registers"
    assert label.get_bbox_patch() is not None  # read on top of the buffers
    plain = viz.sram_timeline(cases.trace()).texts[0]
    assert "registers" not in plain.get_text()


def test_sram_timeline_reaches_the_peak():
    trace = cases.trace()
    ax = viz.sram_timeline(trace)
    top = max(path.vertices[:, 1].max() for c in ax.collections for path in c.get_paths())
    assert top == trace.peak_sram()
    assert f"{trace.device.sram_bytes:,} B" in ax.texts[0].get_text()
    labels = words(ax.get_legend().get_texts())
    assert labels[-2:] == ["O", "Q"]  # what stays on chip makes the base; listed from the top


def test_sram_timeline_draws_the_limit_when_it_is_near():
    device = flashsim.Device.get("H100").with_sram(4096)
    run = flashsim.run(*cases.arrays(), tiling=cases.TILING, device=device, trace=True)
    ax = viz.sram_timeline(run, stage="forward", steps=(0, 4))
    assert ax.lines[0].get_ydata()[0] == 4096


def test_diff_shows_only_differences():
    one, two = cases.trace("flash1"), cases.trace("flash2")
    ax = viz.diff(one, two)
    expected = {"/".join(k): b - a for k, (a, b) in one.diff(two).items()}
    assert {gid: bar.get_width() for gid, bar in bars(ax).items()} == expected
    same = viz.diff(two, two.predicted())
    assert not bars(same)
    assert "equal, byte for byte" in words(same.texts)
    assert any(text.startswith("5 transfers are equal") for text in words(same.texts))


def test_diff_lists_stages_in_order_and_fits_its_title():
    forward, backward = (flashsim.load_sample_trace(f"h200-{d}") for d in ("forward", "backward"))
    ax = viz.diff([forward, backward])  # one argument that holds two
    stages = [label.get_text().split(":")[0] for label in ax.get_yticklabels()]
    assert list(dict.fromkeys(stages)) == ["forward", "delta", "fused", "convert"]
    assert overlaps(ax.figure) == []
    many = viz.diff(cases.trace("flash1", "backward"), cases.trace("flash2", "backward"))
    assert len(bars(many)) > 25
    assert overlaps(many.figure) == []


# -- models ----------------------------------------------------------------------------------------


def line(ax, text):
    return next(x for x in ax.lines if text in str(x.get_label()))


def test_io_curve_from_counts_and_from_a_sweep():
    sweep = flashsim.sweep(
        [512, 1024, 2048], dtype="bfloat16", algorithm=["standard", "flash1", "flash2"]
    )
    for data in (counts(), sweep, sweep.rows):
        ax = viz.io_curve(data)
        ours = line(ax, "FlashAttention-2")
        assert list(ours.get_xdata()) == [512, 1024, 2048]
        assert list(ours.get_ydata()) == [c.bytes() for c in counts()[6:]]
        assert list(line(ax, "compulsory").get_ydata()) == [c.compulsory() for c in counts()[6:]]
    frame = pytest.importorskip("pandas").DataFrame(sweep.rows)
    assert len(viz.io_curve(frame).lines) == len(ax.lines)


def test_io_curve_lists_algorithms_in_one_order_and_says_what_was_fitted():
    sweep = flashsim.sweep([512, 1024], algorithm=["flash2", "standard"])
    texts = words(viz.io_curve(sweep).get_legend().get_texts())
    assert texts[:2] == ["standard", "FlashAttention-2"]
    assert texts[2].endswith("fitted\nto FlashAttention-2")


def test_io_curve_under_a_window_shows_no_bound_that_does_not_hold():
    options = {"head_dim": 64, "algorithm": ["standard", "flash2"]}
    texts = {
        window: [
            entry.get_label() for entry in viz.io_curve(sweep).lines if entry.get_color() != "k"
        ]
        for window in (None, (64, 0))
        for sweep in [flashsim.sweep([1024, 4096], window=window, **options)]
    }
    assert any("Saha" in text for text in texts[None])
    assert not any("Saha" in text or "Θ" in text for text in texts[64, 0])
    assert "compulsory (exact)" in texts[64, 0]
    both = flashsim.sweep([1024, 4096], window=[(64, 0), None])
    assert line(viz.io_curve(both), "FlashAttention-2, window 64:0")
    causal = flashsim.sweep([1024, 4096], causal=True, window=(64, 0), direction="backward")
    about = "d = 64, float32, causal, window 64:0, backward, H100"
    assert about in words(viz.io_curve(causal).texts)


def test_io_curve_slopes():
    ax = viz.io_curve(counts(tiling=Tiling(64, 64)))
    theorem = line(ax, "Θ(N²d²/M)").get_ydata()
    assert theorem[1] / theorem[0] == pytest.approx(4)
    lower = line(ax, "Saha").get_ydata()
    assert lower[1] / lower[0] == pytest.approx(4)


@pytest.mark.parametrize("x", ["head_dim", "block_q", "sram_bytes"])
def test_io_curve_over(x):
    options = {
        "head_dim": {"head_dim": [32, 64]},
        "block_q": {"tiling": [Tiling(16, 64), Tiling(64, 64)]},
        "sram_bytes": {"sram_bytes": [65536, 131072], "algorithm": ["flash1", "flash2"]},
    }[x]
    ax = viz.io_curve(flashsim.sweep(1024, **options), x=x)
    assert len([entry for entry in ax.lines if entry.get_marker() == "^"]) == 1
    assert len(line(ax, "FlashAttention-2").get_xdata()) == 2


def test_failed_points_are_left_out():
    sweep = flashsim.sweep([512, 1024], tiling=[Tiling(32, 32), Tiling(512, 512)], sram_bytes=65536)
    assert len(line(viz.io_curve(sweep), "FlashAttention-2").get_xdata()) == 2


def test_bounds():
    assert bounds.flash_theorem(1024, 1024, 64, 2048) == 1024 * 1024 * 64 * 64 / 2048
    assert bounds.lower_bound(1024, 1024, 64, 64**2) == bounds.flash_theorem(1024, 1024, 64, 64**2)
    below = bounds.lower_bound(1024, 1024, 64, 1024)
    assert below == 1024 * 1024 * 64 / 32
    assert below < bounds.flash_theorem(1024, 1024, 64, 1024)


def test_roofline_places_points_on_the_roof():
    count = flashsim.count(Problem(4096, head_dim=128, dtype="bfloat16"))
    ax = viz.roofline(count)
    hollow, filled, *_ = [x for x in ax.lines if x.get_marker() == "^"]
    device = count.device
    assert hollow.get_xdata()[0] == count.flops("matmul") / count.bytes()
    assert filled.get_xdata()[0] == count.flops("matmul") / count.compulsory()
    tops = {
        x.get_xdata()[0]: x.get_ydata()[1]
        for x in ax.lines
        if len(x.get_xdata()) == 2 and len(set(x.get_xdata())) == 1
    }
    for end in (hollow, filled):  # a dotted line leads from each to the roof
        at = end.get_xdata()[0]
        assert tops[at] == min(at * device.hbm_bandwidth, device.peak("bfloat16"))
    measured = viz.roofline(count, seconds={"flash2": 1e-3}, device="H200")
    speed = count.flops("matmul") / 1e-3
    marks = [x for x in measured.lines if x.get_marker() == "^"]
    assert [list(x.get_ydata()) for x in marks] == [[speed], [speed]]
    assert f"FlashAttention-2 (measured: {human(speed, 'FLOP/s')})" in words(measured.texts)
    assert "H200" in measured.get_title(loc="left")


def test_the_name_of_the_strip_lies_on_no_other():
    long = Problem(1 << 17, head_dim=64, dtype="float16")
    tiling = Tiling(64, 64)
    counted = [flashsim.count(long, algorithm=a, tiling=tiling) for a in ("flash1", "flash2")]
    assert overlaps(viz.roofline(counted).figure) == []


def test_perfect_l2_leaves_standard_attention_bound_by_memory():
    problem = Problem(4096, head_dim=128, heads=16, dtype="bfloat16")
    standard, flash = (
        flashsim.count(problem, algorithm=a, tiling=Tiling(64, 64)) for a in ("standard", "flash2")
    )
    matrix = 16 * 4096 * 4096 * 2
    assert traffic.once(problem, "standard") == flash.compulsory() - 16 * 4096 * 4 + 4 * matrix
    assert traffic.once(problem, "flash2") == flash.compulsory()
    ax = viz.roofline([standard, flash], dram_bytes={"standard": 10**9})
    (low,), (high,) = (
        next(x for x in ax.lines if x.get_marker() == mark and x.get_mfc() != "#ffffff").get_xdata()
        for mark in "o^"
    )
    ridge = standard.device.ridge("bfloat16")
    assert low < ridge / 2
    assert high > ridge
    title = "With a perfect L2, only standard is limited by the HBM of H100"
    assert ax.get_title(loc="left") == title
    diamonds = [x.get_xdata()[0] for x in ax.lines if x.get_marker() == "D"]
    assert diamonds == [standard.flops("matmul") / 10**9]
    assert "diamond: DRAM bytes" in " ".join(words(ax.texts))
    swept = viz.roofline(flashsim.sweep(4096, head_dim=128, heads=16, dtype="bfloat16"))
    filled = [x.get_xdata()[0] for x in swept.lines if x.get_marker() == "^"][1]
    assert filled == flash.flops("matmul") / flash.compulsory()


def test_bars_without_a_height_lie_beside_no_figure():
    ax = viz.roofline(counts()[::3], seconds={"flash1": 1e-3})
    strip = next(p for p in ax.patches if p.get_height() > 0)
    floor = strip.get_y() + strip.get_height()
    assert min(ax.get_yticks()) >= floor
    marked = [entry for entry in ax.lines if entry.get_marker() in ("o", "s", "^")]
    heights = {y for entry in marked for y in entry.get_ydata() if y < 1}  # of the axes
    assert len(heights) == 2  # of three: one was measured
    share = ax.transAxes.inverted().transform(ax.transData.transform((1, floor)))[1]
    assert max(heights) < share
    assert min(ax.lines[0].get_ydata()) >= floor * (1 - 1e-9)  # the roof
    measured = viz.roofline(counts()[:1], seconds={"standard": 1e-3})
    assert not measured.patches


def test_roofline_of_a_sweep_says_which_point_is_which():
    ax = viz.roofline(flashsim.sweep([512, 1024], algorithm=["standard", "flash2"]))
    assert {"standard, N = 512", "FlashAttention-2, N = 1,024"} <= {*words(ax.texts)}


def test_memory_footprint_writes_no_number_over_another():
    ax = viz.memory_footprint(Problem(64, head_dim=64))  # m and l, or L: almost the same
    assert " ".join(words(ax.texts)).count("B") == 3
    assert overlaps(ax.figure) == []
    full = viz.memory_footprint(Problem(64, head_dim=64), device="T4")  # P of 65,536 keys fills it
    assert crossings(full.figure) == []


def test_memory_footprint_is_what_is_saved():
    problem = Problem(64, head_dim=32, heads=4)
    names = ("standard", "flash2")
    ax = viz.memory_footprint(problem, n=(128, 256), algorithms=names, device="A100")
    standard = line(ax, "standard").get_ydata()
    for n, nbytes in zip((128, 256), standard, strict=True):
        assert nbytes == traffic.saved(Problem(n, head_dim=32, heads=4), "standard")
    short, long = line(ax, "FlashAttention-2").get_ydata()
    assert long == 2 * short
    sweep = flashsim.sweep([128, 256], algorithm=["standard", "flash2"])
    assert len(viz.memory_footprint(sweep).lines) == 2


def test_l2_curve_ends_at_first_reads_and_marks_devices():
    requested = flashsim.count(Problem(2048, head_dim=64, dtype="bfloat16"))
    (curve,) = l2.curves(requested).values()
    ax = viz.l2_curve({"here": curve}, devices=("H100",))
    line = next(x for x in ax.lines if x.get_label() == "here")
    assert line.get_ydata()[0] == requested.bytes("load")
    assert line.get_ydata()[-1] == curve.cold < curve.reads(curve.enough() - 1)
    assert any(list(x.get_xdata()) == [50 * 2**20] * 2 for x in ax.lines)
    assert "H100" in words(ax.texts)


def test_bytes_of_little_more_than_a_decade_have_labels():
    ax = viz.l2_curve(l2.curves(flashsim.count(Problem(300))))
    low, high = ax.get_ylim()
    labels = [low <= at <= high for at in ax.get_yticks()]
    assert high < 30 * low
    assert sum(labels) >= 3


def test_residuals_are_in_per_cent_of_what_was_measured():
    ax = viz.predicted_against_measured({"a": [(1.1, 1.0), (9.7, 10.0)], "b": [(2.0, 2.0)]})
    lines = {x.get_label(): x for x in ax.lines}
    assert lines["a"].get_xdata().tolist() == [1.0, 10.0]
    assert lines["a"].get_ydata() == pytest.approx([10, -3])
    about = "3 points, mean error 4.3%, 66% within 5%, 100% within 12%"  # rounded down
    assert about in words(ax.texts)


# -- GPU timelines ---------------------------------------------------------------------------------


def bar_heights(collection):
    return {round(path.get_extents().height, 6) for path in collection.get_paths()}


def test_gpu_timeline_rows_and_phases():
    trace = cases.with_timeline()
    ax = viz.gpu_timeline(trace)
    labels = [c.get_label() for c in ax.collections]
    assert labels == ["visit", "load", "scores", "softmax", "output"]
    assert all(len(c.get_paths()) == trace.n_visits for c in ax.collections)
    box = ax.collections[1].get_paths()[0].get_extents()
    assert box.width == pytest.approx(0.3)  # 300 ns, in microseconds
    one = viz.gpu_timeline(trace, sms=(1, 1))
    assert one.get_title(loc="left").endswith("one SM")
    assert words(one.get_yticklabels()) == ["SM 1  block 0", "block 1"]


def test_gpu_timeline_numbers_visits_where_there_is_room():
    near = viz.gpu_timeline(cases.with_timeline(), sms=(0, 0), times=(0, 1.9))
    numbers = [text for text in words(near.texts) if text.startswith("j ")]
    assert numbers == ["j 0", "j 1", "j 0", "j 1"]  # the third does not end in time
    far = viz.gpu_timeline(cases.with_timeline(), sms=(0, 0), times=(0, 40))
    assert not [text for text in words(far.texts) if text.startswith("j ")]


def test_gpu_timeline_by_block():
    trace = cases.with_timeline(sm_count=2, shared=2)
    ax = viz.gpu_timeline(trace, color="block")
    (blocks,) = ax.collections
    assert sorted(blocks.get_array().tolist()) == list(range(trace.schedule.t_r))
    visits = trace.schedule.t_c
    widths = [path.get_extents().width for path in blocks.get_paths()]
    assert widths == pytest.approx([0.64 * visits] * trace.schedule.t_r)
    assert bar_heights(blocks) == {0.45}  # two share an SM
    many = cases.with_timeline(sm_count=66, shared=1)
    assert len(viz.gpu_timeline(many).collections) == 5  # six SMs at work: rows thick enough


def test_gpu_timeline_of_overlapping_visits_and_roles():
    trace = cases.with_roles()
    ax = viz.gpu_timeline(trace, sms=(0, 0))
    assert words(ax.get_yticklabels()) == [
        *("SM 0  producer", "consumer 0", "consumer 0, next", "consumer 1", "consumer 1, next")
    ]
    visits = [path.get_extents() for path in ax.collections[0].get_paths()]
    for one, other in itertools.combinations(visits, 2):
        apart = one.x1 <= other.x0 or other.x1 <= one.x0 or one.y1 <= other.y0 or other.y1 <= one.y0
        assert apart


# -- numbers ---------------------------------------------------------------------------------------


def test_human():
    assert human(4_456_448) == "4.46 MB"
    assert human(999) == "999 B"
    assert [human(n) for n in (17_000_000, 99_960_000, 999_499)] == ["17.0 MB", "100 MB", "999 kB"]
    assert human(999_500) == human(999_999) == "1.00 MB"  # never 1e+03 kB
    ticks = plt.figure().add_subplot().yaxis
    unit_axis(ticks)
    shown = [ticks.get_major_formatter()(n) for n in (0, 400, 15e6, 17.5e6, 300e6)]
    assert shown == ["0 B", "400 B", "15 MB", "17.5 MB", "300 MB"]
    assert human(989.4e12, "FLOP/s") == "989 TFLOP/s"
    assert human(0) == "0 B"


def test_a_series_lies_where_it_was_measured_and_names_its_share_of_the_peak():
    ax = viz.roofline_series({"mine": [("N = 1", 3.0, 31.2e12)]}, device="A100")
    line = ax.lines[-1]
    assert line.get_xydata().tolist() == [[3.0, 31.2e12]]
    assert line.get_label() == "mine\nN = 1: 10 % of peak"


def test_words_lie_in_their_banks_and_panels_say_how_many_wavefronts():
    ax = viz.banks([banks.access("column", layout) for layout in ("row-major", "padded")])
    first, second = (
        [path.get_extents().bounds[:2] for path in panel.get_paths()]
        for panel in ax.collections[2::3]
    )
    assert first == [(0, row) for row in range(32)]
    assert second == [(37 + row, row) for row in range(32)]
    assert words(ax.texts)[:2] == ["row-major: 32 wavefronts", "padded: 1 wavefront"]


def test_precision_shows_each_point_and_what_overflows_at_the_edge():
    found = precision.laboratory((32,), kinds=("normal",), points=("lse", "s"))
    last = dataclasses.replace(
        found.findings[-1], errors=dict.fromkeys(("out", "dq", "dk", "dv"), np.nan)
    )
    found = dataclasses.replace(found, findings=(*found.findings[:-1], last))
    ax = viz.precision(found)
    assert words(ax.get_xticklabels()) == ["float32", "lse", "s"]
    drawn = {line.get_label(): line.get_ydata() for line in ax.lines}
    assert drawn["dq"][1] == found.of("lse").errors["dq"] > 100 * drawn["out"][1]
    assert drawn["dq"][2] > max(drawn["dq"][:2])


def test_block_sizes_are_over_the_smallest_and_what_is_too_large_is_hollow():
    found = blocks.sizes(Problem(1024, head_dim=128), (64, 256), algorithm="flash1")
    ax = viz.block_sizes(found, stage="forward")  # without times: flash1 has no kernels
    assert len([line for line in ax.lines if not line.get_label().startswith("_")]) == 2
    # Of each series a line for each number of rows, and one of the hollow marks.
    *visits, _, first, second, hollow = ax.lines
    assert len(visits) == 2
    sizes = [block.bytes for block in found.found]
    drawn = [*first.get_ydata(), *second.get_ydata()]
    np.testing.assert_allclose(drawn, np.divide(sizes, min(sizes)))
    place = [*first.get_xdata(), *second.get_xdata()]
    large = [x for x, block in zip(place, found.found, strict=True) if not block.blocks]
    assert hollow.get_xdata().tolist() == large != []
