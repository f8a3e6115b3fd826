"""Speeds in the guides are those of the kept measurements."""

import csv
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PERFORMANCE = (ROOT / "docs/guides/performance.md").read_text(encoding="utf-8")
WORDS = " ".join(PERFORMANCE.split())
#: The shapes of the papers that are behind, forward and backward.
BEHIND = [f"d = {d} without a mask at N = 16,384" for d in (64, 128)]


@pytest.fixture
def bench(monkeypatch):
    """A module of benchmarks/, by its name."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


@pytest.fixture
def tables(bench):
    return bench("speed_tables")


@pytest.mark.parametrize(("module", "least"), [("speed_tables", 13), ("cpu_tables", 7)])
def test_the_guides_tables_are_of_the_kept_measurements(bench, module, least):
    sections = bench(module).SECTIONS
    assert len(sections) >= least
    for section, table in sections:
        assert table() in PERFORMANCE.partition(f"{section}\n")[2], section


def test_tables_of_other_guides_are_of_the_kept_measurements(bench):
    tables = bench("doc_tables")
    for page, section, table in (
        ("texts.md", tables.COURSE, tables.softmax_matmul()),
        ("texts.md", tables.COURSE, tables.attention()),
        ("many_gpus.md", tables.REAL, tables.on_real_gpus()),
        ("truth.md", tables.COUNTERS, tables.decode_counters()),
    ):
        text = (ROOT / "docs/guides" / page).read_text(encoding="utf-8")
        assert table.markdown() in text.partition(f"{section}\n")[2]


@pytest.mark.thorough
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_what_many_gpus_reach_on_paper_is_predicted_so_today(bench, direction):
    tables = bench("doc_tables")
    text = (ROOT / "docs/guides/many_gpus.md").read_text(encoding="utf-8")
    assert tables.on_paper(direction).markdown() in text.partition(f"{tables.PAPER}\n")[2]


def test_the_guides_sentences_are_of_the_kept_measurements(tables):
    def of(name, ratio):
        found = tables.shapes(name, lambda s: s.n)
        return [sorted(ratio(one, way) for one in found) for way in ("forward", "backward")]

    def ends(ratios):
        return f"{ratios[0]:.2f} to {ratios[-1]:.2f}"

    papers = of("gpu-papers-h200.csv", tables.Shape.ratio)
    assert [sum(x >= 1 for x in way) for way in papers] == [12, 12]
    least = 100 * (min(papers[0] + papers[1]) - 1)
    assert f"all twelve are at least as fast as the best, by {least:.1f} % at least;" in WORDS
    first = of("gpu-papers-h200-first.csv", tables.Shape.ratio)
    assert [sum(x >= 1 for x in way) for way in first] == [11, 11]
    forward, backward = (f"{way[0]:.3f}" for way in first)
    assert f"eleven were forward, {BEHIND[0]} made {forward}, and eleven" in WORDS
    assert f"backward, {BEHIND[1]} made {backward}, both behind FA-CuTe" in WORDS
    best = "× the best of FA-CuTe, cuDNN and FlashAttention-2"
    both = [ends(sorted(way + other)) for way, other in zip(papers, first, strict=True)]
    assert f"| in two runs {both[0]} {best} forward, {both[1]} × backward |" in WORDS
    before = of("gpu-papers-h200-before.csv", tables.Shape.ratio)
    assert [sum(x >= 1 for x in way) for way in before] == [10, 9]
    assert "ten forward and nine backward were" in WORDS
    cudnn = of("gpu-papers-h200.csv", lambda x, way: x.ms(way, "torch cudnn") / x.ms(way))
    assert f"behind in all, forward {ends(cudnn[0])} times, backward {ends(cudnn[1])}." in WORDS
    short = of("gpu-short-h200.csv", tables.Shape.ratio)
    assert [len(way) for way in short] == [72, 72]
    assert [sum(x >= 1 for x in way) for way in short] == [70, 68]
    assert (
        f"70 are at least as fast forward, and 68 backward, by up to {short[1][-1]:.2f}." in WORDS
    )
    assert {f"{x:.2f}" for x in short[0][:2]} == {"0.97"}
    behind = f"{short[1][0]:.2f} to {short[1][3]:.2f}"
    assert f"of 256, 0.97 each; backward 64 of 256 to 768, {behind} of FA-CuTe." in WORDS
    serving = of("gpu-serving-h200.csv", tables.Shape.ratio)
    assert [sum(x >= 1 for x in way) for way in serving] == [13, 12]
    last = f"32 heads on 8 at 32,768 tokens make {serving[1][0]:.3f}."
    assert f"Forward all thirteen are at least as fast, backward twelve; {last}" in WORDS
    widths = of("gpu-widths-h200.csv", tables.Shape.ratio)
    assert [sum(x >= 1 for x in way) for way in widths] == [16, 15]
    assert f"backward fifteen; d = 32 without a mask makes {widths[1][0]:.3f}." in WORDS


def test_the_sentences_of_fp8_are_of_the_kept_measurements(tables):
    """Each error on outliers, but of whole tensors rotated, of which the page does not speak."""
    rows = [row for row in tables.kept("fp8-h200.csv") if row["rmse"]]
    assert len(rows) == 6
    for row in rows:
        assert row["rmse"] in WORDS or row["way"] == "a scale each tensor, rotated"


def test_the_sentences_of_kernels_in_python_are_of_the_kept_measurements(tables):
    runs = {}
    for row in tables.kept("gpu-python-h200.csv"):
        shape = row["head_dim"], row["causal"], row["seq_len"]
        runs.setdefault(shape, {})[row["implementation"]] = row
    assert len(runs) == 12

    def ratios(suffix, direction="backward"):
        names = [f"flashsim {backend}{suffix}" for backend in ("numba_cuda", "cupy")]
        pairs = ([float(of[name][f"{direction}_tflops"]) for name in names] for of in runs.values())
        found = [python / ours for python, ours in pairs]
        return f"{min(found):.2f} to {max(found):.2f}"

    words = f"{ratios('')} of C++'s fused, {ratios(' deterministic')} in order and"
    assert f"{words} {ratios(' three passes')} in three passes" in WORDS
    forward = ratios("", "forward")
    assert f"in three passes, the forward {forward}." in WORDS
    assert f'on a Hopper GPU {forward} × `"cupy"` forward, {ratios("")} backward (from' in WORDS
    ours = [
        float(row["C++ / and K ahead"])
        for row in tables.kept("python-forward-h200.csv")
        if row["head_dim"] not in ("64", "128")
    ]
    worst, *others = sorted(ours)
    assert f"the forward makes {worst:.2f} at d = 256 without a mask, and elsewhere" in WORDS
    assert f"elsewhere {others[0]:.2f} to {others[-1]:.2f} ([file]" in WORDS


def test_the_sentences_of_second_runs_are_of_the_kept_measurements(tables):
    """Of the fastest library's time by ours, and of ours by Python's."""
    runs = {}
    for name, count in (("short", 37), ("serving", 9)):
        runs[name] = tables.shapes(f"gpu-{name}-h200-second.csv", lambda s: s.n)
        for way in ("forward", "backward"):
            found = [x for one in runs[name] if (x := one.ratio(way))]
            assert (len(found), min(found) >= 1) == (count, True)
            if name == "short":
                assert f"{way} by {min(found):.2f}" in WORDS

    def python(shapes):
        times = [
            [x.ms("backward", f"flashsim {b}") for b in ("cupy", "numba_cuda")] for x in shapes
        ]
        found = [ours / python for ours, python in times if ours and python]
        return f"{min(found):.2f} to {max(found):.2f}"

    (long,) = (one for one in runs["serving"] if one.n == 32_768)
    assert f"and all nine are faster, that one by {long.ratio('backward'):.2f}." in WORDS
    assert f"32 or 64 heads on 8, causal, {python(runs['serving'])}" in WORDS
    narrow = [one for one in runs["short"] if one.d == 64]
    once = python(one for one in narrow if one.n == 128 and one.batch > 1)
    assert (
        f"at d = 64, N = 128 the backward of 8 and of 64 sequences makes {once} of C++'s" in WORDS
    )
    others = python(one for one in narrow if one.n > 128)
    notebook = (ROOT / "docs/notebooks/python_kernels.md").read_text(encoding="utf-8")
    assert f"d = 64, from N = 197 to 768, Python's make {others} of C++'s" in notebook


def test_the_sentences_since_then_are_of_the_kept_measurements(tables):
    """Of cuDNN's time by ours in both runs."""

    def ratios(name):
        times = {}
        for row in tables.kept(name):
            if row["seq_len"] == "1024":
                shape = times.setdefault((row["head_dim"], row["causal"]), {})
                shape[row["implementation"]] = float(row["forward_ms"])
        return {shape: of["torch cudnn"] / of[tables.OURS] for shape, of in times.items()}

    then, now = ratios("gpu-h200.csv"), ratios("gpu-papers-h200.csv")
    gains = sorted(100 * (now[shape] / then[shape] - 1) for shape in then)
    said = f"{gains[0]:.0f} to {gains[-1]:.0f} % on cuDNN at N = 1,024"
    assert f'Since then "cupy" forward has gained {said}' in WORDS


