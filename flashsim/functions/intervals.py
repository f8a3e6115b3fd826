"""Bounds a function's result over boxes of indices by interval arithmetic.

For a mask function (0 is False, 1 is True), a lower bound of 1 means that every score of a box is
kept. An upper bound of 0 means that no score is kept. The bounds are safe, but not always tight.
The bounds of a captured array's element are the array's minimum and maximum over the possible
indices.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cached_property, reduce
from itertools import product
from typing import Any

import numpy as np

from flashsim.errors import UnsupportedError
from flashsim.functions.graph import Graph, Node, needed
from flashsim.functions.operations import BOOL, FLOAT, INDICES, INT, OPERATIONS

#: A lower and an upper bound per box.
Interval = tuple[np.ndarray, np.ndarray]
#: The largest integer on the CPU, and in GPU kernels.
LARGEST, LARGEST_ON_GPU = 2**63 - 1, 2**31 - 1
#: Elements per block of a range table. A range is widened to whole blocks.
BLOCK = 32


class RangeTable:
    """Minima and maxima of a 1-D array over ranges of indices, widened to whole blocks of BLOCK."""

    def __init__(self, values: np.ndarray) -> None:
        self.n = len(values)
        pad = -len(values) % BLOCK
        blocks = np.concatenate([values, np.repeat(values[-1:], pad)]).reshape(-1, BLOCK)
        self.low, self.high = [blocks.min(axis=1)], [blocks.max(axis=1)]
        step = 1
        while 2 * step <= len(self.low[0]):  # level x covers 2^x blocks
            low, high = self.low[-1], self.high[-1]
            self.low.append(np.minimum(low[:-step], low[step:]))
            self.high.append(np.maximum(high[:-step], high[step:]))
            step *= 2

    def of(self, first: np.ndarray, last: np.ndarray) -> Interval:
        """Return the least and the greatest element of each widened range `first` to `last`."""
        first, last = np.clip(first, 0, self.n - 1) // BLOCK, np.clip(last, 0, self.n - 1) // BLOCK
        length = last - first + 1
        level = np.frexp(length)[1] - 1
        low, high = (
            np.empty(first.shape, self.low[0].dtype),
            np.empty(first.shape, self.low[0].dtype),
        )
        for x in np.unique(level).tolist():
            at = level == x
            a, b = first[at], last[at] - (1 << x) + 1
            low[at] = np.minimum(self.low[x][a], self.low[x][b])
            high[at] = np.maximum(self.high[x][a], self.high[x][b])
        return low, high


class Bounds:
    """Bounds a graph's result over boxes; `arrays` has the values of the captured arrays.

    Bounds of floats are computed in type `dtype`, as `Graph.evaluate` computes the floats.
    """

    def __init__(self, graph: Graph, arrays: Iterable[np.ndarray], dtype: str = "float64") -> None:
        self.graph, self.arrays, self.dtype = graph, tuple(arrays), np.dtype(dtype)
        self._tables: dict[int, tuple[RangeTable | None, Any, Any]] = {}

    def of(self, ranges: Mapping[str, Interval]) -> Interval:
        """Return bounds of the function's result, from each argument's first and last values."""
        return self.every(ranges)[self.graph.root]

    def every(self, ranges: Mapping[str, Interval]) -> list[Interval]:
        """Return bounds of all nodes, from each argument's first and last values."""
        found: list[Interval] = []
        nan: list[Any] = []
        with np.errstate(all="ignore"):
            for n, node in enumerate(self.graph.nodes):
                args, of = [found[a] for a in node.args], _any(nan[a] for a in node.args)
                if node.op == "arg":
                    found.append(ranges[node.value])
                elif node.op == "const":
                    value = np.asarray(node.value, self._type(node))
                    found.append((value, value))
                elif node.op == "load":
                    found.append(_known(node, self._load(n, node, args), self.dtype))
                else:
                    kinds = [self.graph.nodes[a].kind for a in node.args]
                    found.append(_bounds(node, args, kinds, of, self.dtype, LARGEST))
                own = node.op == "load" and self._holds_nan[node.value]
                nan.append(own or _may_be_nan(node, args, of))
        return found

    @cached_property
    def _holds_nan(self) -> list[bool]:
        return [x.dtype.kind == "f" and bool(np.isnan(x).any()) for x in self.arrays]

    def _type(self, node: Node) -> Any:
        return self.dtype if node.kind == FLOAT else np.int64

    def _load(self, n: int, node: Node, args: list[Interval]) -> Interval:
        """Return bounds of a loaded element, from the range of the index that depends on q or k."""
        if n not in self._tables:
            self._tables[n] = self._table(node)
        table, low, high = self._tables[n]
        if table is None:
            return low, high
        axis = next(x for x, a in enumerate(node.args) if self._moves(a))
        first, last = args[axis]
        size = self.arrays[node.value].shape[axis]
        below = first < 0  # a negative index counts from the end
        inside = (~below | (last < 0)) if np.any(below) else None
        shift = np.where(last < 0, size, 0)
        low, high = table.of(np.asarray(first + shift), np.asarray(last + shift))
        if inside is not None:
            whole = table.of(np.zeros(1, np.int64), np.full(1, size - 1))
            low, high = np.where(inside, low, whole[0]), np.where(inside, high, whole[1])
        return low, high

    def _moves(self, a: int) -> bool:
        return bool(self.graph.depends[a] & {"q", "k", "score"})

    def _table(self, node: Node) -> tuple[RangeTable | None, Any, Any]:
        """Return the table of ranges of a load's array, or the array's minimum and maximum.

        The table exists only if the index of exactly one axis depends on q, k or the score. Ranges
        run along this axis; minima and maxima are over all remaining axes.
        """
        array = self.arrays[node.value]
        kind = self._type(node)
        moving = [axis for axis, a in enumerate(node.args) if self._moves(a)]
        if len(moving) != 1:
            return None, np.asarray(array.min()).astype(kind), np.asarray(array.max()).astype(kind)
        rest = tuple(axis for axis in range(array.ndim) if axis != moving[0])
        low, high = (array, array) if not rest else (array.min(axis=rest), array.max(axis=rest))
        table = RangeTable(np.ascontiguousarray(low).astype(kind, copy=False))
        if rest:
            table.high = RangeTable(np.ascontiguousarray(high).astype(kind, copy=False)).high
        return table, None, None


