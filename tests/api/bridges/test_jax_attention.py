"""`flashsim.jax.attention` and `dot_product_attention` as JAX's own tools see them."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from bridge_cases import CASES, CUTS  # noqa: E402
from bridge_cases import plain_in_jax as plain  # noqa: E402
from jax.test_util import check_grads  # noqa: E402
from refusals import refuses  # noqa: E402

import flashsim.jax  # noqa: E402
from flashsim.errors import (  # noqa: E402
    BackendUnavailable,
    DTypeError,
    FunctionError,
    ShapeError,
    UnsupportedError,
)
from flashsim.functions.tracing import trace_score  # noqa: E402
from flashsim.jax import attention, dot_product_attention, foreign, xla_ffi  # noqa: E402

pytestmark = pytest.mark.promise("bridges equal their library")


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True):
        yield


def tensors(*, batch=2, heads=2, kv_heads=2, n_q=7, n_kv=9, d=4, dv=3, bias=None, dtype="float64"):
    random = np.random.default_rng(0)
    shapes = [(batch, heads, n_q, d), (batch, kv_heads, n_kv, d), (batch, kv_heads, n_kv, dv)]
    shapes += [(*bias, n_q, n_kv)] if bias else []
    return [jnp.asarray(random.standard_normal(shape), dtype) for shape in shapes]


def call(q, k, v, bias=None, **question):
    return attention(q, k, v, bias=bias, **{"backend": "simulator", **question})


#: Keys in two parts.
CUT = slice(0, 4), slice(4, None)


def in_parts(q, k, v):
    cuts = ((0, 4, 0, 5), (4, 7, 5, 9))
    parts = [plain(q[:, :, a:b], k[:, :, c:d], v[:, :, c:d], causal=True) for a, b, c, d in cuts]
    return jnp.concatenate(parts, axis=2)


def close(x, y, **tolerances):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerances), x, y)


# -- numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sizes", "question"), CASES.values(), ids=CASES)
def test_the_value_is_plain_attentions_also_under_jit(sizes, question):
    inputs = tensors(**sizes)
    expected = in_parts(*inputs) if question is CUTS else plain(*inputs, **question)
    close(call(*inputs, **question), expected, rtol=1e-10)
    close(jax.jit(lambda *x: call(*x, **question))(*inputs), expected, rtol=1e-10)


@pytest.mark.parametrize(("sizes", "question"), CASES.values(), ids=CASES)
@pytest.mark.parametrize(
    ("backend", "return_lse"), [("simulator", False), ("numba", False), ("numba", True)]
)
def test_check_grads(backend, return_lse, sizes, question):
    told = {**question, "backend": backend, "return_lse": return_lse}
    check_grads(lambda *x: call(*x, **told), tensors(**sizes), order=1, modes=["rev"])


def test_the_fused_backward():
    told = {"causal": True, "algorithm": "flash2-fused", "deterministic": False}
    inputs = tensors(heads=4)
    check_grads(jax.jit(lambda *x: call(*x, **told)), inputs, order=1, modes=["rev"])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_narrow_types_come_out_as_they_went_in(dtype):
    inputs = tensors(dtype=dtype)
    out, lse = call(*inputs, return_lse=True, backend="numba")
    assert (out.dtype, lse.dtype) == (dtype, "float32")
    gradients = jax.grad(lambda *x: call(*x).astype("float32").sum(), (0, 1, 2))(*inputs)
    assert {x.dtype for x in gradients} == {jnp.dtype(dtype)}
    expected = plain(*(x.astype("float64") for x in inputs))
    close(out.astype("float64"), expected, atol=3 * float(jnp.finfo(dtype).eps), rtol=0.02)


@pytest.mark.parametrize("lead", [(), (2,), (2, 2)], ids=["(n, d)", "(heads, n, d)", "4-D"])
def test_leading_axes_may_be_left_out_and_numpy_arrays_be_given(lead):
    q, k, v = (np.ones((*lead, n, 4)) for n in (7, 9, 9))
    out, lse = call(q, k, v, return_lse=True)
    assert isinstance(out, jax.Array)
    assert (out.shape, lse.shape) == (q.shape, q.shape[:-1])


def test_offsets_may_be_traced():
    q, k, v = tensors(batch=1)
    ends = [jnp.asarray(CUTS[name]) for name in ("cu_seqlens_q", "cu_seqlens_k")]

    def loss(x, a, b):
        return call(*x, causal=True, cu_seqlens_q=a, cu_seqlens_k=b).var()

    got = jax.jit(jax.grad(loss))((q, k, v), *ends)
    close(got, jax.grad(lambda x: in_parts(*x).var())((q, k, v)), rtol=1e-7)
    close(jax.grad(loss)((q, k, v), *ends), got)  # eagerly: they are known


# -- transforms -----------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [(1, 2), (2, 1)])
def test_maps_fold_into_the_batch(bias):
    """Two, one inside the other, over different operands; values and gradients."""
    q, k, v, b = tensors(bias=bias)
    queries, keys, biases = (jnp.stack([x, -x, 2 * x]) for x in (q, k, b))

    def gradients(*x):
        return jax.value_and_grad(lambda *y: call(*y).var(), (0, 1, 2, 3))(*x)

    mapped = jax.vmap(jax.vmap(gradients, (0, None, None, 0)), (None, 2, None, None), out_axes=1)
    got = jax.jit(mapped)(queries, jnp.moveaxis(keys, 0, 2), v, biases)
    for i in range(3):
        for j in range(3):
            expected = gradients(queries[i], keys[j], v, biases[i])
            close(jax.tree.map(lambda x, at=(i, j): x[at], got), expected, atol=1e-14)


def test_packed_sequences_are_mapped_one_after_the_other():
    q, k, v = tensors(batch=1)
    queries = jnp.stack([q, -q])
    got = jax.vmap(lambda x: call(x, k, v, **CUTS))(queries)
    close(got, jnp.stack([in_parts(x, k, v) for x in queries]), rtol=1e-10)


def test_beside_inputs_and_output_one_number_a_row_is_kept():
    q, k, v = tensors()
    out, pull_back = jax.vjp(lambda *x: call(*x, causal=True), q, k, v)
    kept = sorted(x.shape for x in jax.tree.leaves(pull_back))
    assert kept == sorted([q.shape, k.shape, v.shape, out.shape, q.shape[:-1]])


def test_merged_parts_of_the_keys_have_the_gradients_of_the_whole():
    def loss(q, k, v):
        parts = [call(q, k[..., at, :], v[..., at, :], return_lse=True) for at in CUT]
        lse = jnp.logaddexp(*(part for _, part in parts))
        out = sum(out * jnp.exp(part - lse)[..., None] for out, part in parts)
        return jnp.sin(out).sum() + jnp.square(lse).sum()

    def whole(q, k, v):
        scores = q @ k.mT * q.shape[-1] ** -0.5
        lse = jax.nn.logsumexp(scores, axis=-1)
        return jnp.sin(plain(q, k, v)).sum() + jnp.square(lse).sum()

    inputs = tensors()
    expected = jax.grad(whole, (0, 1, 2))(*inputs)
    close(jax.jit(jax.grad(loss, (0, 1, 2)))(*inputs), expected, atol=1e-12)
    queries = jnp.stack([inputs[0], -inputs[0]])
    mapped = jax.vmap(jax.grad(loss), (0, None, None))(queries, *inputs[1:])
    singles = [jax.grad(whole)(x, *inputs[1:]) for x in queries]
    close(mapped, jnp.stack(singles), atol=1e-12)


def test_without_the_lse_no_gradient_of_it_is_read(monkeypatch):
    from flashsim.api import execution

    told, backward = [], execution.backward
    monkeypatch.setattr(
        execution, "backward", lambda **how: told.append("dlse" in how) or backward(**how)
    )
    inputs = tensors()
    jax.block_until_ready(jax.grad(lambda *x: call(*x).sum())(*inputs))
    jax.block_until_ready(jax.grad(lambda *x: call(*x, return_lse=True)[1].sum())(*inputs))
    assert told == [False, True]


# -- functions and sinks --------------------------------------------------------------------------

N_Q, N_KV = 20, 30


def functional(score, mask, **told):
    """Attention with a score function and a mask that capture what is given with q, k and v."""

    def attend(q, k, v, slopes, sinks, marks):
        score_mod = lambda *x: score(slopes, *x)  # noqa: E731
        mask_mod = lambda *x: mask(marks, *x)  # noqa: E731
        given = {"score_mod": score_mod, "mask_mod": mask_mod, "sinks": sinks}
        return attention(q, k, v, **given, **told, return_lse=True)

    return attend


def alibi(slopes, s, b, h, q, k):
    return 3 * jnp.tanh((s + slopes[h] * (k - q)) / 3)


def marked(marks, b, h, q, k):
    return (marks[q] == marks[k]) | (k <= q)


def written_out(q, k, v, slopes, sinks, marks):
    i, j = jnp.arange(N_Q)[:, None], jnp.arange(N_KV)
    s = q @ jnp.swapaxes(k, -1, -2) * q.shape[-1] ** -0.5
    s = alibi(slopes[:, None, None], s, 0, slice(None), i, j)
    s = jnp.where(marked(marks, 0, 0, i, j), s, -jnp.inf)
    more = jnp.broadcast_to(sinks[:, None, None], (*s.shape[:3], 1))
    s = jnp.concatenate([s, more], axis=-1)
    return jax.nn.softmax(s, axis=-1)[..., :-1] @ v, jax.nn.logsumexp(s, axis=-1)


def loss(function):
    weight = np.random.default_rng(1).standard_normal((2, 4, N_Q, 8))

    def total(*x):
        out, lse = function(*x)
        return (out * weight).sum() + jnp.sin(lse).sum()

    return total


@pytest.mark.parametrize("how", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("backend", ["simulator", "numba"])
def test_functions_and_sinks_have_gradients_of_what_they_capture(backend, how):
    """Captured arrays may be traced, and mapped: then the entries run one after the other."""
    random = np.random.default_rng(0)
    q, k, v = (jnp.asarray(random.standard_normal((2, 4, n, 8))) for n in (N_Q, N_KV, N_KV))
    slopes, sinks = jnp.asarray(random.standard_normal((2, 4)))
    marks = jnp.asarray(np.sort(random.integers(0, 3, N_KV)))
    given, which = (q, k, v, slopes, sinks, marks), (0, 1, 2, 3, 4)
    mine = functional(alibi, marked, backend=backend)
    value = lambda f: jax.value_and_grad(loss(f), which)  # noqa: E731
    got, exact = how(value(mine))(*given), value(written_out)(*given)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(exact), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-8, atol=1e-8)
    many = jnp.stack([slopes, -slopes])
    gradient = lambda f: jax.grad(loss(f), (0, 3))  # noqa: E731
    mapped = how(jax.vmap(gradient(mine), (None, None, None, 0, None, None)))(
        *given[:3], many, sinks, marks
    )
    for n in range(2):
        single = gradient(written_out)(*given[:3], many[n], sinks, marks)
        for x, y in zip(mapped, single, strict=True):
            np.testing.assert_allclose(x[n], y, rtol=1e-8, atol=1e-8)


def test_functions_without_captured_arrays_and_sinks_alone():
    q, k, v, *_ = tensors()
    got = attention(q, k, v, mask_mod=lambda b, h, i, j: j <= i + 2)
    np.testing.assert_allclose(got, plain(q, k, v, causal=True), rtol=1e-9)
    capped = attention(q, k, v, score_mod=lambda s, b, h, i, j: 2 * jnp.tanh(s / 2))
    np.testing.assert_allclose(capped, attention(q, k, v, softcap=2.0), rtol=1e-9)
    low = attention(q, k, v, sinks=jnp.full(2, -1e30))
    np.testing.assert_allclose(low, plain(q, k, v), rtol=1e-9)
    with pytest.raises(
        ShapeError, match=r"one number per query head, a float array of shape \(2,\)"
    ):
        attention(q, k, v, sinks=jnp.zeros(3))
    with pytest.raises(FunctionError, match="Python's if"):
        attention(q, k, v, score_mod=lambda s, b, h, i, j: s if i > j else -s)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda s, i: jax.lax.div(i - 4, 3) + s, lambda s, i: np.trunc((i - 4) / 3) + s),
        (lambda s, i: jax.lax.div(s, 3.0), lambda s, i: s / 3),
        (lambda s, i: jax.nn.gelu(s), lambda s, i: jax.nn.gelu(s)),
        (lambda s, i: jax.nn.gelu(s, approximate=False), lambda s, i: jax.nn.gelu(s, False)),
    ],
)
def test_functions_that_differ_from_torchs_of_the_same_name(function, expected):
    graph = trace_score(lambda s, b, h, i, j: function(s, i)).graph
    score, rows = np.linspace(-2, 2, 9), np.arange(9)
    close(graph.evaluate({"score": score, "q": rows}, ()), expected(score, rows), rtol=1e-12)


# -- errors ---------------------------------------------------------------------------------------


def test_captured_integers_of_more_bits_than_jaxs_are_refused():
    q, k, v = tensors(n_q=9)
    numbers = np.arange(9)
    mask = lambda b, h, i, j: numbers[i] == numbers[j]  # noqa: E731
    with jax.enable_x64(False):
        q, k, v = (x.astype("float32") for x in (q, k, v))
        close(call(q, k, v, mask_mod=mask), v)
        wide, torch = numbers + 2**32, pytest.importorskip("torch")
        for library in (np.asarray, torch.from_numpy):
            numbers = library(wide)
            with pytest.raises(DTypeError, match=r"numbers of .*int64 .* not fit in JAX's int32"):
                call(q, k, v, mask_mod=mask)


def traced(ask):
    """What a function says of three tensors, of which the first has no values."""
    q, k, v = tensors()
    return jax.eval_shape(lambda x: ask(x, k, v), q)


test_what_cannot_be_done_is_said_while_it_is_traced = refuses(r"""
traced(lambda q, k, v: attention(q, k[..., :2], v)) -> ShapeError: same head_dim
traced(lambda q, k, v: attention(q, k, v.astype("float32"))) -> DTypeError: must have one dtype
traced(lambda q, k, v: attention(q, k, v, algorithm="flash1"))
    -> UnsupportedError: not 'flash1'
