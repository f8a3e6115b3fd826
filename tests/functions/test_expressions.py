"""Tracing, evaluation and derivatives of score and mask functions."""

import functools
import math
from types import SimpleNamespace

import numpy as np
import pytest
from random_functions import Random

from flashsim import functions
from flashsim.errors import FunctionError, MaskError, OptionError, ShapeError
from flashsim.functions.builder import graph_of
from flashsim.functions.derivative import DOUT, adjoints
from flashsim.functions.emit_expressions import literal
from flashsim.functions.forward_mode import pushed
from flashsim.functions.graph import Graph, Node
from flashsim.functions.mask import MaskFunction
from flashsim.functions.names import FUNCTIONS
from flashsim.functions.operations import BOOL, FLOAT, INT
from flashsim.functions.tracing import trace_mask, trace_score
from flashsim.problem.problem import Problem

B, H, N, M = 2, 3, 7, 9
INDICES = {
    "b": np.arange(B)[:, None, None, None],
    "h": np.arange(H)[:, None, None],
    "q": np.arange(N)[:, None],
    "k": np.arange(M),
}
SLOPES = np.array([0.5, -1.0, 2.0])


def evaluated(function, score=None):
    traced = trace_mask(function) if score is None else trace_score(function)
    given = INDICES if score is None else {"score": score, **INDICES}
    return np.broadcast_to(traced.graph.evaluate(given, traced.arrays), (B, H, N, M))


def plain(function):
    """The same function called on index arrays, as NumPy runs it."""
    return np.broadcast_to(function(*INDICES.values()), (B, H, N, M))


MASKS = {
    "comparisons": lambda b, h, q, k: (q >= k) & (q < 5) | (k != 2) & (h == 1),
    "arithmetic": lambda b, h, q, k: (3 * q - k) // 2 % 3 <= (-k) // 4 + 2,
    "bits": lambda b, h, q, k: ((q & 3) | (k ^ 1)) << 1 >= (k >> 1) + 4,
    "not": lambda b, h, q, k: ~((q - k) % 2 == 0),
    "numpy": lambda b, h, q, k: np.logical_or(np.abs(q - k) < 2, np.minimum(q, k) == 0),
    "where": lambda b, h, q, k: np.where(k > 3, q > k, q < k),
    "clip": lambda b, h, q, k: np.clip(q - k, -1, 1) == 0,
    "turned": lambda b, h, q, k: (k < 5) & (2 + q - 1 >= 10 - k) & np.equal(h % 2, 0),
}


@pytest.mark.parametrize("name", MASKS)
def test_a_traced_mask_is_the_function(name):
    assert np.array_equal(evaluated(MASKS[name]), plain(MASKS[name]))


def test_captured_arrays_are_indexed_by_expressions():
    documents, offset = np.array([[0, 0, 1, 1, 2, 2, 2, 3, 3]] * B), np.array(1)

    def mask(b, h, q, k):
        return documents[b, q + offset] == documents[b, k]

    expected = documents[INDICES["b"], INDICES["q"] + 1] == documents[INDICES["b"], INDICES["k"]]
    assert np.array_equal(evaluated(mask), np.broadcast_to(expected, (B, H, N, M)))
    assert {a.name for a in trace_mask(mask).graph.arrays} == {"documents", "offset"}


def test_an_index_wraps_once_and_is_then_clamped():
    row = np.array([10, 20, 30])
    got = evaluated(lambda b, h, q, k: row[q - 5] == 10)
    expected = row[np.clip(np.where(np.arange(N) < 5, np.arange(N) - 2, np.arange(N) - 5), 0, 2)]
    assert np.array_equal(got, np.broadcast_to((expected == 10)[:, None], (B, H, N, M)))


class Alibi:
    """Slopes as an attribute, read by a method."""

    def __init__(self):
        self.slopes, self.power = SLOPES, 2

    def distance(self, q, k):
        return abs(q - k) ** self.power

    def __call__(self, score, b, h, q, k):
        return score - self.slopes[h] * self.distance(q, k)


def helper(slopes, score, b, h, q, k):
    return score - slopes[h] * abs(q - k) ** 2


def nested(score, b, h, q, k):
    inner = [lambda x: x - SLOPES[h] * abs(q - k) ** 2]
    return inner[0](score)


