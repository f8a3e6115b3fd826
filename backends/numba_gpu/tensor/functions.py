"""Apply mask and score functions to fragments of scores.

The expression graph of a function becomes LLVM code: a few instructions per node and element of a
fragment. A value that several elements share is computed once, for example a captured element whose
index depends only on the query.
"""

import math
from collections.abc import Collection, Mapping
from types import SimpleNamespace
from typing import Any

from llvmlite import ir
from numba.cuda import cgutils, types

from flashsim.backends.launch import kernel as launch
from flashsim.backends.launch.kernel import Kernel
from flashsim.backends.numba_gpu import ptx
from flashsim.backends.numba_gpu.emit import (
    F32,
    FRAGMENT,
    I16,
    I32,
    I64,
    Like,
    Rounded,
    Values,
    argument,
    asm,
    emitted,
    f32,
    i32,
)
from flashsim.backends.numba_gpu.mma_tiles import elements, lane_of
from flashsim.backends.numba_gpu.tensor.gradients import mask_probabilities
from flashsim.backends.numba_gpu.tensor.softmax import LOG2E, NEG_INF
from flashsim.functions.derivative import DOUT, adjoints
from flashsim.functions.graph import ArraySpec, Graph, Node, needed
from flashsim.functions.intervals import never_negative, of_extremes
from flashsim.functions.operations import BOOL, FLOAT, INT, SCORE

int32 = types.int32
_TYPES: dict[str, ir.Type] = {
    **{"bool": ir.IntType(8), "uint8": ir.IntType(8), "int8": ir.IntType(8), "int16": I16},
    **{"int32": I32, "int64": I64, "float32": F32, "float64": ir.DoubleType()},
    **{"float16": I16, "bfloat16": I16},
}
#: Functions of CUDA's math library (libdevice), by operation.
_LIBRARY = {
    **{op: f"__nv_{op}f" for op in ("expm1", "log1p", "sqrt", "rsqrt", "sin", "cos", "erf", "pow")},
    **{op: f"__nv_{op}f" for op in ("floor", "ceil")},
    **{"abs": "__nv_fabsf", "div": "__nv_fast_fdividef"},
}
_COMPARED = {"lt": "<", "le": "<=", "eq": "==", "ne": "!="}
#: Methods of the LLVM builder, by operation.
_ON_BITS = {
    **{"and": "and_", "or": "or_", "bitand": "and_", "bitor": "or_", "bitxor": "xor"},
    **{"shl": "shl", "shr": "ashr"},
}


