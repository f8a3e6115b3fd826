"""`flashsim.torch.attention` as torch's own tools see it, `FlashAttention` as a course calls it."""

import os
import shutil
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from bridge_cases import CASES, CUTS, plain  # noqa: E402
from refusals import refuses  # noqa: E402
from torch.autograd.graph import saved_tensors_hooks  # noqa: E402

import flashsim  # noqa: E402
from flashsim.errors import (  # noqa: E402
    FlashSimError,
    ShapeError,
    UnsupportedError,
)
from flashsim.torch import FlashAttention, attention, decode, flex_attention, ops  # noqa: E402

pytestmark = pytest.mark.promise("bridges equal their library")


def tensors(*, batch=2, heads=2, kv_heads=2, n_q=7, n_kv=9, d=4, dv=3, bias=None, dtype=None):
    torch.manual_seed(0)
    shapes = [(batch, heads, n_q, d), (batch, kv_heads, n_kv, d), (batch, kv_heads, n_kv, dv)]
    shapes += [(*bias, n_q, n_kv)] if bias else []
    like = {"dtype": dtype or torch.float64, "requires_grad": True}
    return [torch.randn(shape, **like) for shape in shapes]


def call(q, k, v, bias=None, **question):
    return attention(q, k, v, bias=bias, **{"backend": "simulator", **question})


def close_to_each(mapped, singles):
    """Compare what a function mapped by torch gives with what it gives of each sample."""
    torch.testing.assert_close(mapped, tuple(map(torch.stack, zip(*singles, strict=True))))


#: Keys in two parts.
CUT = slice(0, 4), slice(4, None)


def merged(first, second):
    """Attention over all keys, from (out, LSE) over some and over the others."""
    lse = torch.logaddexp(first[1], second[1])
    return sum(out * (part - lse).exp()[..., None] for out, part in (first, second)), lse


# -- numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sizes", "question"), CASES.values(), ids=CASES)
def test_the_value_is_plain_attentions(sizes, question):
    inputs = tensors(**sizes)
    got = call(*inputs, **question)
    if question is CUTS:
        q, k, v = inputs
        parts = [
            plain(q[:, :, a:b], k[:, :, c:d], v[:, :, c:d], causal=True)
            for a, b, c, d in ((0, 4, 0, 5), (4, 7, 5, 9))
        ]
        expected = torch.cat(parts, dim=2)
    else:
        expected = plain(*inputs, **question)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(("sizes", "question"), CASES.values(), ids=CASES)
@pytest.mark.parametrize(
    ("backend", "return_lse"), [("simulator", False), ("numba", False), ("numba", True)]
)
def test_gradcheck(backend, return_lse, sizes, question):
    told = {**question, "backend": backend, "return_lse": return_lse}
    assert torch.autograd.gradcheck(lambda *x: call(*x, **told), tensors(**sizes))


