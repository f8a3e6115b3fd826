"""Map a kernel's parameter names to the names of the FlashAttention papers ("k_ptr" to "K")."""

import re
from collections.abc import Collection, Iterable, Mapping
from itertools import chain, count

from flashsim.errors import OptionError, choices
from flashsim.schedule.names import TENSORS

_ENDINGS = re.compile(r"_?(ptr|pointer|desc|descriptor|base|ref|hbm|gmem|global)$", re.IGNORECASE)
_BEGINNINGS = re.compile(r"^(ptr|pointer|desc|descriptor|tma|gmem|hbm)_", re.IGNORECASE)
_PAPERS = {
    "Q": "q query queries",
    "K": "k key keys",
    "V": "v value values",
    "O": "o out output o_out",
    "L": "l lse softmax_lse logsumexp log_sum_exp m",
    "dO": "do dout do_out grad_out grad_o grad_output",
    "dQ": "dq grad_q",
    "dK": "dk grad_k",
    "dV": "dv grad_v",
    "delta": "delta d di dsum",
    "S": "s scores",
    "P": "p probs",
    "bias": "bias",
    "O_part": "o_part o_partial mid_o part_o o_split",
    "L_part": "l_part l_partial mid_lse part_l mid_l l_split lse_part",
}
_KNOWN = {word: paper for paper, words in _PAPERS.items() for word in words.split()}


def paper_name(parameter: str) -> str | None:
    """Return the papers' name for a kernel's parameter ("k_ptr": "K"), or None if unknown."""
    word = parameter
    while (shorter := _ENDINGS.sub("", _BEGINNINGS.sub("", word))) not in ("", word):
        word = shorter
    return _KNOWN.get(word.lower())


def labels(parameters: Iterable[str], given: Mapping[str, str] | None = None) -> list[str]:
    """Return each tensor's name: the user's (in `given`), else the papers', else the kernel's."""
    parameters, given = list(parameters), dict(given or {})
    for name in given:
        if name not in parameters:
            raise OptionError(
                f"names= contains {name!r}, which is not a parameter of the kernel; "
                f"choose from {choices(name, parameters)}"
            )
    found: dict[str, str] = {}
    for name in (*(n for n in parameters if n in given), *parameters):
        label = given.get(name) or paper_name(name) or name
        if name not in found:
            found[name] = label if label not in found.values() else _unused(name, found.values())
    return [found[name] for name in parameters]


def _unused(name: str, taken: Collection[str]) -> str:
    """Return the name, with the first number that makes it differ from the names in `taken`."""
    numbered = (f"{name}_{n}" for n in count(2))
    return next(one for one in chain((name,), numbered) if one not in taken)


def identifier(label: str, taken: Iterable[str] = ()) -> str:
    """Return a tensor's name in a trace: a unique identifier of about 20 characters."""
    if label in TENSORS[1:]:
        return label
    word = re.sub(r"\W", "_", label)[:20] or "_"
    word = word if word.isidentifier() else f"_{word}"[:20]
    n, made = 2, word
    while made in taken:
        made, n = f"{word}_{n}", n + 1
    return made