@pytest.mark.parametrize(
    "function", [Alibi(), Alibi().__call__, functools.partial(helper, SLOPES), nested]
)
def test_arrays_are_found_wherever_a_function_keeps_them(function):
    score = np.random.default_rng(0).standard_normal((B, H, N, M))
    expected = score - SLOPES[:, None, None] * abs(INDICES["q"] - INDICES["k"]) ** 2
    assert np.allclose(evaluated(function, score), expected)


def test_math_functions_are_traced_too():
    score = np.linspace(-2, 2, M)
    got = evaluated(lambda s, b, h, q, k: math.exp(s) + math.tanh(s) * math.pi, score)
    assert np.allclose(got, np.exp(score) + np.tanh(score) * np.pi)


def fails(text, match):
    kept = SimpleNamespace()
    trace_mask(lambda b, h, q, k: setattr(kept, "symbol", q > 2) or q > k)
    scope: dict = {"np": np, "math": math, "table": np.zeros((4, 5)), "names": np.array(["a"])}
    kept.table = scope["table"]
    scope["hidden"] = np.ma.masked_array(np.zeros(9), np.arange(9) > 3)
    scope |= {"empty": np.zeros(0), "earlier": kept.symbol, "kept": kept}
    exec(compile(f"def f(b, h, q, k):\n    return {text}", __file__, "exec"), scope)
    with pytest.raises(FunctionError, match=match):
        trace_mask(scope["f"])


@pytest.mark.promise("refuses bad input")
@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("q if q > k else k", "Python's if"),
        ("q < k < 3", "chained comparisons"),
        ("q and k", "Python's if"),
        ("range(q)", "not a Python integer"),
        ("kept.table[q, k] > 0", "table = model.table"),
        ("float(q) > 1", "not a Python float"),
        ("np.sort(q) > 1", "the function sort cannot be traced"),
        ("table[q] > 0", "one index per axis"),
        ("table[q, :] > 0", "slice"),
        ("table[q].sum() > 0", "sum"),
        ("table[q] + 1 > 0", r"table of shape \(4, 5\) needs one index per axis, but has 1"),
        ("table[q][k, b] > 0", "needs one index per axis, but has 3"),
        ("table[q][k][b] > 0", "cannot be indexed"),
        ("np.round(k, 1) > 0", "round"),
        ("table[q / 2, k] > 0", "is a float"),
        ("table > q", "without an index"),
        ("names[q] == 1", "dtype"),
        ("hidden[q] == 1", r"hidden is a masked array, .* capture hidden.filled\(value\)"),
        ("q + k", "must return a boolean"),
        ("unknown(q)", "NameError"),
        ("None", "one value per score, got None"),
        ("q + 'a' > 1", "unsupported operand"),
        ("q.nothing > 1", "has no attribute 'nothing'"),
        ("empty[q] > 1", "captured array empty has no elements"),
        ("q.new_full((2,), 1) > q", r"cannot make an array of shape \(2,\)"),
        ("(q > 1) & earlier", "a value of an earlier call"),
        ("k.item() > 0", "Python's if"),
        ("k[0] > 0", "cannot be indexed"),
        ("k.astype(np.complex64) > 0", "cannot be converted to complex64"),
        ("k.to('complex64') > 0", "to complex64; convert it to one of .*int32"),
        ("k.to('gpu') > 0", "cannot be converted to gpu"),
        ("np.add(k, 1, where=True) > 0", "unexpected keyword argument 'where'"),
        ("(q, k)", "must return one value per score"),
        ("np.clip(k, 0, 1, middle=2) > 0", "middle"),
        ("k in {1, 2}", "looked up in a set or a dict"),
        ("{0: 5}.get(h, 1) > k", "looked up in a set or a dict"),
        ("np.max(k) > 0", "max takes 2 values here, got 1"),
        ("k.exp(q) > 0", "exp takes 1 value here, got 2"),
        ("q + 2**63 > k", "9223372036854775808 does not fit in 64 bits"),
        ("q + np.uint64(2**63) > k", "9223372036854775808 does not fit in 64 bits"),
        ("math.remainder(k, 3) > 0", "use the operator %"),
        ("~(k * 0.5) > 0", "take booleans and integers, got a float"),
        ("(k * 0.5) << 1 > q", "take booleans and integers, got a float"),
    ],
)
def test_what_cannot_be_traced_is_refused(text, match):
    fails(text, match)