@pytest.mark.parametrize("transformed", [False, True], ids=["operator", "autograd.Function"])
def test_a_loss_of_the_lse_alone(transformed, monkeypatch):
    if transformed:
        monkeypatch.setattr(ops, "transformed", lambda: True)
    q, k, v = tensors()
    _, lse = call(q, k, v, return_lse=True)
    assert lse.requires_grad
    got = torch.autograd.grad(lse.sum(), (q, k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    expected = torch.autograd.grad(scores.logsumexp(-1).sum(), (q, k))
    torch.testing.assert_close(got, (*expected, torch.zeros_like(v)))


@pytest.mark.parametrize("return_lse", [False, True])
def test_without_a_gradient_of_the_lse_none_is_read(return_lse, monkeypatch):
    from flashsim.api import execution

    told, backward = [], execution.backward
    monkeypatch.setattr(
        execution, "backward", lambda *x, **how: told.append(how["dlse"]) or backward(*x, **how)
    )
    found = call(*tensors(), return_lse=return_lse)
    (found[0] if return_lse else found).sum().backward()
    assert told == [None]


@pytest.mark.parametrize("how", ["eager", "compiled", "torch.func"])
def test_merged_parts_of_the_keys_have_the_gradients_of_the_whole(how):
    def loss(q, k, v):
        parts = [call(q, k[..., at, :], v[..., at, :], return_lse=True) for at in CUT]
        out, lse = merged(*parts)
        return out.sin().sum() + lse.square().sum()

    def whole(q, k, v):
        scores = q @ k.mT * q.shape[-1] ** -0.5
        return plain(q, k, v).sin().sum() + scores.logsumexp(-1).square().sum()

    inputs = tensors()
    expected = torch.autograd.grad(whole(*inputs), inputs)
    if how == "torch.func":
        got = torch.func.grad(loss, argnums=(0, 1, 2))(*(x.detach() for x in inputs))
    else:
        run = loss if how == "eager" else torch.compile(loss, fullgraph=True, backend="aot_eager")
        got = torch.autograd.grad(run(*inputs), inputs)
    torch.testing.assert_close(got, expected)


def test_gradcheck_fused():
    inputs = tensors(heads=4, kv_heads=2)
    assert torch.autograd.gradcheck(
        lambda *x: call(*x, causal=True, algorithm="flash2-fused", deterministic=False), inputs
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_narrow_types_come_out_as_they_went_in(dtype):
    q, k, v = tensors(dtype=dtype)
    out, lse = call(q, k, v, return_lse=True, backend="numba")
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    out.backward(torch.ones_like(out))
    assert {x.grad.dtype for x in (q, k, v)} == {dtype}
    expected = plain(*(x.detach().double() for x in (q, k, v)))
    torch.testing.assert_close(out.double(), expected, atol=3 * torch.finfo(dtype).eps, rtol=0.02)


def test_other_memory_layouts_and_broadcast_gradients():
    q, k, v = (x.detach() for x in tensors(dv=4))
    expected = call(q, k, v)
    views = [x.mT.contiguous().mT.requires_grad_() for x in (q, k, v)]
    out = call(*views)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    out.sum().backward()  # a gradient with strides 0
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    call(*whole).backward(torch.ones_like(out))
    torch.testing.assert_close(views[0].grad, whole[0].grad, rtol=0, atol=0)


# -- what is kept ---------------------------------------------------------------------------------


@pytest.mark.parametrize("transformed", [False, True], ids=["operator", "autograd.Function"])
def test_beside_inputs_and_output_one_number_a_row_is_kept(transformed, monkeypatch):
    if transformed:
        monkeypatch.setattr(ops, "transformed", lambda: True)
    q, k, v = tensors()
    kept = []
    with saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        out = call(q, k, v, causal=True)
    known = {x.data_ptr() for x in (q, k, v, out)}
    beside = [x for x in kept if x.data_ptr() not in known]
    assert [x.shape for x in beside] == [q.shape[:-1]]
    assert {x.data_ptr() for x in kept} >= known
    out.sum().backward()


# -- torch's tools --------------------------------------------------------------------------------


def operator(*names, **changes):
    """The operators for a call with these optional tensors."""
    usual = {"causal": True, "window_left": -1, "window_right": -1, "softcap": 0.0, "scale": None}
    last = {"algorithm": "flash2", "deterministic": None, "backend": "simulator"}
    return ops.OpCall.of(ops.Options(**usual | last | changes), names)


OPTIONAL = {
    "plain": {},
    "bias": {"bias": torch.ones(1, 2, 7, 9).double()},
    "packed": {"cu_seqlens_q": torch.tensor([0, 4, 7]), "cu_seqlens_k": torch.tensor([0, 5, 9])},
    "sinks": {"sinks": torch.ones(2).double()},
}


@pytest.mark.parametrize("more", OPTIONAL.values(), ids=OPTIONAL)
@pytest.mark.parametrize("backend", ["numba", "simulator"])
def test_opcheck(more, backend):
    q, k, v = tensors(batch=1)
    call, asked = torch.ops.flashsim, operator(*more, backend=backend)
    rest = [x.requires_grad_(x.is_floating_point()) for x in more.values()], *asked
    fixed = q.detach(), k.detach(), v.detach(), [x.detach() for x in rest[0]], *asked
    out, lse = call.attention.default(*fixed)
    for run, given in (
        (call.attention, (q, k, v, *rest)),
        (call.attention_without_gradient, fixed),
        (call.attention_backward, (out, out, lse, None, *fixed)),
        (call.attention_backward, (out, out, lse, lse, *fixed)),
    ):
        assert set(torch.library.opcheck(run.default, given).values()) == {"SUCCESS"}


NEEDS_A_COMPILER = [
    pytest.mark.thorough,
    pytest.mark.skipif(shutil.which("g++") is None, reason="no g++, which inductor needs"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),  # torch's, of its own
]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=NEEDS_A_COMPILER)])
def test_compiles_without_a_break(backend, dynamic):
    def loss(q, k, v, bias):
        return call(q * 2, k, v, bias, causal=True).sin().sum()

    compiled = torch.compile(loss, fullgraph=True, backend=backend, dynamic=dynamic)
    for n_kv in (9, 12):
        one, other = (tensors(n_kv=n_kv, bias=(1, 2)) for _ in range(2))
        compiled(*one).backward()
        loss(*other).backward()
        torch.testing.assert_close([x.grad for x in one], [x.grad for x in other])


