"""benchmarks/times.py without a GPU: which form of a backward is timed under which name."""

import importlib
from types import SimpleNamespace

import numpy as np
import pytest
from repository import ROOT, page, script

import flashsim
from flashsim import Problem, Tiling
from flashsim.api.request import Checked
from flashsim.backends.launch.kernel import Gpu
from flashsim.backends.launch_policy.family import fastest_backward
from flashsim.backends.launch_policy.hopper import HOPPER
from flashsim.engines.protocol import Job
from flashsim.schedule.split import Split

GPU = Gpu.like(flashsim.Device.get("H200"))
#: Of these, Hopper's rule takes the three passes.
SHORT = Problem(128, 128, 64, heads=10, dtype="bfloat16")
WIDE = Problem(512, 512, 256, heads=4, dtype="bfloat16")


@pytest.fixture
def times(monkeypatch):
    module = script("times")
    monkeypatch.setattr(module, "this_gpu", lambda: GPU)
    return module


def asked(times, monkeypatch, problem, family):
    """Options of the backward passes that are timed, by their names."""
    found = []

    class Result:
        def __init__(self, algorithm=None):
            self.algorithm = algorithm

        def backward(self, dout, **options):
            found.append(options | ({"after": self.algorithm} if self.algorithm else {}))

    def run(*arrays, **options):
        return Result(options.get("algorithm"))

    monkeypatch.setattr(flashsim, "run", run)
    lab = SimpleNamespace(array=lambda shape, dtype: np.zeros(1))
    timed = [one.name for one in times.contenders(lab, problem, [family], standard=False)]
    backward = [name for name in timed if name != "forward"]
    return dict(zip(backward, found, strict=True))


@pytest.mark.parametrize("family", ["hopper", "portable"])
@pytest.mark.parametrize("problem", [SHORT, WIDE], ids=["short", "wide"])
def test_the_fused_form_is_timed_where_the_rule_takes_the_other(
    times, monkeypatch, problem, family
):
    forms = asked(times, monkeypatch, problem, family)
    once = {"flash2-once"} if family == "hopper" and problem is SHORT else set()
    assert set(forms) == {"flash2", "flash2-fused"} | once
    assert forms["flash2"] == {"deterministic": None, "tiling": None}
    fused = forms["flash2-fused"]
    assert fused["deterministic"] is False
    passes = times.passes_of(family, problem, "flash2-fused")
    assert fused["tiling"] == passes[0].tables.schedule.tiling
    assert "fused" in {one.stage.name for one in passes}
    assert form_of(problem, **fused) == "flash2-fused"


def form_of(problem, deterministic, tiling):
    """What `Result.backward` makes of its options where the rule says three passes."""

    def fastest(job, saved, *how):
        tiled = job.tiling is not None
        return fastest_backward(job.problem, GPU, lambda _: HOPPER, *how, tiled=tiled)

    checked = Checked(SimpleNamespace(fastest_backward=fastest), "cupy", None, None, 4, None)
    mine = Job(problem, None, None, None)
    return checked.backward_job(mine, {}, tiling, deterministic, None, dlse=False).algorithm


def test_the_rule_takes_three_passes_there():
    for problem in (SHORT, WIDE):
        assert form_of(problem, deterministic=False, tiling=None) == "flash2"


def test_a_form_that_no_kernel_has_is_said(times, monkeypatch, capsys):
    monkeypatch.setattr(times, "kernel_families", lambda family: ())
    assert set(asked(times, monkeypatch, WIDE, "hopper")) == {"flash2"}
    assert "hopper flash2-fused 256 512: no kernels of 'hopper' run this" in capsys.readouterr().out


def test_the_form_of_one_visit_is_asked_for_as_an_algorithm(times, monkeypatch):
    """Its rule would take the three passes here."""
    form = asked(times, monkeypatch, SHORT, "hopper")["flash2-once"]
    assert form == {"deterministic": None, "tiling": None, "after": "flash2-once"}
    (one,) = times.passes_of("hopper", SHORT, "flash2-once")
    assert one.stage.once
    assert not times.visited_once(Problem(128, 129, 64, dtype="bfloat16"))


def test_shapes_for_fused_forms_are_timed_in_these_alone(times):
    short = {name for p in times.time_shapes.FUSED_ALONE for name in times.wanted(p, ["hopper"])}
    assert short == {("hopper", "flash2-fused"), ("hopper", "flash2-once")}
    for p in times.time_shapes.FUSED_ALONE:
        assert not times.wanted(p, ["portable", "python"])
        once = ("hopper", "flash2-once") in times.wanted(p, ["hopper"])
        assert once == (p.n_kv <= 128)