def test_what_is_no_function_is_refused_and_what_was_traced_is_left_alone():
    with pytest.raises(FunctionError, match=r"expected a function of the form mask_mod.*, got 3"):
        trace_mask(3)
    for trace, function in ((trace_mask, MASKS["not"]), (trace_score, nested)):
        traced = trace(function)
        assert trace(traced) is traced


def test_defaults_by_name_and_names_of_later_are_captured():
    keys = np.arange(9)

    def mask(b, h, q, k, *, row=keys):
        return (row[k] > 3) & ((q > 1) | (lambda: k > later)())

    later = 5
    assert np.array_equal(evaluated(mask), plain(lambda b, h, q, k: (k > 3) & ((q > 1) | (k > 5))))

    def unset(b, h, q, k):
        return q > (k if k is not None else never)

    assert np.array_equal(evaluated(unset), plain(lambda b, h, q, k: q > k))
    never = None


def test_a_captured_scalar_is_a_number_too():
    size, table = np.array(2), np.arange(9.0).reshape(3, 3)

    def mask(b, h, q, k):
        rows = [int(size), float(size) + 0, len(table), range(3)[size]]
        return table.max() * k > sum(rows) * table[0][2] * (q + table.T.shape[0])

    expected = plain(lambda b, h, q, k: 8 * k > (2 + 2 + 3 + 2) * 2 * (q + 3))
    assert np.array_equal(evaluated(mask), expected)


@pytest.mark.parametrize(
    ("nodes", "match"),
    [
        ([["add", [0, 1], None, "int"]], "must have earlier nodes as arguments, got \\[0, 1\\]"),
        ([["arg", [], "z", "int"]], "a function has no argument 'z'"),
        ([["const", [], "1", "int"]], "a constant must be a number or a boolean, got '1'"),
        ([["load", [], 0, "float"]], "reads array 0 with 0 indices"),
        ([["arg", [], "q", "int"], ["add", [0], None, "int"]], "add must have 2 arguments, got 1"),
    ],
)
def test_a_file_that_holds_no_graph_is_refused(nodes, match):
    entry = {"name": "f", "nodes": nodes, "root": 0, "arrays": [["a", [3], "float32"]]}
    with pytest.raises(ValueError, match=match):
        graph_of(entry)
    with pytest.raises(ValueError, match="supported dtype, got 'a', \\[0\\]"):
        graph_of({**entry, "arrays": [["a", [0], "float32"]]})


def test_a_graph_comes_back_from_its_entry():
    traced = trace_mask(lambda b, h, q, k: SLOPES[h] * q > k + 1)
    again = graph_of(traced.graph.entry())
    assert again == traced.graph
    assert traced.graph.nbytes == SLOPES.nbytes


@pytest.mark.parametrize(
    ("kind", "value", "text"),
    [
        (BOOL, True, "true"),
        (INT, -2, "(-2)"),
        (FLOAT, 0.5, "0.5f"),
        (FLOAT, math.inf, "__int_as_float(0x7f800000)"),
        (FLOAT, -math.inf, "__int_as_float(0xff800000)"),
        (FLOAT, math.nan, "__int_as_float(0x7fffffff)"),
    ],
)
def test_a_constant_is_written_for_cuda(kind, value, text):
    """Infinity has no literal in CUDA C++: its bits are what IEEE 754 says."""
    assert literal(Node("const", (), value, kind)) == text
    if kind == FLOAT and "0x" in text:
        number = np.uint32(int(text[-11:-1], 16)).view(np.float32)
        np.testing.assert_array_equal(number, np.float32(value))


def test_an_error_names_the_line_of_the_function():
    def mask(b, h, q, k):
        first = q > k
        if first:
            return True
        return k > 3

    line = mask.__code__.co_firstlineno + 2
    with pytest.raises(FunctionError, match=rf"test_expressions.py:{line}: if first"):
        trace_mask(mask)


def test_an_index_may_not_depend_on_the_score():
    with pytest.raises(FunctionError, match="depends on the score"):
        trace_score(lambda score, b, h, q, k: score + SLOPES[score.int()])


def test_a_captured_array_needs_an_element_per_index():
    with pytest.raises(ShapeError, match=r"slopes.* axis 0.*at least 4"):
        Problem(8, heads=4, score_mod=functions.alibi(SLOPES))


