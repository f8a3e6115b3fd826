"""Masks and scores as functions in the CUDA C++ kernels, without a GPU: results and gradients of
their own sources on a CPU, registers, what is refused, and that other kernels do not change.
"""

import re
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import flashsim
from flashsim import Problem, Tiling
from flashsim.backends.launch.device_tables import lower
from flashsim.backends.launch.functions import functions_of, plain_of, ramp_of, tile_of
from flashsim.backends.launch_policy.hopper import HOPPER
from flashsim.backends.launch_policy.hopper_fp8 import HOPPER_FP8
from flashsim.backends.launch_policy.portable import PORTABLE
from flashsim.errors import UnsupportedError
from flashsim.problem import oracle
from flashsim.schedule.schedule import Schedule

pytest.importorskip("cupy")
import emulator
import test_emulated
import test_emulated_decode
from compiled import compares_maxima, compiled, errors, some, thorough
from cupy_checks import ROOMY, budget, check_lse, hardware_tanh, make
from decode_cases import Case
from gpus import H200
from test_hopper_kernels import check

pytestmark = pytest.mark.promise("twice plain attention's error", "kernels compile")

GPU = replace(H200, multiprocessors=2)
RNG = np.random.default_rng(3)
slopes = np.linspace(0.05, 0.2, 4, dtype=np.float32)
table = RNG.normal(size=(4, 1024)).astype(np.float32)
bias = RNG.normal(size=(300, 300)).astype(np.float16)
planes = RNG.normal(size=(2, 210, 208)).astype(np.float16)  # rows of whole 16 bytes
wide_planes = planes[:, :208].astype(np.float32)  # whole groups of eight rows
buckets = RNG.normal(size=(4, 12)).astype(np.float32)
plane = RNG.normal(size=(210, 204)).astype(np.float32)
document = np.sort(RNG.integers(0, 3, (2, 512)).astype(np.int32), axis=1)
segment = np.sort(RNG.integers(0, 9, 512).astype(np.int16))
of_keys = segment + 1
lengths = np.array([100, 3])

