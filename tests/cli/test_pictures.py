"""`flashsim plot`, `animate` and `page`."""

import importlib.util
from pathlib import Path

import pytest
import viz_cases as cases
from commands import found, invoke, ok, refused, rows
from matplotlib import pyplot as plt
from PIL import Image

import flashsim
from flashsim import viz
from flashsim.cli import pictures
from flashsim.cli.pictures import KINDS

pytestmark = pytest.mark.promise("command line equals library")

SMALL = ("-n", "64", "-d", "8")


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


@pytest.fixture
def drawn(monkeypatch):
    """What a command would draw: the data and the plot's options; nothing is drawn."""
    held = {}
    monkeypatch.setattr(
        pictures, "draw", lambda kind, data, out, options, **_: held.update(data=data, **options)
    )
    return held


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in ("diff", "gpu-timeline")])
def test_plot_from_sizes(kind, tmp_path):
    out = tmp_path / "new" / f"{kind}.png"
    words = {"io-curve": ("-d", 8, "--causal"), "memory-footprint": ("-d", 8)}
    words["mask"] = ("-n", 64, "--window", "9:0", "-t", "16x16")
    words = words.get(kind, (*SMALL, "--causal", "-t", "16x16"))
    ok("plot", kind, *words, "-o", out)
    with Image.open(out) as image:
        assert image.width == 1440


def test_plot_from_saved_traces(tmp_path):
    files = []
    for name in ("flash1", "flash2"):
        files += ["-T", tmp_path / f"{name}.npz"]
        cases.trace(name).save(files[-1])
    out = tmp_path / "diff.svg"
    ok("plot", "diff", *files, "-o", out)
    assert "FlashAttention-2 minus FlashAttention-1" in out.read_text()
    ok("plot", "tile-map", *files[:2], "-o", tmp_path / "map.pdf")


def test_a_gpu_timeline_of_bundled_and_saved_traces(tmp_path):
    cases.with_timeline().save(tmp_path / "gpu.npz")
    out = tmp_path / "gpu.svg"
    for trace, words, texts in (
        ("h200-forward", ("--sms", "0:1"), ("stage forward: 2 SMs", "NVIDIA H200")),
        ("h200-backward", ("--sms", "0:1", "--times", "0:40"), (">40</text>",)),
        (tmp_path / "gpu.npz", (), ("stage forward: 3 SMs",)),
    ):
        ok("plot", "gpu-timeline", "-T", trace, *words, "-o", out)
        assert all(text in out.read_text() for text in texts)
        assert trace != "h200-backward" or ">60</text>" not in out.read_text()  # it takes 160 µs


@pytest.mark.parametrize("over", ["head_dim", "block_q", "block_k", "sram_bytes"])
def test_io_curve_over(over, tmp_path):
    out = tmp_path / "io.svg"
    words = ("-n", 512, "-a", "flash2", "--over", over, "-t", "32x32", "-o", out)
    ok("plot", "io-curve", *words)
    held = {"block_q": "block_k = 32", "block_k": "block_q = 32"}.get(over, "N = 512")
    assert held in out.read_text()


def test_every_plot_is_drawn_by_a_command():
    """By `plot`, or by the command whose table it shows; the last three by none."""
    # By the studies banks, blocks, precision, reproduce pallas; by xray.
    elsewhere = {"banks", "block_sizes", "precision", "roofline_series", "tile_evidence"}
    elsewhere |= {"predicted_against_measured", "rank_timeline", "scaling"}
    plots = {name for room, names in viz._ROOMS.items() if "plots." in room for name in names}
    # "heads" is traffic, of three ways to share heads.
    assert {kind.replace("-", "_") for kind in KINDS} == plots - elsewhere | {"heads"}


def test_a_mask_is_drawn_of_the_lengths_and_the_mask_given(drawn, tmp_path):
    words = ("-n", 48, "--n-kv", 64, "--causal", "--window", "9:0", "-t", "16x8")
    ok("plot", "mask", *words, "-o", tmp_path / "x.png")
    p = drawn["data"]
    assert (p.n_q, p.n_kv, p.causal, p.window) == (48, 64, True, (9, 0))
    assert drawn["tiling"] == flashsim.Tiling(16, 8)
    ok("plot", "mask", "--causal", "-o", tmp_path / "x.png")
    assert (drawn["data"].n_q, drawn["tiling"]) == (512, None)  # few enough scores to draw


