"""Shared code of the tests of kernels on a GPU: problems, inputs, families, checks.

Outputs are filled with NaN before every kernel, so that unwritten elements show.
"""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
import pytest

import flashsim
from flashsim import Device
from flashsim.errors import BackendUnavailable
from flashsim.problem import oracle
from flashsim.problem.masks import BlockMask
from flashsim.problem.problem import numpy_dtype
from flashsim.trace.events import PHASES, ROLES

cupy = pytest.importorskip("cupy")


def gpus():
    try:
        return cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError:
        return 0


def hoppers():
    """Whether the current GPU is of the Hopper generation."""
    return bool(gpus()) and cupy.cuda.runtime.getDeviceProperties(0)["major"] == 9


MARKS = [pytest.mark.gpu, pytest.mark.skipif(not gpus(), reason="no NVIDIA GPU")]
ON_HOPPER = [pytest.mark.gpu, pytest.mark.skipif(not hoppers(), reason="no Hopper GPU")]


def on_any_gpu(test):
    """Mark one test of a file whose other tests need no GPU, or another one."""
    for mark in MARKS:
        test = mark(test)
    return test


#: Arguments with which tests capture CUDA graphs: `torch.cuda.graph(graph, **CAPTURE)`. XLA checks
#: the state of its streams from another thread. Under torch's default mode, "global", the driver
#: rejects that check while any thread captures: the capture fails, and so does all later work of
#: JAX.
CAPTURE = {"capture_error_mode": "thread_local"}

#: The backward for problems where each row tile has one visit.
ONCE = "flash2-once"
#: The fused backward in which the first visit of a row tile stores its part of dQ.
FIRST = "flash2-fused-first"


@dataclass(frozen=True)
class Family:
    """A kernel family under test.

    `forms` are its backwards, by `deterministic`: None, the three passes of "flash2"; True, the
    fastest whose bits are always the same; False, fused, with dQ added in any order. They support a
    head_dim up to `widest`. Hopper's C++ kernels also have `FIRST` up to a head_dim of 192, and
    `ONCE` if row tiles have one visit.
    """

    backend: str
    kernel: str
    forms: tuple[bool | str | None, ...] = (True, False)
    widest: int = 256

    def forms_of(self, problem):
        """Return the backwards that the family has for a problem."""
        forms = self.forms if max(problem.head_dim, problem.head_dim_v) <= self.widest else ()
        more = (FIRST, ONCE) if self is HOPPER else ()
        return (*forms, *(form for form in more if on_hopper(problem, form)))


def on_hopper(problem, algorithm):
    """Whether Hopper's kernels have a backward for a problem."""
    from flashsim.backends.cupy_gpu.engine import gpu_of
    from flashsim.backends.launch_policy import hopper

    return not hopper.HOPPER.refusal(problem, None, gpu_of(0), "backward", algorithm)


PORTABLE = Family("cupy", "portable")
HOPPER = Family("cupy", "hopper", (None, True, False))
PYTHON = Family("numba_cuda", "tensor")
PYTHON_HOPPER = Family("numba_cuda", "hopper", (None, True, False))
#: The families by their names in tests/tools/sanitize.py.
FAMILIES = {
    "portable": PORTABLE,
    "hopper": HOPPER,
    "python": PYTHON,
    "python-hopper": PYTHON_HOPPER,
}


def families(*names, **changed):
    """Return parameters for a test's `family`: these, or all; skipped where they cannot run."""
    return [
        pytest.param(replace(one, **changed) if changed else one, id=name, marks=_marks(one))
        for name, one in FAMILIES.items()
        if name in (names or FAMILIES)
    ]


def _marks(family):
    missing = _numba_cuda_is_missing() if family.backend == "numba_cuda" else None
    marks = ON_HOPPER if family.kernel == "hopper" else MARKS
    return [*marks, pytest.mark.skipif(missing is not None, reason=str(missing))]