def test_equal_functions_have_equal_graphs_and_others_do_not():
    def masks(n, values):
        return MaskFunction.of(lambda b, h, q, k: (q >= k + n) & (values[q] == 1))

    ones, twos = np.ones(9, int), np.full(9, 2)
    assert masks(1, ones) == masks(1, ones.copy())
    assert hash(masks(1, ones)) == hash(masks(1, ones.copy()))
    assert len({masks(1, ones), masks(2, ones), masks(1, twos)}) == 3


def test_constants_fold_and_equal_nodes_are_shared():
    graph = trace_mask(lambda b, h, q, k: (q >= k) & True & (k <= q) | False).graph
    assert [node.op for node in graph.nodes] == ["arg", "arg", "le"]
    assert graph.uses == {"q", "k"}


# -- derivatives ---------------------------------------------------------------------------------


def gradients(graph, arrays, score, dout):
    """The gradients of the score and of each captured array, by the reverse mode."""
    made = adjoints(graph)
    whole = Graph(made.nodes, made.root, made.arrays)
    values = whole.values({"score": score, DOUT: dout, **INDICES}, arrays)
    of_score = 0.0 if made.score is None else values[made.score]
    return of_score, {n: values[g] for n, g in made.reads}


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.promise("gradients equal differences")
def test_both_modes_and_differences_agree(seed):
    function = Random(seed, B, H, N, M).score_mod()
    graph, arrays = trace_score(function)
    rng = np.random.default_rng(seed)
    score, dout = rng.standard_normal((2, B, H, N, M))
    of_score, of_reads = gradients(graph, arrays, score, dout)
    values = graph.values({"score": score, **INDICES}, arrays)
    forward = dout * pushed(graph, values, {graph.argument("score")})
    assert np.allclose(np.broadcast_to(of_score, dout.shape), forward, rtol=1e-10, atol=1e-10)
    for n, g in of_reads.items():
        assert np.allclose(g, dout * pushed(graph, values, {n}), rtol=1e-10, atol=1e-10)
    up, down = (
        graph.evaluate({"score": score + step, **INDICES}, arrays) for step in (1e-6, -1e-6)
    )
    difference = dout * (up - down) / 2e-6
    smooth = abs(difference - forward) < 1e-4 * (1 + abs(forward))
    assert smooth.mean() > 0.99  # min, max, abs and floor have corners


@pytest.mark.parametrize(
    ("name", "more", "slope"),
    [
        *(("maximum", (0.0,), 0.5), ("minimum", (0.0,), 0.5), ("clip", (0.0, 1.0), 1.0)),
        *(("clamp_min", (0.0,), 1.0), ("clamp_max", (0.0,), 1.0), ("abs", (), 0.0)),
        *(("relu", (), 0.0), ("leaky_relu", (), 0.01), ("softplus", (), 0.5)),
        ("logaddexp", (0.0,), 0.5),
    ],
)
def test_a_slope_at_a_corner_is_torchs(name, more, slope):
    """softplus and logaddexp have no corner; the terms of which they consist do."""
    graph, arrays = trace_score(lambda s, b, h, q, k: FUNCTIONS[name](s, *more))
    score = np.zeros((B, H, N, M))
    of_score, _ = gradients(graph, arrays, score, np.ones_like(score))
    assert np.allclose(of_score, slope)
    values = graph.values({"score": score, **INDICES}, arrays)
    assert np.allclose(pushed(graph, values, {graph.argument("score")}), slope)


# -- ready-made masks and scores -------------------------------------------------------------------

