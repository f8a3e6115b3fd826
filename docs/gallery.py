"""Write every picture, animation and player of the guides and README.md into docs/gallery/.

    python docs/gallery.py [NAME ...]

NAME is a file name without its folder; by default all files are written. `page.png` and `lab.png`
are screenshots of HTML pages. They need Playwright and Chromium, and are not
rewritten without them.
"""

from __future__ import annotations

import re
import shutil
import sys
from functools import cache
from pathlib import Path

import matplotlib as mpl
import numpy as np

import flashsim
from flashsim import (
    Problem,
    Tiling,
    banks,
    blocks,
    distributed,
    exercises,
    l2,
    precision,
    predict,
    viz,
)
from flashsim.exercises.picture import draw
from flashsim.studies.reproduce import pallas

HERE = Path(__file__).parent / "gallery"
TILE = Tiling(64, 64)


@cache
def tensors(n, d=64):
    """Random q, k and v of one head, each of shape (n, d)."""
    return np.random.default_rng(0).standard_normal((3, n, d), dtype=np.float32)


@cache
def run(algorithm="flash2", n=1024, causal=False):
    """The result of a traced forward pass on random inputs."""
    return flashsim.run(*tensors(n), algorithm=algorithm, causal=causal, tiling=TILE, trace=True)


@cache
def backward(algorithm="flash2", n=512):
    """The gradients of a traced causal backward pass on random inputs."""
    return run(algorithm, n, causal=True).backward(tensors(n)[0], tiling=TILE)


@cache
def real():
    """The traced result of one layer of a sentence encoder, and m, α and l of a query row."""
    sample = flashsim.load_sample("layer5")
    result = flashsim.run(sample.q, sample.k, sample.v, tiling=Tiling(32, 32), trace=True)
    return result, viz.row_statistics(result.trace, sample.q, sample.k)


