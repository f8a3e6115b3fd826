"""Ready-made masks and score functions, for ``mask_mod=`` and ``score_mod=``.

The operators ``&``, ``|`` and ``~`` combine a ready-made mask ``mask(b, h, q, k)`` with any
function of the same arguments. The indices q and k count from the start of each sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from flashsim.errors import MaskError, OptionError, shown

Function = Callable[[Any, Any, Any, Any], Any]


class MaskRule:
    """A mask function that can be combined with others: ``causal() & window(128)``."""

    def __init__(self, function: Function, name: str = "") -> None:
        if not callable(function):
            raise MaskError(f"a mask must be a function mask(b, h, q, k), got {function!r}")
        self.function = function
        self.__name__ = name or getattr(function, "__name__", "mask")

    def __call__(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        """Return whether query q of batch entry b and head h sees key k."""
        return self.function(b, h, q, k)

    def __and__(self, other: Function) -> MaskRule:
        return _both(self, other, "and", lambda x, y: x & y)

    def __rand__(self, other: Function) -> MaskRule:
        return _both(other, self, "and", lambda x, y: x & y)

    def __or__(self, other: Function) -> MaskRule:
        return _both(self, other, "or", lambda x, y: x | y)

    def __ror__(self, other: Function) -> MaskRule:
        return _both(other, self, "or", lambda x, y: x | y)

    def __invert__(self) -> MaskRule:
        one = self.function
        return MaskRule(lambda b, h, q, k: ~one(b, h, q, k), f"not_{self.__name__}")

    def __repr__(self) -> str:
        return f"<mask {self.__name__}>"


def _both(a: Any, b: Any, word: str, combine: Callable[[Any, Any], Any]) -> MaskRule:
    first, second = (x if isinstance(x, MaskRule) else MaskRule(x) for x in (a, b))
    one, other = first.function, second.function
    name = f"{first.__name__}_{word}_{second.__name__}"
    return MaskRule(lambda b, h, q, k: combine(one(b, h, q, k), other(b, h, q, k)), name)


def _whole(name: str, value: Any, least: int = 0) -> int:
    """Return `value` if it is an integer of at least `least`; otherwise raise `OptionError`."""
    plain = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not plain or value < least:
        raise OptionError(f"{name} must be an integer of at least {least}, got {shown(value)}")
    return int(value)


def _array(name: str, value: Any, ndim: tuple[int, ...], kinds: str) -> Any:
    """Return an array-like as an array, after checking the number of axes and the dtype's kind."""
    array = value if hasattr(value, "dtype") and hasattr(value, "shape") else np.asarray(value)
    kind = np.dtype(str(array.dtype).rpartition(".")[2].replace("bfloat16", "float32")).kind
    if len(array.shape) not in ndim or kind not in kinds:
        axes = " or ".join(map(str, ndim))
        raise OptionError(
            f"{name} must be an array of {'integers' if 'f' not in kinds else 'numbers'} with "
            f"{axes} axes, got {array.dtype} of shape {tuple(array.shape)}"
        )
    return array


# -- masks ---------------------------------------------------------------------------------------


def causal(offset: int = 0) -> MaskRule:
    """Return a causal mask: query q sees keys up to ``q + offset``.

    With an offset of 0, the mask is aligned at the top left: query 0 sees key 0 only. With an
    offset of ``n_kv - n_q``, the mask is aligned at the bottom right, like ``causal=True``: the
    last query sees the last key.
    """
    return MaskRule(lambda b, h, q, k: k <= q + offset, "causal")


def window(left: int, right: int = 0, offset: int = 0) -> MaskRule:
    """Return a sliding-window mask: a query sees `left` keys before its own key, `right` after it.

    Query q also sees its own key, ``q + offset``. If `left` or `right` is -1, there is no limit on
    that side.
    """
    left, right = _whole("left", left, -1), _whole("right", right, -1)
    if left < 0 and right < 0:
        return MaskRule(lambda b, h, q, k: True, "window")
    if left < 0:
        return MaskRule(lambda b, h, q, k: k - q <= right + offset, "window")
    if right < 0:
        return MaskRule(lambda b, h, q, k: q - k <= left - offset, "window")
    return MaskRule(
        lambda b, h, q, k: (q - k <= left - offset) & (k - q <= right + offset), "window"
    )


def prefix_lm(length: Any) -> MaskRule:
    """Return a prefix-LM mask: queries see the first `length` keys, and later keys up to their own.

    `length` is a number, or an array with one number per batch entry.
    """
    if isinstance(length, (int, np.integer)):
        length = _whole("length", length)
        return MaskRule(lambda b, h, q, k: (k < length) | (k <= q), "prefix_lm")
    lengths = _array("length", length, (1,), "iu")
    return MaskRule(lambda b, h, q, k: (k < lengths[b]) | (k <= q), "prefix_lm")


def documents(numbers: Any) -> MaskRule:
    """Return a document mask: a query sees only keys of its own document.

    The array `numbers`, of shape (n,) or (batch, n), holds the document number of each position. If
    the positions of each document are contiguous, tiles can be skipped without evaluating the mask
    for each score.
    """
    numbers = _array("numbers", numbers, (1, 2), "iu")
    if len(numbers.shape) == 1:
        return MaskRule(lambda b, h, q, k: numbers[q] == numbers[k], "documents")
    return MaskRule(lambda b, h, q, k: numbers[b, q] == numbers[b, k], "documents")


def dilated(step: int) -> MaskRule:
    """Return a dilated mask: a query sees keys whose distance is a multiple of `step`."""
    step = _whole("step", step, 1)
    return MaskRule(lambda b, h, q, k: (q - k) % step == 0, "dilated")


