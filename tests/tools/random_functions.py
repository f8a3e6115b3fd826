"""Random score and mask functions: plain Python on symbols, with captured arrays."""

import numpy as np

#: Operations on one number whose values stay moderate for any argument.
_ONE = (
    lambda x: -x,
    abs,
    np.tanh,
    np.sin,
    np.cos,
    lambda x: x.sigmoid(),
    lambda x: np.exp(np.minimum(x, 1.0)),
    lambda x: np.sqrt(abs(x) + 1),
    lambda x: (abs(x) + 1).rsqrt(),
    lambda x: np.log(abs(x) + 2),
    lambda x: np.log2(abs(x) + 2),
    lambda x: np.log1p(abs(x)),
    lambda x: np.expm1(np.minimum(x, 1.0)),
    lambda x: np.exp2(np.minimum(x, 1.0)),
    lambda x: x.erf(),
    lambda x: x**2 * 0.1,
    lambda x: (abs(x) + 0.5) ** 1.5,
    lambda x: x.float() * 0.3,
    lambda x: np.clip(x, -2, 2),
)
_TWO = (
    lambda x, y: x + y,
    lambda x, y: x - y,
    lambda x, y: x * y * 0.2,
    lambda x, y: x / (abs(y) + 1),
    np.minimum,
    np.maximum,
)
#: Operations with jumps: a rounded score may fall on the other side of a jump.
_JUMPS_ONE = (lambda x: np.floor(x * 0.5),)
_JUMPS_TWO = (lambda x, y: (x + y) % 3,)
_WHOLE = (
    lambda x, y: x + y,
    lambda x, y: x - y,
    lambda x, y: x * 2 - y,
    np.minimum,
    np.maximum,
    lambda x, y: x // 3 + y,
    lambda x, y: x % 5 - y,
    lambda x, y: abs(x - y),
    lambda x, y: (x & 7) + y,
    lambda x, y: (x >> 1) - y,
    lambda x, y: np.where(x < y, x, 2 * y),
)
_COMPARED = (
    *(lambda x, y: x < y, lambda x, y: x <= y, lambda x, y: x > y, lambda x, y: x >= y),
    *(lambda x, y: x == y, lambda x, y: x != y),
)


class Random:
    """A source of random functions for one problem's sizes; `arrays` are those that they capture.

    Without `jumps` the functions are continuous in the score.
    """

    def __init__(
        self, seed: int, batch: int, heads: int, n_q: int, n_kv: int, *, jumps: bool = True
    ) -> None:
        self.rng = np.random.default_rng(seed)
        self._one = (*_ONE, *_JUMPS_ONE) if jumps else _ONE
        self._two = (*_TWO, *_JUMPS_TWO) if jumps else _TWO
        draw = self.rng.standard_normal
        self.arrays = {
            "slopes": draw(heads),
            "rows": draw((batch, n_q)),
            "keys": draw(n_kv),
            "table": draw((heads, n_q + n_kv)),
            "bias": draw((n_q, n_kv)),
            "temperature": np.array(draw()),
        }
        self.numbers = {
            "documents_q": np.sort(self.rng.integers(0, 4, n_q)),
            "documents_k": np.sort(self.rng.integers(0, 4, n_kv)),
            "lengths": self.rng.integers(0, n_kv + 1, batch),
            "marks": self.rng.integers(0, 3, (heads, n_kv)),
        }

    def _pick(self, choices):
        return choices[self.rng.integers(len(choices))]

    # Each of these returns a function of (score, b, h, q, k) that makes no random choice itself.

    def _whole(self, depth):
        """Return a random integer function of the indices."""
        if depth == 0 or self.rng.random() < 0.3:
            kind, number = self.rng.integers(9), int(self.rng.integers(-3, 20))
            n = self.numbers
            return (
                lambda s, b, h, q, k: q,
                lambda s, b, h, q, k: k,
                lambda s, b, h, q, k: q,
                lambda s, b, h, q, k: k,
                lambda s, b, h, q, k: h,
                lambda s, b, h, q, k: b + number,
                lambda s, b, h, q, k: n["documents_q"][q],
                lambda s, b, h, q, k: n["documents_k"][k] + n["marks"][h, k],
                lambda s, b, h, q, k: n["lengths"][b],
            )[kind]
        function, x, y = self._pick(_WHOLE), self._whole(depth - 1), self._whole(depth - 1)
        return lambda *a: function(x(*a), y(*a))

    def condition(self, depth):
        """Return a random boolean function of the indices."""
        if depth == 0 or self.rng.random() < 0.3:
            compare, x, y = self._pick(_COMPARED), self._whole(2), self._whole(1)
            return lambda *a: compare(x(*a), y(*a))
        x, y = self.condition(depth - 1), self.condition(depth - 1)
        return self._pick(
            (
                lambda *a: x(*a) & y(*a),
                lambda *a: x(*a) | y(*a),
                lambda *a: ~x(*a),
                lambda *a: np.where(x(*a), y(*a), ~y(*a)),
            )
        )

    def number(self, depth):
        """Return a random float function of the score and the indices."""
        if depth == 0 or self.rng.random() < 0.2:
            kind, value = self.rng.integers(9), float(self.rng.standard_normal())
            n = self.arrays
            return (
                lambda s, b, h, q, k: s,
                lambda s, b, h, q, k: s,
                lambda s, b, h, q, k: value,
                lambda s, b, h, q, k: n["slopes"][h] * (k - q) * 0.1,
                lambda s, b, h, q, k: n["rows"][b, q],
                lambda s, b, h, q, k: n["keys"][k],
                lambda s, b, h, q, k: n["table"][h, k - q],
                lambda s, b, h, q, k: n["bias"][q, k],
                lambda s, b, h, q, k: n["temperature"] * s,
            )[kind]
        x, y = self.number(depth - 1), self.number(depth - 1)
        if (kind := self.rng.random()) < 0.4:
            one = self._pick(self._one)
            return lambda s, *a: one(x(s, *a) + 0 * s)  # makes a symbol, even if x is a constant
        if kind < 0.8:
            two = self._pick(self._two)
            return lambda *a: two(x(*a), y(*a))
        where = self.condition(1)
        return lambda *a: np.where(where(*a), x(*a), y(*a))

    def score_mod(self, depth=3):
        """Return a random score function."""
        number = self.number(depth)
        return lambda score, b, h, q, k: 0.5 * score + number(score, b, h, q, k)

    def mask_mod(self, depth=2):
        """Return a random mask function."""
        condition = self.condition(depth)
        return lambda b, h, q, k: condition(None, b, h, q, k)