def test_packed_sequences_compile_too():
    compiled = torch.compile(lambda *x: call(*x, **CUTS), fullgraph=True, backend="aot_eager")
    inputs = tensors(batch=1)
    torch.testing.assert_close(compiled(*inputs), call(*inputs, **CUTS))


@pytest.mark.parametrize("bias", [None, (1, 2)], ids=["plain", "bias"])
def test_a_window_may_be_a_symbol_of_the_compiler(bias):
    windowed = lambda left, *x: call(*x, window=(left, 0))  # noqa: E731
    compiled = torch.compile(windowed, fullgraph=True, backend="aot_eager", dynamic=True)
    inputs = tensors(bias=bias)
    for left in (3, 2):
        torch.testing.assert_close(compiled(left, *inputs), windowed(left, *inputs))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    "save",
    [
        lambda module, x: torch.export.export(module, (x,)).module(),
        lambda module, x: torch.jit.trace(module, (x,)),
    ],
    ids=["export", "trace"],
)
def test_a_program_that_was_saved_without_gradients_can_be_trained(save):
    class Attends(torch.nn.Module):
        def forward(self, x):
            return call(x, x, x)

    x = tensors(heads=1, kv_heads=1)[0]
    with torch.no_grad():
        saved = save(Attends(), x)
    theirs, ours = (torch.autograd.grad(f(x).sin().sum(), x)[0] for f in (Attends(), saved))
    torch.testing.assert_close(ours, theirs)


def test_the_meta_device_gives_shapes():
    q, k, v = (x.detach().to("meta") for x in tensors())
    out, lse = attention(q, k, v, return_lse=True)
    assert (out.shape, lse.shape, out.device.type) == ((2, 2, 7, 3), (2, 2, 7), "meta")


def test_gradients_and_maps_of_torch_func():
    q, k, v, bias = (x.detach() for x in tensors(bias=(1, 2)))
    loss = lambda *x: call(*x, causal=True).square().sum()  # noqa: E731
    wanted = [x.clone().requires_grad_() for x in (q, k, v, bias)]
    loss(*wanted).backward()
    gradient = torch.func.grad(loss, argnums=(0, 1, 2, 3))
    torch.testing.assert_close(gradient(q, k, v, bias), [x.grad for x in wanted])

    many = torch.randn(3, *q.shape, dtype=q.dtype)
    per_sample = torch.func.vmap(gradient, in_dims=(0, None, None, None))(many, k, v, bias)
    close_to_each(per_sample, [gradient(x, k, v, bias) for x in many])


