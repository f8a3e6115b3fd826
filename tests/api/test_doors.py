"""Everything that a user can pass is checked at the door: a right answer or an error of ours.

Each parameter of the public functions meets every value of `WRONG`. What it takes stands beside it,
by name; everything else must be refused with a `FlashSimError` that is also a built-in.
"""

import itertools  # noqa: F401 - used in a table
import math

import numpy as np
import pytest
from refusals import refuses

import flashsim
from flashsim import (
    BlockMask,
    Device,
    Problem,
    Schedule,
    Tiling,
    Trace,
    l2,
    ladder,
    predict,
    reproduce,
    roofline,
    verify,
)
from flashsim.errors import FlashSimError
from flashsim.l2 import L2Model

pytestmark = pytest.mark.promise("refuses bad input")


class Torchlike:
    """What a tensor of a library that is not installed looks like from outside."""

    shape, dtype, ndim = (8, 16), "torch.float32", 2

    def reshape(self, *shape):
        """Itself."""
        return self

    def __array__(self, *_, **__):
        raise TypeError("can't convert cuda:0 device type tensor to numpy")


class Mute:
    """An object that cannot even be shown, compared or hashed."""

    __hash__ = None

    def __repr__(self):
        raise RuntimeError("no repr")

    def __eq__(self, other):
        raise RuntimeError("no ==")


WRONG = {
    "None": None,
    "[]": [],
    "()": (),
    "{}": {},
    "''": "",
    "'x'": "x",
    "'64'": "64",
    "b'x'": b"x",
    "-1": -1,
    "0": 0,
    "1": 1,
    "1.5": 1.5,
    "1e39": 1e39,
    "nan": float("nan"),
    "inf": float("inf"),
    "10**400": 10**400,
    "10**5000": 10**5000,
    "2**63": 2**63,
    "True": True,
    "False": False,
    "1j": 1j,
    "int64": np.int64(1),
    "float32": np.float32(1),
    "bool_": np.bool_(True),
    "object": object(),
    "mute": Mute(),
    "type": dict,
    "function": lambda *_: None,
    "array": np.array([1.0, 2.0]),
    "ints": np.array([1, 2]),
    "empty array": np.zeros(0),
    "0-d": np.array(3),
    "objects": np.array([None, "x"], object),
    "masked": np.ma.masked_array(np.zeros((8, 16), np.float32), mask=True),
    "torch": Torchlike(),
    "(1.0, 1.0)": (1.0, 1.0),
    "(1, 1)": (1, 1),
    "[[]]": [[]],
    "['x']": ["x"],
    "[None]": [None],
    "2-d": np.zeros((2, 2)),
    "{'a': None}": {"a": None},
    "{'x': 1}": {"x": 1},
    "lone surrogate": "\ud800",
}

X = np.random.default_rng(0).standard_normal((8, 16)).astype(np.float32)
P, T = Problem(8, head_dim=16), Tiling(4, 4)
RESULT = flashsim.run(X, X, X, tiling=T)
COUNTED = flashsim.count(P, tiling=T)
SCHEDULE = Schedule(P, T)

INTS = "1 int64"
FLAGS = "True False bool_"
NUMBERS = f"-1 0 1.5 2**63 float32 {INTS}"
NOTHING = ""
SEEDS = f"0 2**63 10**400 10**5000 {INTS}"


def run(**options):
    arrays = {"q": X, "k": X, "v": X, "tiling": T, **options}
    return flashsim.run(arrays.pop("q"), arrays.pop("k"), arrays.pop("v"), **arrays)


def numba(**options):
    return run(backend="numba", **options)


def sweep(**options):
    return flashsim.sweep(**{"n_q": 8, "head_dim": 16, "tiling": T, **options})


def device(**fields):
    return Device(**{"name": "mine", "sram_bytes": 1 << 16, "sram_per_sm": 1 << 16, **fields})


def backward(dout=X, **options):
    return RESULT.backward(dout, **{"tiling": T, **options})