@lru_cache
def _numba_cuda_is_missing():
    try:
        import flashsim.backends.numba_gpu.engine  # noqa: F401
    except BackendUnavailable as error:
        return str(error)
    return None


#: Problems with every mask and kind of shape, small enough for the simulator.
FEATURES = {
    "gqa": dict(n_q=113, n_kv=203, heads=4, kv_heads=2, causal=True),
    "mqa": dict(n_q=97, n_kv=61, heads=3, kv_heads=1),
    "batch": dict(n_q=65, n_kv=127, batch=3, heads=2, causal=True),
    "window": dict(n_q=203, n_kv=150, heads=2, window=(40, 7)),
    "left window": dict(n_q=150, n_kv=203, heads=2, window=(17, -1)),
    "causal window": dict(n_q=203, n_kv=203, heads=2, window=(33, 0), causal=True),
    "softcap": dict(n_q=113, n_kv=90, heads=2, softcap=2.0, causal=True),
    "negative scale": dict(n_q=70, n_kv=70, heads=2, scale=-0.2),
    "varlen": dict(
        n_q=200,
        n_kv=230,
        heads=2,
        causal=True,
        cu_seqlens_q=(0, 30, 30, 131, 200),
        cu_seqlens_k=(0, 50, 81, 81, 230),
    ),
    "no keys": dict(n_q=150, n_kv=40, heads=2, causal=True),
    "blocks": dict(
        n_q=192,
        n_kv=256,
        heads=2,
        causal=True,
        block_mask=BlockMask(np.array([[1, 0, 0, 1], [0, 0, 0, 0], [0, 1, 1, 1]], bool), 64, 64),
    ),
}


#: A device without a limit of `sram_bytes`, for tiles that use Hopper's registers.
ROOMY = replace(Device.get("H100"), name="roomy", sram_bytes=1 << 24)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Fill every output with NaN (all bits set), and also a Hopper GPU's shared memory."""
    poison_outputs(monkeypatch)
    if hoppers():
        poison_shared_memory()


@pytest.fixture
def without_turns(monkeypatch):
    """Disable ping-pong scheduling in Hopper's forwards."""
    from flashsim.backends.cupy_gpu import engine
    from flashsim.backends.launch_policy import family, hopper_kernels

    def forget():
        family._passes.cache_clear()
        engine._planned.cache_clear()

    forget()
    monkeypatch.setattr(hopper_kernels, "take_turns", lambda problem, tiling: False)
    yield
    forget()


def poison_outputs(monkeypatch):
    from flashsim.backends.cupy_gpu import arrays

    for space in (arrays.CupySpace, arrays.NumpySpace, arrays.TorchSpace):
        empty = space.empty

        def filled(self, shape, like=None, empty=empty):
            made = empty(self, shape, like)
            if isinstance(made, cupy.ndarray):
                made.reshape(-1).view(cupy.uint8).fill(0xFF)
            else:
                made.reshape(-1).view(self.torch.uint8).fill_(0xFF)
            return made

        monkeypatch.setattr(space, "empty", filled)


def poison_shared_memory():
    kernel = cupy.RawKernel(
        'extern "C" __global__ void poison(int n) { extern __shared__ int s[];'
        " for (int i = threadIdx.x; i < n; i += blockDim.x) ((volatile int*)s)[i] = -1; }",
        "poison",
    )
    kernel.max_dynamic_shared_size_bytes = 227 * 1024
    kernel((1056,), (256,), (np.int32(227 * 256),), shared_mem=227 * 1024)