def strided(step: int) -> MaskRule:
    """Return Sparse Transformers' strided mask: a query sees the last key of every `step` keys."""
    step = _whole("step", step, 1)
    return MaskRule(lambda b, h, q, k: k % step == step - 1, "strided")


def chunked(size: int) -> MaskRule:
    """Return a chunked mask, as in Llama 4: a query sees keys of its chunk of `size` positions."""
    size = _whole("size", size, 1)
    return MaskRule(lambda b, h, q, k: q // size == k // size, "chunked")


def streaming(first: int, left: int) -> MaskRule:
    """Return StreamingLLM's mask: a query sees the `first` keys, and `left` keys before its own.

    A query also sees its own key, but no later key.
    """
    first, left = _whole("first", first), _whole("left", left)
    return MaskRule(lambda b, h, q, k: (k <= q) & ((k < first) | (q - k <= left)), "streaming")


def tree(parents: Any, prompt: int = 0) -> MaskRule:
    """Return a mask for a tree of drafted tokens, as speculative decoding verifies it.

    Each drafted token (a node of the tree) sees the prompt, itself and its ancestors. `parents[n]`
    is the parent of node n: an earlier node, or -1 for a child of the prompt. The queries are the
    tree's nodes; the keys are the `prompt` keys followed by the nodes.
    """
    parents, prompt = np.asarray(parents), _whole("prompt", prompt)
    if parents.ndim != 1 or parents.dtype.kind not in "iu" or not len(parents):
        raise OptionError(
            f"parents must be a one-dimensional array of integers, got {shown(parents)}"
        )
    wrong = np.flatnonzero((parents >= np.arange(len(parents))) | (parents < -1))
    if len(wrong):
        n = int(wrong[0])
        raise OptionError(
            f"parents[{n}] is {int(parents[n])}, but the parent of node {n} must be an earlier "
            "node, or -1 for a child of the prompt"
        )
    seen = np.eye(len(parents), dtype=bool)
    for n, parent in enumerate(parents.tolist()):
        if parent >= 0:
            seen[n] |= seen[parent]
    return MaskRule(lambda b, h, q, k: (k < prompt) | (seen[q, k - prompt] & (k >= prompt)), "tree")


def padding(lengths: Any) -> MaskRule:
    """Return a padding mask: queries of batch entry b see only the first ``lengths[b]`` keys."""
    lengths = _array("lengths", lengths, (1,), "iu")
    return MaskRule(lambda b, h, q, k: k < lengths[b], "padding")


# -- scores --------------------------------------------------------------------------------------


def alibi_slopes(heads: int) -> np.ndarray:
    """Return ALiBi's slopes (arXiv:2108.12409) of n heads, float32: 2^(-8 / n), 2^(-16 / n), ...

    Unless n is a power of two, the remaining slopes come from the next larger power of two, as in
    the authors' code.
    """
    heads = _whole("heads", heads, 1)
    below = 2 ** int(math.log2(heads))
    first = 2.0 ** (-8 / below * np.arange(1, below + 1))
    more = 2.0 ** (-4 / below * np.arange(1, 2 * (heads - below), 2))
    return np.concatenate([first, more])[:heads].astype(np.float32)


def alibi(slopes: Any, offset: int = 0) -> Callable[..., Any]:
    """Return ALiBi as a score function: the score minus the head's slope times the distance.

    The argument `slopes` is the number of heads, or an array with one slope per head. The distance
    between query q and key k is ``|q + offset - k|``.
    """
    slopes = alibi_slopes(int(slopes)) if isinstance(slopes, (int, np.integer)) else slopes

    def alibi(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score - slopes[h] * abs(q + offset - k)

    return alibi


def relative(table: Any, most: int) -> Callable[..., Any]:
    """Return a score function that adds the learned bias ``table[h, k - q + most]``.

    `table` has the shape (heads, 2 most + 1). Longer distances than `most` count as `most`.
    """
    most = _whole("most", most)

    def relative(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score + table[h, np.minimum(np.maximum(k - q, -most), most) + most]

    return relative


def t5_bias(
    table: Any, *, bidirectional: bool = True, max_distance: int = 128
) -> Callable[..., Any]:
    """Return T5's relative bias as a score function: a learned value per bucket of distances.

    `table` has the shape (buckets, heads). In each direction (earlier and later keys), half of the
    buckets hold one distance each. The other buckets hold ranges of distances that grow
    logarithmically, up to `max_distance`.
    """
    buckets = int(table.shape[0])

    def t5_bias(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        half = buckets // 2 if bidirectional else buckets
        distance = abs(k - q) if bidirectional else np.maximum(q - k, 0)
        exact = half // 2
        far = np.log(np.maximum(distance, 1) / exact) / math.log(max_distance / exact)
        far = exact + (far * (half - exact)).int()
        bucket = np.where(distance < exact, distance, np.minimum(far, half - 1))
        later = np.where(k > q, half, 0) if bidirectional else 0
        return score + table[bucket + later, h]

    return t5_bias


def softcap(cap: float) -> Callable[..., Any]:
    """Return a score function that maps s to ``cap * tanh(s / cap)``, like the option `softcap`."""
    if not (isinstance(cap, (int, float, np.floating)) and cap > 0 and math.isfinite(cap)):
        raise OptionError(f"cap must be a positive number, got {shown(cap)}")

    def softcap(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return cap * np.tanh(score / cap)

    return softcap


def chain(*functions: Callable[..., Any]) -> Callable[..., Any]:
    """Return a score function that applies several functions in order, one after another."""

    def chain(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        for function in functions:
            score = function(score, b, h, q, k)
        return score

    return chain
