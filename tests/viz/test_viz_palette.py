"""The palette: colours that stay apart for every kind of sight, in both themes."""

import itertools

import numpy as np
import pytest

from flashsim.schedule.names import TENSORS
from flashsim.viz import palette

# Machado, Oliveira and Fernandes (2009), severity 1, on linear RGB.
SIGHT = {
    "normal": np.eye(3),
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
               [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
               [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602],
               [0.004733, 0.691367, 0.303900]],
}  # fmt: skip
CORE = ("Q", "K", "V", "O", "S", "P", "L")  # a forward pass's


def linear(color):
    srgb = np.array([int(color[n : n + 2], 16) for n in (1, 3, 5)]) / 255
    return np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)


def oklab(rgb):
    """Ottosson's Oklab: Euclidean distance is roughly perceived difference; black to white is 1."""
    lms = np.array(
        [[0.4122214708, 0.5363325363, 0.0514459929], [0.2119034982, 0.6806995451, 0.1073969566],
         [0.0883024619, 0.2817188376, 0.6299787005]]
    ) @ rgb  # fmt: skip
    return np.array(
        [[0.2104542553, 0.7936177850, -0.0040720468], [1.9779984951, -2.4285922050, 0.4505937099],
         [0.0259040371, 0.7827717662, -0.8086757660]]
    ) @ np.cbrt(lms)  # fmt: skip


def distance(a, b, sight):
    seen = [oklab(np.clip(np.array(SIGHT[sight]) @ linear(c), 0, 1)) for c in (a, b)]
    return float(np.linalg.norm(seen[0] - seen[1]))


def contrast(a, b):
    light = sorted(float(linear(c) @ [0.2126, 0.7152, 0.0722]) + 0.05 for c in (a, b))
    return light[1] / light[0]


def closest(colors, sight):
    pairs = itertools.combinations(colors.items(), 2)
    return min((distance(a, b, sight), x, y) for (x, a), (y, b) in pairs)


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize("name", palette.THEMES)
def test_tensors_stay_apart(name, sight):
    every = palette.THEMES[name].tensors
    tensors = {tensor: color for tensor, color in every.items() if tensor not in palette.SHARED}
    assert closest({t: tensors[t] for t in CORE}, sight)[0] > 0.11
    assert closest(tensors, sight)[0] > 0.06


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize("name", palette.THEMES)
def test_algorithms_stay_apart(name, sight):
    cycle = palette.THEMES[name].cycle
    assert closest(dict(enumerate(cycle[:4])), sight)[0] > 0.11


def test_the_measure_has_teeth():
    # Red and green of the same lightness: far apart for most, the same for a deuteranope.
    assert distance("#d03030", "#7a7a00", "normal") > 0.15
    assert distance("#d03030", "#7a7a00", "deutan") < 0.06


@pytest.mark.parametrize("name", palette.THEMES)
def test_contrast(name):
    theme = palette.THEMES[name]
    assert contrast(theme.text, theme.background) > 12
    assert contrast(theme.muted, theme.background) > 4.5
    assert contrast(theme.accent, theme.background) > 3
    assert all(contrast(color, theme.background) > 3 for color in theme.cycle[:4])
    for tensor, color in theme.tensors.items():
        assert contrast(color, theme.background) > 1.7, tensor


@pytest.mark.parametrize("name", palette.THEMES)
def test_every_tensor_has_one_colour(name):
    for tensor in TENSORS[1:]:
        assert palette.color(tensor, name).startswith("#")
    assert palette.color("dQ_acc", name) == palette.color("dQ", name)
    assert palette.color("Q_scale", name) == palette.color("Q", name)


def test_gradients_are_known():
    assert [t for t in ("Q", "dQ", "delta", "dBias", "L") if palette.is_gradient(t)] == [
        "dQ",
        "dBias",
    ]


@pytest.mark.parametrize("name", palette.THEMES)
def test_own_tensors_of_one_picture_differ(name):
    own = ["s", "p", "acc", "acc_scale", "m_new", "out", "alpha", "s_2", "p_2"]
    assert palette.tint("p", name) == palette.tint("out", name)  # in different pictures
    colors = {tensor: palette.tint(tensor, name, ["Q", *own]) for tensor in own}
    assert colors["acc"] == colors["acc_scale"]
    assert len(set(colors.values())) == 8
