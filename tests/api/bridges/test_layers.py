"""Calls of a model's layers: looked up once per step, and never taken for another call."""

import copy
import gc
import pickle
import weakref

import pytest

torch = pytest.importorskip("torch")

from test_direct import tensors, variations  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from flashsim.torch import attention, direct  # noqa: E402
from flashsim.torch.layers import Layers  # noqa: E402

pytestmark = pytest.mark.promise("bridges equal their library")

NAMES = ("causal", "window", "softcap", "scale", "algorithm", "deterministic", "backend")
DEFAULTS = False, None, 0.0, None, "flash2", None, None


def asked(**told):
    """The options of `attention`, as `Layers` takes them."""
    return tuple((dict(zip(NAMES, DEFAULTS, strict=True)) | told).values())


@pytest.fixture
def looked_up(monkeypatch):
    """The calls that were looked up."""
    seen, known = [], direct.known

    def counted(*given):
        seen.append(given)
        return known(*given)

    monkeypatch.setattr(direct, "known", counted)
    return seen


def primed(*given, **told):
    """A step whose first call was checked, and its result."""
    attention(*given, **told)
    layers = Layers()
    return layers, layers(*given, asked(**told))


def others(given):
    """Tensors of the same sizes, and of other numbers."""
    return [torch.randn_like(x) for x in given]


def test_only_the_first_layer_is_looked_up(looked_up):
    layers, out = primed(*tensors(1), causal=True)
    looked_up.clear()
    for _ in range(11):
        given = others(tensors(1))
        out = layers(*given, asked(causal=True))
        assert out.is_contiguous()
        assert looked_up == []
        assert torch.equal(out.transpose(1, 2), attention(*given, causal=True))
        looked_up.clear()


def test_a_call_that_differs_is_looked_up(looked_up):
    """All pairs of calls that differ in one thing: shapes, strides, types, options."""
    calls = list(variations())
    for first, options in calls:
        layers, _ = primed(*first, **options)
        for given, told in calls:
            wanted = attention(*given, **told)
            looked_up.clear()
            out = layers(*given, asked(**told))
            assert torch.equal(out.transpose(1, 2), wanted)
            if given is not first or told != options:
                assert looked_up, (told, options)


@pytest.mark.parametrize("told", [{"causal": 1}, {"softcap": True}, {"scale": True}], ids=str)
def test_equal_options_of_another_type_must_be_checked(told):
    given = tensors()
    good = {"causal": True, "softcap": 1.0, "scale": 1.0}
    layers, _ = primed(*given, **{name: good[name] for name in told})
    assert layers(*given, asked(**told)) is None


def test_a_gradient_that_is_wanted_later():
    given = tensors()
    layers, _ = primed(*given)
    inputs = [x.clone().requires_grad_() for x in given]
    with torch.no_grad():
        assert not layers(*inputs, asked()).requires_grad
    for step in (layers, Layers()):
        for _ in range(2):
            (step(*inputs, asked()) * 1.0).sum().backward()
            assert all(x.grad.abs().max() > 0 for x in inputs)
            for x in inputs:
                x.grad = None
    # Also if the first call of a step had tensors that require one, but no gradient was wanted.
    layers = Layers()
    with torch.no_grad():
        layers(*inputs, asked())
    assert layers(*inputs, asked()).requires_grad


class Mode(TorchDispatchMode):
    """Observes operators."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def traced(work):
    torch.jit.trace(lambda x: work() or x + 1, (torch.zeros(1),), check_trace=False)


def within(context):
    def run(work):
        with context():
            work()

    return run


@pytest.mark.parametrize(
    "run",
    [
        within(Mode),
        within(lambda: torch.autocast("cpu", torch.bfloat16)),
        within(torch.autograd.forward_ad.dual_level),
        lambda work: torch.func.vmap(lambda x: work() or x)(torch.zeros(2)),
        traced,
    ],
    ids=["mode", "autocast", "forward mode", "vmap", "trace"],
)
@pytest.mark.filterwarnings("ignore:.*jit.*:DeprecationWarning")
def test_a_call_that_torch_observes_must_be_checked(run):
    given, found = tensors(), []
    layers, _ = primed(*given)
    run(lambda: found.append(layers(*given, asked())))
    assert found == [None]
    assert layers(*given, asked()) is not None


def test_a_pending_negation_and_one_tensor_as_k_and_v():
    q, k, v = tensors(dtype=torch.float32)
    layers, _ = primed(q, k, v)
    negated = torch.complex(q, -q).conj().imag
    assert negated.is_neg()
    assert layers(negated, k, v, asked()) is None
    assert torch.equal(layers(q, k, k, asked()).transpose(1, 2), attention(q, k, k))


def test_compiled_code_asks_nothing_of_a_step():
    given = tensors(dtype=torch.float32)
    layers, _ = primed(*given)
    seen = []

    def compiled(x):
        seen.append(layers(x, *given[1:], asked()))
        return x + 1

    torch.compile(compiled, backend="eager", fullgraph=True)(given[0])
    assert seen == [None]


def test_a_step_keeps_no_tensors_and_can_be_copied():
    given = tensors()
    gone = [weakref.ref(x) for x in given]
    layers, _ = primed(*given)
    assert isinstance(copy.deepcopy(layers), Layers)
    assert isinstance(pickle.loads(pickle.dumps(layers)), Layers)
    del given
    gc.collect()
    assert all(x() is None for x in gone)


def test_without_torchs_guards_every_call_is_looked_up(looked_up, monkeypatch):
    monkeypatch.delattr(torch._C._dynamo.guards, "TensorGuards")
    given = tensors()
    layers, out = primed(*given)
    looked_up.clear()
    assert torch.equal(layers(*given, asked()), out)
    assert len(looked_up) == 1