def problem(**fields):
    """A problem that can be counted, not only made."""
    return Problem(**{"n_q": 8, "head_dim": 16, **fields})


#: By function: what it takes, and the parameters that take just that.
TAKES = {
    run: {
        NOTHING: "q k v algorithm device backend key_order nan_policy threads",
        FLAGS: "causal trace",
        "None (1,1) ints": "window",
        "0 1 1.5 2**63 int64 float32": "softcap",
        f"None {NUMBERS}": "scale",
        "None": "bias mask block_mask cu_seqlens_q cu_seqlens_k tiling",
    },
    numba: {"None": "micro_kernel"},
    backward: {NOTHING: "dout", "None": "tiling", f"None {FLAGS}": "deterministic trace"},
    flashsim.count: {
        NOTHING: "problem algorithm direction device key_order level",
        "None": "tiling l2 splits cache_seqlens shared_prefix",
        f"None {FLAGS}": "pack_gqa",
    },
    flashsim.compare: {
        NOTHING: "algorithms backend algorithm",
        "None": "dout backward_tiling",
        "True bool_": "trace",
    },
    sweep: {
        f"{INTS} ints 0-d (1,1)": "n_q batch heads head_dim",
        f"None [None] {INTS} ints 0-d (1,1)": "n_kv head_dim_v kv_heads sram_bytes",
        "None": "n executor",
        "None [None]": "tiling",
        NOTHING: "dtype algorithm direction device key_order method",
        FLAGS: "causal progress",
        "None [None] (1,1)": "window",
        "0 1 1.5 1e39 2**63 int64 float32 array ints 0-d (1,1) (1.0,1.0)": "softcap",
        "None 'x' '64'": "path",
    },
    problem: {
        INTS: "n_q head_dim batch heads",
        f"None {INTS}": "n_kv head_dim_v kv_heads page_size",
        NOTHING: "dtype",
        FLAGS: "causal latent",
        "None (1,1) ints": "window",
        "0 1 1.5 2**63 int64 float32": "softcap",
        f"None {NUMBERS}": "scale",
        "None": "cu_seqlens_q cu_seqlens_k block_mask",
        "None (1,1)": "bias",
        "0": "shared_prefix",
        "None type function": "mask",
    },
    Tiling: {INTS: "block_q block_k"},
    Tiling.preset: {NOTHING: "name", INTS: "head_dim", FLAGS: "causal"},
    Tiling.fit: {NOTHING: "problem device algorithm direction"},
    T.clip: {NOTHING: "problem"},
    T.buffers: {NOTHING: "problem algorithm"},
    T.footprint: {NOTHING: "direction"},
    T.check: {NOTHING: "device"},
    Schedule: {NOTHING: "problem tiling outer key_order", FLAGS: "dense"},
    device: {
        "'' 'x' '64' lone-surrogate": "name source link",
        INTS: "sram_bytes sram_per_sm registers_per_sm sm_count l2_bytes hbm_bytes l2_partitions",
        f"{INTS} 1.5 1e39 2**63 float32": "hbm_bandwidth",
        f"0 {INTS} 1.5 1e39 2**63 float32": "l2_bandwidth",
        "{} {'x':1}": "tensor_flops cuda_flops",
        "(1,1)": "compute_capability",
    },
    Device.get: {NOTHING: "device"},
    Device.get("H100").with_sram: {INTS: "sram_bytes"},
    Device.get("H100").peak: {NOTHING: "dtype"},
    Device.get("H100").ridge: {NOTHING: "dtype"},
    BlockMask: {NOTHING: "grid", INTS: "block_q block_k"},
    Trace.load: {NOTHING: "path"},
    flashsim.load_sample: {NOTHING: "name"},
    flashsim.load_sample_trace: {NOTHING: "name"},
    flashsim.random_inputs: {NOTHING: "problem", SEEDS: "seed"},
    COUNTED.bytes: {"None": "op tensor"},
    COUNTED.flops: {"None": "kind"},
    COUNTED.on_chip: {"None": "op"},
    L2Model: {
        NOTHING: "launch walk",
        f"None {INTS}": "blocks_per_sm partitions ways heads_in_group",
        "0": "jitter",
        FLAGS: "flush",
        SEEDS: "seed",
    },
    l2.dram: {NOTHING: "requested", "None": "model"},
    l2.curves: {NOTHING: "requested", "None": "model"},
    ladder.climb: {
        INTS: "n_q head_dim",
        f"None {INTS}": "n_kv",
        NOTHING: "dtype device",
        "None": "tiling rungs",
        NUMBERS: "magnify",
        SEEDS: "seed",
    },
    roofline.roofline: {
        NOTHING: "counted",
        "None": "l2",
        f"None {INTS} 1.5 1e39 2**63 float32": "seconds measured_bytes",
    },
    roofline.ridge_points: {NOTHING: "device"},
    roofline.textbook_bytes: {NOTHING: "problem algorithm direction"},
    predict.predict: {
        NOTHING: "problem direction algorithm device splits",
        "None": "kernels tiling constants",
        "None {}": "heads_in_group",
        f"None {FLAGS}": "pack_gqa",
    },
    reproduce.tables: {NOTHING: "name"},
    verify.verify: {"[] ()": "passes", "'' 'x' '64' lone-surrogate": "title", "None": "l2"},
}