@pytest.fixture
def in_three():
    """A fused pass of three launches, between two others."""
    p = Problem(4096, head_dim=128, batch=4, heads=16, dtype="bfloat16")
    passes = HOPPER.backward_passes(p, None, GPU, "ascending", "", "flash2-fused")
    assert [len(one.before) for one in passes] == [0, 2, 0]
    return p, passes


def test_launches_of_a_stage_are_timed_together(times, in_three):
    _, passes = in_three
    assert [*times.by_stage(passes, "abcde")] == [["a"], ["b", "c", "d"], ["e"]]


def test_all_launches_of_a_stage_are_compiled(times, monkeypatch, in_three):
    p, passes = in_three
    found = []
    monkeypatch.setattr(times.gpu_compile, "compile_all", lambda jobs, count: found.extend(jobs))
    times.compile_all([p], ["hopper"], 1)
    every = {x.kernel for one in passes for x in (*one.before, one)}
    assert {kernel.cluster for kernel in every} == {1, 2, 8}
    assert every <= {kernel for _, kernel in found}


class Tensor:
    """What launches read of a tensor; all have one address, as from an allocator."""

    shape = (1, 1, 1, 128)

    def contiguous(self):
        return self

    def data_ptr(self):
        return 0

    def stride(self):
        return (128, 128, 128, 1)

    def element_size(self):
        return 2


@pytest.fixture
def repeats(monkeypatch):
    """A function that returns a call which repeats the launches of passes; a list of launches."""
    pytest.importorskip("cupy")
    from flashsim.backends.cupy_gpu import calls, direct

    launched = []

    class Launch:
        needs_counter = False

        def __init__(self, one, device, load):
            self.one = one

        def __call__(self, call, report):
            launched.append(self.one.stage.name)

        def fixed(self, call):
            return lambda: launched.append("again")

    monkeypatch.setattr(calls, "ReadyPass", Launch)
    for kind, name in ((calls.Plan, "run"), (calls.Repeated, "launch")):  # which `Split` replaces
        monkeypatch.setattr(kind, name, getattr(kind, name))
    space = SimpleNamespace(
        maker=lambda shape, dtype="float32": Tensor,
        stream=lambda: 7,
        pointer=lambda array: array.data_ptr(),
    )

    def repeating(passes, algorithm):
        plan, x = calls.Plan("hopper", passes, GPU, 0, None, algorithm=algorithm), Tensor()
        if algorithm == "forward":
            run, given = direct.Forward(space, plan), (x, x, x)
        else:
            run, given = direct.RepeatedBackward(space, (128, 128), plan), (x, x, x, x, x, x)
        for _ in range(3):
            run(*given)
        assert launched[-1] == "again"
        launched.clear()
        return lambda: run(*given)

    return repeating, launched


def test_stages_of_repeated_launches_are_timed(times, repeats, in_three):
    """A call that repeats its launches reaches its passes while they are timed, and only then."""
    p, backward = in_three
    forward = HOPPER.forward_passes(p, None, GPU, "ascending", "")
    repeating, launched = repeats
    now = iter(range(100))
    lab = SimpleNamespace(
        spin=lambda: None, event=lambda: next(now), milliseconds=lambda start, end: 1e3
    )
    split = times.Split(lab)
    for passes, algorithm in ((forward, "forward"), (backward, "flash2-fused")):
        call = repeating(passes, algorithm)
        names = [one.stage.name for one in passes]
        assert split.stages(call) == dict.fromkeys(names, 1.0)
        assert launched == [one.stage.name for one in passes for _ in (*one.before, one)]
        launched.clear()
        call()
        assert set(launched) == {"again"}


def test_the_tile_is_that_of_the_result(times):
    """Not that of another pass that ran before."""
    results = {
        "forward": SimpleNamespace(tiling=Tiling(128, 96), split=Split(pack_gqa=True)),
        "flash2": SimpleNamespace(tiling=Tiling(64, 128, 128)),
    }
    everyone = [times.Timed("hopper", name, lambda x=x: x) for name, x in results.items()]
    for one in everyone:
        one.warm_up()
    told = [(one.tile, one.packs) for one in everyone]
    assert told == [("128 x 96", True), ("64 x 128 (dQ: 128 x 128)", False)]