traced(lambda q, k, v: attention(q, k, v, backend="cuda")) -> OptionError: backend
traced(lambda q, k, v: attention(q, k, v, is_causal=True))
    -> UnknownArgumentError: is called causal
traced(lambda q, k, v: attention(q, k, v, **CUTS)) -> ShapeError: batch
traced(lambda q, k, v: attention(k, k, v, causal=q[0, 0] > 0))
    -> DTypeError: causal= must be a Python value ... pass 'causal' in static_argnames=
traced(lambda q, k, v: attention(k, k, v, window=(q[0, 0], 0)))
    -> DTypeError: window= must be a Python value ... pass 'window' in static_argnames=
jax.jit(as_jax_nn)(is_causal=True)
    -> DTypeError: is_causal= must be a Python value ... pass 'is_causal' in static_argnames=
jax.jit(as_jax_nn)(local_window_size=(3, 2))
    -> DTypeError: local_window_size= must be a Python value ... pass 'local_window_size' in static
jax.jit(as_jax_nn)(return_residual=True)
    -> DTypeError: return_residual= must be a Python value ... pass 'return_residual' in static
traced(lambda q, k, v: dot_product_attention(q, k, v[0]))
    -> ShapeError: or all be ... arrays, got shapes
traced(lambda q, k, v: dot_product_attention(q, q, q, mask=q)) -> DTypeError: must be boolean
traced(lambda q, k, v: dot_product_attention(q, q, q, q[None]))
    -> ShapeError: bias must broadcast