@cache
def decoded():
    """The trace of decoding a batch of 3: 8 heads, 2 KV heads, pages of 24 keys, 96 keys shared."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((3, 8, 2, 16), np.float32)
    k, v = rng.standard_normal((2, 16, 2, 24, 16), np.float32)
    table = [[0, 1, 2, 3, *range(4 * b + 4, 4 * b + 8)] for b in range(3)]
    return flashsim.run(
        q, k, v, algorithm="flash-decode", tiling=Tiling(8, 16), splits=3, trace=True,
        block_table=table, cache_seqlens=[190, 160, 130], shared_prefix=96,
    ).trace  # fmt: skip


@cache
def guide(page):
    """The names that the code blocks of a guide define; its pictures show these objects."""
    text = (HERE.parent / "guides" / page).read_text(encoding="utf-8")
    scope = {}
    for block in re.findall(r"^```python\n(.*?)^```", text, re.S | re.M):
        exec(block, scope)
    return scope


def own(name):
    """A result that the code of docs/guides/your_own_algorithm.md computes."""
    return guide("your_own_algorithm.md")[name]


def picture_of_a_solution(rows):
    """A plot of the bytes of a solution with tiles of `rows` rows, and of the reference."""
    one = exercises.get("fewest-bytes")
    _, trace = exercises.grade(one.solution_source.replace("16", str(rows)), one)
    return draw({f"tiles of {rows} rows": trace, "reference": one.executed.trace}, one)


def named(problem, bias=None):
    """A plot of a mask that docs/guides/masks.md defines."""
    scope = guide("masks.md")
    return viz.mask(scope[problem], scope["tile"], bias=None if bias is None else scope[bias])


def function(problem):
    """A plot of a mask that docs/guides/your_own_mask.md defines."""
    scope = guide("your_own_mask.md")
    return viz.mask(scope[problem], scope["tile"])


def heads_of_keys():
    """Counts of one token on a long cache with 32, 8 and 1 KV heads, for 32 query heads."""
    cache = {"n_q": 1, "n_kv": 32_768, "head_dim": 128, "heads": 32, "dtype": "bfloat16"}
    return {
        f"{name}, {n} KV head{'s' if n > 1 else ''}": flashsim.count(
            Problem(**cache, kv_heads=n), algorithm="flash-decode", device="H100"
        )
        for name, n in (("MHA", 32), ("GQA", 8), ("MQA", 1))
    }


def three(**options):
    """Traced results of three algorithms on the same inputs."""
    return [run(name, **options) for name in ("standard", "flash1", "flash2")]


def counts(problem, **options):
    """Counts of three algorithms, in closed form."""
    return [
        flashsim.count(problem, algorithm=name, **options)
        for name in ("standard", "flash1", "flash2")
    ]


def gpu(name):
    """A trace that a GPU recorded and that comes with flashsim."""
    return flashsim.load_sample_trace(name)


def caches(problem):
    """DRAM reads against the size of L2, for three orders of thread blocks."""
    requested = flashsim.count(problem, tiling=Tiling(128, 64), device="H100")
    return {
        order: l2.curves(requested, l2.L2Model(order))["forward"]
        for order in ("head-first", "tile-first", "grouped")
    }


def ranks(scheme, n=8):
    """The count of a causal sequence that is spread over n GPUs."""
    problem = Problem(8192, head_dim=128, heads=8, dtype="bfloat16", causal=True)
    return distributed.count(problem, ranks=n, scheme=scheme, tiling=Tiling(128, 128))


def million():
    """Predicted times of a million tokens for each scheme, on 2 to 1,024 GPUs."""
    shape = {"head_dim": 128, "heads": 32, "kv_heads": 8, "dtype": "bfloat16"}
    problem = Problem(2**20, **shape, causal=True)
    sizes = {"ulysses": (2, 4, 8)}
    return {
        scheme: [
            predict.spread(problem, ranks=n, scheme=scheme, algorithm="flash2-fused")
            for n in sizes.get(scheme, (2, 4, 8, 16, 64, 256, 1024))
        ]
        for scheme in distributed.SCHEMES
    }


BIG = Problem(8192, head_dim=128, heads=16, dtype="bfloat16")
PLOTS = {
    "traffic.png": lambda: viz.traffic(three()),
    "traffic-backward-dark.png": lambda: viz.traffic(
        [backward(name) for name in ("standard", "flash1", "flash2", "flash2-fused")], theme="dark"
    ),
    "tile-map.png": lambda: viz.tile_map(run(causal=True)),
    "tile-map-2048.png": lambda: viz.tile_map(run("flash1", n=2048, causal=True)),
    "tile-map-decode.png": lambda: viz.tile_map(decoded(), color="block"),
    "cumulative.png": lambda: viz.cumulative(three(n=2048, causal=True)),
    "sram-timeline.png": lambda: viz.sram_timeline(run()),
    "sram-timeline-dark.png": lambda: viz.sram_timeline(backward(), theme="dark"),
    "io-curve.png": lambda: viz.io_curve(
        flashsim.sweep(
            [512, 1024, 2048, 4096, 8192, 16384, 32768], dtype="bfloat16", tiling=TILE,
            algorithm=["standard", "flash1", "flash2"],
        )
    ),
    "io-curve-sram.png": lambda: viz.io_curve(
        flashsim.sweep(
            8192, dtype="bfloat16", algorithm=["flash1", "flash2"],
            sram_bytes=[16384, 32768, 65536, 131072, 262144, 524288],
        ),
        x="sram_bytes",
    ),
    "roofline.png": lambda: viz.roofline(counts(BIG, tiling=Tiling(64, 64))),
    "banks.png": lambda: viz.banks([banks.access("column", layout) for layout in banks.LAYOUTS]),
    "precision.png": lambda: viz.precision(precision.laboratory((1024,), kinds=("normal",))),
    "block-sizes.png": lambda: viz.block_sizes(
        blocks.sizes(Problem(4096, head_dim=128, batch=4, heads=16, dtype="bfloat16"))
    ),
    "roofline-series.png": lambda: viz.roofline_series(pallas.series(), device="RTX 4000 Ada"),
    "memory-footprint.png": lambda: viz.memory_footprint(BIG, device="H100"),
    "l2-curve.png": lambda: viz.l2_curve(caches(BIG), devices=("A100", "H100")),
    "diff.png": lambda: viz.diff(run("flash1"), run("flash2")),
    "gpu-phases.png": lambda: viz.gpu_timeline(gpu("h200-forward"), sms=(0, 1)),
    "gpu-phases-dark.png": lambda: viz.gpu_timeline(
        gpu("h200-backward"), sms=(0, 1), times=(0, 40), theme="dark"
    ),
    "own-linear.png": lambda: viz.sram_timeline(own("result"), steps=(0, 9)),
    "own-orders.png": lambda: viz.traffic([own("result"), own("turned")]),
    "own-levels.png": lambda: viz.sram_timeline(own("small"), steps=(0, 9)),
    "course-bytes.png": lambda: picture_of_a_solution(8),
    "heads.png": lambda: viz.traffic(heads_of_keys()),
    "mask-own-documents.png": lambda: function("documents"),
    "mask-own-streaming.png": lambda: function("streaming"),
    "mask-own-chunks.png": lambda: function("chunks"),
    "mask-causal.png": lambda: named("causal"),
    "mask-chunk.png": lambda: named("chunk"),
    "mask-window.png": lambda: named("window"),
    "mask-local.png": lambda: named("local"),
    "mask-sinks.png": lambda: named("sinking"),
    "mask-strided.png": lambda: named("dilated"),
    "mask-block-sparse.png": lambda: named("sparse"),
    "mask-documents.png": lambda: named("documents"),
    "mask-prefix.png": lambda: named("prefix"),
    "mask-alibi.png": lambda: named("biased", "alibi"),
    "gpu-blocks.png": lambda: viz.gpu_timeline(gpu("h200-forward")),
    "rank-timeline.png": lambda: viz.rank_timeline([ranks("ring"), ranks("zigzag")]),
    "scaling.png": lambda: viz.scaling(million()),
}  # fmt: skip
ANIMATIONS = {
    "traversal.gif": lambda path: viz.animate(
        run(n=512, causal=True),
        path,
        statistics=viz.row_statistics(run(n=512, causal=True).trace, *tensors(512)[:2]),
        fps=6,
    ),
    "traversal-dark.gif": lambda path: viz.animate(
        run(n=512, causal=True),
        path,
        statistics=viz.row_statistics(run(n=512, causal=True).trace, *tensors(512)[:2]),
        fps=6,
        theme="dark",
    ),
    "real-tensors.gif": lambda path: viz.animate(
        real()[0], path, statistics=real()[1], max_frames=136, fps=10
    ),
    "side-by-side.gif": lambda path: viz.animate(
        [run("standard", n=512, causal=True), run(n=512, causal=True)], path, clock="bytes", fps=10
    ),
    "flash1-flash2.gif": lambda path: viz.animate(
        [run("flash1", n=512, causal=True), run(n=512, causal=True)], path, fps=6
    ),
    "backward-dark.gif": lambda path: viz.animate(backward(), path, theme="dark", fps=8),
    "own-split.gif": lambda path: viz.animate(own("split"), path, fps=6),
    "gpu-forward.gif": lambda path: viz.animate(gpu("h200-forward"), path, max_frames=76, fps=8),
    "zigzag.gif": lambda path: viz.animate_ranks(ranks("zigzag"), path),
}
FILES = {
    "causal-2048.html": lambda path: viz.page(
        run(n=2048, causal=True),
        path,
        statistics=viz.row_statistics(run(n=2048, causal=True).trace, *tensors(2048)[:2]),
    ),
    "real-tensors.html": lambda path: viz.page(real()[0], path, statistics=real()[1]),
    "flash1-flash2.html": lambda path: viz.page([run("flash1"), run("flash2")], path),
    "backward.html": lambda path: viz.page(backward("flash2-fused"), path),
    "gpu-forward.html": lambda path: viz.page(gpu("h200-forward"), path),
    "gpu-backward.html": lambda path: viz.page(gpu("h200-backward"), path),
    "ring.html": lambda path: viz.animate_ranks(ranks("ring", 4), path),
    "zigzag.html": lambda path: viz.animate_ranks(ranks("zigzag", 4), path),
    "lab.html": viz.lab,
    "gpu-forward.json.gz": lambda path: gpu("h200-forward").to_perfetto(path),
}


def plot(path, draw):
    """Draw a figure and save it at slide size."""
    axes = draw()
    viz.save_figure(axes, path, dpi=110)
    mpl.pyplot.close(axes.figure)


#: Screenshots: the page, the end of its address, the JavaScript that moves it to a step, a key
#: to press, the colour scheme, and the height.
PICTURES = {
    "page.png": ("real-tensors.html", "", "player.go(200)", "Enter", "dark", 800),
    "lab.png": ("lab.html", "#mask=causal&n_q=2048", "go(170)", "ArrowRight", "light", 1010),
}


def picture(path):
    """Save a screenshot of a page in the middle of its animation."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        chromium = None
    if chromium is None:
        print(f"{path.name}: not rewritten, because Playwright or Chromium is missing")
        return
    name, at, script, key, scheme, height = PICTURES[path.name]
    page = HERE / name
    FILES[name](page)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1280, "height": height}, color_scheme=scheme)
        tab.goto(page.as_uri() + at)
        tab.evaluate(script)
        tab.keyboard.press(key)
        tab.wait_for_timeout(300)
        tab.screenshot(path=path)
        browser.close()


def main(wanted):
    """Write the named files, or all files."""
    mpl.use("Agg")
    HERE.mkdir(exist_ok=True)
    every = [*PLOTS, *ANIMATIONS, *FILES, *PICTURES]
    unknown = set(wanted) - set(every)
    if unknown:
        raise SystemExit(
            f"unknown file: {', '.join(sorted(unknown))}; possible: {', '.join(every)}"
        )
    for name in wanted or every:
        path = HERE / name
        if name in PLOTS:
            plot(path, PLOTS[name])
        elif name in PICTURES:
            picture(path)
        else:
            {**ANIMATIONS, **FILES}[name](path)
        print(f"{path.relative_to(HERE.parent)}: {path.stat().st_size:,} B")


if __name__ == "__main__":
    main(sys.argv[1:])
