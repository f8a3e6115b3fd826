"""How a decode is launched, without a GPU: the launcher's own code, with memory that is the CPU's
and the kernel in the emulator; what cannot be decoded says so.
"""

import ctypes
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from flashsim import Problem
from flashsim.engines.protocol import Job
from flashsim.problem.problem import numpy_dtype
from flashsim.trace.events import PHASES

pytest.importorskip("cupy")
import emulator
from decode_cases import Case, moved, simulated
from refusals import refusals, refused
from test_emulated_decode import AMPERE, CASCADES, CASES, H200

from flashsim.api import inputs
from flashsim.backends.cupy_gpu import arrays, decode, decode_options, launching
from flashsim.backends.cupy_gpu import engine as cupy_engine
from flashsim.backends.cupy_gpu import workspace as memory
from flashsim.backends.launch_policy import decode_kernels
from flashsim.backends.launch_policy import decode_plan as family


class Array(np.ndarray):
    """The CPU's memory, addressed as a GPU's."""

    data = property(lambda self: SimpleNamespace(ptr=self.ctypes.data))

    def get(self):
        return np.asarray(self)


class Space:
    """As `arrays.Space`, of such memory; it says how often it allocated."""

    device, made = 0, 0

    def view(self, array):
        array = emulator.padded(array)
        size = array.itemsize
        strides = (s // size for s in array.strides[:3])
        return arrays.View((array.ctypes.data, *strides), array)

    def empty(self, shape, like=None):
        self.made += 1
        made = np.empty(shape, np.float32 if like is None else like.dtype)
        made.view(np.uint8)[...] = 0xFF
        return made

    def zeros(self, shape, dtype):
        self.made += 1
        return np.zeros(shape, dtype).view(Array)

    def pointer(self, array):
        return array.ctypes.data

    def stream(self):
        return 7

    def result(self, array, keep=0, width=0):
        return array if keep == width else array[..., :keep].copy()

    def active(self):
        return nullcontext()

    on_device = active


@pytest.fixture
def launches(monkeypatch):
    """Every launch goes to the emulator; the list has what each was given."""
    seen, kernels = [], {}

    def load(kernel, device):
        kernels[len(kernels)] = kernel
        return SimpleNamespace(ptr=len(kernels) - 1)

    def launch(ptr, x, y, z, *rest):
        threads, _, _, shared, stream, at, _ = rest
        kernel = kernels[ptr]
        assert (threads, shared, stream, z) == (kernel.threads, kernel.shared_bytes, 7, 1)
        address = ctypes.cast(at, ctypes.POINTER(ctypes.c_void_p))[0]
        data = ctypes.string_at(address, decode_kernels.RECORD.itemsize)
        record = np.frombuffer(bytearray(data), decode_kernels.RECORD)
        AMPERE.run(kernel, record, (x, y))
        seen.append(record)

    stream = SimpleNamespace(synchronize=lambda: None)
    runtime = SimpleNamespace(streamIsCapturing=lambda stream: False, getDevice=lambda: 0)
    cuda = SimpleNamespace(
        runtime=runtime,
        driver=SimpleNamespace(launchKernel=launch),
        get_current_stream=lambda: stream,
    )
    fake = SimpleNamespace(asarray=lambda x: np.array(x).view(Array), cuda=cuda)
    for module in (decode, decode_options, memory, launching):
        monkeypatch.setattr(module, "cupy", fake)
    monkeypatch.setattr(decode.nvrtc, "load", load)
    monkeypatch.setattr(memory, "WORKSPACES", {})
    monkeypatch.setattr(decode, "aside", nullcontext)
    monkeypatch.setattr(memory, "aside", nullcontext)
    decode._ready.cache_clear()
    yield seen
    decode._ready.cache_clear()


def job(case, x, **options):
    options = {"cache_seqlens": list(case.lengths)} | options
    if case.page:
        options["block_table"] = x["table"]
    return Job(case.problem, x["q"], x["k"], x["v"], algorithm=family.ALGORITHM, options=options)


@pytest.mark.promise("three counts equal")
@pytest.mark.parametrize(
    "name", ["one query", "padded rows", "softcap, one key head", "window", "pages of 3"]
)
def test_values_counts_and_the_workspace_kept(name, launches):
    case, splits = CASES[name]
    x, space = case.make(), Space()
    one = job(case, x, splits=splits)
    for _ in range(2):
        out = decode.forward(one, H200, space)
        case.check(x, out.arrays["out"], out.arrays["lse"])
    counters = 2 if max(out.saved["splits"]) > 1 else 0
    assert space.made == 2 * 2 + counters, "results anew, the rest once"
    made = family.plan(case.problem, case.lengths, H200, splits, case.page, counts=True)
    assert decode.counted(one, H200, space) == moved(made, case)


def test_a_workspace_that_is_given_needs_no_memory_twice(launches):
    case, splits = CASES["one query"]
    x, space, workspace = case.make(), Space(), decode.Workspace()
    one = job(case, x, splits=splits, workspace=workspace)
    first = decode.forward(one, H200, space).arrays["out"]
    made = space.made
    again = decode.forward(one, H200, space).arrays["out"]
    assert space.made == made
    assert again is first
    case.check(x, again, workspace.results(space, case.problem, x["q"])[1])
    larger = Case(Problem(1, 600, 64, batch=2, heads=8, kv_heads=2, dtype="bfloat16"), (600, 500))
    x = larger.make()
    result = decode.forward(job(larger, x, splits=4, workspace=workspace), H200, space)
    larger.check(x, result.arrays["out"], result.arrays["lse"])


class Tensor:
    """What `decode.Decoder` asks of a torch tensor."""

    def __init__(self, x):
        self.x, self.shape = np.ascontiguousarray(x), x.shape
        self.dtype, self.ctypes = x.dtype, self.x.ctypes

    def stride(self, axis=None):
        steps = tuple(s // self.x.itemsize for s in self.x.strides)
        return steps if axis is None else steps[axis]

    def data_ptr(self):
        return self.x.ctypes.data

    def element_size(self):
        return self.x.itemsize


class Tensors(Space):
    """Of such tensors."""

    def empty(self, shape, like=None):
        return Tensor(super().empty(shape))

    copies = 0

    def view(self, array):
        self.copies += 1
        return super().view(array.x)

    def maker(self, shape, dtype="float32"):
        return lambda: Tensor(np.full(shape, np.nan, numpy_dtype(dtype)))


@pytest.mark.parametrize("name", ["one query", "empty and full", "pages of 3"])
def test_one_decoder_serves_every_length(name, launches):
    case, splits = CASES[name]
    x, problem = case.make(), case.problem
    decoder = decode.Decoder(Tensors(), problem, H200, case.page, splits)
    q, k, v = (Tensor(x[name]) for name in "qkv")
    table = Tensor(x["table"]) if case.page else None
    for lengths in (case.lengths, tuple(n // 2 for n in case.lengths)):
        out, lse = decoder(q, k, v, Tensor(np.array(lengths, np.int32)), table)
        replace(case, lengths=lengths).check(x, out.x, lse.x)
    if case.page:
        return
    full = Case(problem, (problem.n_kv,) * problem.batch)
    x = full.make()
    out, lse = (Tensor(np.zeros(n.shape, n.dtype)) for n in (out.x, lse.x))
    places = [arrays.place(Tensors(), Tensor(x[name]))[0] for name in "qkv"]
    decoder.at(*places, out.data_ptr(), lse.data_ptr(), problem.n_kv, 7)
    full.check(x, out.x, lse.x)


class Strided(Tensor):
    """A tensor with the strides of an array."""

    def __init__(self, x):
        super().__init__(x)
        self.x, self.ctypes = x, x.ctypes


def moved_by_an_element(x):
    """Return the same numbers at an address that 16-byte accesses cannot read."""
    memory = np.zeros(x.size + 16, x.dtype)
    start = -memory.ctypes.data % 16 // x.itemsize + 1
    made = memory[start : start + x.size].reshape(x.shape)
    made[...] = x
    return made


LAYOUTS = {
    "contiguous": np.ascontiguousarray,
    "at an odd address": moved_by_an_element,  # with the strides of the call before
    "by token": lambda x: np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2),
    "the end of a larger cache": lambda x: np.pad(x, [(0, 0)] * 2 + [(5, 0), (0, 0)])[:, :, 5:],
}


@pytest.mark.parametrize("splits", [1, 3])
def test_a_decoder_reads_the_strides_and_the_length_of_each_call(splits, launches):
    """It skips the checks of strides that an earlier call had, and of nothing else."""
    problem = Problem(2, 100, 64, batch=2, heads=4, kv_heads=2, dtype="bfloat16", causal=True)
    space = Tensors()
    decoder = decode.Decoder(space, problem, H200, 0, splits)
    for n in (100, 37, 100):
        case = Case(replace(problem, n_kv=n), (n, n))
        for seed, (name, layout) in enumerate(LAYOUTS.items()):
            x = case.make(seed)
            given = [Strided(layout(x[name])) for name in "qkv"]
            space.copies = 0
            out, lse = decoder(*given)
            case.check(x, out.x, lse.x)
            assert space.copies == 3 * (name == "at an odd address")
            kept = lse.x.copy()
            assert np.array_equal(decoder.output(*given).x, out.x), name
            assert np.array_equal(decoder.by_token(*given).x, out.x.swapaxes(1, 2)), name
            assert np.array_equal(lse.x, kept), "an LSE that a caller holds"
            # Numbers at other addresses, between calls of another layout that use the same buffer.
            again = decoder.repeated(*given)
            x = case.make(seed + 10)
            others = [Strided(layout(x[name])) for name in "qkv"]
            for those in (others, others, given):
                found = again(*those)
                assert np.array_equal(found.x, decoder.output(*those).x.swapaxes(1, 2)), name


def repeatable(n, layout="contiguous"):
    """A decoder of 50 keys that has not been called, and inputs of n keys."""
    problem = Problem(1, 50, 64, heads=2, kv_heads=1, dtype="bfloat16")
    x = Case(replace(problem, n_kv=n), (n,)).make()
    decoder = decode.Decoder(Tensors(), problem, H200, 0, 2)
    return decoder, [Strided(LAYOUTS[layout](x[name])) for name in "qkv"]


def test_repeated_calls_of_several_kinds_by_turns(launches):
    """All fill the same buffer: of two lengths and layouts, and between calls by themselves."""
    decoder, first = repeatable(50)
    kinds = [
        first,
        repeatable(37)[1],
        repeatable(50, layout="the end of a larger cache")[1],
        repeatable(50)[1],
    ]
    found = []
    for given in kinds:
        wanted = decoder.by_token(*given).x
        found.append((decoder.repeated(*given), given, wanted))
    for n in (0, 1, 0, 2, 3, 1, 2):
        again, given, wanted = found[n]
        assert np.array_equal(again(*given).x, wanted)
        assert np.array_equal(decoder.by_token(*found[n - 1][1]).x, found[n - 1][2])
        assert np.array_equal(again(*given).x, wanted)
        assert np.array_equal(found[n - 1][0](*found[n - 1][1]).x, found[n - 1][2])


def test_what_is_not_repeated(launches, monkeypatch):
    decoder, given = repeatable(50)
    assert decoder.repeated(*given) == decoder.by_token, "no call before"
    decoder(*given)
    assert decoder.repeated(*given) == decoder.by_token, "no scratch memory yet"
    decoder.by_token(*given)
    assert decoder.repeated(*given) != decoder.by_token
    other = repeatable(50, layout="the end of a larger cache")[1]
    assert decoder.repeated(*other) == decoder.by_token, "strides of no call before"
    monkeypatch.setattr(decoder, "_width", 60)
    assert decoder.repeated(*given) == decoder.by_token, "results without their padding are copies"


@pytest.mark.parametrize("changed", ["stream", "device", "capture", "address"])
def test_a_repeated_call_elsewhere_is_a_call_by_itself(changed, launches, monkeypatch):
    """Its scratch memory belongs to one stream, and a graph has its own."""
    decoder, given = repeatable(50)
    wanted, again, ran = decoder.by_token(*given), decoder.repeated(*given), []
    monkeypatch.setattr(again, "_by_token", lambda *those: ran.append(those))
    assert np.array_equal(again(*given).x, wanted.x)
    assert not ran
    runtime = decode.cupy.cuda.runtime
    if changed == "stream":
        monkeypatch.setattr(decoder._space, "stream", lambda: 8)
    elif changed == "device":
        monkeypatch.setattr(runtime, "getDevice", lambda: 1)
    elif changed == "capture":
        monkeypatch.setattr(runtime, "streamIsCapturing", lambda stream: True)
    else:
        given[1] = Strided(moved_by_an_element(given[1].x))
    again(*given)
    assert ran == [tuple(given)]


def test_a_per_thread_stream_shares_no_memory(launches, monkeypatch):
    """Its handle is the same in all threads, so their partial results must be apart."""
    monkeypatch.setattr(memory, "PER_THREAD", 7)
    monkeypatch.setattr(launching, "PER_THREAD", 7)
    space = Tensors()
    monkeypatch.setattr(space, "counters", lambda shape: np.zeros(shape, np.uint32), raising=False)
    monkeypatch.setattr(space, "pointer", lambda x: x.ctypes.data)
    case, splits = CASES["one query"]
    x, problem = case.make(), case.problem
    decoder = decode.Decoder(space, problem, H200, case.page, splits)
    full = replace(case, lengths=(problem.n_kv,) * problem.batch)
    x = full.make()
    for _ in range(2):
        out, lse = decoder(*(Tensor(x[name]) for name in "qkv"))
        full.check(x, out.x, lse.x)
        assert np.array_equal(decoder.output(*(Tensor(x[name]) for name in "qkv")).x, out.x)
    assert not memory.WORKSPACES


def test_a_graph_keeps_counters_of_its_own(launches, monkeypatch):
    """Calls of a capture share them, as long as they are enough; they are never given back."""
    case, splits = CASES["one query"]
    x, captured = case.make(), []
    monkeypatch.setattr(decode.cupy.cuda.runtime, "streamIsCapturing", lambda stream: True)
    monkeypatch.setattr(memory, "capture_of", lambda stream: 5)
    zeros = lambda n, dtype: captured.append(n) or np.zeros(n, dtype).view(Array)  # noqa: E731
    monkeypatch.setattr(decode.cupy, "zeros", zeros, raising=False)
    monkeypatch.setattr(memory, "CAPTURED", {})
    decoder = decode.Decoder(Tensors(), case.problem, H200, case.page, splits)
    given = [Tensor(x[name]) for name in "qkv"]
    for _ in range(2):
        out, lse = decoder(*given, Tensor(np.array(case.lengths, np.int32)))
        case.check(x, out.x, lse.x)
    assert captured == [1024]
    assert len(memory.CAPTURED[0, 5, 7]) == 1


@pytest.mark.promise("three counts equal")
@pytest.mark.parametrize("name", CASCADES)
def test_a_shared_prefix_is_two_launches(name, launches):
    case, splits = CASCADES[name]
    x, space = case.make(), Space()
    one = job(case, x, splits="auto" if splits is None else splits, shared_prefix=case.prefix)
    for _ in range(2):
        out = decode.forward(one, H200, space)
        case.check(x, out.arrays["out"], out.arrays["lse"])
    assert len(launches) == 4
    assert space.made == 2 * 2 + 1, "results anew, the parts once"
    made = family.plan(case.problem, case.lengths, H200, splits, case.page, prefix=case.prefix)
    assert decode.counted(one, H200, space) == simulated(made, case)


@pytest.mark.parametrize("name", ["one query", "pages of 3"])
def test_a_timeline_has_every_visit_and_the_merge(name, launches):
    case, splits = CASES[name]
    case = replace(case, lengths=(300,) * len(case.lengths))
    x = case.make()
    one = replace(job(case, x, splits=splits), trace="timeline")
    spans = decode.forward(one, H200, Space()).timeline
    assert spans["start_ns"].min() == 0
    assert (spans["end_ns"] > spans["start_ns"]).all()
    p, made = case.problem, family.plan(case.problem, case.lengths, H200, splits, case.page)
    visits = spans[spans["phase"] == PHASES.index("visit")]
    tiles = -(-300 // made.block_k)
    assert len(visits) == p.batch * p.kv_heads * tiles
    assert len(np.unique(visits[["head", "visit"]])) == len(visits)
    merges = spans[spans["stage"] == 1]
    assert len(merges) == p.batch * p.kv_heads, "the last block of each"
    for span in merges:
        mine = (spans["i"] == span["i"]) & (spans["head"] == span["head"]) & (spans["stage"] == 0)
        assert span["start_ns"] >= spans[mine]["end_ns"].max()


P = Problem(1, 64, 64, batch=2, heads=4, kv_heads=2, dtype="float16")
POOL = np.zeros((6, 2, 16, 1), np.float16)
TABLE = np.array([[0, 1, 9, 9], [4, 5, 2, -1]], np.int32)


class OnGpu:
    """A table whose numbers nobody may ask for: only its shape and type."""

    def __init__(self, shape, dtype="torch.int32"):
        self.shape, self.dtype = shape, dtype


#: Three sequences in pages, and their table.
PAGED_Q = np.zeros((3, 4, 1, 64), numpy_dtype("float16"))
PAGES_K, PAGES_V = (np.zeros((9, 2, 16, d), numpy_dtype("float16")) for d in (64, 32))
PAGES = OnGpu((3, 5))


def with_prefix(name, spoil=False, **more):
    """Decode a case of `CASCADES`, whose table may have an own page among those of the prefix."""
    case, _ = CASCADES[name]
    x = case.make()
    if spoil:
        x["table"][1, 2] = x["table"][1, 3]
    trace, options = more.pop("trace", False), {"shared_prefix": case.prefix} | more
    return decode.forward(replace(job(case, x, **options), trace=trace), H200, Space())


def lengths_of(lengths, table=None, prefix=0):
    options = {"cache_seqlens": lengths, "shared_prefix": prefix}
    return decode_options.keys_of(Job(P, None, POOL, None, options=options), table, 16)


def check(**more):
    decode_options.check(Job(**{"problem": P, "q": None, "k": None, "v": None} | more))


def prepare(q, k, v, table, *request):
    return inputs.prepare(q, k, v, *request, block_table=table)


REFUSED = refusals(r"""
with_prefix("one query", trace="timeline")
    -> UnsupportedError: does not support shared_prefix=
with_prefix("one query", trace=True)
    -> UnsupportedError: run with shared_prefix= cannot be traced
with_prefix("four, causal, pages", spoil=True, shared_prefix=64)
    -> OptionError: block_table[1, 2] must be page  ... first 64 keys
with_prefix("four, causal, pages", shared_prefix=-1)
    -> ShapeError: shared_prefix must be at least 0, got -1
lengths_of([1, 2, 3]) -> ShapeError: must be 2 integers, one per batch entry, got
lengths_of([1, 65])
    -> OptionError: cache_seqlens[1] must be from 0 to 64, ... keys in the cache, got 65
lengths_of([-1, 3]) -> OptionError: cache_seqlens[0] must be from 0 to 64, ... , got -1
lengths_of([1.5, 2]) -> ShapeError: cache_seqlens must be 2 integers
lengths_of([True, 2]) -> ShapeError: cache_seqlens must be 2 integers
lengths_of(7) -> ShapeError: cache_seqlens must be 2 integers
lengths_of([20, 49], TABLE) -> OptionError: block_table[1, 3] must be ... 0 to 5, got -1
lengths_of([33, 48], TABLE) -> OptionError: block_table[0, 2] must be ... 0 to 5, got 9
lengths_of([20, 48], TABLE, 16)
    -> OptionError: block_table[1, 0] must be page 0, ... first 16 keys, got page 4
lengths_of([1, 1], TABLE.astype(np.int64))
    -> DTypeError: block_table must be int32, got int64
decode_options.splits_of(0) -> OptionError: splits= must be 'auto' or an integer of at least 1
decode_options.splits_of(-3) -> OptionError: splits= must be 'auto' or an integer of at least 1
decode_options.splits_of(1.5) -> OptionError: splits= must be 'auto' or an integer of at least 1
decode_options.splits_of("many") -> OptionError: splits= must be 'auto' or an integer of at least 1
decode_options.splits_of(True) -> OptionError: splits= must be 'auto' or an integer of at least 1
check(tiling=Tiling(16, 16)) -> UnsupportedError: leave out tiling= and key_order=
check(key_order="descending") -> UnsupportedError: in ascending order
check(options={"kernel": "hopper"}) -> UnsupportedError: leave out kernel=
check(options={"workspace": 3}) -> DTypeError: workspace= must be a  ... Workspace, got 3
check(options={"pack_gqa": 1}) -> DTypeError: pack_gqa must be True or False, got 1
check(options={"pack_gqa": False})
    -> UnsupportedError: always share a tile, ... ; leave out pack_gqa=, or use backend='simulator'
prepare(PAGED_Q, PAGES_K[0], PAGES_V, PAGES)
    -> ShapeError: k and v must be (pages, ... got k (2, 16, 64)
prepare(PAGED_Q, PAGES_K, PAGES_V[:8], PAGES) -> ShapeError: with the same number of pages, got
prepare(PAGED_Q, PAGES_K, PAGES_V, OnGpu((2, 5)))
    -> ShapeError: must have shape (batch, max_pages) for q
prepare(PAGED_Q, PAGES_K, PAGES_V, OnGpu((3, 5), "torch.float32"))
    -> DTypeError: must be an array of integers ... got float32
prepare(PAGED_Q, PAGES_K, PAGES_V, [[0] * 5] * 3)
    -> DTypeError: block_table must be an array, got list
prepare(PAGED_Q, PAGES_K, PAGES_V, PAGES, inputs.Request(nan_policy="raise"))
    -> OptionError: nan_policy='raise' cannot be combined with block_table
""")


@pytest.mark.promise("refuses bad input")
@pytest.mark.parametrize(("call", "said"), REFUSED)
def test_what_cannot_be_decoded(call, said):
    refused(call, said, globals())


def test_live_keys_and_pages_that_can_be():
    assert lengths_of([20, 48], TABLE) == ((20, 48), 0)
    made = prepare(PAGED_Q, PAGES_K, PAGES_V, PAGES)
    assert (made.problem.n_kv, made.problem.head_dim_v) == (80, 32)
    assert made.k is PAGES_K


def test_packed_heads_may_be_said():
    """What the kernels do anyway; of heads that share nothing, that they are not packed."""
    for problem, packs in ((P, True), (replace(P, heads=2, kv_heads=2), False)):
        decode_options.check(Job(problem, None, None, None, options={"pack_gqa": packs}))
    assert "pack_gqa" in cupy_engine.OPTIONS
