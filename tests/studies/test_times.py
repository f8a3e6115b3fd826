"""benchmarks/times.py without a GPU: which form of a backward is timed under which name."""

import importlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import flashsim
from flashsim import Problem
from flashsim.api.asked import Checked
from flashsim.backends.families.hopper import HOPPER
from flashsim.backends.launch.kernel import Gpu
from flashsim.engines.engine import Job

GPU = Gpu.like(flashsim.Device.get("H200"))
#: Of these, Hopper's rule takes the three passes.
SHORT = Problem(128, 128, 64, heads=12, dtype="bfloat16")
WIDE = Problem(512, 512, 256, heads=4, dtype="bfloat16")


@pytest.fixture
def times(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    module = importlib.import_module("times")
    monkeypatch.setattr(module, "this_gpu", lambda: GPU)
    return module


def asked(times, monkeypatch, problem, family):
    """Options of the backward passes that are timed, by their names."""
    found = []

    class Result:
        def backward(self, dout, **options):
            found.append(options)

    monkeypatch.setattr(flashsim, "run", lambda *arrays, **options: Result())
    lab = SimpleNamespace(array=lambda shape, dtype: np.zeros(1))
    timed = [one.name for one in times.contenders(lab, problem, [family], standard=False)]
    return dict(zip(timed[1:], found, strict=True))


@pytest.mark.parametrize("family", ["hopper", "portable"])
@pytest.mark.parametrize("problem", [SHORT, WIDE], ids=["short", "wide"])
def test_the_fused_form_is_timed_where_the_rule_takes_the_other(
    times, monkeypatch, problem, family
):
    forms = asked(times, monkeypatch, problem, family)
    assert set(forms) == {"flash2", "flash2-fused"}
    assert forms["flash2"] == {"deterministic": None, "tiling": None}
    fused = forms["flash2-fused"]
    assert fused["deterministic"] is False
    passes = times.passes_of(family, problem, "flash2-fused")
    assert fused["tiling"] == passes[0].tables.schedule.tiling
    assert "fused" in {one.stage.name for one in passes}
    assert form_of(problem, **fused) == "flash2-fused"


def form_of(problem, deterministic, tiling):
    """What `Result.backward` makes of its options where the rule says three passes."""
    engine = SimpleNamespace(fuses=lambda job, saved: HOPPER.fuses(job.problem, GPU))
    checked = Checked(engine, "cupy", None, None, 4, None)
    mine = Job(problem, None, None, None)
    return checked.backward_job(mine, {}, tiling, deterministic, None).algorithm


def test_the_rule_takes_three_passes_there():
    for problem in (SHORT, WIDE):
        assert form_of(problem, deterministic=False, tiling=None) == "flash2"


def test_a_form_that_no_kernel_has_is_said(times, monkeypatch, capsys):
    monkeypatch.setattr(times, "kernel_families", lambda family: ())
    assert set(asked(times, monkeypatch, SHORT, "hopper")) == {"flash2"}
    assert "hopper flash2-fused 64 128: no kernels of 'hopper' run this" in capsys.readouterr().out