class _Values:
    """Emits the values of a graph's nodes for the elements of a fragment, each distinct value once.

    `given` has the values of the graph's arguments: one of b and one of h, and for the others a
    dict of values. `where` says for each element which of these values belong to it, by the
    argument's name. `addresses` are those of the captured arrays. `inside` is as in `Generated`.
    """

    def __init__(
        self,
        b: ir.IRBuilder,
        graph: Graph,
        given: Mapping[str, Mapping[int, ir.Value]],
        where: list[dict[str, int]],
        addresses: Values,
        inside: Collection[tuple[int, int]],
        *,
        fast_tanh: bool,
    ) -> None:
        self.b, self.nodes, self.arrays = b, graph.nodes, graph.arrays
        self.given, self.where, self.addresses = given, where, addresses
        self.fast_tanh, self._in_range = fast_tanh, inside
        self._positive = never_negative(graph.nodes)
        self._extreme = of_extremes(graph.nodes)
        self._depends = [sorted(names) for names in graph.depends]
        self._known: dict[tuple[int, ...], ir.Value] = {}
        self._needed: dict[int, list[int]] = {}

    def key(self, n: int, e: int) -> tuple[int, ...]:
        """Return what node n's value for element e depends on; equal keys mean equal values."""
        return n, *(self.where[e].get(name, 0) for name in self._depends[n])

    def value(self, n: int, e: int) -> ir.Value:
        """Return the value of node n for element e."""
        if n not in self._needed:
            self._needed[n] = needed(self.nodes, [n])
        for node in self._needed[n]:  # in order, so that arguments are known
            key = self.key(node, e)
            if key not in self._known:
                self._known[key] = self._emit(self.nodes[node], e)
        return self._known[self.key(n, e)]

    def _emit(self, node: Node, e: int) -> ir.Value:
        b, op = self.b, node.op
        args = [self._known[self.key(a, e)] for a in node.args]
        if op == "arg":
            return self.given[node.value][self.where[e].get(node.value, 0)]
        if op == "const":
            kind = {BOOL: ir.IntType(1), INT: I32, FLOAT: F32}[node.kind]
            return ir.Constant(kind, node.value)
        if op == "load":
            address = self.addresses[node.value]
            return _element(b, address, self.offset(node, e), self.arrays[node.value].dtype)
        if op == "where":
            return b.select(*args)
        if op == "not":
            return b.not_(args[0])
        if op in _ON_BITS:
            return getattr(b, _ON_BITS[op])(*args)
        of = self.nodes[node.args[0]].kind
        if op == "cast":
            return _converted(b, args[0], of, node.kind)
        if op in _COMPARED:
            if op in ("eq", "ne") and any(self._extreme[a] for a in node.args):
                # see flash_same in emit.py
                args = [ptx.exclusive_or(b, *args), i32(0)]
            if of != FLOAT:
                compare = b.icmp_signed if of == INT else b.icmp_unsigned
            else:  # NaN differs from everything
                compare = b.fcmp_unordered if op == "ne" else b.fcmp_ordered
            return compare(_COMPARED[op], *args)
        if op == "div" and self.nodes[node.args[1]].op == "const":
            by = self.nodes[node.args[1]].value
            if by and math.isfinite(by):
                return b.fmul(args[0], f32(1 / by))
        return self._float(op, *args) if node.kind == FLOAT else self._integer(node, *args)

    def _float(self, op: str, x: ir.Value, *more: ir.Value) -> ir.Value:
        b = self.b
        if op in ("add", "sub", "mul"):
            return getattr(b, f"f{op}")(x, *more)
        if op == "neg":
            return b.fsub(f32(-0.0), x)
        if op in ("min", "max"):
            first = b.fcmp_ordered("<=" if op == "min" else ">=", x, *more)
            return b.select(first, x, *more)
        if op in ("exp", "exp2"):
            return ptx.exp2(b, b.fmul(x, f32(LOG2E)) if op == "exp" else x)
        if op in ("log", "log2"):
            power = ptx.log2(b, x)
            return b.fmul(power, f32(1 / LOG2E)) if op == "log" else power
        if op == "tanh":
            if self.fast_tanh:
                return asm(b, "tanh.approx.f32 $0, $1;", "=f,f", [x], F32)
            return _library(b, "__nv_tanhf", x)
        if op == "sigmoid":
            half = f32(0.5)
            return b.fadd(b.fmul(half, self._float("tanh", b.fmul(half, x))), half)
        if op in ("floordiv", "mod"):
            quotient = self._float("floor", b.fdiv(x, *more))
            return quotient if op == "floordiv" else b.fsub(x, b.fmul(quotient, *more))
        return _library(b, _LIBRARY[op], x, *more)

    def _integer(self, node: Node, x: ir.Value, *more: ir.Value) -> ir.Value:
        b, op = self.b, node.op
        if op in ("add", "sub", "mul"):
            return getattr(b, op)(x, *more)
        if op == "neg":
            return b.neg(x)
        if op == "abs":
            return b.select(b.icmp_signed("<", x, i32(0)), b.neg(x), x)
        if op in ("min", "max"):
            return b.select(b.icmp_signed("<" if op == "min" else ">", x, *more), x, *more)
        (y,), by = more, self.nodes[node.args[1]]
        if by.op == "const" and by.value > 0:
            if by.value & (by.value - 1) == 0:  # an arithmetic shift rounds down, as Python does
                if op == "mod":
                    return b.and_(x, i32(by.value - 1))
                return b.ashr(x, i32(by.value.bit_length() - 1))
            if self._positive[node.args[0]]:
                return b.urem(x, y) if op == "mod" else b.udiv(x, y)
        y = b.select(b.icmp_signed("==", y, i32(0)), i32(1), y)
        quotient, rest = b.sdiv(x, y), b.srem(x, y)
        apart = b.icmp_signed("<", b.xor(rest, y), i32(0))
        low = b.and_(b.icmp_signed("!=", rest, i32(0)), apart)
        if op == "mod":
            return b.add(rest, b.select(low, y, i32(0)))
        return b.sub(quotient, b.zext(low, I32))

    def offset(self, node: Node, e: int) -> ir.Value:
        """Return the index, in its array in memory, of the element that a load reads."""
        b, spec = self.b, self.arrays[node.value]
        kind, at = I32 if math.prod(spec.shape) < 2**31 else I64, None
        for size, a in zip(spec.shape, node.args, strict=True):
            i = self._inside(a, self._known[self.key(a, e)], size)
            i = b.sext(i, I64) if kind == I64 else i
            at = i if at is None else b.add(b.mul(at, ir.Constant(kind, size)), i)
        at = ir.Constant(kind, 0) if at is None else at
        return at if kind == I64 else b.zext(at, I64)

    def _inside(self, n: int, i: ir.Value, size: int) -> ir.Value:
        """Return node n's value `i` as an index of an axis; see `Graph.evaluate`."""
        b = self.b
        if (n, size) in self._in_range:
            return i
        if not self._positive[n]:
            i = b.add(i, b.select(b.icmp_signed("<", i, i32(0)), i32(size), i32(0)))
            i = b.select(b.icmp_signed(">", i, i32(0)), i, i32(0))
        return b.select(b.icmp_signed("<", i, i32(size - 1)), i, i32(size - 1))