q, k = np.arange(12)[:, None], np.arange(12)
DOCUMENTS = np.array([0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 3, 3])
READY = {
    "causal": (functions.causal(), k <= q),
    "aligned": (functions.causal(-3), k <= q - 3),
    "window": (functions.window(2, 1), (k >= q - 2) & (k <= q + 1)),
    "half": (functions.window(-1, 2), k <= q + 2),
    "prefix": (functions.prefix_lm(4), (k < 4) | (k <= q)),
    "prefixes": (functions.prefix_lm([4, 6]), (k < 4) | (k <= q)),
    "documents": (functions.documents(DOCUMENTS), DOCUMENTS[:, None] == DOCUMENTS),
    "batch": (functions.documents(DOCUMENTS[None]), DOCUMENTS[:, None] == DOCUMENTS),
    "dilated": (functions.dilated(3), abs(q - k) % 3 == 0),
    "strided": (functions.strided(4), np.isin(k, [3, 7, 11]) & (q >= 0)),
    "chunked": (functions.chunked(5), q // 5 == k // 5),
    "streaming": (functions.streaming(2, 3), (k <= q) & ((k < 2) | (k >= q - 3))),
    "padding": (functions.padding([7, 3]), (k < 7) & (q >= 0)),
    "and": (functions.causal() & functions.chunked(5), (k <= q) & (q // 5 == k // 5)),
    "or": (functions.window(1) | functions.strided(4), ((k <= q) & (k >= q - 1)) | (k % 4 == 3)),
    "not": (~functions.causal(), k > q),
    "plain and": ((lambda b, h, q, k: k > 2) & functions.causal(), (k <= q) & (k > 2)),
    "plain or": ((lambda b, h, q, k: k > 2) | functions.causal(), (k <= q) | (k > 2)),
    "all": (functions.window(-1, -1), (k >= 0) & (q >= 0)),
    "keys after": (functions.window(-1, 2), k - q <= 2),
    "keys before": (functions.window(3, -1), q - k <= 3),
    "plain": (functions.causal() & (lambda b, h, q, k: k > 2), (k <= q) & (k > 2)),
}


@pytest.mark.parametrize("name", READY)
def test_ready_made_masks(name):
    mask, expected = READY[name]
    assert np.array_equal(
        np.broadcast_to(MaskFunction.of(mask).keep(0, 0, q, k), (12, 12)), expected
    )


def test_a_node_of_a_tree_sees_its_ancestors():
    mask = MaskFunction.of(functions.tree([-1, 0, 0, 2, -1], prompt=3))
    kept = mask.keep(0, 0, np.arange(5)[:, None], np.arange(8))
    paths = [{0}, {0, 1}, {0, 2}, {0, 2, 3}, {4}]
    assert [set(np.flatnonzero(row[3:])) for row in kept] == paths
    assert kept[:, :3].all()
    with pytest.raises(OptionError, match="must be an earlier node"):
        functions.tree([1, -1])
    with pytest.raises(OptionError, match="must be a one-dimensional array of integers"):
        functions.tree([0.5])


def test_a_rule_says_what_it_is():
    assert repr(~functions.causal()) == "<mask not_causal>"
    with pytest.raises(MaskError, match=r"a mask must be a function mask\(b, h, q, k\), got 3"):
        functions.causal() & 3


def test_slopes_of_alibi():
    assert np.allclose(functions.alibi_slopes(8), 2.0 ** -np.arange(1, 9))
    assert np.allclose(functions.alibi_slopes(3), [2**-4, 2**-8, 2**-2])


def test_buckets_of_t5():
    """The buckets of the paper's code, written as loops."""

    def bucket(distance):  # k - q, bidirectional, 32 buckets up to 128
        later, n = (16 if distance > 0 else 0), abs(distance)
        if n < 8:
            return later + n
        far = 8 + int(math.log(n / 8) / math.log(128 / 8) * 8)
        return later + min(far, 15)

    table = np.arange(32.0)[:, None]
    graph, arrays = trace_score(functions.t5_bias(table))
    distances = np.arange(-300, 301)
    got = graph.evaluate({"score": 0.0, "b": 0, "h": 0, "q": 300, "k": 300 + distances}, arrays)
    assert got.tolist() == [bucket(int(x)) for x in distances]


def test_a_learned_bias_of_each_distance():
    table = np.random.default_rng(3).standard_normal((H, 7))
    score = np.zeros((B, H, N, M))
    distance = np.clip(INDICES["k"] - INDICES["q"], -3, 3) + 3
    expected = np.broadcast_to(table[INDICES["h"], distance], score.shape)
    assert np.allclose(evaluated(functions.relative(table, 3), score), expected)


def test_scores_after_one_another():
    score = np.linspace(-40, 40, M)
    got = evaluated(functions.chain(functions.alibi(SLOPES), functions.softcap(30.0)), score)
    moved = score - SLOPES[:, None, None] * abs(INDICES["q"] - INDICES["k"])
    assert np.allclose(got, 30 * np.tanh(moved / 30))


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: functions.window(-2), "left must be an integer of at least -1"),
        (lambda: functions.dilated(0), "step must be"),
        (lambda: functions.documents([0.5]), "numbers must be"),
        (lambda: functions.softcap(0), "cap must be"),
        (lambda: functions.alibi(0), "heads must be"),
    ],
)
def test_wrong_arguments_are_refused(make, match):
    with pytest.raises(OptionError, match=match):
        make()