def test_the_sentences_of_decoding_are_of_the_kept_measurements(tables):
    shapes = {}
    for row in tables.kept("decode-h200.csv"):
        shape = row["n_q"], row["head_dim"], row["batch"], row["keys"]
        shapes.setdefault(shape, {})[row["implementation"]] = float(row["us"])
    ratios = {"1": [], "4": []}
    for (n_q, *_), us in shapes.items():
        ratios[n_q].append(min(us["cuDNN"], us["FlashAttention-2"]) / us["flashsim"])
    ahead = {n_q: sum(x >= 1 for x in of) for n_q, of in ratios.items()}
    assert f"Of {len(ratios['1'])} shapes with one query {ahead['1']} are at least as fast" in WORDS
    least, most = min(ratios["4"]), max(ratios["4"])
    assert f"four queries all {ahead['4']} are ahead, by {least:.1f} to {most:.1f} times" in WORDS


def test_the_sentence_of_float32_on_a_cpu_is_of_the_kept_measurements(bench):
    tables, ratios = bench("cpu_tables"), []
    for table in (tables.speed(), tables.avx512()):
        head, _, *rows = (line.split(" | ") for line in table.replace(" |\n", "\n").splitlines())
        ratios += [float(row[head.index("× PyTorch")]) for row in rows]
    others = tables.kept("cpu-zen4.csv") + tables.kept("cpu-amx-float32.csv")
    ratios += [float(row["x torch"]) for row in others if row.get("type", "float32") == "float32"]
    assert len(ratios) == 48
    assert f"in float32 {min(ratios)} to {max(ratios)} × PyTorch's attention" in WORDS