def test_every_kind_says_what_it_uses():
    taken = {p.name for p in found(["plot"])[0].params}
    assert all(uses <= taken for uses in pictures._USES.values())
    assert taken - {"kind", "out", "theme", "dpi", "size", "slides", "help"} == set.union(
        *pictures._USES.values()
    )


def test_size_and_resolution(tmp_path):
    out = tmp_path / "x.png"
    words = ("-n", 64, "-a", "flash2", "--size", "8x5", "--dpi", 60, "-o", out)
    ok("plot", "traffic", *words)
    with Image.open(out) as image:
        assert image.size == (480, 300)


@pytest.mark.parametrize("kind", ["traffic", "cumulative", "tile-map", "sram-timeline", "diff"])
def test_pictures_are_counted_and_the_same_when_executed(kind, tmp_path):
    words = ("plot", kind, "-n", 128, "-d", 16, "--causal", "--direction", "backward")
    words += ("-a", "flash1,flash2") if kind == "diff" else ()
    counted, executed = tmp_path / "a.svg", tmp_path / "b.svg"
    assert "counted by formula; --execute simulates it" in invoke(*words, "-o", counted).stderr
    assert "counted, nothing" not in invoke(*words, "-o", executed, "--execute").stderr
    said = executed.read_text().replace("simulated", "counted")
    assert said == counted.read_text()


def test_a_picture_of_what_no_machine_could_run(tmp_path, monkeypatch):
    def run(*_, **__):
        raise AssertionError("executed")

    monkeypatch.setattr(pictures.execution, "run", run)
    words = ("plot", "traffic", "-n", 16384, "--heads", 32, "-o", tmp_path / "x.svg")
    ok(*words)
    assert "counted" in (tmp_path / "x.svg").read_text()
    for command, out in (("animate", "x.gif"), ("page", "x.html")):
        ok(command, "-n", 128, "-d", 16, "-o", tmp_path / out)


def test_a_roofline_plots_what_the_table_says(drawn, tmp_path):
    words = ("-n", 512, "--heads", 2)
    ok("plot", "roofline", *words, "-o", tmp_path / "x.png")
    table = {(row["algorithm"], row["count"]): row["B"] for row in rows("roofline", *words)}
    assert [c.algorithm for c in drawn["data"]] == ["standard", "flash2"]
    for counted in drawn["data"]:
        assert table[counted.algorithm, "requested"] == counted.bytes()
        assert table[counted.algorithm, "dram"] == drawn["dram_bytes"][counted.algorithm]


def test_a_gpus_trace_stands_at_the_time_it_took(tmp_path):
    trace = flashsim.load_sample_trace("h200-forward")
    took = (trace.timeline["end_ns"].max() - trace.timeline["start_ns"].min()) * 1e-9
    out = tmp_path / "x.svg"
    ok("plot", "roofline", "-T", "h200-forward", "-o", out)
    assert "(measured" in out.read_text()
    shown = ok("trace", "show", "h200-forward")
    tera = trace.flops("matmul") / took / 1e12
    assert f"{took * 1e6:.4g} µs, {tera:.4g} TFLOP/s" in " ".join(shown.split())


def test_windows_and_grouped_heads(tmp_path):
    out, html = tmp_path / "map.svg", tmp_path / "walk.html"
    words = ("--n-kv", 96, "--window", "16:8", "--heads", 4, "--kv-heads", 2, "-t", "16x16")
    ok("plot", "tile-map", *SMALL, *words, "-o", out)
    assert "4 / 2 heads, 64 × 96" in out.read_text()
    assert "window 16:8" in out.read_text()
    ok("page", *SMALL, *words, "-o", html)
    assert "window 16:8" in html.read_text()


def test_animate_and_page(tmp_path):
    gif, html = tmp_path / "walk.gif", tmp_path / "walk.html"
    words = (*SMALL, "-t", "16x16", "--row", 63)
    ok("animate", *words, "--max-frames", 3, "-o", gif)
    with Image.open(gif) as image:
        assert image.n_frames == 3
    ok("page", *words, "-o", html)
    assert '"row":63' in html.read_text()
    back = ("--direction", "backward", "-a", "flash1,flash2")
    ok("page", *SMALL, "-t", "16x16", *back, "-o", html)
    assert '"statistics":null' in html.read_text()


