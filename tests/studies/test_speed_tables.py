"""Speeds beside other libraries' in the guide are those of the kept measurements."""

import csv
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tables(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("speed_tables")


def test_the_guides_tables_are_of_the_kept_measurements(tables):
    page = (ROOT / "docs/guides/performance.md").read_text(encoding="utf-8")
    for section, table in tables.SECTIONS:
        assert table() in page.partition(f"{section}\n")[2], table.__name__


def test_the_guides_sentences_are_of_the_kept_measurements(tables):
    page = " ".join((ROOT / "docs/guides/performance.md").read_text(encoding="utf-8").split())

    def of(name, ratio):
        found = tables.shapes(name, lambda s: s.n)
        return [sorted(ratio(one, way) for one in found) for way in ("forward", "backward")]

    def ends(ratios):
        return f"{ratios[0]:.2f} to {ratios[-1]:.2f}"

    papers = of("gpu-papers-h200.csv", tables.Shape.ratio)
    assert [sum(x >= 1 for x in way) for way in papers] == [10, 9]
    assert "Forward, ten of the twelve are at least as fast as the best" in page
    wide, causal, no_mask = (f"{x:.3f}" for x in papers[1] if x < 1)
    assert f"nine, the others {wide} (d = 128, no mask), {no_mask} and, causal, {causal}" in page
    best = "× the best of FA-CuTe, cuDNN and FlashAttention-2"
    assert f"| {ends(papers[0])} {best} forward, {ends(papers[1])} × backward |" in page
    cudnn = of("gpu-papers-h200.csv", lambda x, way: x.ms(way, "torch cudnn") / x.ms(way))
    assert f"behind in all, forward {ends(cudnn[0])} times, backward {ends(cudnn[1])}." in page
    short = of("gpu-short-h200.csv", tables.Shape.ratio)
    assert len(short[0]) == 72
    fast = [sum(x >= 1 for x in way) for way in short]
    least, next_one = (f"{x:.2f}" for x in short[0] if x < 1)
    others = f"the others make {least} (behind cuDNN) and {next_one}."
    assert f"Forward, {fast[0]} of the 72 are at least as fast, {others}" in page
    behind = ends([x for x in short[1] if x < 1])
    assert f"Backward, {fast[1]} are; the others, behind FA-CuTe, make {behind}." in page


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


def test_kernels_under_nsight_compute_are_told_apart_by_run(tables):
    """benchmarks/limits.py: two runs, the first of two kernels; noise before the table."""
    limits = importlib.import_module("limits")
    printed = ["left out: nothing", "==PROF== x", '"ID","Kernel Name","us"', '"","","ns"']
    for n, name in enumerate(("spin_kernel", "delta", "main, wide", "spin_kernel", "main")):
        printed.append(f'"{n}","{name}","{n}"')
    found = limits.kernels("\n".join(printed))
    assert [[one["us"] for one in run] for run in found] == [["1", "2"], ["4"]]
    with pytest.raises(SystemExit, match="no table"):
        limits.kernels("==ERROR== permission")