def ranges_of_integers(
    nodes: tuple[Node, ...], extents: Mapping[str, int]
) -> dict[int, tuple[int, int]]:
    """Return safe bounds of each integer node; `extents` has the sizes of b, h, q and k."""
    found = _anywhere(nodes, extents)
    return {
        n: (int(found[n][0]), int(found[n][1])) for n, node in enumerate(nodes) if node.kind == INT
    }


def largest_result(graph: Graph, extents: Mapping[str, int]) -> float:
    """Return a bound on the absolute value of a score function's result; infinity if unbounded.

    The bound holds for any scores and captured arrays.
    """
    low, high = _anywhere(graph.nodes, extents)[graph.root]
    return float(max(abs(low), abs(high)))


def in_32_bits(graph: Graph, extents: Mapping[str, int]) -> Graph:
    """Return an equal graph whose integer constants fit in 32 bits, with the same node numbers.

    A comparison with a larger constant has the same result for all indices and is replaced by it.
    The same holds for a minimum or maximum. Captured integers are assumed to fit in 32 bits.

    Raises
    ------
    UnsupportedError
        If other operations use a larger constant.
    """
    if all(_fits(node) for node in graph.nodes):
        return graph
    bounds, nodes = _anywhere(graph.nodes, extents), list(graph.nodes)
    for n, node in enumerate(nodes):
        low, high = bounds[n]
        if node.kind == BOOL and low == high:
            nodes[n] = Node("const", (), bool(low), BOOL)
        elif node.kind == INT and node.op in ("min", "max"):
            for one, other in (node.args, node.args[::-1]):
                x, y = (one, other) if node.op == "min" else (other, one)
                if bounds[x][1] <= bounds[y][0]:
                    nodes[n] = node._replace(args=(one, one))
    used = set(needed(nodes, [graph.root]))
    for n, node in enumerate(nodes):
        if n not in used and node.kind == INT and node.op != "arg":
            nodes[n] = Node("const", (), 0, INT)
        elif n in used and not _fits(node):
            raise UnsupportedError(
                f"{graph.name} computes with the integer {node.value}, but kernels on a GPU "
                "compute with 32-bit integers; use smaller integers, or backend='numba', which "
                "computes with 64 bits on the CPU"
            )
    return replace(graph, nodes=tuple(nodes))


def _fits(node: Node) -> bool:
    return node.op != "const" or node.kind != INT or -(2**31) <= node.value < 2**31