@pytest.mark.parametrize("lead", [(1, 1), (1, 2), (2, 1)])
@pytest.mark.parametrize("dim", [None, 0, 2])
def test_maps_fold_into_the_batch(dim, lead):
    """Also where the bias is mapped, along any of its axes, and where the operator is called."""
    q, k, v = (x.detach() for x in tensors())
    biases = torch.randn(3, *lead, 7, 9, dtype=q.dtype)
    given = biases[0] if dim is None else biases.movedim(0, dim)
    queries = torch.randn(3, *q.shape, dtype=q.dtype)
    expected = torch.stack(
        [
            call(x, k, v, biases[0] if dim is None else b)
            for x, b in zip(queries, biases, strict=True)
        ]
    )
    got = torch.vmap(call, in_dims=(0, None, None, dim))(queries, k, v, given)
    torch.testing.assert_close(got, expected)
    direct = lambda q, b: operator("bias", causal=False).forward(q, k, v, b)[0]  # noqa: E731
    torch.testing.assert_close(torch.vmap(direct, in_dims=(0, dim))(queries, given), expected)

    def gradient(q, bias):
        return torch.func.grad(lambda b: call(q, k, v, b).square().sum())(bias)

    singles = [
        gradient(x, biases[0] if dim is None else b) for x, b in zip(queries, biases, strict=True)
    ]
    mapped = torch.vmap(gradient, in_dims=(0, dim))(queries, given)
    torch.testing.assert_close(mapped, torch.stack(singles))


@pytest.mark.parametrize("bias", [None, (1, 2)], ids=["plain", "bias"])
def test_the_backward_operator_maps_to_a_gradient_for_each(bias):
    q, k, v, *more = (x.detach() for x in tensors(bias=bias))
    asked = operator(*["bias"] * len(more), causal=False)
    out, lse = asked.forward(q, k, v, *more)
    douts = torch.randn(3, *out.shape, dtype=out.dtype)
    rest = q, k, v, *more
    for dlse in (None, lse):
        of = lambda dout, dlse=dlse: tuple(asked.backward(dout, out, lse, dlse, *rest))  # noqa: E731
        close_to_each(torch.vmap(of)(douts), map(of, douts))
    of = lambda dlse: tuple(asked.backward(out, out, lse, dlse, *rest))  # noqa: E731
    dlses = torch.randn(3, *lse.shape, dtype=lse.dtype)
    close_to_each(torch.vmap(of)(dlses), map(of, dlses))


# -- sinks -----------------------------------------------------------------------------------------


def with_sinks(q, k, v, sinks, bias=None):
    return plain(q, k, v, bias, sinks)


def sinking(q, k, v, sinks, bias=None, **told):
    return attention(q, k, v, bias=bias, sinks=sinks, **{"backend": "simulator", **told})


@pytest.mark.parametrize("backend", ["simulator", "numba"])
@pytest.mark.parametrize("bias", [None, (2, 1)], ids=["plain", "bias"])
def test_sinks_have_a_gradient(bias, backend):
    inputs = tensors(bias=bias)
    inputs.insert(3, torch.randn(2, dtype=torch.float64, requires_grad=True))
    got, exact = sinking(*inputs, backend=backend), with_sinks(*inputs)
    torch.testing.assert_close(got, exact)
    weight = torch.randn_like(got)
    ours, theirs = (torch.autograd.grad((x * weight).sum(), inputs) for x in (got, exact))
    torch.testing.assert_close(ours, theirs)


def test_sinks_under_torchs_tools():
    q, k, v = tensors()
    sinks = torch.randn(2, dtype=torch.float64, requires_grad=True)
    compiled = torch.compile(sinking, fullgraph=True, backend="aot_eager")
    expected = sinking(q, k, v, sinks)
    torch.testing.assert_close(compiled(q, k, v, sinks), expected)
    loss = lambda q, sinks: sinking(q, k, v, sinks).square().sum()  # noqa: E731
    gradient = torch.func.grad(loss, argnums=(0, 1))
    queries, many = torch.randn(3, *q.shape, dtype=q.dtype), torch.randn(2, 3, dtype=q.dtype)
    for dims, each in (((0, 1), many.T), ((0, None), [many[:, 0]] * 3)):
        given = many if dims[1] == 1 else many[:, 0]
        mapped = torch.vmap(gradient, in_dims=dims)(queries, given)
        close_to_each(mapped, [gradient(x, y) for x, y in zip(queries, each, strict=True)])