def make(problem, seed=0, kind="normal"):
    """Return q, k, v and dout, and dlse if the problem has one.

    Scores are normal, rise or fall along the keys, are all negative and fall far ("below"), or a
    few are huge ("outliers").
    """
    p, rng = problem, np.random.default_rng(seed)
    shapes = {
        "q": (p.batch, p.heads, p.n_q, p.head_dim),
        "k": (p.batch, p.kv_heads, p.n_kv, p.head_dim),
        "v": (p.batch, p.kv_heads, p.n_kv, p.head_dim_v),
        "dout": (p.batch, p.heads, p.n_q, p.head_dim_v),
    }
    x = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    if kind in ("rising", "falling"):
        slope = np.linspace(-2, 2, p.n_kv)[:, None] * (1 if kind == "rising" else -1)
        x["q"] = np.abs(x["q"])
        x["k"] = 0.1 * x["k"] + slope
    if kind == "below":
        x["q"] = np.abs(x["q"])
        x["k"] = -0.1 * np.abs(x["k"]) - np.linspace(0.1, 20, p.n_kv)[:, None]
    if kind == "outliers":
        x["k"] *= np.where(rng.random(shapes["k"][:-1]) < 0.02, 8, 1)[..., None]
    x = {name: array.astype(numpy_dtype(p.dtype)) for name, array in x.items()}
    if p.dlse:
        x["dlse"] = 3 * rng.standard_normal(shapes["q"][:-1], np.float32)
    return x


def on_gpu(x):
    """Move named NumPy arrays to CuPy, or to torch for bfloat16, which CuPy may lack."""
    if all(a.dtype.kind == "f" for a in x.values()):
        return {name: cupy.asarray(a) for name, a in x.items()}
    torch = pytest.importorskip("torch")

    def moved(a):
        if a.dtype.kind == "f":
            return torch.as_tensor(a, device="cuda")
        return torch.as_tensor(a.view(np.int16), device="cuda").view(torch.bfloat16)

    return {name: moved(a) for name, a in x.items()}


def bits(array):
    """Return a GPU array's elements as integers."""
    if isinstance(array, cupy.ndarray):
        return array.view(f"u{array.itemsize}")
    import torch

    return array.view({2: torch.int16, 4: torch.int32}[array.element_size()])


def options(problem):
    names = ("causal", "window", "softcap", "scale", "block_mask", "cu_seqlens_q", "cu_seqlens_k")
    return {name: getattr(problem, name) for name in names}


def run(problem, x, family, **more):
    given = options(problem) | {"backend": family.backend, "kernel": family.kernel} | more
    return flashsim.run(x["q"], x["k"], x["v"], **given)


def gradients(result, dout, form, **more):
    """Run a backward in one of `Family.forms_of`; False is fused even if another form is faster."""
    if form in (False, FIRST, ONCE):
        algorithm = "flash2-fused" if form is False else form
        result = replace(result, _job=replace(result._job, algorithm=algorithm))
        return result.backward(dout, **more | ({"tiling": None} if form == ONCE else {}))
    return result.backward(dout, deterministic=form, **more)


def budget(exact, plain, problem):
    """Return the allowed error: twice plain attention's, one rounding, and that of float32 sums."""
    # with tf32, `plain` has rounded operands, and results are float32
    u = {"float16": 2**-11, "bfloat16": 2**-8, "float32": 2**-24}[problem.dtype]
    size = np.abs(exact).max()
    sums = 2**-24 * (problem.n_kv + problem.n_q + problem.head_dim) * problem.group
    return 2 * np.abs(plain - exact).max() + (u + sums) * max(size, 1)


def check_lse(got, exact, plain):
    """Check log-sum-exps against the oracle and against `plain`, which has rounded operands.

    A row that sees no key has -inf in all three; such rows are compared without differences.
    """
    seen = np.isfinite(exact)
    np.testing.assert_array_equal(got[~seen], exact[~seen])
    off = 2 * np.abs(plain[seen] - exact[seen]).max(initial=0)
    np.testing.assert_allclose(got[seen], exact[seen], rtol=2e-6, atol=2e-5 + off)


def hardware_tanh(problem):
    """Whether kernels cap scores with the hardware's tanh, which also rounds the LSE."""
    return bool(problem.softcap) and problem.dtype == "bfloat16"