#: Operations that are finite if their first argument is above a limit, or at it for a square root.
_LIMITS = {"log": 0, "log2": 0, "rsqrt": 0, "log1p": -1, "pow": 0, "sqrt": 0}
_DIVISIONS = ("div", "floordiv", "mod")
#: The logarithm of each operation's result to base 2, and the largest one of a finite float32.
_EXPONENTS: dict[str, Callable[..., Any]] = {
    **{name: lambda x: x / np.log(2) for name in ("exp", "expm1")},
    "exp2": lambda x: x,
    "pow": lambda x, y: y * np.log2(x),
}
_LARGEST_EXPONENT = 127
#: Positions past the last one at which kernels may evaluate a function, because tiles are whole.
_PAST = 256


def without_poles(nodes: tuple[Node, ...], extents: Mapping[str, int]) -> list[bool]:
    """Return one bool per node: True if the node has no pole at any score, index and position.

    The value is then finite if the scores, captured elements and constants are. False means that
    the node may divide by 0, for example, also at positions past the last one. An exponential of
    positions that may exceed float32 counts as a pole. A divisor that all scores of a head share is
    assumed not to be 0.
    """
    bounds = _anywhere(nodes, _whole_tiles(extents))
    found: list[bool] = []
    moves: list[bool] = []  # whether scores of a head differ in it
    places: list[bool] = []  # whether it is computed from a query's or key's number
    for node in nodes:
        inside = True
        if node.op in _LIMITS or (node.kind == FLOAT and node.op in _DIVISIONS):
            of = node.args[0 if node.op == "pow" else -1]
            low, high = bounds[of]
            above = low >= 0 if node.op == "sqrt" else low > _LIMITS.get(node.op, 0)
            below = node.op in _DIVISIONS and high < 0
            inside = bool(above or below) or not moves[of]
        if inside and node.op in _EXPONENTS and any(places[a] for a in node.args):
            with np.errstate(all="ignore"):
                args = [bounds[a] for a in node.args]
                of_corners = [_EXPONENTS[node.op](*corner) for corner in product(*args)]
            inside = bool(np.max(of_corners) <= _LARGEST_EXPONENT)  # False for NaN
        found.append(inside and all(found[a] for a in node.args))
        own = node.op == "arg" and node.value not in ("b", "h")
        moves.append(own or any(moves[a] for a in node.args))
        computed = node.op != "load" and any(places[a] for a in node.args)
        places.append(computed or (node.op == "arg" and node.value in ("q", "k")))
    return found


def bounded(nodes: tuple[Node, ...], extents: Mapping[str, int]) -> list[bool]:
    """Return one bool per node: True if the node is finite for any scores and captured values."""
    pairs = zip(_anywhere(nodes, _whole_tiles(extents)), without_poles(nodes, extents), strict=True)
    return [bool(np.isfinite(low) & np.isfinite(high)) and safe for (low, high), safe in pairs]


def _whole_tiles(extents: Mapping[str, int]) -> dict[str, int]:
    return {name: n + _PAST * (name in ("q", "k")) for name, n in extents.items()}


def _anywhere(nodes: tuple[Node, ...], extents: Mapping[str, int]) -> list[Interval]:
    """Return bounds of each node over all indices, all scores and all values of captured arrays."""
    found: list[Interval] = []
    nan: list[Any] = []
    with np.errstate(all="ignore"):
        for node in nodes:
            args, of = [found[a] for a in node.args], _any(nan[a] for a in node.args)
            if node.op == "arg" and node.value in extents:
                found.append((np.asarray(0), np.asarray(extents[node.value] - 1)))
            elif node.op == "const":
                value = np.asarray(node.value, np.float64 if node.kind == FLOAT else np.int64)
                found.append((value, value))
            elif node.op in ("arg", "load"):
                found.append(_unknown(node, ()))
            else:
                found.append(_bounds(node, args, [nodes[a].kind for a in node.args], of))
            unknown = node.kind == FLOAT and node.op in ("arg", "load")
            nan.append(unknown or _may_be_nan(node, args, of))
    return found


def _any(flags: Iterable[Any]) -> Any:
    """Return the elementwise or of booleans and arrays of booleans."""
    return reduce(np.logical_or, flags, False)


def _may_be_nan(node: Node, args: list[Interval], of: Any) -> Any:
    """Return True where a node may be NaN; `of` tells where one of the arguments may be NaN."""
    if node.kind != FLOAT or node.op in ("arg", "load"):
        return False
    if node.op == "const":
        return np.isnan(node.value)
    infinite = [np.isinf(low) | np.isinf(high) for low, high in args]
    zero = [(low <= 0) & (high >= 0) for low, high in args]
    own: Any = False
    if node.op in _LIMITS:
        own = args[0][0] < _LIMITS[node.op]
    elif node.op in ("sin", "cos"):
        own = infinite[0]
    elif node.op in ("add", "sub"):
        own = infinite[0] & infinite[1]
    elif node.op == "mul":
        own = zero[0] & infinite[1] | infinite[0] & zero[1]
    elif node.op == "div":
        own = zero[0] & zero[1] | infinite[0] & infinite[1]
    elif node.op in ("floordiv", "mod"):
        own = zero[1] | infinite[0] | infinite[1]
    return of | own