#: What the other parameters are.
OTHERS = {
    flashsim.count: {"problem": P, "tiling": T},
    flashsim.compare: {"q": X, "k": X, "v": X, "tiling": T, "algorithms": ["flash2"]},
    Tiling: {"block_q": 4, "block_k": 4},
    Tiling.preset: {"name": "fa2-forward", "head_dim": 64},
    Tiling.fit: {"problem": P},
    T.buffers: {"problem": P},
    T.footprint: {"problem": P},
    T.check: {"problem": P, "device": "H100"},
    Schedule: {"problem": P, "tiling": T},
    BlockMask: {"grid": [[True]], "block_q": 4, "block_k": 4},
    flashsim.random_inputs: {"problem": P},
    l2.dram: {"requested": COUNTED},
    l2.curves: {"requested": COUNTED},
    ladder.climb: {"n_q": 8, "n_kv": 8, "head_dim": 16, "rungs": ["naive"]},
    roofline.roofline: {"counted": COUNTED},
    roofline.textbook_bytes: {"problem": P, "algorithm": "flash2"},
    predict.predict: {"problem": Problem(64, head_dim=64, dtype="float16"), "kernels": "portable"},
    verify.verify: {"passes": [], "title": "none"},
}


CASES = {
    f"{function.__qualname__}-{parameter}": (function, parameter, taken)
    for function, by_values in TAKES.items()
    for taken, parameters in by_values.items()
    for parameter in parameters.split()
}


def error_of(function, options):
    """The error of ours, or None; any other exception goes through."""
    try:
        function(**options)
    except FlashSimError as error:
        return error
    return None