@pytest.mark.parametrize("n_q", [0, 3])
def test_sinks_without_a_key(n_q):
    q, k = torch.ones(2, 2, n_q, 8), torch.ones(2, 2, 0, 8, requires_grad=True)
    sinks = torch.tensor([0.5, -2.0], requires_grad=True)
    out, lse = attention(q, k, k, sinks=sinks, return_lse=True)
    assert not out.any()
    torch.testing.assert_close(lse, sinks[:, None].expand(2, 2, n_q))
    (out.sum() + lse.sum()).backward()
    torch.testing.assert_close(sinks.grad, torch.full((2,), 2.0 * n_q))
    assert k.grad.shape == k.shape


def test_sinks_of_bfloat16_that_autocast_left_alone():
    q, k, v = (x.detach().float() for x in tensors())
    sinks = torch.tensor([0.5, -2.0], dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(q, k, v, sinks=sinks)
    torch.testing.assert_close(out.float(), with_sinks(q, k, v, sinks.float()), rtol=0, atol=0.02)
    out.sum().backward()
    assert sinks.grad.dtype == torch.bfloat16


# -- errors ---------------------------------------------------------------------------------------


Q, K, V = (x.detach() for x in tensors(batch=1))


def nested():
    return torch.nested.nested_tensor([Q[0], Q[0, :, :3]], layout=torch.jagged)


def second_derivative():
    q = Q.clone().requires_grad_()
    (first,) = torch.autograd.grad(call(q, K, V).sum(), q, create_graph=True)
    first.sum().backward()


def ask(**question):
    return attention(Q, K, V, **question)


#: No argument reaches torch's schema, whose error quotes the operator; no gradient is dropped.
test_what_cannot_be_done_is_said = refuses(r"""
attention(Q.numpy(), K, V) -> DTypeError: q must be a torch.Tensor, got ndarray; use flashsim.run
ask(algorithm="standard")
    -> UnsupportedError: flash2-fused, not 'standard'; use flashsim.run, which sim
ask(is_causal=True) -> UnknownArgumentError: 'is_causal'; here it is called causal
call(Q, K[..., :2], V) -> ShapeError: same head_dim
torch.vmap(lambda x: call(x, K, V, **CUTS))(Q[None])
    -> UnsupportedError: vmap cannot map packed sequences
torch.vmap(lambda x: call(x, K, V))(Q[None][:0])
    -> UnsupportedError: vmap over an axis of length 0
torch.vmap(lambda x: call(x, K, V, cu_seqlens_k=[0, 9]))(Q[None])
    -> UnsupportedError: vmap cannot map packed sequences
second_derivative() -> UnsupportedError: no second derivatives
attention(Q.to("meta"), K, V) -> DTypeError: one device, got q on meta, k on cpu, v on cpu
attention(Q[0, 0, 0], K, V) -> ShapeError: q must be (batch, heads, n, head_dim) ... got (4,)
attention(Q[None], K, V) -> ShapeError: leading axes optional, got (1, 1, 2, 7, 4)
attention(Q, K.to_sparse(), V)
    -> UnsupportedError: k must be a dense tensor, got a sparse_coo tensor
attention(*[nested()] * 3) -> UnsupportedError: got a nested tensor; ... cu_seqlens
ask(window=3)
    -> DTypeError: window= must be a pair (left, right), the numbers of keys that are visible on
    each side, with -1 for no limit, got 3$
ask(window=(1, 2, 3)) -> DTypeError: a pair ... got (1, 2, 3)
ask(window=(1.5, 2))
    -> DTypeError: window= must be a pair of integers (left, right), got (1.5, 2)$
ask(causal="yes") -> DTypeError: causal must be True or False, got 'yes'
ask(softcap=None) -> DTypeError: softcap must be a number, got None
ask(scale=torch.tensor(0.3, requires_grad=True)) -> DTypeError: scale must be a number
ask(deterministic="x") -> DTypeError: deterministic must be True or False, got 'x'
ask(backend="cuda") -> OptionError: unknown backend 'cuda'; choose from simulator
ask(bias=[0.0]) -> DTypeError: bias must be a torch.Tensor, got list
attention(*[torch.ones(3, 4).bfloat16()] * 3, bias=torch.ones(3, 3))
    -> DTypeError: bias must have the same dtype as q, which is bfloat16, got float32
ask(**{**CUTS, "cu_seqlens_q": [0, 4.7, 7]})
    -> ShapeError: integer offsets, got [0, 4.7, 7]
ask(**{**CUTS, "cu_seqlens_k": "0, 5, 9"}) -> ShapeError: cu_seqlens_k ... got '0, 5, 9'
ask(**{**CUTS, "cu_seqlens_k": {0: 5}}) -> ShapeError: integer offsets, got {0: 5}
ask(**{**CUTS, "cu_seqlens_k": [0, 2**70]}) -> ShapeError: integer offsets
ask(return_lse=torch.ones(2)) -> DTypeError: return_lse must be True or False, got tensor(
ask(sinks=[0.0, 0.0]) -> DTypeError: sinks must be a torch.Tensor
ask(sinks=torch.zeros(3)) -> ShapeError: of shape (2,), got float32 of shape (3,)
ask(sinks=torch.zeros(2, dtype=torch.int64)) -> ShapeError: got int64
ask(sinks=torch.zeros(2, device="meta")) -> DTypeError: on q's device cpu, got meta
""")


@pytest.mark.parametrize("name", ["causal", "deterministic"])
@pytest.mark.parametrize("more", [{}, {"sinks": torch.zeros(2)}], ids=["plain", "sinks"])
def test_compiled_code_refuses_other_flags_too(name, more):
    compiled = torch.compile(ask, fullgraph=True, backend="eager")
    with pytest.raises(RuntimeError, match=f"{name} must be True or False, got '1'"):
        compiled(**{name: 1}, **more)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("sizes", "question", "text"),
    [
        ({"heads": 3}, {}, "query heads must be a multiple of the number of KV heads, got heads=3"),
        ({"d": 0}, {}, "must have at least one head and one column"),
        ({"bias": (3, 1)}, {}, "a Problem's bias= must be the first two sides"),
        ({}, {"window": (-3, 0)}, "side of window= must be at least 0, or -1"),
    ],
)
def test_what_has_no_numbers_is_checked_like_what_has(device, sizes, question, text):
    q, k, v, *bias = (x.detach().to(device) for x in tensors(**sizes))
    with pytest.raises(FlashSimError, match=text):
        attention(q, k, v, bias=bias[0] if bias else None, **question)