def _corners(function: Callable[..., Any], a: Interval, b: Interval) -> Interval:
    """Return bounds of an operation that is monotonic in a and b, from the values at 4 corners."""
    of = [function(x, y) for x in a for y in b]
    low = np.minimum(np.minimum(of[0], of[1]), np.minimum(of[2], of[3]))
    high = np.maximum(np.maximum(of[0], of[1]), np.maximum(of[2], of[3]))
    return low, high


def _unknown(node: Node, shape: Any, most: int = LARGEST_ON_GPU) -> Interval:
    """Return the widest bounds of a node's kind, for a node of unknown value."""
    if node.kind == BOOL:
        return np.zeros(shape, np.int64), np.ones(shape, np.int64)
    if node.kind == INT:
        return np.full(shape, -most - 1), np.full(shape, most)
    return np.full(shape, -np.inf), np.full(shape, np.inf)


def _may_wrap(op: str, args: list[Interval]) -> Any:
    """Return True where an operation on 64-bit integers may exceed them, and wrap around."""
    sizes = [np.maximum(*(np.abs(np.asarray(x, np.float64)) for x in pair)) for pair in args]
    if op in ("add", "sub", "neg", "abs"):
        return sum(sizes) >= 2.0**63
    if op == "shl":
        return sizes[0] * 2.0 ** np.clip(sizes[1], 0, 64) >= 2.0**63
    return op == "mul" and sizes[0] * sizes[1] >= 2.0**63


def _bounds(
    node: Node,
    args: list[Interval],
    kinds: list[str],
    nan: Any,
    dtype: Any = np.float64,
    most: int = LARGEST_ON_GPU,
) -> Interval:
    """Return bounds of a node from bounds of its arguments; `nan`: where an argument may be NaN.

    `most` is the largest integer.
    """
    op = node.op
    none = _unknown(node, (), most)
    result: Interval = args[0]
    if op in ("add", "min", "max", "and", "or"):
        function = OPERATIONS[{"and": "min", "or": "max"}.get(op, op)].numpy
        result = function(args[0][0], args[1][0]), function(args[0][1], args[1][1])
    elif op == "sub":
        result = args[0][0] - args[1][1], args[0][1] - args[1][0]
    elif op == "neg":
        result = -args[0][1], -args[0][0]
    elif op == "not":
        result = 1 - args[0][1], 1 - args[0][0]
    elif op == "mul":
        result = _corners(np.multiply, *args)
    elif op == "abs":
        low, high = args[0]
        sizes = np.abs(low), np.abs(high)
        least = np.where((low <= 0) & (high >= 0), 0, np.minimum(*sizes))
        result = least, np.maximum(*sizes)
    elif op in ("lt", "le"):
        (a, b), (c, d) = args
        compare = np.less if op == "lt" else np.less_equal
        always = compare(b, c) & np.logical_not(nan)  # a comparison with NaN is False
        result = always.astype(np.int64), compare(a, d).astype(np.int64)
    elif op in ("eq", "ne"):
        (a, b), (c, d) = args
        same = (a == b) & (c == d) & (a == c) & np.logical_not(nan)
        apart = (b < c) | (d < a)
        yes, no = (same, apart) if op == "eq" else (apart, same)
        result = np.asarray(yes, np.int64), 1 - np.asarray(no, np.int64)
    elif op == "where":
        (always, ever), x, y = args
        low = np.where(always == 1, x[0], np.where(ever == 0, y[0], np.minimum(x[0], y[0])))
        high = np.where(always == 1, x[1], np.where(ever == 0, y[1], np.maximum(x[1], y[1])))
        result = low, high
    elif op == "cast":
        low, high = args[0]
        if node.kind == INT and kinds[0] == FLOAT:
            far = 2.0**31 if most == LARGEST_ON_GPU else 2.0**62
            nan = nan | ((most == LARGEST) & ((low < -far) | (high > far)))
            low, high = (np.trunc(np.clip(x, -far, far)).astype(np.int64) for x in args[0])
            low, high = np.where(nan, none[0], low), np.where(nan, none[1], high)
        result = low, high
    elif op in ("floordiv", "mod"):
        result = _divided(node, args[0], args[1], none)
    elif op in _RISING:
        low, high = (OPERATIONS[op].numpy(x) for x in args[0])
        result = low, high
    elif op in ("shl", "shr"):
        (a, b), (c, d) = args
        shift = np.left_shift if op == "shl" else np.right_shift
        safe = (c >= 0) & (d < 32)
        low, high = _corners(shift, (a, b), (np.clip(c, 0, 31), np.clip(d, 0, 31)))
        result = np.where(safe, low, none[0]), np.where(safe, high, none[1])
    elif op == "bitand":
        (a, b), (c, d) = args
        safe = (a >= 0) & (c >= 0)
        one = (a == b) & (c == d)
        whole = safe & (c == d) & (c & (c + 1) == 0) & (b <= c)  # every bit of the first is kept
        high = np.where(safe, np.minimum(b, d), none[1])
        low = np.where(whole, a, np.where(safe, 0, none[0]))
        result = np.where(one, a & c, low), np.where(one, a & c, high)
    elif op == "div":
        (a, b), (c, d) = args
        low, high = _corners(np.divide, (a, b), (c, d))
        safe = (c > 0) | (d < 0)
        result = np.where(safe, low, -np.inf), np.where(safe, high, np.inf)
    else:
        (shape,) = {np.broadcast_shapes(*(np.shape(x) for pair in args for x in pair))}
        result = _unknown(node, shape, most)
    if most == LARGEST and node.kind == INT:
        wraps = _may_wrap(op, args)
        result = np.where(wraps, none[0], result[0]), np.where(wraps, none[1], result[1])
    return _known(node, result, dtype)