def test_more_errors(tmp_path):
    ending = "cannot write 'out.xyz', because flashsim knows no format with this ending; choose"
    assert ending in refused("plot", "traffic", *SMALL, "-o", tmp_path / "out.xyz")
    cases.trace().save(tmp_path / "t.npz")
    words = ("page", "-T", tmp_path / "t.npz", "--row", "1", "-o", tmp_path / "x.html")
    assert "--row needs tensors" in refused(*words)


def test_the_gallery_writes_what_the_docs_show(tmp_path, monkeypatch):
    docs = Path(__file__).parents[2] / "docs"
    spec = importlib.util.spec_from_file_location("gallery", docs / "gallery.py")
    gallery = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gallery)
    names = {*gallery.PLOTS, *gallery.ANIMATIONS, *gallery.FILES, *gallery.PICTURES}
    pages = ("gallery.md", "masks.md", "lab.md", "your_own_mask.md", "your_own_algorithm.md")
    pages += ("course.md", "precision.md", "many_gpus.md", "gpu_timelines.md")
    text = "".join((docs / "guides" / page).read_text(encoding="utf-8") for page in pages)
    assert names == {path.name for path in (docs / "gallery").iterdir()}
    assert all(f"(../gallery/{name})" in text for name in names)
    monkeypatch.setattr(gallery, "HERE", tmp_path)
    gallery.main(["diff.png"])
    assert (tmp_path / "diff.png").exists()
    with pytest.raises(SystemExit, match=r"unknown file: a\.png"):
        gallery.main(["a.png"])


# -- heads, own times, slides ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "algorithm"), [(("-n", 1, "--n-kv", 4096), "flash-decode"), (("-n", 1024), "flash2")]
)
def test_heads_are_side_by_side_in_one_command(words, algorithm, drawn, tmp_path):
    ok("plot", "heads", *words, "-o", tmp_path / "x.png")
    counts = drawn["data"]
    assert [*counts] == ["MHA, 32 KV heads", "GQA, 8 KV heads", "MQA, 1 KV head"]
    assert [c.problem.kv_heads for c in counts.values()] == [32, 8, 1]
    assert {c.algorithm for c in counts.values()} == {algorithm}
    assert len({c.tiling for c in counts.values()}) == 1


def test_a_roofline_has_ones_own_times(drawn, tmp_path):
    file = tmp_path / "times.csv"
    file.write_text("algorithm,seconds,note\nflash2,0.001,x\nstandard,0.004,\n")
    ok("plot", "roofline", "-n", 256, "--measured", file, "-o", tmp_path / "x.png")
    assert drawn["seconds"] == {"flash2": 0.001, "standard": 0.004}
    assert [c.algorithm for c in drawn["data"]] == ["flash2", "standard"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name,ms\nflash2,1\n", "with rows such as flash2,0.0012, got the columns name, ms"),
        ("algorithm,seconds\nflash2,fast\n", "line 2, seconds must be a positive number"),
        ("algorithm,seconds\nflash2,-1\n", "line 2, seconds must be a positive number"),
        ("algorithm,seconds\nflash9,1\n", "unknown algorithm 'flash9'"),
        ("algorithm,seconds\nflash2,1\nflash2,2\n", "flash2 appears for the second time"),
        ("algorithm,seconds\n", "has no rows"),
        ("", "got the columns none"),
    ],
)
def test_times_that_are_none_are_refused(text, said, tmp_path):
    file = tmp_path / "times.csv"
    file.write_text(text)
    assert said in refused("plot", "roofline", "--measured", file, "-o", tmp_path / "x.png")


def test_a_plot_for_slides_is_two_files(tmp_path):
    words = ("plot", "traffic", "-n", 64, "-d", 16, "--slides", "-o", tmp_path / "x.png")
    ok(*words)
    assert {p.name for p in tmp_path.iterdir()} == {"x.png", "x.svg"}
    clash = "--slides chooses the size and resolution itself; leave out --dpi"
    assert clash in refused(*words, "--dpi", 200)