#: Masks and scores.
F = SimpleNamespace(
    causal=lambda b, h, q, k: q >= k,
    documents=lambda b, h, q, k: (q >= k) & (document[b, q] == document[b, k]),
    # and rows and columns of tiles without a score
    dilated=lambda b, h, q, k: ((q - k) % 7 != 3) & (k // 64 != 1),
    late=lambda b, h, q, k: k + 40 <= q,  # the first rows see no key
    prefixes=lambda b, h, q, k: (k < lengths[b]) | (q >= k),
    # a key past the length is kept by no query, without any last query
    padded=lambda b, h, q, k: (k < 30 + lengths[b]) & (q >= k),
    chunked=lambda b, h, q, k: (q // 70 == k // 70) & (q >= k),
    # other numbers for keys; those of the first queries have no key
    segments=lambda b, h, q, k: segment[q] == of_keys[k],
    alibi=lambda s, b, h, q, k: s + slopes[h] * (k - q),
    steep=lambda s, b, h, q, k: s + 7.77 * slopes[h] * (k - q),
    # another step per head, and one that no 16-bit number holds
    falling=lambda s, b, h, q, k: s - (q - 2 * k + 7) * 0.3 * slopes[h] * (h - 1),
    relative=lambda s, b, h, q, k: s + table[h, q - k + 512],
    # an element that comes ahead, and one that does not
    relative_and_keys=lambda s, b, h, q, k: s + table[h, q - k + 512] + bias[0, k],
    biased=lambda s, b, h, q, k: s + bias[q, k],
    of_planes=lambda s, b, h, q, k: s + planes[h // 2, q, k] * slopes[h],
    of_wide_planes=lambda s, b, h, q, k: s + wide_planes[h // 2, q, k],
    of_plane=lambda s, b, h, q, k: s + plane[q, k],
    capped=lambda s, b, h, q, k: 3 * np.tanh(s / 3) * (1 + slopes[h]),
    decaying=lambda s, b, h, q, k: s * np.exp(k - q),  # beyond float32 at keys after the query
    bounded=lambda s, b, h, q, k: 40 * np.tanh(s / 40) - np.minimum(np.abs(k - q), 9),
)


def bucketed(s, b, h, q, k):  # as T5 does, and ALiBi without a causal mask
    bucket = np.minimum(np.log2(1.0 + np.abs(q - k)).astype(int), 5) + 6 * (k > q)
    return s + buckets[h, bucket] - 0.02 * np.abs(k - q)


CAPTURED = {
    F.alibi: {"slopes": slopes},
    F.falling: {"slopes": slopes},
    F.steep: {"slopes": slopes},
    F.relative: {"table": table},
    bucketed: {"buckets": buckets},
    F.relative_and_keys: {"table": table, "bias": bias},
    F.biased: {"bias": bias},
    F.of_planes: {"planes": planes, "slopes": slopes},
    F.of_wide_planes: {"wide_planes": wide_planes},
    F.of_plane: {"plane": plane},
    F.capped: {"slopes": slopes},
}
SINKS = np.array([0.3, -1.0, 2.0, 0.0], np.float32)


def problem(n_q, n_kv, d, mask=None, score=None, **more):
    """With gradients of all that the score function captures."""
    given = {"heads": 4, "kv_heads": 2, "dtype": "bfloat16", **more}
    wanted = tuple(CAPTURED.get(score, {}))
    functions = {"mask_mod": mask, "score_mod": score, "score_grads": wanted}
    return Problem(n_q, n_kv, d, **functions, **given)


def case(n_q, n_kv, d, mask=None, score=None, **more):
    return problem(n_q, n_kv, d, mask, score, **more), score


def forward(p, score, family, machine=test_emulated.HOPPER):
    """O and LSE within the budget of their type; inputs, and what the kernels held."""
    captured = tuple(CAPTURED.get(score, {}).values())
    x = make(p) | {"captured": captured, "sinks": SINKS[: p.heads]}
    held = {"captured": captured, "sinks": x["sinks"] if p.sinks else None}
    quiet = replace(p, score_grads=())
    passes = family.forward_passes(quiet, None, GPU, "ascending", "")
    arrays, _ = emulator.run_forward(machine, passes, quiet, x)
    inputs = [x[name] for name in "qkv"]
    (true, lse), (rough, rough_lse) = (
        oracle.attention(*inputs, p, dtype=t, **held) for t in ("float64", p.dtype)
    )
    got = arrays["o"][..., : p.head_dim_v].astype(np.float64)
    assert np.abs(got - true).max() <= budget(true, rough, p)
    tanh = hardware_tanh(p) or (score in (F.capped, F.bounded) and p.dtype == "bfloat16")
    check_lse(arrays["lse"], lse, rough_lse if tanh else lse)
    return x, arrays, held


def compare(p, score, family, algorithm, machine=test_emulated.HOPPER):
    """Besides, dQ, dK, dV and the gradients of captured arrays."""
    x, arrays, held = forward(p, score, family)
    inputs = [x[name] for name in "qkv"]
    passes = family.backward_passes(p, None, GPU, "ascending", "", algorithm)
    arrays = arrays | emulator.read_by_functions(p, x)
    fused = algorithm == "flash2-fused"
    arrays, _ = emulator.run_backward(machine, passes, p, arrays, x, fused=fused)
    true = oracle.gradients(*inputs, x["dout"], p, **held)
    rough = oracle.gradients(*inputs, x["dout"], p, dtype=p.dtype, **held)
    for name in true.keys() - {"dsinks"}:  # which the engine makes of delta
        got = arrays[name][..., : true[name].shape[-1]].astype(np.float64)
        assert np.abs(got - true[name]).max() <= budget(true[name], rough[name], p), name
    return passes


#: Every kernel: both warpgroups alike, columns shared, roles; spans and lists of tiles.
PACKED = {"cu_seqlens_q": (0, 70, 71, 170), "cu_seqlens_k": (0, 100, 103, 200)}
PAIR = {"heads": 2, "kv_heads": 1}
HOPPER_CASES = {
    "causal 64": case(150, 200, 64, F.causal),
    "alibi 64": case(150, 200, 64, F.causal, F.alibi, batch=2),
    "falling 64": case(200, 250, 64, F.late, F.falling, sinks=True),
    "prefixes 64": case(200, 250, 64, F.prefixes, batch=2),
    "padded 128": case(200, 250, 128, F.padded, batch=2),
    "chunked 128": case(200, 250, 128, F.chunked, F.alibi),
    "segments 192": case(200, 250, 192, F.segments),
    "segments packed 64": case(170, 200, 64, F.segments, F.relative, **PACKED),
    "falling 128": case(150, 400, 128, None, F.falling),
    "alibi packed 64": case(170, 200, 64, None, F.alibi, **PACKED),
    "alibi dilated 64": case(200, 300, 64, F.dilated, F.alibi, causal=True),
    "relative 128": case(150, 200, 128, None, F.relative),
    "relative 96": case(300, 400, 96, None, F.relative, **PAIR),  # 192 + 112 distances
    "bucketed 64": case(150, 300, 64, None, bucketed, sinks=True),
    "bucketed fp16": case(200, 130, 128, F.late, bucketed, dtype="float16"),
    "bucketed packed 128": case(170, 200, 128, F.causal, bucketed, **PACKED),
    "bucketed 256": case(130, 130, 256, None, bucketed),
    "relative 192": case(300, 400, 192, None, F.relative),
    "relative and keys 64": case(150, 200, 64, None, F.relative_and_keys),
    "documents 128": case(300, 300, 128, F.documents, batch=2, **PAIR),
    "dilated 32": case(200, 200, 32, F.dilated, F.alibi),
    "late 64": case(200, 250, 64, F.late, F.biased),
    "capped 192": case(150, 200, 192, F.causal, F.capped),
    "documents 192": case(200, 200, 192, F.documents),
    "softcap 96": case(130, 130, 96, F.dilated, softcap=3.0),
    "sinks 64": case(100, 130, 64, sinks=True, causal=True),
    "planes 64": case(200, 207, 64, F.late, F.of_planes),
    "wide planes 64": case(200, 207, 64, F.late, F.of_wide_planes),
    "plane 128": case(130, 200, 128, None, F.of_plane),
    "bounded 64": case(130, 200, 64, F.late, F.bounded, sinks=True),
    "packed 64": case(170, 200, 64, F.causal, F.relative, **PACKED),
    "packed 128": case(170, 200, 128, F.dilated, **PACKED),
}
OFTEN = (
    "alibi 64",
    "falling 128",
    "relative 96",
    "relative and keys 64",
    "padded 128",
    "packed 64",
)


@pytest.mark.parametrize("algorithm", ["flash2-fused", thorough("flash2")])
@pytest.mark.parametrize("name", [n if n in OFTEN else thorough(n) for n in HOPPER_CASES])
def test_hopper_kernels(name, algorithm):
    p, score = HOPPER_CASES[name]
    compare(p, score, HOPPER, algorithm)


#: Without gradients of captured arrays, products add linear functions and tables to the scores.
ALONE = {
    "alibi 64": {"RAMP": 1, "STATISTICS": 1, "SCORE_MOD": 0},
    "falling 128": {"RAMP": 1, "STATISTICS": 1, "SCORE_MOD": 0},
    "alibi packed 64": {"RAMP": 1, "STATISTICS": 1},
    "alibi dilated 64": {"RAMP": 1, "STATISTICS": 1},
    "relative 96": {"DISTANCES": 2, "STATISTICS": 1, "SCORE_MOD": 0},
    "packed 64": {"DISTANCES": 2, "STATISTICS": 1, "SCORE_MOD": 0},
    "bucketed 64": {"DISTANCES": 2, "STATISTICS": 1, "SCORE_MOD": 0},
    "bucketed fp16": {"DISTANCES": 2, "STATISTICS": 0, "SCORE_MOD": 1, "ADDED": 1},
    "relative and keys 64": {"STATISTICS": 0, "SCORE_MOD": 1},
    "late 64": {"STATISTICS": 0, "SCORE_MOD": 1},
}


@pytest.mark.parametrize("algorithm", ["flash2-fused", thorough("flash2")])
@pytest.mark.parametrize(
    "name", [n if n in ("alibi 64", "relative 96") else thorough(n) for n in ALONE]
)
def test_gradients_of_q_k_and_v_alone(name, algorithm):
    p, score = HOPPER_CASES[name]
    passes = compare(replace(p, score_grads=()), score, HOPPER, algorithm)
    (one,) = (x.kernel for x in passes if x.stage.outer == "keys" and x.kernel.boxes)
    made = dict(one.constants)
    assert ALONE[name] == {key: made[f"FS_{key}"] for key in ALONE[name]}


@pytest.mark.parametrize(
    ("family", "name"),
    [(PORTABLE, "late 64"), thorough(HOPPER, "relative 128"), thorough(HOPPER, "documents 192")],
)
def test_traces_hold_what_functions_read(family, name):
    """Forward, three passes and fused: the visits and bytes that kernels report, and the others."""
    p, score = HOPPER_CASES[name]
    x = make(p) | {"captured": tuple(CAPTURED.get(score, {}).values()), "sinks": None}
    quiet, machine = replace(p, score_grads=()), test_emulated.HOPPER
    passes = family.forward_passes(quiet, None, GPU, "ascending", "counts")
    arrays, stages = emulator.run_forward(machine, passes, quiet, x)
    how = {"mask_mod": p.mask_mod, "score_mod": score, "device": ROOMY, "trace": True}
    inputs = [x[name] for name in "qkv"]
    simulated = flashsim.run(*inputs, tiling=passes[0].tables.schedule.tiling, **how)
    np.testing.assert_array_equal(stages[0].events, simulated.trace.stages[0].events)
    arrays = arrays | emulator.read_by_functions(p, x)
    for algorithm in ("flash2", "flash2-fused"):
        passes = family.backward_passes(p, None, GPU, "ascending", "counts", algorithm)
        fused = algorithm == "flash2-fused"
        _, stages = emulator.run_backward(machine, passes, p, arrays, x, fused=fused)
        tiling = passes[1].tables.schedule.tiling
        again = flashsim.run(*inputs, algorithm=algorithm, tiling=tiling, **how)
        given = {"captured": p.score_grads, "tiling": tiling}
        for one, expected in zip(
            stages, again.backward(x["dout"], **given).trace.stages, strict=True
        ):
            np.testing.assert_array_equal(one.events, expected.events, one.name)


#: Biases of -inf, some of whole rows; and functions that are infinite at a score of 0, or where no
#: query or key exists.
gaps = np.where(RNG.random((4, 1024)) < 0.3, -np.inf, table).astype(np.float32)
holes = np.where(RNG.random((210, 208)) < 0.3, -np.inf, planes[0]).astype(np.float16)
holes[:70] = -np.inf
temperature = np.array([0.5, 1, 2, 0.3], np.float32)
open_keys = RNG.random(200) < 0.5


INFINITE = dict(
    with_gaps=lambda s, b, h, q, k: s + gaps[h, q - k + 512],
    with_holes=lambda s, b, h, q, k: (s + holes[q, k]) * temperature[h],
    of_open_keys=lambda s, b, h, q, k: s + np.log(open_keys[k]),
    divided=lambda s, b, h, q, k: np.where(k <= q, s / (q - k + 1.0), -np.inf),
    to_the_last_query=lambda s, b, h, q, k: s + np.log(150.0 - q),
    to_the_last_key=lambda s, b, h, q, k: s * np.log(200.0 - k),
    growing=lambda s, b, h, q, k: s * np.exp(2.0 * (k - 199)),  # beyond float32 past the last key
    roots=lambda s, b, h, q, k: s - 1e-6 * np.log(abs(s)) + 0.1 * np.maximum(s, 0.0) ** 1.5,
)
vars(F).update(INFINITE)

CAPTURED |= {
    F.with_gaps: {"gaps": gaps},
    F.with_holes: {"holes": holes, "temperature": temperature},
    F.of_open_keys: {"open_keys": open_keys},  # without a gradient
}


@pytest.mark.parametrize(
    ("family", "algorithm", "d"),
    [
        (HOPPER, "flash2-fused", 64),
        thorough(HOPPER, "flash2-fused", 128),
        thorough(HOPPER, "flash2-fused", 192),
        thorough(HOPPER, "flash2", 256),
        thorough(PORTABLE, "flash2", 64),
    ],
)
@pytest.mark.parametrize("score", INFINITE.values(), ids=INFINITE)
def test_infinite_scores(score, family, algorithm, d):
    wanted = tuple(n for n, x in CAPTURED.get(score, {}).items() if x.dtype != bool)
    p = replace(problem(150, 200, d), score_mod=score, score_grads=wanted)
    compare(p, score, family, algorithm)


#: What is run with and without faults.
SEEDED = {
    "causal": case(130, 130, 64, F.causal, F.alibi, sinks=True),
    "called": case(130, 130, 64, F.dilated, F.alibi, sinks=True),
    "planes": case(128, 128, 64, None, F.of_planes),  # a bias that comes by TMA
    "interleaved": case(128, 128, 64, None, F.of_wide_planes),
    "table": case(128, 128, 64, None, F.relative),  # which another warp reads
    "steep": case(130, 300, 64, None, F.steep),  # ALiBi in the scores' product
    "chunked": case(130, 200, 64, F.chunked),
    "falling": case(130, 200, 64, F.late, F.falling),
    "relative": case(130, 200, 64, None, F.relative),
}
FORWARD_FAULTS = {
    ("causal", "a range that ends a key too late"): (
        "min(keep.hi, keys.high + start) - first}",
        "min(keep.hi, keys.high + start + FAULT) - first}",
    ),
    ("called", "a called mask shifted by a key"): (
        "flash_mask(a.captured, at.at, at.query(q), at.key(k))",
        "flash_mask(a.captured, at.at, at.query(q), at.key({k.base + FAULT, k.step}))",
    ),
    ("causal", "a partial tile taken for a full one"): (
        "if (visit.masked) ask_functions<true, true, true>",
        "if (visit.masked && !FAULT) ask_functions<true, true, true>",
    ),
    ("causal", "an array read for another head"): (
        "head_at(a, it.walk / a.heads, it.walk % a.heads, it.outer)",
        "head_at(a, it.walk / a.heads, (it.walk + FAULT) % a.heads, it.outer)",
    ),
    ("causal", "a sink left out of the sum"): (
        "l * mine + exp2_approx((sink - top) * LOG2E)",
        "l * mine + (FAULT ? 0.0f : exp2_approx((sink - top) * LOG2E))",
    ),
    ("planes", "a bias of another head"): (
        "plane = flash_tile_plane(a.captured, at.at)",
        "plane = (flash_tile_plane(a.captured, at.at) + FAULT) % 2",
    ),
    ("planes", "a bias' rows of another warpgroup"): (
        "row = it.own.start + 64 * g;",
        "row = it.own.start + (FAULT ? 64 - 64 * g : 64 * g);",
    ),
    ("interleaved", "a bias' rows in their own order"): (
        "row_of_eight % 4 * 2 + row_of_eight / 4",
        "(FAULT ? row_of_eight : row_of_eight % 4 * 2 + row_of_eight / 4)",
    ),
    ("interleaved", "a bias' next eight rows"): ("row / 8, plane)", "row / 8 + FAULT, plane)"),
    ("table", "a table's element of another distance"): (
        "query - key - (BLOCK_K - 1) + n;",
        "query - key - (BLOCK_K - 1) + n + FAULT;",
    ),
    ("steep", "the running maximum stays where it was"): (
        "step * BLOCK_K * (visit.tile - tile)",
        "step * BLOCK_K * (FAULT ? 0 : visit.tile - tile)",
    ),
    ("steep", "a step rounded to 16 bits"): ("if (row < 3)", "if (row < 3 - 2 * FAULT)"),
    ("steep", "another head's step"): (
        "flash_ramp_step(a.captured, at.at)",
        "flash_ramp_step(a.captured, FAULT ? head_at(a, 0, 0, 0).at : at.at)",
    ),
    ("steep", "the LSE without the row's own number"): (
        "flash_score(a.captured, 0.0f, at.at, at.query(row), first_key)",
        "flash_score(a.captured, 0.0f, at.at, at.query(FAULT ? 0 : row), first_key)",
    ),
}
BACKWARD_FAULTS = {
    ("chunked", "a range of queries that ends too late"): (
        "queries.high + start) - first}",
        "queries.high + start + FAULT) - first}",
    ),
    ("falling", "another head's step"): (
        "flash_ramp_step(a.captured, at.at) *",
        "flash_ramp_step(a.captured, FAULT ? head_at(a, 0, 0, 0).at : at.at) *",
    ),
    ("falling", "the key's number in its warpgroup"): (
        "key = (threadIdx.x / 128 - 1) * 64 +",
        "key = (FAULT ? 0 : threadIdx.x / 128 - 1) * 64 +",
    ),
    ("falling", "the function of another query"): (
        "at.query(existing(first + lane + 32 * i, it.end))",
        "at.query(existing(first + (FAULT ? 0 : lane) + 32 * i, it.end))",
    ),
    ("relative", "a term of another distance"): (
        "- 64 * g - fragment_row() + BLOCK_K - 1;",
        "- 64 * g - fragment_row() + BLOCK_K - 1 + FAULT;",
    ),
}
FAULTY = {
    "forward": emulator.Faulty(900, FORWARD_FAULTS, "hopper/forward.cu"),
    "backward": emulator.Faulty(900, BACKWARD_FAULTS, "hopper/backward.cu"),
}
#: In `make test`: all of the forward, and one of the backward.
SEEDED_RUNS = [
    *(("forward", *x) for x in FORWARD_FAULTS),
    *(("forward", case, "") for case in ("causal", "planes", "interleaved", "table", "steep")),
    ("backward", "falling", "another head's step"),
    *(thorough("backward", *x) for x in BACKWARD_FAULTS if x[1] != "another head's step"),
    *(thorough("backward", case, "") for case in ("chunked", "falling", "relative")),
]


@pytest.mark.parametrize(("direction", "case", "fault"), SEEDED_RUNS)
def test_faults_are_caught(direction, case, fault):
    """The same kernels without a fault pass."""
    (p, score), machine = SEEDED[case], FAULTY[direction]
    p = replace(p, score_grads=())
    assert case != "steep" or ramp_of(p) is not None
    machine.seeded = (case, fault) if fault else ""
    with pytest.raises(AssertionError) if fault else nullcontext():
        if direction == "forward":
            forward(p, score, HOPPER, machine)
        else:
            compare(p, score, HOPPER, "flash2-fused", machine)


PORTABLE_CASES = {
    "alibi 64": case(150, 200, 64, F.causal, F.alibi, batch=2),
    "relative 128": case(150, 200, 128, None, F.relative),
    "softcap 128": case(300, 300, 128, F.documents, batch=2, softcap=3.0),
    "float32": case(100, 130, 64, F.dilated, F.capped, dtype="float32"),
    "late float32": case(100, 130, 32, F.late, F.biased, dtype="float32"),
    "packed 64": case(170, 200, 64, F.causal, F.relative, **PACKED),
    "packed float32": case(170, 200, 32, F.late, F.biased, dtype="float32", **PACKED),
    "sinks float32": case(100, 130, 64, sinks=True, causal=True, dtype="float32"),
}


@pytest.mark.parametrize("algorithm", ["flash2-fused", thorough("flash2")])
@pytest.mark.parametrize(
    "name", [n if n in ("relative 128", "float32") else thorough(n) for n in PORTABLE_CASES]
)
def test_portable_kernels(name, algorithm):
    p, score = PORTABLE_CASES[name]
    compare(p, score, PORTABLE, algorithm)


DECODE_CASES = {
    "documents, alibi": case(3, 300, 64, F.documents, F.alibi, batch=2),
    "late, biased": case(17, 280, 64, F.late, F.biased),
    "sinks": case(2, 200, 128, None, F.relative, sinks=True),
}


@pytest.mark.parametrize("splits", [3, thorough(1)])
@pytest.mark.parametrize("name", [n if n == "sinks" else thorough(n) for n in DECODE_CASES])
def test_decoding(name, splits):
    p, score = DECODE_CASES[name]
    p = replace(p, score_grads=())
    captured = tuple(CAPTURED[score].values())
    x = make(p) | {"captured": captured, "sinks": SINKS[: p.heads]}
    gpu = replace(H200, compute_capability=(8, 0))  # without clusters
    case = Case(p, (p.n_kv,) * p.batch)
    out, lse, *_ = test_emulated_decode.launch(test_emulated_decode.AMPERE, case, x, splits, gpu)
    inputs, sinks = [x[n] for n in "qkv"], x["sinks"] if p.sinks else None
    exact, rough = (
        oracle.attention(*inputs, p, dtype=t, captured=captured, sinks=sinks)
        for t in ("float64", p.dtype)
    )
    assert np.abs(out.astype(np.float64) - exact[0]).max() <= budget(exact[0], rough[0], p)
    check_lse(lse, exact[1], exact[1])


# -- tables of tiles ------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 64, 1000, 1024])
@pytest.mark.parametrize("by", ["row", "col"])
@pytest.mark.parametrize("key_order", ["ascending", "descending"])
def test_a_causal_function_has_the_spans_of_the_named_mask(n, by, key_order):
    """So it runs the named mask's loops."""
    outer = "queries" if by == "row" else "keys"
    spans = [
        lower(Schedule(p, Tiling(64, 64), outer, key_order), by).spans
        for p in (Problem(n, n, 64, mask_mod=F.causal), Problem(n, n, 64, causal=True))
    ]
    np.testing.assert_array_equal(*spans)


def test_spans_cover_the_tiles_of_a_list_or_there_are_none():
    for mask, contiguous in ((F.documents, True), (F.late, True), (F.dilated, False)):
        for by, outer in (("row", "queries"), ("col", "keys")):
            schedule = Schedule(Problem(300, 300, 64, mask_mod=mask), Tiling(64, 32), outer)
            tables = lower(schedule, by)
            assert (tables.spans is not None) == (contiguous or by == "col"), (mask, by)
            if tables.spans is None:
                continue
            ptr, index, kind = schedule.row_csr if by == "row" else schedule.col_csr
            for outer_tile, (lo, full_lo, full_hi, hi) in enumerate(tables.spans.tolist()):
                mine = slice(ptr[outer_tile], ptr[outer_tile + 1])
                np.testing.assert_array_equal(index[mine], np.arange(lo, hi))
                masked = [not full_lo <= tile < full_hi for tile in range(lo, hi)]
                np.testing.assert_array_equal(kind[mine] != 0, masked)


# -- compiled -------------------------------------------------------------------------------------

LARGE = {"heads": 16, "kv_heads": 16, "batch": 1}
large_table = np.zeros((16, 8192), np.float32)
large_document = np.zeros(4096, np.int32)


large_bias = np.zeros((4096, 4096), np.float32)


vars(F).update(
    large_relative=lambda s, b, h, q, k: s + large_table[h, q - k + 4096],
    large_documents=lambda b, h, q, k: (q >= k) & (large_document[q] == large_document[k]),
    large_biased=lambda s, b, h, q, k: s + large_bias[q, k],
    large_alibi=lambda s, b, h, q, k: s + large_table[h, 0] * (k - q),
)
#: Bytes that a thread may spill: (forward, backward). Functions that read an element per score have
#: its address beside the score.
VARIANTS = {
    "causal": ((F.causal, None), (0, 48)),
    "documents": ((F.large_documents, None), (160, 320)),
    "alibi": ((F.causal, F.large_alibi), (64, 64)),
    "table": ((F.causal, F.large_relative), (128, 240)),
    "bias": ((None, F.large_biased), (64, 160)),
}


def kernels_of(name, d):
    (mask, score), _ = VARIANTS[name]
    p = Problem(
        *(4096, 4096, d), **{"mask_mod": mask, "score_mod": score, "dtype": "bfloat16", "heads": 16}
    )
    passes = list(HOPPER.forward_passes(p, None, H200, "ascending", ""))
    grads = () if score is None else tuple(a.name for a in p.score_mod.arrays)
    p = replace(p, score_grads=grads)
    for algorithm in ("flash2", "flash2-fused"):
        passes += HOPPER.backward_passes(p, None, H200, "ascending", "", algorithm)
    return [x.kernel for one in passes for x in (*one.before, one) if x.kernel.boxes]


@pytest.mark.parametrize(
    "case",
    some(
        (("causal", 128),),
        (("alibi", 64), ("table", 128), ("bias", 128)),
        [(name, d) for name in VARIANTS for d in (64, 128, 192, 256)],
    ),
    ids=str,
)
def test_registers_and_products(case):
    name, d = case
    forward, backward = VARIANTS[name][1]
    for kernel in kernels_of(name, d):
        check(kernel, forward if kernel.name == "hopper_forward" else backward)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("d", [40, 256])
def test_kernels_are_sound_to_the_compilers_front_end(name, d):
    for kernel in kernels_of(name, d):
        assert not errors(kernel, kernel.options)


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # of the plain bfloat16 scores
@pytest.mark.parametrize("algorithm", ["flash2-fused", thorough("flash2")])
def test_infinite_slopes_of_masked_scores(algorithm):
    compare(problem(150, 150, 64, F.causal, F.decaying), F.decaying, HOPPER, algorithm)


#: A kernel that calls a mask function.
CALL = """
extern "C" __global__ void masked(FlashCaptured c, bool* out) {
    const FlashHead at = flash_head(c, blockIdx.y, blockIdx.z);
    out[threadIdx.x] = flash_mask(c, at, FlashAt(blockIdx.x), FlashAt(threadIdx.x));
}
"""


@pytest.mark.parametrize(
    "condition",
    [
        lambda b, h, q, k: np.maximum(k - k, np.maximum(h, q)) == 2 * q - q,
        lambda b, h, q, k: ~(np.maximum(np.minimum(q, k), 0) != k) | (h == 1),
        lambda b, h, q, k: np.where(q < k, k, q).clip(0) == k,
    ],
)
def test_a_maximum_is_compared_by_an_instruction_of_its_own(condition):
    """ptxas has an instruction that computes both, and its result is wrong."""
    text = functions_of(problem(100, 100, 64, condition)).plain.text + CALL
    kernel = SimpleNamespace(file="masked.cu")
    for same, wrong in (("apart == 0", False), ("a == b", True)):
        log, cubin = compiled(kernel, ("-arch=sm_90a",), text.replace("apart == 0", same))
        assert cubin, log
        assert compares_maxima(cubin) == wrong


def test_kernels_without_functions_are_compiled_as_before():
    """No constant and no text of functions reaches them, so their machine code is the same."""
    p = Problem(4096, 4096, 128, heads=16, dtype="bfloat16", causal=True)
    passes = [*HOPPER.forward_passes(p, None, H200, "ascending", "")]
    passes += HOPPER.backward_passes(p, None, H200, "ascending", "", "flash2-fused")
    passes += PORTABLE.forward_passes(p, None, H200, "ascending", "")
    for one in passes:
        assert one.kernel.functions is None
        named = {name for name, _ in one.kernel.constants}
        assert not named & {"FS_MASK_MOD", "FS_SCORE_MOD", "FS_SCORE_SUMS", "FS_SINKS", "FS_READS"}


def test_row_wise_kernels_are_not_compiled_again_for_a_function():
    p = problem(300, 300, 64, F.causal, F.alibi)
    plain = replace(p, mask_mod=None, score_mod=None, score_grads=())
    for one, other in (
        (a.kernel, b.kernel)
        for a, b in zip(
            HOPPER.backward_passes(p, None, H200, "ascending", "", "flash2-fused"),
            HOPPER.backward_passes(plain, None, H200, "ascending", "", "flash2-fused"),
            strict=True,
        )
        if not a.kernel.boxes
    ):
        assert one.functions is None
        assert dict(one.constants).keys() == dict(other.constants).keys()


def test_the_text_of_a_function_does_not_depend_on_lengths():
    """So that other lengths find it in the cache on disk."""
    texts = {functions_of(problem(n, n, 64, F.causal, F.alibi)).plain.text for n in (100, 300)}
    assert len(texts) == 1


def test_an_index_that_stays_inside_its_array_is_not_checked():
    inside = functions_of(problem(300, 300, 64, None, F.biased)).plain.text
    outside = functions_of(problem(300, 300, 64, None, F.relative)).plain.text
    beyond = functions_of(problem(600, 600, 64, None, F.relative)).plain.text
    assert "min(" not in inside.rpartition("flash_score(")[2].partition("}")[0]
    assert "flash_wrap(v" not in outside
    assert "flash_wrap(v" in beyond


def of_reads(score, n=(150, 200), **more):
    p = problem(*n, 64, None, score, **more)
    return tile_of(p), plain_of(p).band


def test_what_comes_by_tma_or_is_read_ahead():
    tile, band = of_reads(F.of_planes)
    assert (tile.spec.name, tile.shape, band) == ("planes", (2, 210, 208), None)
    assert of_reads(F.of_plane)[0].shape == (1, 210, 204)
    assert of_reads(F.biased) == (None, None), "its rows are no multiples of 16 bytes"
    assert of_reads(F.of_plane, (170, 200), **PACKED)[0] is None
    assert of_reads(F.alibi) == (None, None)
    _, band = of_reads(F.relative)
    assert (band.sign, band.offset) == (1, 512)
    assert of_reads(F.relative, (600, 600)) == (None, None), "some distances are outside"
    assert of_reads(lambda s, b, h, q, k: s + table[h, 300 - (q - k)])[1][1:] == (-1, 300)
    assert of_reads(lambda s, b, h, q, k: s + table[h, q + k]) == (None, None)
    assert of_reads(lambda s, b, h, q, k: s + table[h, k]) == (None, None)


def test_functions_that_are_linear_in_the_positions():
    def ramp(score, **more):
        return ramp_of(problem(150, 200, 64, None, score, **more))

    assert ramp(F.alibi).steps == ramp(F.steep).steps == 1
    assert (ramp(F.falling).steps, len(ramp(F.falling).factors)) == (2, 3)
    assert ramp(lambda s, b, h, q, k: 0.5 * (k + 3) + s).steps == 1
    for other in (
        lambda s, b, h, q, k: s + slopes[h] * np.abs(k - q),
        lambda s, b, h, q, k: s + slopes[h] * q,  # the same for all keys
        lambda s, b, h, q, k: s * slopes[h],
        lambda s, b, h, q, k: slopes[h] * (k - q) - s,
        lambda s, b, h, q, k: s + s,
        lambda s, b, h, q, k: s + 0.1 * (k * k),
        lambda s, b, h, q, k: s + table[h, k] * (k - q),
    ):
        assert ramp(other) is None
    assert ramp(F.alibi, dtype="float16") is None, "its exponents are too small for steps"
    assert ramp(F.alibi, softcap=3.0) is None
    assert ramp(F.alibi, scale=-0.1) is None


def test_scores_that_are_bounded_need_no_maximum():
    def constants(**more):
        p = Problem(300, 300, 64, **{"dtype": "bfloat16"} | more)
        return dict(HOPPER.forward_passes(p, None, H200, "ascending", "")[0].kernel.constants)

    assert constants(softcap=50.0)["FS_BOUNDED"]
    assert constants(score_mod=F.bounded)["FS_BOUNDED"]
    for more in ({}, {"softcap": 51.0}, {"softcap": 30.0, "dtype": "float16"}):
        assert "FS_BOUNDED" not in constants(**more)
    assert "FS_BOUNDED" not in constants(score_mod=F.alibi, heads=4)


def test_functions_with_poles():
    """Also at a score of 0, and at positions past the last one, which tiles contain."""
    for score, poles in (
        *(
            (f, False)
            for f in (F.alibi, F.relative, bucketed, F.biased, F.capped, F.bounded, F.with_holes)
        ),
        *(
            (f, True)
            for f in (F.of_open_keys, F.divided, F.to_the_last_query, F.to_the_last_key, F.roots)
        ),
        (lambda s, b, h, q, k: s / np.sqrt(q + 1.0) * np.log(k + 2.0), False),
        (lambda s, b, h, q, k: s / (k - q - 0.5), True),
        (lambda s, b, h, q, k: s / (k + 0.5) % 3.0, False),
        (lambda s, b, h, q, k: slopes[h] * np.tanh(s / slopes[h]), False),
        (lambda s, b, h, q, k: s + np.log(700.0 - q), False),  # tiles are smaller
        (lambda s, b, h, q, k: abs(s) ** 1.5 + s**2, True),
        (F.decaying, True),
        (lambda s, b, h, q, k: s * 2.0 ** (0.1 * (k - q)) + np.exp2(-0.5 * abs(k - q)), False),
        (lambda s, b, h, q, k: s * 3.0 ** (k - q), True),
        (lambda s, b, h, q, k: s * np.exp(s - table[h, k]), False),
    ):
        p = replace(problem(150, 200, 64), score_mod=score)
        assert functions_of(p).plain.poles == poles


def test_integers_of_more_than_32_bits():
    """A comparison with one is decided, and everything else with one is refused."""
    huge = 2**40
    for mask, same in (
        (lambda b, h, q, k: (q >= k) & (q - k <= huge), lambda b, h, q, k: (q >= k) & (k == k)),
        (lambda b, h, q, k: k + huge > q, lambda b, h, q, k: k == k),
        (lambda b, h, q, k: np.clip(k, -huge, huge) <= q, lambda b, h, q, k: k <= q),
        (lambda b, h, q, k: (q < 2**31) & (q > -(2**31) - 1), lambda b, h, q, k: k == k),
        (lambda b, h, q, k: np.where(k > huge, q, k) <= q, lambda b, h, q, k: k <= q),
    ):
        p = problem(40, 50, 64, mask)
        graphs = functions_of(p).plain.graphs[0], problem(40, 50, 64, same).mask_graph
        at = {"b": 0, "h": 1, "q": np.arange(40)[:, None], "k": np.arange(50)}
        mine, other = (np.broadcast_to(graph.evaluate(at, ()), (40, 50)) for graph in graphs)
        np.testing.assert_array_equal(mine, other)
        np.testing.assert_array_equal(
            mine, np.broadcast_to(p.mask_graph.evaluate(at, ()), mine.shape)
        )
        assert not re.findall(r"(?<![.\d])\d{10,}", functions_of(p).plain.text)
    for mask in (lambda b, h, q, k: (q + huge) % 7 == k, lambda b, h, q, k: q * 2**31 > k):
        with pytest.raises(UnsupportedError, match="computes with the integer"):
            functions_of(problem(40, 50, 64, mask))
    with pytest.raises(UnsupportedError, match="computes with the integer"):
        functions_of(problem(40, 50, 64, None, lambda s, b, h, q, k: s + (q ^ huge) % 3))
    identities = np.arange(300) * 2**33
    with pytest.raises(UnsupportedError, match=r"identities that .* more than 32 bits"):
        functions_of(problem(40, 50, 64, lambda b, h, q, k: identities[q] == identities[k]))


def test_what_is_refused():
    p = problem(300, 300, 64, F.causal)
    with pytest.raises(UnsupportedError, match="do not support mask_mod"):
        HOPPER_FP8.forward_passes(p, None, H200, "ascending", "")
    small = problem(100, 100, 64, None, F.alibi)
    with pytest.raises(UnsupportedError, match="and no softcap, score_mod"):
        HOPPER.backward_passes(small, None, H200, "ascending", "", "flash2-once")