def _known(node: Node, bounds: Interval, dtype: Any) -> Interval:
    """Return a node's bounds; those of floats have type `dtype`, and infinity in place of NaN."""
    if node.kind != FLOAT:
        return bounds
    low, high = (np.asarray(x, dtype) for x in bounds)
    return np.where(np.isnan(low), -np.inf, low), np.where(np.isnan(high), np.inf, high)


def _divided(node: Node, a: Interval, b: Interval, none: Interval) -> Interval:
    """Return bounds of a // b or a % b, which are tight only if b has a single positive value."""
    one = (b[0] == b[1]) & (b[0] > 0)
    by = np.where(one, b[0], 1)
    divide = OPERATIONS["floordiv"].numpy  # np.floor_divide differs for floats
    low, high = divide(a[0], by), divide(a[1], by)
    if node.op == "floordiv":
        return np.where(one, low, none[0]), np.where(one, high, none[1])
    same = low == high
    least, most = 0, by - 1
    if node.kind == FLOAT:  # a - floor(a / b) * b has rounding errors
        error = 2 * np.finfo(by.dtype).eps * np.maximum(np.abs(a[0]), np.abs(a[1]))
        least, most = -error, by + error
    first, last = np.where(same, a[0] - low * by, least), np.where(same, a[1] - low * by, most)
    return np.where(one, first, none[0]), np.where(one, last, none[1])


#: Monotonically increasing operations.
_RISING = (
    *("exp", "exp2", "expm1", "log", "log2", "log1p"),
    *("sqrt", "tanh", "floor", "ceil", "sigmoid"),
)


def never_negative(nodes: tuple[Node, ...]) -> list[bool]:
    """Return one bool per node: True if the node's value is certainly an integer of at least 0."""
    found: list[bool] = []
    for node in nodes:
        of = [found[a] for a in node.args]
        if node.op == "arg":
            yes = node.value in INDICES
        elif node.op == "const":
            yes = node.kind != FLOAT and node.value >= 0
        elif node.op in ("add", "mul", "min", "floordiv", "shl", "shr", "bitor", "bitxor"):
            yes = all(of)
        elif node.op in ("max", "bitand"):
            yes = any(of)
        elif node.op == "mod":
            yes = of[1]
        elif node.op == "where":
            yes = all(of[1:])
        elif node.op == "load":
            yes = False
        else:
            yes = node.op == "abs" or (node.op == "cast" and nodes[node.args[0]].kind == BOOL)
        found.append(yes and node.kind == INT)
    return found


def of_extremes(nodes: tuple[Node, ...]) -> list[bool]:
    """Return one bool per node: True if the node computes an integer from a min, max or where."""
    found: list[bool] = []
    for node in nodes:
        own = node.op in ("min", "max", "where")
        of = node.op != "load" and any(found[a] for a in node.args)
        found.append(node.kind == INT and (own or of))
    return found
