"""The bundled tensors and random inputs."""

import numpy as np
import pytest

import flashsim
from flashsim import Problem


@pytest.mark.parametrize("name", ["layer0", "layer5"])
def test_a_sample_is_a_real_attention_layer(name):
    sample = flashsim.load_sample(name)

    assert [x.shape for x in sample] == [(12, 512, 32)] * 4
    assert [str(x.dtype) for x in sample] == ["float16", "float16", "float16", "float32"]
    q, k, v = (x.astype(np.float64) for x in sample[:3])
    scores = q @ k.swapaxes(1, 2) / np.sqrt(32)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    expected = weights @ v / weights.sum(axis=-1, keepdims=True)
    assert np.abs(expected - sample.out).max() < 5e-3


def test_layers_differ():
    assert np.abs(flashsim.load_sample("layer0").q - flashsim.load_sample("layer5").q).max() > 1


@pytest.mark.promise("three counts equal")
@pytest.mark.parametrize("name", ["h200-forward", "h200-backward"])
def test_a_bundled_trace_is_a_gpus_and_its_counts_are_the_prediction(name):
    trace = flashsim.load_sample_trace(name)

    assert trace.provenance["gpu"] == "NVIDIA H200"
    assert trace.provenance["command"].startswith("benchmarks/gpu_trace.py")
    assert (trace.backend, trace.direction) == ("cupy", name.removeprefix("h200-"))
    assert not trace.diff(trace.predicted())
    spans = trace.timeline
    assert (spans["end_ns"] >= spans["start_ns"]).all()
    assert 100 < len(np.unique(spans["sm"])) <= 132
    main = [s.name for s in trace.stages].index(trace.main_stage.name)
    visits = spans[(spans["stage"] == main) & (spans["phase"] == 0)]
    roles, each = np.unique(visits["role"], return_counts=True)
    assert set(each) == {trace.main_stage.schedule.n_visits * 16}  # every role, every visit
    assert len(roles) == 3


def test_random_inputs_have_the_problems_shapes_and_follow_the_seed():
    problem = Problem(
        n_q=5, n_kv=7, head_dim=3, head_dim_v=2, batch=2, heads=4, kv_heads=2, dtype="bfloat16"
    )

    inputs = flashsim.random_inputs(problem, seed=1)

    assert inputs.q.shape == (2, 4, 5, 3)
    assert inputs.k.shape == (2, 2, 7, 3)
    assert inputs.v.shape == (2, 2, 7, 2)
    assert inputs.dout.shape == (2, 4, 5, 2)
    assert {str(x.dtype) for x in inputs} == {"bfloat16"}
    again, other = (flashsim.random_inputs(problem, seed=seed) for seed in (1, 2))
    assert all((x == y).all() for x, y in zip(inputs, again, strict=True))
    assert (inputs.q != other.q).any()