traced(lambda q, k, v: dot_product_attention(q, q, q, i=1))
    -> UnknownArgumentError: no argument 'i'
attention(np.ma.masked_array(np.ones((7, 4))), np.ones((7, 4)), np.ones((7, 4)))
    -> DTypeError: q must be a jax.Array or ... got numpy.ma ... MaskedArray
""")


def test_derivatives_of_no_use_are_refused():
    q, k, v = tensors()
    with pytest.raises(TypeError, match=r"forward-mode .* to a custom_vjp function"):  # JAX's own
        jax.jvp(lambda x: call(x, k, v), (q,), (q,))
    with pytest.raises(UnsupportedError, match="cannot be differentiated twice"):
        jax.grad(lambda x: jax.grad(lambda y: call(y, k, v).sum())(x).sum())(q)


NOTHING = {"no batch": {"batch": 0}, "no queries": {"n_q": 0}, "no keys": {"n_kv": 0}}


@pytest.mark.parametrize("backend", ["simulator", "numba"])
@pytest.mark.parametrize("sizes", NOTHING.values(), ids=NOTHING)
def test_of_nothing_zeros(sizes, backend):
    inputs = tensors(**sizes, bias=(1, 2))
    both = lambda *x: call(*x, backend=backend, return_lse=True)  # noqa: E731
    for function in (both, jax.jit(both)):
        out, lse = function(*inputs)
        close((out, lse), (jnp.zeros((*inputs[0].shape[:-1], 3)), lse), rtol=0)
        assert out.dtype == inputs[0].dtype
        assert lse.shape == inputs[0].shape[:-1]
        assert jnp.isneginf(lse).all()
    gradients = jax.grad(lambda *x: call(*x, backend=backend).sum(), (0, 1, 2, 3))(*inputs)
    close(gradients, tuple(map(jnp.zeros_like, inputs)), rtol=0)
    mapped = jax.vmap(lambda q: call(q, *inputs[1:]))(jnp.stack([inputs[0]] * 3))
    assert mapped.shape == (3, *out.shape)
    by_token = [jnp.swapaxes(x, 1, 2) for x in inputs[:3]]
    assert not dot_product_attention(*by_token, backend=backend).any()


def test_of_nothing_packed():
    q, k, v = tensors(batch=1, n_q=0)
    cuts = jnp.array([0, 0]), jnp.array([0, 9])
    ask = lambda a, b: call(q, k, v, cu_seqlens_q=a, cu_seqlens_k=b)  # noqa: E731
    for function in (ask, jax.jit(ask)):
        assert function(*cuts).shape == (1, 2, 0, 3)


def test_fp8_has_no_scales_here():
    q, k, v = tensors(dtype="float8_e4m3fn")
    with pytest.raises(UnsupportedError, match=r"jax.attention takes no scales.*run\(q, k, v, sca"):
        attention(q, k, v, backend="simulator")


def test_what_only_the_engine_can_tell_is_said_when_it_runs():
    pytest.importorskip("cupy")
    q, k, v = tensors()
    words = "INVALID_ARGUMENT: UnsupportedError: backend='cupy' takes .* not float64"
    with pytest.raises(jax.errors.JaxRuntimeError, match=words):
        jax.block_until_ready(attention(q, k, v, backend="cupy"))


def test_a_forward_pass_on_a_gpu_without_cupy_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    foreign._devices.cache_clear()
    call = SimpleNamespace(layout=lambda: (SimpleNamespace(runs={}), [4096]))
    with pytest.raises(BackendUnavailable, match=r"backend='cupy' needs CuPy, .* pip install"):
        foreign._forward_on_gpu(call)


def test_an_interface_of_another_major_version_is_refused(monkeypatch):
    monkeypatch.setattr(xla_ffi, "_MAJOR", 1)
    with pytest.raises(BackendUnavailable, match=r"uses version 1.x .* uses 0.x"):
        xla_ffi.register("flashsim_never_called", "cpu", print)


def test_a_foreign_call_is_read_once_and_again_from_its_layout():
    seen = []

    def look(call):
        layout, addresses = call.layout()
        assert [x.address for x in call.arrays] == addresses
        assert layout.inputs == 2
        seen.append((layout, layout.texts["question"], tuple(layout.looks)))

    xla_ffi.register("flashsim_test_layout", "cpu", look)
    for n in (3, 5, 3, 5):
        for text in "ab":
            x = jnp.zeros((n, 2), "int32")
            call = jax.ffi.ffi_call("flashsim_test_layout", jax.ShapeDtypeStruct((n,), "float16"))
            run = jax.jit(lambda x, call=call, text=text: call(x, x, question=text, more=text))
            for _ in range(3):
                jax.block_until_ready(run(x))
                assert seen[-1][1:] == (text, (((n, 2), "int32"),) * 2 + (((n,), "float16"),))
    assert len(seen) == 24
    found = {}
    for layout, *says in seen:
        assert found.setdefault(layout, says) == says
    assert len(found) <= 8  # a function's later calls have the layout of its first


@pytest.mark.parametrize("change", ["dims", "rank", "dtype", "buffer", "text"])
def test_memory_that_holds_another_call_is_not_taken_for_the_first(change):
    """XLA may free a call's structures, and another call may be stored at the same addresses."""
    word = ctypes.c_uint64
    at = ctypes.addressof
    dims, other_dims = (word * 2)(3, 4), (word * 2)(3, 4)
    buffer = (word * 6)(48, 0, 12, 4096, 2, at(dims))
    other = (word * 6)(48, 0, 12, 8192, 1, at(other_dims))
    text = ctypes.create_string_buffer(b"one")
    spans = [(word * 2)(at(text), 3), (word * 2)(at(text), 3)]
    arguments, names, texts = (word * 1)(at(buffer)), *((word * 1)(at(x)) for x in spans)
    kinds = (ctypes.c_uint32 * 1)(4)
    frame = (word * 21)()
    frame[7], frame[9] = 1, at(arguments)
    frame[17:21] = 1, at(kinds), at(names), at(texts)
    layout, addresses = xla_ffi.ForeignCall(at(frame)).layout()
    assert addresses == [4096]
    buffer[3] = 8192
    assert xla_ffi.ForeignCall(at(frame)).layout() == (layout, [8192])
    if change == "dims":
        dims[1] = 5
    elif change == "rank":
        buffer[4] = 1
    elif change == "dtype":
        buffer[2] = 11
    elif change == "buffer":
        arguments[0] = at(other)
    else:
        text[0] = b"x"
    again, addresses = xla_ffi.ForeignCall(at(frame)).layout()
    assert again is not layout
    assert addresses == [8192]