@pytest.mark.filterwarnings("ignore:out contains:RuntimeWarning")
@pytest.mark.parametrize("case", CASES)
def test_a_right_answer_or_an_error_of_ours(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    function, parameter, taken = CASES[case]
    for name, value in WRONG.items():
        error = error_of(function, {**OTHERS.get(function, {}), parameter: value})
        label = name.replace(", ", ",").replace(": ", ":").replace(" ", "-")
        assert (error is None) == (label in taken.split()), (
            f"{name}: {error or 'taken without a word'}"
        )
        if error is not None:
            assert isinstance(error, (ValueError, TypeError, RuntimeError, NotImplementedError))
            assert 10 < len(str(error)) < 1000, name


R = flashsim.run(X, X, X, tiling=T, trace=True)
EMPTY = flashsim.run(X, X, X, mask=lambda q, k: q < 0 * k, tiling=T, trace=True)
PAGES = np.zeros((2, 1, 4, 16), np.float32)
HUGE = np.array([[2**64 - 1]], np.uint64)


test_what_cannot_be_done_is_said_at_once = refuses(r"""
load_sample("layer1") -> OptionError: unknown sample 'layer1'; choose from layer0, layer5
load_sample_trace("h200") -> OptionError: unknown trace 'h200'; ... choose from h200-forward
warm(direction="sideways") -> OptionError: unknown direction 'sideways'
warm(algorithm="flash1") -> OptionError: unknown algorithm 'flash1'
compare(X, X, X, backward_tiling=T) -> OptionError: pass dout
flashsim.sweep() -> OptionError: sweep() needs the query lengths; pass n_q=
flashsim.sweep(64, device=[Device("x", 9999, 9999), Device("x", 9999, 9999, sm_count=2)])
    -> OptionError: device has different devices with one name, 'x'
flashsim.sweep(range(1, 10**18)) -> OptionError: n_q has more than 1,000,000 points
flashsim.sweep(itertools.count(1)) -> OptionError: n_q has more than 1,000,000 points
flashsim.sweep(range(1, 10**5), head_dim=range(1, 577))
    -> OptionError: a sweep has more than 1,000,000 points
random_inputs(Problem(2**50)) -> OptionError: this machine has too little memory for q, k, v
random_inputs(Problem(2**62, batch=2**40)) -> OptionError: too little memory for q
count(Problem(2**24, mask=lambda q, k: q >= k), tiling=Tiling(64, 64))
    -> MaskError: evaluated at 2.8e+14 scores, but the limit is 1.1e+12
quantize(*[np.full((4, 8), 1e300)] * 3) -> OptionError: q contains NaN or infinity (in float32
merge(*[np.ones((4, 8), int), np.ones(4, np.float32)] * 2)
    -> OptionError: unknown dtype of out_a 'int64'
R.trace.diff("x") -> DTypeError: needs a Trace or a Traffic, got 'x'
R.trace.same_events(COUNTED) -> DTypeError: other must be a flashsim.Trace
R.trace.frame("x") -> TraceError: step= must be from 0 to 3, ... got 'x'
EMPTY.trace.frame(0) -> TraceError: this trace has no visits, and so no frames
R.trace.frame(0, 1) -> TraceError: head= must be from 0 to 0, got 1
list(R.trace.schedule.visits(-1)) -> OptionError: outer must be from 0 to 1, got -1
list(R.trace.schedule.visits(0, 1)) -> OptionError: part must be from 0 to 0, got 1
R.trace.to_perfetto(".") -> OptionError: it is a folder; name a file
R.trace.to_perfetto(3) -> DTypeError: path must be the path of a file, got 3
run(q=X.astype(">f4"), k=X.astype(">f4"), v=X.astype(">f4"))
    -> DTypeError: '>f4' is float32 with swapped byte order
run(q=X[None, None], k=PAGES, v=PAGES, algorithm="flash-decode", block_table=HUGE)
    -> OptionError: block_table[0, 0] must be a page of the pool, ... , got 9223372036854775807
""")


@pytest.mark.parametrize("value", [np.inf, np.nan])
@pytest.mark.parametrize("side", [0, 1])
def test_what_is_no_lse_is_not_merged(value, side):
    wrong = R.lse.copy()
    wrong[0] = value
    sides = [(R.out, R.lse), (R.out, R.lse)]
    sides[side] = R.out, wrong
    text = rf"lse_{'ab'[side]} contains 1 NaN or \+inf values, .*base-2 LSE by math.log\(2\)"
    with pytest.raises(flashsim.OptionError, match=text):
        flashsim.merge(*sides[0], *sides[1])


def test_a_base_2_lse_is_converted_as_the_error_says():
    halves = [flashsim.run(X, x, x) for x in (X[:4], X[4:])]
    base_2 = [r.lse / np.float32(math.log(2)) for r in halves]  # log2 of the sum of exponentials
    a, b = (lse * np.float32(math.log(2)) for lse in base_2)
    out, lse = flashsim.merge(halves[0].out, a, halves[1].out, b)
    whole = flashsim.run(X, X, X)
    np.testing.assert_allclose(out, whole.out, atol=1e-6)
    np.testing.assert_allclose(lse, whole.lse, atol=1e-6)