NOTHING = {"no batch": {"batch": 0}, "no queries": {"n_q": 0}, "no keys": {"n_kv": 0}}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("backend", ["simulator", "numba"])
@pytest.mark.parametrize("sizes", NOTHING.values(), ids=NOTHING)
def test_of_nothing_zeros_as_torchs_own(sizes, backend, compiled):
    """Gradients, too: those of the inputs there are, and of a bias."""
    inputs = tensors(**sizes, bias=(1, 2))
    theirs = torch.nn.functional.scaled_dot_product_attention(*inputs[:3], attn_mask=inputs[3])
    wanted = torch.autograd.grad(theirs.sum(), inputs, allow_unused=True)

    def both(*x):
        return call(*x, backend=backend, return_lse=True)

    out, lse = (torch.compile(both, backend="eager", fullgraph=True) if compiled else both)(*inputs)
    torch.testing.assert_close(out, theirs, rtol=0, atol=0)
    assert lse.shape == inputs[0].shape[:-1]
    assert torch.isneginf(lse).all()
    for got, want, x in zip(torch.autograd.grad(out.sum(), inputs), wanted, inputs, strict=True):
        want = torch.zeros_like(x) if want is None else want
        torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("sizes", NOTHING.values(), ids=NOTHING)
def test_of_nothing_on_the_meta_device_and_under_vmap(sizes):
    inputs = [x.detach() for x in tensors(**sizes)]
    on_meta = attention(*(x.to("meta") for x in inputs))
    assert on_meta.shape == (*inputs[0].shape[:-1], 3)
    mapped = torch.func.vmap(call)(*(torch.stack([x, x, x]) for x in inputs))
    torch.testing.assert_close(mapped, inputs[0].new_zeros((3, *on_meta.shape)), rtol=0, atol=0)
    three = [x.flatten(0, 1)[..., :3] for x in inputs]  # heads are its batch
    three = [x.requires_grad_() for x in three]
    out = FlashAttention.apply(*three)
    assert not out.any()
    gradients = torch.autograd.grad(out.sum(), three)
    assert [x.shape for x in gradients] == [x.shape for x in three]
    assert not any(x.any() for x in gradients)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("backend", ["simulator", "numba", None])