class Truth:
    """A problem's inputs, the float64 oracle's results, and plain attention's in the same type."""

    def __init__(self, problem, kind, tf32):
        self.problem, self.x = problem, make(problem, kind=kind)
        self.dtype = "tf32" if tf32 else problem.dtype
        rounded = {name: oracle.tf32(a) if tf32 else a for name, a in self.x.items()}
        self.exact, self.coarse = (((x["q"], x["k"], x["v"]), x["dout"]) for x in (self.x, rounded))
        self.out, self.lse = oracle.attention(*self.exact[0], problem)
        self.plain, self.plain_lse = oracle.attention(*self.coarse[0], problem, dtype=self.dtype)

    @cached_property
    def gradients(self):
        """Return the true and the plain gradients, by name."""
        (given, dout), (coarse, rough) = self.exact, self.coarse
        dlse = self.x.get("dlse")
        exact = oracle.gradients(*given, dout, self.problem, dlse=dlse)
        plain = oracle.gradients(*coarse, rough, self.problem, dlse=dlse, dtype=self.dtype)
        return {name: (exact[name], plain[name]) for name in ("dq", "dk", "dv")}


def within(got, exact, plain, problem, name):
    error = np.abs(got.astype(np.float64) - exact).max()
    assert error <= budget(exact, plain, problem), name


def check(
    problem, family=PORTABLE, tiling=None, backward_tiling=None, kind="normal", tf32=False, **more
):
    """Check the results of a family in all its forms against the error budget of their type."""
    p, truth = problem, Truth(problem, kind, tf32)
    more |= {"allow_tf32": True} if tf32 else {}
    result = run(p, truth.x, family, tiling=tiling, **more)
    assert result.out.dtype == numpy_dtype(p.dtype)
    assert result.lse.dtype == np.float32
    assert result.kernel == family.kernel + (", tf32" if tf32 else "")
    within(result.out, truth.out, truth.plain, p, "out")
    rounded = tf32 or hardware_tanh(truth.problem)
    check_lse(result.lse, truth.lse, truth.plain_lse if rounded else truth.lse)
    for form in family.forms_of(problem):
        given = {"dlse": truth.x.get("dlse"), "tiling": backward_tiling}
        grads = gradients(result, truth.x["dout"], form, **given)
        assert grads.kernel.startswith(family.kernel)
        for name, (exact, plain) in truth.gradients.items():
            within(getattr(grads, name), exact, plain, p, (name, form))


def check_counts(problem, family, key_order="ascending", tilings=(None, None), **more):
    """Check that a family's counts, in all its forms, equal the simulator's, visit by visit."""
    x, how = make(problem), {"key_order": key_order, "trace": True}
    result = run(problem, x, family, tiling=tilings[0], **how, **more)
    simulated = same_counts(problem, x, result.trace)
    for form in family.forms_of(problem):
        grads = gradients(result, x["dout"], form, dlse=x.get("dlse"), tiling=tilings[1])
        same_backward_counts(simulated, x, grads.trace)


def same_counts(problem, x, trace):
    """Compare a forward pass's counts with the simulator's; return the simulator's result."""
    simulated = flashsim.run(
        *(x["q"], x["k"], x["v"]),
        algorithm=trace.algorithm,
        tiling=trace.tiling,
        key_order=trace.stages[0].schedule.key_order,
        device=ROOMY,
        trace=True,
        pack_gqa=trace.stages[0].schedule.split.pack_gqa or None,
        **options(problem),
    )
    _same(trace, simulated.trace)
    return simulated


def same_backward_counts(simulated, x, trace):
    """Compare a backward pass's counts with those of a simulated backward pass."""
    job = replace(simulated._job, algorithm=trace.algorithm)
    given = {"dlse": x.get("dlse"), "tiling": trace.tiling}
    grads = replace(simulated, _job=job).backward(x["dout"], **given)
    _same(trace, grads.trace)