OLD = "type(sys)('jax')\nm.__version__, m.__version_info__ = '0.7.2', (0, 7, 2)"


@pytest.mark.parametrize(
    ("module", "words"),
    [("None", "which cannot be imported"), (OLD, "JAX 0.10.2 or newer, but found 0.7.2")],
)
def test_without_jax_it_says_what_to_install(module, words):
    code = f"import sys\nm = {module}\nsys.modules['jax'] = m\nimport flashsim.jax"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "BackendUnavailable: flashsim.jax needs JAX" in done.stderr
    assert words in done.stderr
    assert "flashsim-attention[jax]'" in done.stderr
    metadata = (Path(__file__).parents[3] / "setup.cfg").read_text(encoding="utf-8")
    assert "jax >= 0.10.2\n" in metadata


# -- called as jax.nn's ---------------------------------------------------------------------------

LENGTHS = {
    "query_seq_lengths": np.array([5, 7], "int32"),
    "key_value_seq_lengths": np.array([6, 4], "int32"),
}
CALLS = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"local_window_size": (2, 1), "scale": 0.7},
    "one number": {"local_window_size": 2, "is_causal": True},
    "lengths": LENGTHS,
}


@pytest.mark.parametrize("question", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize(("t", "s"), [(7, 7), (7, 12), (12, 7)])
def test_called_as_jax_nn_is(t, s, question):
    """Rows that see no key are left out: jax.nn makes the mean of all values of them."""
    random = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(random.standard_normal((2, n, h, 4))) for n, h in ((t, 4), (s, 2), (s, 2))
    )
    bias = jnp.asarray(random.standard_normal((1, 4, t, s)))
    mask = jnp.asarray(random.random((2, 1, 1, s)) > 0.3).at[..., 0].set(True)
    if "local_window_size" in question:
        mask = None  # or whole rows would be empty
    left = question.get("local_window_size", (t, t))
    rows = min(t, s + (left if isinstance(left, int) else left[0]))

    def residual_and_gradients(function, **more):
        def loss(q, k, v, bias):
            told = {**question, **more, "return_residual": True}
            out, lse = function(q, k, v, bias, mask, **told)
            counted = question.get("query_seq_lengths", np.full(2, t))
            lse = jnp.where(jnp.arange(t)[:, None] < counted[:, None, None], lse, 0)
            return out[:, :rows].var(), (out[:, :rows], lse[:, :rows])

        return jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True)(q, k, v, bias)

    got = residual_and_gradients(dot_product_attention, backend="simulator")
    expected = residual_and_gradients(jax.nn.dot_product_attention)
    close(got, expected, rtol=1e-4, atol=1e-6)  # its softmax is float32