@pytest.mark.parametrize("took", [4e-6, 8e-6, 60e-6, 1e-3])
def test_what_two_events_add_is_shared_by_many_calls(times, took):
    """A pretended GPU, on which two events add 6 µs to the calls between them."""
    now = [0.0]
    lab = SimpleNamespace(
        spin=lambda: None,
        event=lambda: now[0],
        milliseconds=lambda start, end: 1e3 * (end - start + 6e-6),
    )

    def call():
        now[0] += took

    one = times.Timed(times.LIBRARY, "forward", call)
    times.measure(lab, None, None, [one])
    assert took < np.median(one.times) <= took * 1.011 + 0.16e-6
    assert times.calls_at_once(6e-3) == 1


def test_rows_of_other_families_stay_in_the_file(times, tmp_path):
    file = tmp_path / "times.csv"
    assert times.kept(file, ["hopper"]) == []
    file.write_text("kernels,us\nhopper,1\nlibrary,2\nportable,3\n")
    assert [row["us"] for row in times.kept(file, ["hopper", "portable"])] == ["2"]


def test_times_on_random_shapes_are_read_and_compared(times, tmp_path):
    """The first passes of the judging run, from the file on: shapes, forms, errors."""
    compare = importlib.import_module("random_times")
    kept = ROOT / "docs/data/random-times-judged-h100.csv"
    lines = kept.read_text(encoding="utf-8").splitlines(keepends=True)
    few = tmp_path / "few.csv"
    few.write_text("".join(lines[:6]), encoding="utf-8")
    forward, backward = compare.compared(few)
    assert (forward["pass"], backward["pass"]) == ("forward", "flash2-fused")
    assert list(backward["stages"]) == ["delta", "fused", "convert"]
    assert compare.error(forward | {"predicted": 1.5 * forward["us"]}) == pytest.approx(50)
    errors, _ = compare.tables([forward, backward], 1)
    assert [row[:3] for row in errors.rows] == [
        *(("forward", "10407", 1), ("forward", "all", 1)),
        *(("backward", "10407", 1), ("backward", "all", 1)),
    ]
    errors, _ = compare.tables([forward], 1)  # `--grouped` times no backward
    assert [row[0] for row in errors.rows] == ["forward", "forward"]


def test_a_row_has_the_clusters_that_the_driver_reported(times):
    row = {"gpu": "NVIDIA H200"}
    device_of = script("predict_times").device_of
    assert device_of(row) is device_of(row | {"clusters": ""}) is flashsim.Device.get("H200")
    assert device_of(row | {"clusters": "2:66 8:14"}).clusters == ((2, 66), (8, 14))


def judged(name):
    """The table of errors of a file of random shapes, and the page that prints them."""
    compare = importlib.import_module("random_times")
    errors, _ = compare.tables(compare.compared(ROOT / "docs/data" / name), 1)
    return errors, page("notebooks/predictions.md")


@pytest.mark.promise("doc figures are measured")
@pytest.mark.usefixtures("times")
@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "packed",
            "the forward's mean error is {} % and the worst {} %; backward, they are {} and {}",
        ),
        (
            "judged-again",
            "forwards have a mean error of {} % and a worst of {} %, "
            "and its backwards {} and {} %.",
        ),
        ("rejudged", "has {} and {} % forward, {} and {} % backward."),
        (
            "judged-many-calls",
            "Forward, the mean error is {} % and the worst {} %; backward, they are {} and {} %.",
        ),
        (
            "judged-last",
            "Forward, the mean error is {} % and the worst {} %; backward, they are {} and {} %.",
        ),
        (
            "judged-h200",
            "the forward's mean error is {} % and the worst {} %; backward, they are {} and {} %.",
        ),
        (
            "judged-again-h200",
            "Forward, the mean error is {} % and the worst {} %; backward, they are {} and {} %.",
        ),
        (
            "judged-last-h200",
            "Forward, the mean error is {} % and the worst {} %; backward, they are {} and {} %.",
        ),
    ],
)
def test_the_page_prints_the_errors_of_later_runs_by_the_model_of_today(name, sentence):
    errors, text = judged(f"random-times-{name if 'h200' in name else name + '-h100'}.csv")
    said = {row[0]: row[3:] for row in errors.rows if row[1] == "all"}
    assert sentence.format(*said["forward"], *said["backward"]) in " ".join(text.split())


@pytest.mark.promise("doc figures are measured")
@pytest.mark.usefixtures("times")
def test_the_page_prints_the_errors_of_the_judging_run():
    errors, text = judged("random-times-judged-h100.csv")
    assert errors.markdown().split("\n\n")[0] in text