def _same(counted, simulated):
    assert counted.diff(simulated) == {}
    assert counted.same_events(simulated)
    assert counted.transfers == counted.predicted().transfers


def check_bits(problem, family, runs=200, forms=None):
    """Check for equal bits in every run, except in a fused dQ, which is added in any order."""
    x, first = on_gpu(make(problem)), {}
    for number in range(runs):
        if number % 20 == 0 and hoppers():
            poison_shared_memory()
        result = run(problem, x, family)
        got = {"out": result.out, "lse": result.lse}
        for form in family.forms_of(problem) if forms is None else forms:
            grads = gradients(result, x["dout"], form, dlse=x.get("dlse"))
            names = ("dk", "dv") if form in (False, FIRST) else ("dq", "dk", "dv")
            got |= {(name, form): getattr(grads, name) for name in names}
        if not first:
            first = got
            assert all(bool((a == a).all()) for a in first.values())  # no NaN
        changed = [name for name in got if not bool((bits(got[name]) == bits(first[name])).all())]
        assert changed == [], number


def check_timelines(problem, family, **more):
    """Check the timeline and the counts of a family in all its forms."""
    x, specialised = make(problem), family.kernel == "hopper"
    result = run(problem, x, family, trace="timeline", **more)
    simulated = same_counts(problem, x, result.trace)
    check_timeline(result.trace, result.trace.tiling.block_q // 64 if specialised else 0)
    for form in family.forms_of(problem):
        trace = gradients(result, x["dout"], form, dlse=x.get("dlse")).trace
        same_backward_counts(simulated, x, trace)
        check_timeline(trace, (3 if trace.tiling.block_k == 96 else 2) if specialised else 0)


def check_timeline(trace, consumers):
    """Check that every role has spans, with phases inside, for every visit on real SMs.

    `consumers` is the number of consumer warpgroups besides the producer; 0: a block is one role.
    """
    spans = trace.timeline
    sms = cupy.cuda.runtime.getDeviceProperties(0)["multiProcessorCount"]
    assert (spans["sm"] >= 0).all()
    assert (spans["sm"] < sms).all()
    assert (spans["end_ns"] >= spans["start_ns"]).all()
    assert 0 < spans["end_ns"].max() < 1_000_000_000
    walks = [n for n, s in enumerate(trace.stages) if s.name not in ("delta", "convert")]
    assert set(spans["stage"]) == set(walks)
    roles = {"block"}
    if consumers:
        roles = {"producer", *(f"consumer {n}" for n in range(consumers))}
    for number in walks:
        stage = spans[spans["stage"] == number]
        assert {ROLES[role] for role in stage["role"]} == roles, number
        for role in roles:
            check_spans(trace, number, stage[stage["role"] == ROLES.index(role)], role)


def check_spans(trace, stage, spans, role):
    """Check one role's spans of a stage: every visit once, each phase inside its visit."""
    p, order, schedule = trace.problem, ["head", "visit"], trace.stages[stage].schedule
    ordered = schedule.sums.visits
    visits = np.sort(spans[spans["phase"] == PHASES.index("visit")], order=order)
    every = [(h, v) for h in range(0, p.batch * p.heads, schedule.members) for v in range(ordered)]
    assert visits[order].tolist() == every
    assert (visits["end_ns"] > visits["start_ns"]).all()
    phases = ("load",) if role == "producer" else ("load", "scores", "softmax", "output")
    for phase in phases:
        part = np.sort(spans[spans["phase"] == PHASES.index(phase)], order=order)
        assert part[order].tolist() == every
        assert (part["start_ns"] >= visits["start_ns"]).all()
        assert (part["end_ns"] <= visits["end_ns"]).all()
    stores = spans["phase"] == PHASES.index("store")
    assert stores.any() == (role != "producer")
