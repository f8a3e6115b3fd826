"""The bundled tensors and random inputs."""

import numpy as np
import pytest

import flashsim
from flashsim import FlashSimError, Problem


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


def test_an_unknown_sample_says_which_there_are():
    with pytest.raises(FlashSimError, match=r"unknown sample 'layer1'; possible: layer0, layer5"):
        flashsim.load_sample("layer1")


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