def test_fp8_has_no_scales_here(device, backend):
    q, k, v = (x.detach().to(torch.float8_e4m3fn).to(device) for x in tensors(dv=4))
    with pytest.raises(
        UnsupportedError, match=r"torch.attention takes no scales.*run\(q, k, v, sca"
    ):
        attention(q, k, v, backend=backend)


def test_autocast_casts_as_it_does_for_torchs_own():
    """Also where only some of the tensors come out of a product, which autocast has narrowed."""
    q, k, v, bias = (x.detach().float().requires_grad_() for x in tensors(bias=(1, 2)))
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(q, k, v @ torch.eye(3), bias=bias)
        course = FlashAttention.apply(*(x[:, 0] for x in (q, k, v)))
        wide = attention(*(x.detach().double() for x in (q, k, v)))
    narrow = [x.detach().bfloat16() for x in (q, k, v, bias)]
    torch.testing.assert_close(out, attention(*narrow[:3], bias=narrow[3]), rtol=0, atol=0)
    assert (out.dtype, course.dtype, wide.dtype) == (torch.bfloat16, torch.bfloat16, torch.float64)
    (out.float().sum() + course.float().sum()).backward()
    assert {x.grad.dtype for x in (q, k, v, bias)} == {torch.float32}


def dual(function, x):
    with torch.autograd.forward_ad.dual_level():
        return function(torch.autograd.forward_ad.make_dual(x, x))


# torch's forward mode is made with torch.jit, which torch itself deprecates.
SCRIPTED = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


@SCRIPTED
@pytest.mark.parametrize(
    "forward_mode",
    [
        lambda f, q: torch.func.jvp(f, (q,), (q,)),
        lambda f, q: torch.func.jacfwd(f)(q),
        lambda f, q: torch.func.linearize(f, q),
        lambda f, q: torch.func.hessian(lambda x: f(x).sum())(q),
        dual,
    ],
    ids=["jvp", "jacfwd", "linearize", "hessian", "dual tensors"],
)
@pytest.mark.parametrize("door", [call, flex_attention, decode])
def test_forward_mode_is_refused(forward_mode, door):
    """An operator without a rule for it would give tangents of zero, or none."""
    q, k, v = (x.detach() for x in tensors(batch=1))
    words = r"no forward mode .*vjp or jacrev"
    if door is decode:  # a Hessian is forward mode over a gradient
        words += "|decode has no gradient"
    with pytest.raises(UnsupportedError, match=words):
        forward_mode(lambda x: door(x, k, v), q)
    door(q, k, v)


def test_torch_func_with_the_course_s_function():
    q, k, v = (x[0] for x in tensors(batch=1))
    loss = lambda q: FlashAttention.apply(q, k, v, True).square().sum()  # noqa: E731
    (expected,) = torch.autograd.grad(loss(q), q)
    torch.testing.assert_close(torch.func.grad(loss)(q), expected)
    out = torch.vmap(lambda q: FlashAttention.apply(q, k, v, True))(torch.stack([q, 2 * q]))
    torch.testing.assert_close(out[1], FlashAttention.apply(2 * q, k, v, True))
    with pytest.raises(ShapeError, match=r"FlashAttention.apply takes .* \(batch, n, d\), got \("):
        torch.func.grad(lambda q: FlashAttention.apply(q[0], k, v).sum())(q)