def test_without_a_batch_and_rows_that_see_no_key():
    q = jnp.ones((9, 2, 4))
    out, lse = dot_product_attention(
        q, q[:5], q[:5], local_window_size=(1, 0), return_residual=True, backend="simulator"
    )
    assert (out.shape, lse.shape) == (q.shape, (9, 2))
    close(out, jnp.where(jnp.arange(9)[:, None, None] < 6, 1.0, 0.0) * q)
    assert flashsim.jax.dot_product_attention is dot_product_attention


@pytest.mark.parametrize(
    ("t", "window", "seen"),
    [
        (1, (2, -2), {}),
        (5, (9, -3), {3: (0, 1), 4: (0, 2)}),
        (5, (-3, 4), {0: (3, 5), 1: (4, 5)}),
        (5, (1, -2), {}),
    ],
)
def test_a_window_beside_the_diagonal(t, window, seen):
    """`seen` has the first key and the end of the keys of each row that sees any."""
    q, v = jnp.ones((t, 1, 4)), jnp.arange(5.0).reshape(5, 1, 1)
    out = dot_product_attention(
        q, jnp.ones((5, 1, 4)), v, local_window_size=window, backend="simulator"
    )
    expected = [np.mean(np.arange(5.0)[slice(*seen[n])]) if n in seen else 0 for n in range(t)]
    close(out[:, 0, 0], jnp.asarray(expected))