def test_the_sentence_of_amx_is_of_the_kept_measurement(bench):
    rows = [row.split("|")[1:-1] for row in bench("cpu_tables").amx().splitlines()[2:]]
    forward, backward = rows[::2], rows[1::2]
    eight, two = 5, 9
    assert all("**" in row[column] for row in backward for column in (eight, two))
    assert [sum("**" in row[column] for row in forward) for column in (eight, two)] == [4, 6]
    assert "on two CPUs all, on eight all with the backward and four of six forward passes" in WORDS
    lacking = f"{forward[0][eight].strip()}, and d = 128 without one, {forward[4][eight].strip()};"
    assert f"what eight lack in this run, {lacking}" in WORDS


def test_the_sentence_of_float32_beside_amx_is_of_the_kept_measurement(bench):
    tables = bench("cpu_tables")
    rows = tables.kept("cpu-amx-float32.csv")
    ratios = [f"{float(row['x torch']):.2f}" for row in rows]
    said = "; ".join(", ".join(ratios[i : i + 4]) for i in (0, 4, 8))
    assert f"{said} × PyTorch: nine of the twelve" in WORDS
    pairs = zip(ratios, tables.AVX512_AIMS, strict=True)
    assert sum(float(ratio) >= aim for ratio, aim in pairs) == 9
    forward = [r["of sgemm"] for r in rows if (r["N"], r["pass"]) == ("4096", "forward")]
    least, most = (f"{float(x(forward, key=float)):.2f}" for x in (min, max))
    assert f"at N = 4096 it makes {least} to {most} of sgemm" in WORDS


def test_the_sentences_of_an_epyc_are_of_the_kept_measurements(bench):
    tables = bench("cpu_tables")
    rows = [row.split("|")[1:-1] for row in tables.zen4().splitlines()[2:]]
    assert len(rows) == 12
    assert all("**" in row[column] for row in rows for column in (5, 10))
    lines = [row.split("|")[5:-1] for row in tables.decoding_elsewhere().splitlines()[2:]]
    reached = [
        [float(cell.split(",")[0]) >= 0.8 for cell in column] for column in zip(*lines, strict=True)
    ]
    assert all(reached[0] + reached[2] + reached[3])
    assert [sum(column) for column in (reached[1], reached[4], reached[5])] == [5, 3, 3]


def test_a_ratio_is_of_the_fastest_other_that_was_timed(tables, tmp_path, monkeypatch):
    common = {"head_dim": 64, "seq_len": 8, "causal": True, "batch": 1}
    common |= {"heads": 2, "kv_heads": 2, "window": 0, "backward_ms": "", "backward_tflops": ""}
    times = {"flashsim cupy": 2.0, "flashsim cupy deterministic": 0.5, "torch cudnn": 3.0}
    times |= {"torch flash2": 2.5, "flash-attn cute": ""}
    with (tmp_path / "x.csv").open("w", newline="") as file:
        writer = csv.DictWriter(
            file, ["implementation", "forward_ms", "forward_tflops", *common], lineterminator="\n"
        )
        writer.writeheader()
        for name, ms in times.items():
            speed = 1 / ms if ms else ""
            writer.writerow(
                common | {"implementation": name, "forward_ms": ms, "forward_tflops": speed}
            )
    monkeypatch.setattr(tables, "DATA", tmp_path)
    (one,) = tables.shapes("x.csv", lambda s: s.n)
    assert one.of_the_best("forward") == "1.25"
    assert one.of_the_best("backward") == ""
    assert one.speed("forward", "flash-attn cute") == ""