def _sum_in_first_lane(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """Return the sum over the warp's lanes in lane 0, and 0 in the others."""
    for mask in (1, 2, 4, 8, 16):
        x = b.fadd(x, ptx.shuffle_xor(b, x, mask))
    return b.select(b.icmp_unsigned("==", lane_of(b), i32(0)), x, f32(0.0))


def _library(b: ir.IRBuilder, name: str, *args: ir.Value) -> ir.Value:
    kind = ir.FunctionType(F32, [F32] * len(args))
    return b.call(cgutils.get_or_insert_function(b.module, kind, name), args)


def _converted(b: ir.IRBuilder, x: ir.Value, of: str, to: str) -> ir.Value:
    if to == FLOAT:
        return b.uitofp(x, F32) if of == BOOL else b.sitofp(x, F32) if of == INT else x
    return b.zext(x, I32) if of == BOOL else b.fptosi(x, I32) if of == FLOAT else x


def _element(b: ir.IRBuilder, address: ir.Value, index: ir.Value, dtype: str) -> ir.Value:
    """Return an element of an array in HBM as a boolean, a 32-bit integer or a float32."""
    pointer = b.inttoptr(address, ir.PointerType(_TYPES[dtype], 1))
    x = b.load(b.gep(pointer, [index]))
    if dtype == "bool":
        return b.icmp_unsigned("!=", x, ir.Constant(x.type, 0))
    if dtype in ("float16", "bfloat16"):
        return ptx.unpack(b, dtype == "bfloat16", b.zext(x, I32))[0]
    if dtype == "float64":
        return b.fptrunc(x, F32)
    if dtype == "uint8":
        return b.zext(x, I32)
    if dtype in ("float32", "int32"):
        return x
    return b.trunc(x, I32) if dtype == "int64" else b.sext(x, I32)


class _Fragment:
    """A fragment of 16 `blocks` rows and `n` columns; rows are queries if `by_row`, else keys."""

    def __init__(self, kernel: Kernel, blocks: int, n: int, *, by_row: bool) -> None:
        of, self.by_row, self.count = kernel.functions, by_row, blocks * n // 2
        constants = dict(kernel.constants)
        self.bf16, self.softcap = bool(constants["FS_BF16"]), bool(constants["FS_SOFTCAP"])
        self.mask, self.score = (None, None) if of is None else of.graphs
        #: Whether a function reads captured arrays by query or key, so only at existing ones.
        #: The same holds for a score function with poles.
        self.poles = of is not None and of.poles
        self.reads = of is not None and (of.mask_reads or of.score_reads or of.poles)
        self.in_mask, self.in_score = ((), ()) if of is None else of.inside
        arrays: tuple[ArraySpec, ...] = () if self.score is None else self.score.arrays
        self.of_score = len(arrays)
        #: The captured arrays with gradients, by name: the numbers of the gradients' addresses.
        found = [x.name for x in arrays if of is not None and x.name in of.wanted]
        first = 0 if of is None else of.first_sum
        self.sums = {name: first + x for x, name in enumerate(found)}
        #: The position of each element, relative to the lane's first one.
        self.where: list[dict[str, int]] = []
        for e, i, c, x in elements(blocks, n):
            row, column = 16 * i + x // 2 * 8, 8 * c + x % 2
            q, k = (row, column) if by_row else (column, row)
            self.where.append({"q": q, "k": k, SCORE: e, DOUT: e})

    def values(
        self, b: ir.IRBuilder, graph: Graph, a: ir.Value, place: Values, **more: Values
    ) -> _Values:
        """Return the values of the graph of the mask function, or of one of a score function.

        `a` is the kernel's arguments. `place` has the batch entry, the head, the warp's first query
        and key, and the last existing query and key. `more` has a fragment per argument of a score.
        """
        batch, head, _, _, last_query, last_key = place
        query, key = self.first(b, place)
        starts = {"q": (query, last_query), "k": (key, last_key)}
        given = {"b": {0: batch}, "h": {0: head}}
        given |= {name: dict(enumerate(fragment)) for name, fragment in more.items()}
        for name, (start, last) in starts.items():
            given[name] = {}
            for step in sorted({at[name] for at in self.where}):
                i = b.add(start, i32(step))
                inside = b.select(b.icmp_signed("<", i, last), i, last) if self.reads else i
                given[name][step] = inside
        first, inside = (0, self.in_score) if more else (self.of_score, self.in_mask)
        addresses = [argument(b, a, f"word_{first + x}") for x in range(len(graph.arrays))]
        made = b, graph, given, self.where, addresses, inside
        return _Values(*made, fast_tanh=self.bf16)

    def keep(self, b: ir.IRBuilder, a: ir.Value, place: Values) -> Values:
        """Return whether the mask function keeps each element's score."""
        assert self.mask is not None
        values = self.values(b, self.mask, a, place)
        kept = [values.value(self.mask.root, e) for e in range(self.count)]
        if self.mask.nodes[self.mask.root].kind == INT:
            kept = [b.icmp_signed("!=", x, i32(0)) for x in kept]
        return kept

    def apply_score(self, b: ir.IRBuilder, a: ir.Value, s: Values, place: Values) -> Values:
        """Return the score function's results.

        A function with poles may be infinite at the score of a position that does not exist, which
        is 0. There the result is -inf.
        """
        assert self.score is not None
        values = self.values(b, self.score, a, place, score=s)
        found = [values.value(self.score.root, e) for e in range(self.count)]
        if not self.poles:
            return found
        exists = self.exists(b, place)
        return [b.select(e, x, f32(NEG_INF)) for e, x in zip(exists, found, strict=True)]

    def exists(self, b: ir.IRBuilder, place: Values) -> Values:
        """Return whether each element's query and key exist; see `values`."""
        inside: dict[str, dict[int, ir.Value]] = {}
        for name, start, last in zip("qk", self.first(b, place), place[4:], strict=True):
            steps = sorted({at[name] for at in self.where})
            inside[name] = {x: b.icmp_signed("<=", b.add(start, i32(x)), last) for x in steps}
        return [b.and_(inside["q"][at["q"]], inside["k"][at["k"]]) for at in self.where]

    def first(self, b: ir.IRBuilder, place: Values) -> Values:
        """Return the query and the key of the lane's first element; see `values`."""
        lane = lane_of(b)
        down, across = b.lshr(lane, i32(2)), b.shl(b.and_(lane, i32(3)), i32(1))
        q, k = (down, across) if self.by_row else (across, down)
        return [b.add(place[2], q), b.add(place[3], k)]

    def slope(
        self,
        b: ir.IRBuilder,
        a: ir.Value,
        s: Values,
        ds: Values,
        place: Values,
        sums: Mapping[str, int],
    ) -> Values:
        """Return the gradients of scores `s` from those of the score function's results, `ds`.

        Also add up the gradients of the captured arrays `sums`. Where an element of `ds` is 0, so
        are its gradients, even if the function's slope there is infinite. The gradients of one
        captured element are first added up in the lane, and those of an element that all scores of
        the head share, in the warp.
        """
        assert self.score is not None
        made = adjoints(self.score, tuple(sums))
        graph = Graph(made.nodes, made.root, made.arrays)
        values = self.values(b, graph, a, place, score=s, dout=ds)
        zero, inverse = f32(0.0), None
        if self.softcap:
            inverse = ptx.reciprocal(b, argument(b, a, "softcap"))
        keys = {n: [values.key(n, e) for e in range(self.count)] for n, _ in made.reads}
        totals: dict[tuple[int, ...], ir.Value] = {}
        found = []
        for e in range(self.count):
            alive = b.fcmp_unordered("!=", ds[e], zero)
            for n, gradient in made.reads:
                values.value(n, e)  # and its index
                x, key = b.select(alive, values.value(gradient, e), zero), keys[n][e]
                totals[key] = b.fadd(totals[key], x) if key in totals else x
                if key in keys[n][e + 1 :]:
                    continue
                total, node = totals[key], graph.nodes[n]
                if len(set(keys[n])) == 1:
                    total = _sum_in_first_lane(b, total)
                to = argument(b, a, f"word_{sums[graph.arrays[node.value].name]}")
                at = b.mul(values.offset(node, e), ir.Constant(I64, 4))
                ptx.add_float_unless_zero(b, b.add(to, at), total)
            x = zero if made.score is None else values.value(made.score, e)
            if inverse is not None:  # the slope of c tanh(x / c) is 1 - tanh^2
                t = b.fmul(s[e], inverse)
                x = b.fmul(x, b.fsub(f32(1.0), b.fmul(t, t)))
            found.append(b.select(alive, x, zero))
        return found


def fragment_functions(kernel: Kernel, blocks: int, n: int, *, by_row: bool) -> SimpleNamespace:
    """Return an object with functions that a kernel applies to a fragment of scores.

    The fragment has 16 `blocks` rows and `n` columns. Rows are queries if `by_row` is true, and
    keys if not. All functions take the kernel's arguments `a`, batch entry b, head h, and
    fragments. All functions also take the warp's first query and key, and the last existing query
    and key. If the functions read arrays, positions past the last query or key are replaced by the
    last one.

    The result has the attributes ``has_mask`` and ``has_score``, and these functions:

    - ``mask(a, b, h, s, ...) -> s`` sets masked scores to -inf.
    - ``keep(a, b, h, p, ...) -> p`` sets masked elements of p to 0.
    - ``score(a, b, h, s, ...) -> s`` applies the score function.
    - ``alive(t, p) -> p`` sets elements of p to 0 where the score in t is -inf.
    - ``slope(a, b, h, s, ds, ...) -> ds`` returns the gradient of the score function's input s, and
      adds up captured arrays' gradients. ``slope_alone`` does not add up captured arrays'
      gradients.
    - ``probabilities(a, b, h, s, lse, ...) -> p`` applies the score function and returns P, rounded
      to 16 bits, as a left operand. `lse` is the negative log-sum-exp, in base 2, of each column.
      ``masked_probabilities`` also applies all masks. Its last argument is the mask's offset
      (`softmax.mask_rows`), for positions that start at 0 in each sequence.
    """
    f = _Fragment(kernel, blocks, n, by_row=by_row)
    names = "mask", "keep", "score", "alive", "slope", "slope_alone", "probabilities"
    found = SimpleNamespace(**dict.fromkeys((*names, "masked_probabilities")))
    found.has_mask, found.has_score = f.mask is not None, f.score is not None
    if found.has_mask:
        found.mask, found.keep = _masked(f, NEG_INF), _masked(f, 0.0)
    if found.has_score:
        found.score, found.alive = _score(f), _alive
        found.slope, found.slope_alone = _slope(f, f.sums), _slope(f, {})
    if found.has_score and not by_row and blocks == 1:
        constants = dict(kernel.constants)
        limits = {x: bool(constants[f"FS_{x.upper()}"]) for x in ("left", "right")}
        found.probabilities = _probabilities(f, masked=False, **limits)
        found.masked_probabilities = _probabilities(f, masked=True, **limits)
    return found


_POSITIONS = [int32] * 4


@emitted(Like(3), FRAGMENT, int32, int32, FRAGMENT, *_POSITIONS)
def _masked(b, a, batch, head, s, *place, f, value):
    kept = f.keep(b, a, [batch, head, *place])
    return [b.select(k, x, f32(value)) for k, x in zip(kept, s, strict=True)]


@emitted(Like(3), FRAGMENT, int32, int32, FRAGMENT, FRAGMENT, *_POSITIONS)
def _slope(b, a, batch, head, s, ds, *place, f, sums):
    return f.slope(b, a, s, ds, [batch, head, *place], sums)


@emitted(Like(3), FRAGMENT, int32, int32, FRAGMENT, *_POSITIONS)
def _score(b, a, batch, head, s, *place, f):
    return f.apply_score(b, a, s, [batch, head, *place])


@emitted(Like(1), FRAGMENT, FRAGMENT)
def _alive(b, t, p):
    some = (b.fcmp_ordered(">", x, f32(NEG_INF)) for x in t)
    return [b.select(x, y, f32(0.0)) for x, y in zip(some, p, strict=True)]


@emitted(
    *(Rounded(3), FRAGMENT, int32, int32, FRAGMENT, FRAGMENT),
    lambda c: [*_POSITIONS, *[int32] * c.masked],
)
def _probabilities(b, a, batch, head, s, lse, *place, f, masked, left, right):
    """Return ``probabilities`` or ``masked_probabilities``; see `fragment_functions`."""
    query, key, last_query, last_key, *offset = place
    at = [batch, head, query, key, last_query, last_key]
    p = []
    for e, x in enumerate(f.apply_score(b, a, s, at)):
        p.append(ptx.exp2(b, b.fma(x, f32(LOG2E), lse[e // 4 * 2 + e % 2])))
    if masked:
        limits = argument(b, a, "left"), argument(b, a, "right")
        where = query, key, *offset, b.add(last_key, i32(1)), *limits
        cut = mask_probabilities.__wrapped__
        p = cut(b, p, *where, blocks=1, by_row=False, left=left, right=right)
        if f.mask is not None:
            kept = f.keep(b, a, at)
            p = [b.select(k, x, f32(0.0)) for k, x in zip(kept, p, strict=True)]
    return [ptx.pack(b, f.bf16, p[x], p[x + 1]) for x in range(0, len(p), 2)]


def sink_of(kernel: Kernel) -> Any:
    """Return ``sink(a, head)``, which loads a head's attention sink (0 if there are no sinks)."""
    return _sink((kernel.args.itemsize - launch.ARGS.itemsize) // 8 - 1 if kernel.sinks else None)


@emitted(types.float32, FRAGMENT, int32)
def _sink(b, a, head, *, word):
    if word is None:
        return f32(0.0)
    return _element(b, argument(b, a, f"word_{word}"), b.zext(head, I64), "float32")


def first_rows_of(kernel: Kernel) -> Any:
    """Return ``first_rows(a, outer)``, the first query and key of an outer tile's packed sequence.

    They are 0 if the kernel has no functions, or the sequences are not packed.
    """
    of = kernel.functions
    packed = of is not None and bool(dict(kernel.constants)["FS_VARLEN"])
    return _first_rows(of.captured_bytes // 8 if of is not None and packed else None)


@emitted([int32, int32], FRAGMENT, int32)
def _first_rows(b, a, outer, *, word):
    if word is None:
        return [i32(0), i32(0)]
    pointer = b.inttoptr(argument(b, a, f"word_{word}"), ir.PointerType(I32, 1))
    at = b.shl(outer, i32(1))
    return [b.load(b.gep(pointer, [b.sext(b.add(at, i32(x)), I64)])) for x in range(2)]
