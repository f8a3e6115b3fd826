"""One colour per tensor, in every plot, animation and page; a light and a dark theme.

A search in the colour space Oklab maximised the smallest distance between any two colours, also for
protanopia, deuteranopia and tritanopia as simulated by Machado, Oliveira and Fernandes (2009).
Seventeen colours cannot all differ clearly, so a reader never depends on colour alone: tensors have
labels, gradients are hatched, and line styles differ.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

import numpy as np

from flashsim.errors import own_errors
from flashsim.problem import checks


@dataclass(frozen=True)
class Theme:
    """The colours of the light or the dark theme, as ``#rrggbb``.

    Attributes
    ----------
    background, panel, text, muted, grid : str
        Page, raised areas, text, secondary text and lines, faint lines.
    accent : str
        The tile being computed, and anything else that must stand out.
    cycle : tuple of str
        Colours of lines and bars that stand for algorithms, in the order of `sources.NAMES`. None
        of these colours resembles a tensor's colour.
    """

    name: str
    background: str
    panel: str
    text: str
    muted: str
    grid: str
    accent: str
    tensors: Mapping[str, str]
    cycle: tuple[str, ...]


#: Tensors that share the colour of another tensor, because the two are never drawn together. The
#: gradient of a bias replaces the bias, and a score function's arrays also do. The partial results
#: of decoding share colours of the backward pass. dL shares that of l, which only FlashAttention-1
#: moves.
SHARED = {
    **{"dBias": "bias", "gate": "m", "O_part": "dO", "L_part": "delta", "table": "dP"},
    "dL": "l",
    **dict.fromkeys(("F", "F_own", "dF"), "bias"),
    **{"M": "l", "M_own": "l", "S_raw": "m", "sink": "delta", "dSink": "delta"},
}


def _tensors(**colors: str) -> Mapping[str, str]:
    return MappingProxyType({**colors, **{name: colors[its] for name, its in SHARED.items()}})


THEMES: Mapping[str, Theme] = MappingProxyType(
    {
        "light": Theme(
            name="light",
            background="#ffffff",
            panel="#f3f5f8",
            text="#15181e",
            muted="#5a6372",
            grid="#d8dde5",
            accent="#e6003d",
            tensors=_tensors(
                Q="#0953dc", K="#fa9f03", V="#51ab9a", O="#cf5507", S="#4d0054", P="#90588e",
                dQ="#044d73", dK="#c2b36f", dV="#498d69", dO="#a64106", dP="#7a12a9", dS="#d061d7",
                L="#464835", m="#9fb5cb", l="#626054", delta="#302d2c", bias="#a39a56",
            ),
            cycle=("#15181e", "#4a6394", "#e6003d", "#7f8ebe", "#73571f", "#f09ab3"),
        ),
        "dark": Theme(
            name="dark",
            background="#12151b",
            panel="#1c212a",
            text="#f0f3f8",
            muted="#a3adbd",
            grid="#353d4a",
            accent="#ff5c86",
            tensors=_tensors(
                Q="#659eff", K="#fbba3c", V="#08e3c8", O="#ef6817", S="#ae37c1", P="#b77ea8",
                dQ="#1b7390", dK="#cda269", dV="#a5ff97", dO="#b4480b", dP="#a25af3", dS="#e868e0",
                L="#6b695e", m="#728772", l="#ebf0e9", delta="#aaaaaa", bias="#fbe12c",
            ),
            cycle=("#f0f3f8", "#dcb93a", "#ff5c86", "#3f63ab", "#8fa0ba", "#96355a"),
        ),
    }
)  # fmt: skip


def contrast(first: str, other: str) -> float:
    """Return the contrast ratio of two colours (WCAG 2.1), 1 to 21; small text needs 4.5."""
    high, low = sorted((_luminance(first), _luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def _luminance(color: str) -> float:
    part = rgb(color) / 255
    linear = np.where(part <= 0.04045, part / 12.92, ((part + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


def ink(color: str, look: Theme) -> str:
    """Return the colour of a series' name: the series' colour if readable, else the text colour."""
    return color if contrast(color, look.background) >= 4.5 else look.text


def theme(name: str) -> Theme:
    """Return the theme with this name; raise `OptionError` unless it is "light" or "dark"."""
    return THEMES[checks.one_of("theme", name, THEMES)]


@own_errors
def color(tensor: str, name: str = "light") -> str:
    """Return the colour in which a theme draws a tensor.

    An accumulator (``dQ_acc``) has the colour of dQ, and scales (``Q_scale``) that of Q. An unknown
    tensor or theme raises an `OptionError`.
    """
    tensors = theme(name).tensors
    key = _base(tensor)
    return tensors[checks.one_of("tensor", key, tensors)]


#: Colours for tensors of your own algorithm; a hash of the tensor's name chooses one.
OWN = ("#3f7f3a", "#a33f63", "#2f7f93", "#8a6d1f", "#6a55a8", "#9a4f3a", "#4f7a1f", "#7f3f8f")


def tint(tensor: str, name: str = "light", among: Sequence[str] = ()) -> str:
    """Return the colour of any tensor; tensors that a user's algorithm adds get one of `OWN`.

    In a picture of the tensors `among`, they have different colours while `OWN` has enough.
    """
    key = _base(tensor)
    if key in theme(name).tensors:
        return color(tensor, name)
    return theme(name).muted if key == "temp" else _own((*among, key))[key]


def _base(tensor: str) -> str:
    return tensor.removesuffix("_acc").removesuffix("_scale")


@lru_cache(maxsize=64)
def _own(tensors: tuple[str, ...]) -> dict[str, str]:
    """Return a colour of `OWN` per tensor: that of its hash or, if that is taken, the next one."""
    found: dict[str, str] = {}
    for key in dict.fromkeys(map(_base, tensors)):
        if key not in THEMES["light"].tensors:
            at = zlib.crc32(key.encode()) % len(OWN)
            order = OWN[at:] + OWN[:at]
            found[key] = next((c for c in order if c not in found.values()), order[0])
    return found


def is_gradient(tensor: str) -> bool:
    """Return whether a tensor is a gradient (dQ, dBias ...); gradients are drawn hatched."""
    return len(tensor) > 1 and tensor[0] == "d" and tensor[1].isupper()


def rgb(shade: str) -> np.ndarray:
    """Return a ``#rrggbb`` colour's red, green and blue values from 0 to 255, in float64."""
    return np.array([int(shade[n : n + 2], 16) for n in (1, 3, 5)], float)


def mix(first: str, other: str, share: float) -> np.ndarray:
    """Return a mixture of two colours, in the format of `rgb`; `share` is the part of `other`."""
    return rgb(first) + (rgb(other) - rgb(first)) * share