def test_torch_func_grad_of_decode_is_refused():
    q, k, v = (x.detach() for x in tensors(batch=1))
    with pytest.raises(UnsupportedError, match="decode has no gradient"):
        torch.func.grad(lambda q: decode(q, k, v).sum())(q)
    with pytest.raises(UnsupportedError, match="decode has no gradient"):
        torch.func.vmap(torch.func.grad(lambda q: decode(q[None], k, v).sum()))(q)


@SCRIPTED
@pytest.mark.parametrize("kind", ["course's", "compiled"])
def test_forward_mode_is_refused_elsewhere_too(kind):
    q, k, v = (x.detach() for x in tensors(batch=1))
    compiled = torch.compile(lambda x: call(x, k, v), backend="aot_eager")
    course = lambda x: FlashAttention.apply(x[:, 0], k[:, 0], v[:, 0])  # noqa: E731
    with pytest.raises(UnsupportedError, match="no forward mode"):
        dual(compiled if kind == "compiled" else course, q)


def test_a_bias_and_sinks_of_a_gpu_reach_the_gpus_engine():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        like = {"device": "cuda", "dtype": torch.float16}
        q, bias, sinks = (torch.empty(*shape, **like) for shape in ((2, 7, 4), (7, 7), (2,)))
        out, lse = attention(q, q, q, bias=bias, sinks=sinks, return_lse=True)
    assert (out.shape, lse.shape, out.device.type) == (q.shape, (2, 7), "cuda")


def test_without_torch_it_says_what_to_install():
    code = "import sys; sys.modules['torch'] = None\nimport flashsim.torch"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "BackendUnavailable" in done.stderr
    assert "pip install 'flashsim-attention[torch]'" in done.stderr


def test_flashsim_alone_imports_no_torch():
    code = "import flashsim, sys; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ})
    assert flashsim.torch.attention is attention


# -- Stanford CS336, assignment 2: as its published text describes the tests ----------------------


@pytest.mark.parametrize("is_causal", [False, True])
def test_an_autograd_function_of_the_courses_interface(is_causal):
    """(batch 4, 128 queries and keys, d = 64), float32, 1e-2; L is among the saved tensors."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(4, 128, 64, requires_grad=True) for _ in range(3))
    dout = torch.randn(4, 128, 64)
    out = FlashAttention.apply(q, k, v, is_causal)

    scores = q @ k.mT / 8
    if is_causal:
        scores = scores.masked_fill(torch.ones(128, 128).triu(1).bool(), -1e6)
    expected = torch.softmax(scores, dim=-1) @ v
    saved = [x for x in out.grad_fn.saved_tensors if x.shape == (4, 128)]
    assert len(saved) == 1
    torch.testing.assert_close(saved[0], torch.logsumexp(scores, dim=-1), rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-2)

    got = torch.autograd.grad(out, (q, k, v), dout)
    wanted = torch.autograd.grad(expected, (q, k, v), dout)
    torch.testing.assert_close(got, wanted, rtol=1e-2, atol=1e-2)


def test_the_courses_function_is_not_causal_unless_told():
    q = torch.randn(2, 20, 8)
    torch.testing.assert_close(FlashAttention.apply(q, q, q), FlashAttention.apply(q, q, q, False))


@pytest.mark.parametrize("shape", [(7, 4), (2, 2, 7, 4)])
def test_the_courses_function_takes_no_heads(shape):
    """Of (n, d) it would make n sequences of one token each."""
    q = torch.randn(shape)
    with pytest.raises(ShapeError, match=r"FlashAttention.apply takes .* \(batch, n, d\), got \("):
        FlashAttention.apply(q, q, q)