def as_jax_nn(**told):
    q = jnp.ones((2, 7, 4, 8))
    return dot_product_attention(q, q, q, **told)


test_what_does_not_fit_is_named = refuses(r"""
as_jax_nn(mask=jnp.ones((2, 3, 7, 7), bool))
    -> ShapeError: mask must broadcast to ... (2, 4, 7, 7), got
as_jax_nn(bias=jnp.ones((6,))) -> ShapeError: bias must broadcast to ... got shape (6,)
as_jax_nn(bias=jnp.ones((1, 1, 1, 7, 7)))
    -> ShapeError: bias must broadcast ... got shape (1, 1, 1, 7, 7)
as_jax_nn(key_value_seq_lengths=jnp.ones(3, jnp.int32))
    -> ShapeError: key_value_seq ... (2,), one per batch
as_jax_nn(query_seq_lengths=jnp.ones(2))
    -> ShapeError: query_seq_lengths must be integers ... float64
as_jax_nn(local_window_size=2.5)
    -> DTypeError: must be an integer or a pair (left, right), got 2.5
as_jax_nn(is_causal="no") -> DTypeError: is_causal must be True or False, got 'no'
as_jax_nn(query_seq_lengths="no") -> DTypeError: query_seq_lengths must be integers, got 'no'
as_jax_nn(implementation="xla") -> UnknownArgumentError: here it is called backend
attention(*[jnp.ones((7, 8))] * 3, cu_seqlens_q=7, cu_seqlens_k=7)
    -> ShapeError: cu_seqlens_q must be a 1-D list
jax.jit(lambda x: attention(*[jnp.ones((7, 8))] * 3, deterministic=x))(True)
    -> DTypeError: deterministic= must be a Python value
attention(*[jnp.ones((7, 8))] * 3, deterministic="yes")
    -> DTypeError: deterministic must be True or False
""")


def test_a_bias_of_keys_alone_is_broadcast():
    q, row = jnp.ones((2, 7, 4, 8)) * jnp.arange(8), jnp.arange(7.0)
    got = flashsim.jax.dot_product_attention(q, q, q, bias=row)
    np.testing.assert_allclose(got, jax.nn.dot_product_attention(q, q, q, bias=row), rtol=1e-6)


SHARDED = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, PartitionSpec as P
import flashsim.jax

assert jax.device_count() == 2
mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
q, k, v = (jax.random.normal(key, (2, 3, 5, 4)) for key in jax.random.split(jax.random.key(0), 3))
mine = lambda *x: flashsim.jax.attention(*x, causal=True, backend="simulator")
for specs in ((P("x"), P("x"), P("x")), (P(None, None), P("x"), P("x"))):
    parts = jax.shard_map(mine, mesh=mesh, in_specs=specs, out_specs=P("x"))
    given = (q if specs[0] == P("x") else q[:1], k, v)
    whole = lambda q, k, v: mine(jnp.broadcast_to(q, k.shape), k, v)
    for way in (lambda f: f, jax.jit):
        np.testing.assert_array_equal(way(parts)(*given), whole(*given))
        found, expected = (
            way(jax.grad(lambda *x: (f(*x) ** 2).sum(), argnums=(0, 1, 2)))(*given)
            for f in (parts, whole)
        )
        for x, y in zip(found, expected, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
"""


def test_gradients_on_several_devices():
    """Under `jax.shard_map`, also of an operand that all devices share: the sum of theirs."""
    flags = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    command = [sys.executable, "-c", SHARDED]
    done = subprocess.run(command, env=flags, capture_output=True, text=True, timeout=300)
    assert not done.returncode, done.stderr
