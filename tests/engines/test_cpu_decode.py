"""One query a head on the CPU engine: results, traces, parts, threads, and its sums."""

import re

import numpy as np
import pytest
import tile_machine
from compiled import kernels_only
from helpers import Judge, tensors
from helpers import plain as plain_attention
from llvmlite import ir
from numba import njit
from operations import code_of, jitted
from test_panels import HOST, LOWERED
from tile_machine import EmulatedAmx, EmulatedBf16

import flashsim
from flashsim import Tiling
from flashsim.engines.cpu import heuristics, kernels_decode
from flashsim.engines.cpu.bf16_dot.operations import begin_tiles, end_tiles
from flashsim.engines.cpu.micro_kernels import decode_gemv, plain, registers
from flashsim.engines.cpu.micro_kernels.float16 import BFLOAT16, FLOAT16
from flashsim.engines.cpu.micro_kernels.registers import BLOCKING, Amx, Avx512, Avx512Bf16, Plain
from flashsim.problem.masks import masked_score
from flashsim.problem.problem import numpy_dtype

pytestmark = pytest.mark.promise("twice plain attention's error")

WAYS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (100, 0)},
    "descending": {"key_order": "descending"},
    "softcap": {"softcap": 1.5},
    "scale": {"scale": -0.4},
    "mask": {"mask": lambda q, k: (q + k) % 3 == 0},
    "no key": {"mask": lambda q, k: (q + k) < 0},
    "block mask": {"block_mask": np.arange(27)[None] % 3 == 0},
}
HEADS = {
    "one": {"heads": 1},
    "gqa": {"heads": 10, "kv_heads": 2, "batch": 2},
    "many on one": {"heads": 37, "kv_heads": 1},
    "narrow values": {"heads": 4, "kv_heads": 2, "dv": 5},
}


def agree(x, *, own=None, **options):
    """Results within the judge's budget; the simulator's events. `own` are the engine's options."""
    given = {"bias": x.bias, "tiling": Tiling(16, 16), "trace": True, **options}
    ours = flashsim.run(x.q, x.k, x.v, backend="numba", **given, **(own or {}))
    theirs = flashsim.run(x.q, x.k, x.v, **given)
    Judge.of(x, ours.problem).check({"out": ours.out, "lse": ours.lse})
    assert ours.trace.same_events(theirs.trace)
    return ours


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("way", WAYS)
def test_results_and_traces(way, heads):
    agree(tensors(1, 420, 40, **HEADS[heads]), **WAYS[way])


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["normal", "rising", "falling", "heavy"])
@pytest.mark.parametrize("n_kv", [1, 15, 16, 130, 600])
def test_kinds_types_and_lengths(n_kv, kind, dtype):
    agree(tensors(1, n_kv, 64, kind=kind, dtype=dtype, heads=4, kv_heads=2))


@pytest.mark.parametrize("algorithm", ["flash2", "flash2-fused"])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gradients_recompute_the_scores_of_the_forward_pass(dtype, heads, algorithm):
    """All keys share a large component, which cancels in dQ only if P sums to 1 exactly."""
    errors = {"simulator": 0.0, "numba": 0.0}
    for seed in range(3):
        x = tensors(1, 150, 40, dtype=dtype, seed=seed, **HEADS[heads])
        x.k[..., 0] += 100
        x.q[..., 0] = 8
        exact = plain_attention(x, flashsim.run(x.q, x.k, x.v).problem, np.longdouble)["dq"]
        for backend in errors:
            result = flashsim.run(x.q, x.k, x.v, backend=backend, algorithm=algorithm)
            error = np.abs(result.backward(x.dout).dq - exact).max()
            errors[backend] = max(errors[backend], float(error))
    assert errors["numba"] <= 4 * errors["simulator"]


@pytest.mark.parametrize("algorithm", ["flash2", "flash2-fused"])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("way", WAYS)
def test_gradients(way, heads, algorithm):
    x = tensors(1, 420, 40, bias=(1, 1) if way == "softcap" else None, **HEADS[heads])
    given = {"bias": x.bias, "tiling": Tiling(16, 16), "algorithm": algorithm, **WAYS[way]}
    result = flashsim.run(x.q, x.k, x.v, backend="numba", **given)
    got = result.backward(x.dout, tiling=Tiling(16, 16))
    judged = {"dq": got.dq, "dk": got.dk, "dv": got.dv}
    Judge.of(x, result.problem).check(judged | ({"dbias": got.dbias} if x.bias is not None else {}))


def test_a_packed_query():
    agree(tensors(1, 420, 16), cu_seqlens_q=(0, 0, 1), cu_seqlens_k=(0, 200, 420))


@pytest.mark.parametrize("bias", [(1, 1), (1, 6), (2, 1), (2, 6)])
def test_bias_of_each_head(bias):
    agree(tensors(1, 300, 16, heads=6, kv_heads=2, batch=2, bias=bias))


def test_one_query_needs_no_amx(monkeypatch):
    """Where the CPU has it: decoding's own kernel."""
    monkeypatch.setattr(registers, "pays", lambda name: True)
    monkeypatch.setattr(registers, "without", lambda name: None)
    monkeypatch.setattr(registers, "paired", pytest.fail)
    x = tensors(1, 83, 16, dtype="bfloat16")
    result = flashsim.run(x.q, x.k, x.v, backend="numba")
    kind = type(registers.best("float32")).__name__.lower()
    assert result.kernel.startswith(f"numba {kind},")
    expected = flashsim.run(x.q, x.k, x.v, backend="numba", micro_kernel="vector")
    np.testing.assert_array_equal(result.out, expected.out)


PAIRS, TILES = (
    pytest.mark.skipif(registers.without(name) is not None, reason=f"needs a CPU with {what}")
    for name, what in (("avx512_bf16", "AVX512-BF16"), ("amx", "AMX"))
)


@pytest.mark.parametrize(
    "micro_kernel", [pytest.param("avx512_bf16", marks=PAIRS), pytest.param("amx", marks=TILES)]
)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("way", WAYS)
def test_results_of_pairs(way, heads, micro_kernel):
    x = tensors(1, 420, 40, dtype="bfloat16", **HEADS[heads])
    agree(x, own={"micro_kernel": micro_kernel}, **WAYS[way])


@PAIRS
@pytest.mark.parametrize("kind", ["rising", "falling", "heavy"])
@pytest.mark.parametrize("n_kv", [1, 2, 63, 300])
def test_kinds_and_lengths_of_pairs(n_kv, kind):
    x = tensors(1, n_kv, 70, kind=kind, dtype="bfloat16", heads=6, kv_heads=2)
    result = agree(x, own={"micro_kernel": "avx512_bf16"})
    assert result.kernel.startswith("numba avx512bf16,")


@TILES
@pytest.mark.parametrize("kind", ["normal", "rising", "falling", "heavy"])
@pytest.mark.parametrize(
    ("n_kv", "d"), [(1, 64), (31, 64), (33, 64), (700, 128), (90, 96), (63, 7)]
)
def test_kinds_and_lengths_of_tiles(n_kv, d, kind):
    x = tensors(1, n_kv, d, kind=kind, dtype="bfloat16", heads=6, kv_heads=2)
    result = agree(x, own={"micro_kernel": "amx"}, tiling=Tiling(1, 256))
    assert result.kernel.startswith("numba amx,")


#: Heads, key heads, keys, d, dv, keys of a visit: whole tiles and others, one key, more heads than
#: a tile has, more keys than are turned over together.
EMULATED = [
    (1, 1, 70, 64, 64, 48),
    (8, 2, 64, 32, 96, 48),
    (6, 1, 33, 40, 40, 48),
    (18, 1, 45, 64, 32, 48),
    (3, 1, 1, 7, 5, 48),
    (2, 1, 300, 32, 32, 256),
]


@pytest.mark.parametrize("shape", EMULATED)
def test_tiles_decode_on_an_emulated_cpu(shape, monkeypatch):
    heads, kv_heads, keys, d, dv, tile = shape
    tile_machine.emulate(monkeypatch)
    monkeypatch.setattr(heuristics, "cpu", lambda *_, **__: EmulatedAmx(64))
    x = tensors(1, keys, d, dtype="bfloat16", heads=heads, kv_heads=kv_heads, dv=dv)
    before = [dict(machine.counts) for machine in tile_machine.ALL]
    result = agree(x, tiling=Tiling(1, tile))
    assert result.kernel.startswith("numba emulatedamx,")
    counts = [machine.counts for machine in tile_machine.ALL]
    assert all(x["Configure"] == x["Release"] for x in counts)
    dots = sum(x["Dot"] for x in counts) - sum(x["Dot"] for x in before)
    visits = [min(tile, keys - at) for at in range(0, keys, tile)]
    tiles_of = lambda n: -(-n // 32)  # noqa: E731
    of_one = sum(2 * tiles_of(n) * tiles_of(d) + 2 * tiles_of(n) * tiles_of(dv) for n in visits)
    assert dots == kv_heads * -(-heads // kv_heads // 16) * of_one
    assert tile_machine.ERRORS == []


def test_a_score_beyond_float32_stays_one_where_the_scale_brings_it_back():
    """Q takes the scale's power of two before K."""
    x = tensors(1, 50, 16, heads=2)
    given = x.q * np.float32(2.0**68), x.k * np.float32(2.0**60), x.v
    with np.errstate(over="ignore", invalid="ignore"):
        assert np.isinf(given[0] @ given[1].swapaxes(2, 3)).any()
    ours = flashsim.run(*given, backend="numba", scale=2.0**-125)
    exact = flashsim.run(*(a.astype(np.float64) for a in given), scale=2.0**-125)
    np.testing.assert_allclose(ours.out, exact.out, rtol=0, atol=1e-5)
    np.testing.assert_allclose(ours.lse, exact.lse, rtol=1e-5)


@pytest.mark.parametrize(
    ("group", "d", "pairs", "tiles"),
    [
        *((1, 128, False, False), (2, 64, False, False), (4, 128, False, False)),
        *((4, 256, False, False), (3, 64, True, False), (4, 64, True, False)),
        *((6, 128, True, False), (6, 64, True, True), (8, 128, True, True)),
        *((8, 256, True, False), (16, 256, True, True), (16, 576, True, True)),
    ],
)
def test_heads_that_share_keys_make_arithmetic_of_decoding(group, d, pairs, tiles):
    """As measured on a CPU with either: more work is hidden behind memory where it has AMX."""
    p = flashsim.Problem(1, 4096, d, heads=2 * group, kv_heads=2, dtype="bfloat16")
    for name, limits in (("avx512_bf16", pairs), ("amx", tiles)):
        assert heuristics.arithmetic_limits(p, heuristics.PRODUCTS[name]) is limits


@pytest.mark.thorough  # walks of plain definitions take long to compile
def test_plain_numba_does_the_same():
    agree(tensors(1, 300, 40, heads=6, kv_heads=2), own={"micro_kernel": "plain"})


@pytest.mark.parametrize("n_kv", [100, 20_000])
@pytest.mark.promise("deterministic")
def test_bits_do_not_depend_on_the_number_of_threads(n_kv):
    x = tensors(1, n_kv, 16, heads=3, kv_heads=1)
    results = [flashsim.run(x.q, x.k, x.v, backend="numba", threads=n) for n in (1, 2, 3, 5)]
    for result in results[1:]:
        np.testing.assert_array_equal(result.out, results[0].out)
        np.testing.assert_array_equal(result.lse, results[0].lse)


@pytest.mark.parametrize(
    ("walks", "visits", "parts"), [(1, 0, 1), (1, 7, 1), (1, 64, 16), (1, 4096, 64), (64, 4096, 1)]
)
def test_parts_keep_threads_busy_and_stay_long(walks, visits, parts):
    assert kernels_decode.parts_of(walks, visits) == parts


def test_parts_without_a_key_count_for_nothing():
    """Of three parts of two heads; the first head's middle part and the second's all see no key."""
    sums = np.float32([[[1, 2], [0, 0]], [[0, 0], [0, 0]], [[3, 5], [0, 0]]]).reshape(-1)
    tops = np.float32([[0, -np.inf], [-np.inf, -np.inf], [1, -np.inf]]).reshape(-1)
    totals = np.float32([[2, 0], [0, 0], [1, 0]]).reshape(-1)
    out, lse = np.full(7, 7, np.float32), np.full(2, 7, np.float32)
    kernels_decode.put_together(out, 1, lse, sums, tops, totals, 3, 2, 0, 2, 2)
    total = 2 / np.e + 1
    expected = [7, (1 / np.e + 3) / total, (2 / np.e + 5) / total, 0, 0, 7, 7]
    np.testing.assert_allclose(out, expected, rtol=1e-6)
    np.testing.assert_allclose(lse, [1 + np.log(total), -np.inf], rtol=1e-6)


def tiled(operation):
    """Return an operation, compiled, with the tiles that it needs."""

    @njit
    def call(cpu, array, *args):
        begin_tiles(cpu, array)
        operation(cpu, array, *args)
        end_tiles(cpu, array)

    return call


dots, weigh = map(tiled, (plain.dots, plain.weigh))
side_by_side, softmax_along = map(jitted, (plain.side_by_side, plain.softmax_along))

HALVES = {"bfloat16": BFLOAT16, "float16": FLOAT16}


def reading(case, halves):
    kind, dtype = getattr(case, "values", case)
    if halves and kind not in (HOST, Plain) and not hasattr(case, "marks"):
        return kernels_only(kind, dtype, halves)  # `make test` has it by this CPU's code
    return pytest.param(kind, dtype, halves, marks=getattr(case, "marks", ()))


#: Every kind of code with every kind of number that its floats may stand for.
READINGS = [
    reading(case, halves)
    for case in LOWERED
    for halves in ((None, *HALVES) if getattr(case, "values", case)[1] == "float32" else (None,))
]
#: And bfloat16 in pairs, whose instruction is an emulated one as well.
PAIRED = [
    pytest.param(EmulatedBf16, "float32", "bfloat16"),
    pytest.param(Avx512Bf16, "float32", "bfloat16", marks=PAIRS),
    pytest.param(EmulatedAmx, "float32", "bfloat16"),
    pytest.param(Amx, "float32", "bfloat16", marks=TILES),
]
#: Kinds of CPU that multiply pairs, and those of them that do so by 16 heads at a time.
MULTIPLY_PAIRS = EmulatedBf16, Avx512Bf16, EmulatedAmx, Amx
BY_TILES = EmulatedAmx, Amx
#: The cases of softmax. Compiling plain code of 16-bit numbers takes a second, so only `make
#: kernels` does it: `make test` runs that code as Python, and compares the other kinds with it.
SOFTMAX = [
    kernels_only(*case.values)
    if case.values[0] is Plain and case.values[2] and not case.marks
    else case
    for case in [*READINGS, *PAIRED]
]
SIZES = [(1, 1, 1), (3, 2, 5), (8, 4, 32), (7, 5, 40), (65, 11, 80), (17, 9, 33), (40, 3, 130)]


@pytest.fixture(autouse=True)
def _emulated(request, monkeypatch):
    """Of tests that ask for an instruction which any CPU shall have."""
    asked = getattr(request.node, "callspec", None)
    if asked and {EmulatedBf16, EmulatedAmx} & {*map(_kind, asked.params.values())}:
        tile_machine.emulate(monkeypatch)
        yield
        assert tile_machine.ERRORS == []
    else:
        yield


def _kind(given):
    return given if isinstance(given, type) else None


def among_nan(x, dtype, halves):
    """Numbers from the third on, as a walk takes them; NaN beside them."""
    stored = numpy_dtype(halves or dtype)
    array = np.full(x.size + 40 + x.size % 2, np.nan, stored)
    array[3 : 3 + x.size] = x.reshape(-1)
    exact = array[3 : 3 + x.size].astype(np.longdouble).reshape(x.shape)
    return array.view(dtype), exact


def kept(x, kind):
    """Numbers that floats shall hold: where pairs are multiplied those of bfloat16."""
    return x.astype(numpy_dtype("bfloat16")) if kind in MULTIPLY_PAIRS else x


def weights_of(P, kind):
    """P as `weigh` takes it: where pairs are multiplied, they stand first in each row."""
    if kind in MULTIPLY_PAIRS:
        halves = P.astype(numpy_dtype("bfloat16")).view(np.float32)
        P = np.concatenate([halves, np.full_like(halves, np.nan)], axis=1)
    return P.reshape(-1)


def defined(definition, compiled, kind, steps, halves):
    """Of plain code the definition, as Python where that is quick; else the compiled function.

    The largest case of `SIZES` is compiled for float32, and for 16 bits takes a third of a second.
    """
    return definition if kind is Plain and (halves or steps < 3000) else compiled


@pytest.mark.parametrize(("kind", "dtype", "halves"), [*READINGS, *PAIRED])
@pytest.mark.parametrize(("rows", "heads", "d"), SIZES)
def test_dots(kind, dtype, halves, rows, heads, d):
    """Every sum in its place; nothing beside K is read, and nothing beyond four rows written."""
    rng = np.random.default_rng(d)
    ldq, ld = -(-d // 32) * 32, 80
    K, of_k = among_nan(rng.standard_normal((rows, d)), dtype, halves)
    Q = np.full((16, ldq), np.nan, dtype)
    Q[:heads] = 0
    Q[:heads, :d] = kept(rng.standard_normal((heads, d)), kind)
    taken, factor, cpu = (
        Q.reshape(-1).copy(),
        np.array([-0.7], dtype),
        code_of(kind, dtype, like=Avx512),
    )
    S = np.full((heads + 1, ld), 7, dtype)
    which = HALVES.get(halves)
    side_by_side(cpu, taken, ldq, heads, which)
    args = 3, d, np.concatenate([np.full(2, np.nan, dtype), taken]), 2, ldq, rows, heads, factor
    run = defined(plain.dots, dots, kind, rows * heads * d, halves)
    run(cpu, S.reshape(-1), ld, K, *args, which)
    exact = factor.astype(np.longdouble) * (Q[:heads, :d].astype(np.longdouble) @ of_k.T)
    size = d * np.finfo(dtype).eps * np.abs(of_k).max() * np.abs(Q[:heads]).max()
    np.testing.assert_allclose(S[:heads, :rows], exact.astype(dtype), rtol=0, atol=float(size))
    # Of fewer than four rows, or 32, the last one's, not of what lies behind.
    at_least = 32 if kind in BY_TILES else 4
    assert np.isfinite(S).all()
    assert (S[:heads, max(at_least, rows) + 3 :] == 7).all()
    assert (S[heads] == 7).all()


@pytest.mark.parametrize(("kind", "dtype", "halves"), [*READINGS, *PAIRED])
@pytest.mark.parametrize(("keys", "heads", "dv"), SIZES)
def test_weigh(kind, dtype, halves, keys, heads, dv):
    """O grows by P V; nothing beside V is read, and what stands beside O stays."""
    rng = np.random.default_rng(dv)
    ldo, ldp, beyond = -(-dv // 32) * 32, 96, 16 if kind in BY_TILES else heads
    V, of_v = among_nan(rng.standard_normal((keys, dv)), dtype, halves)
    P, O = kept(rng.random((16, ldp)), kind).astype(dtype), np.full((beyond + 1, ldo), 7, dtype)
    P[heads:], P[:heads, keys:] = np.nan, 0
    O[:heads, :dv] = rng.standard_normal((heads, dv))
    grown = O.reshape(-1).copy()
    which, cpu = HALVES.get(halves), code_of(kind, dtype, like=Avx512)
    run = defined(plain.weigh, weigh, kind, keys * heads * dv, halves)
    run(cpu, grown, 0, ldo, weights_of(P, kind), ldp, V, 3, dv, keys, heads, which)
    exact, P = O.astype(np.longdouble), P[:heads]
    grown.reshape(O.shape)[heads:beyond] = 7  # heads that nobody has
    exact[:heads, :dv] += P[:, :keys].astype(np.longdouble) @ of_v
    size = (keys + 1) * np.finfo(dtype).eps * max(np.abs(of_v).max(), np.abs(O).max())
    np.testing.assert_allclose(grown.reshape(O.shape), exact.astype(dtype), 0, float(size))


@pytest.mark.parametrize(("kind", "dtype", "halves"), SOFTMAX)
@pytest.mark.parametrize("heads", [1, 6])
def test_softmax_along(kind, dtype, halves, heads):
    """As the definition: a first step and a second, rows without a key, and one with NaN."""
    rng = np.random.default_rng(heads)
    n, ld, cpu, eps = 96, 98, code_of(kind, dtype, like=Avx512), np.finfo(dtype).eps
    m, l, alpha = np.full(3 + heads, -np.inf, dtype), np.zeros(3 + heads, dtype), np.zeros(9, dtype)
    results = [[x.copy() for x in (m, l, alpha)] for _ in range(2)]
    for step in range(2):
        S = (20 * rng.standard_normal((heads, ld))).astype(dtype)
        S[-1, : n if step else n - 1] = -np.inf
        S[heads // 2, 5] = np.nan if step else -np.inf
        for run, code, given in (
            (plain.softmax_along, Plain(cpu.width), results[0]),
            (softmax_along, cpu, results[1]),
        ):
            P = S.reshape(-1).copy()
            run(code, P, ld, heads, n, *given[:3], 3, HALVES.get(halves))
            if kind in MULTIPLY_PAIRS and code is cpu:
                halved = P.reshape(heads, ld)[:, : n // 2].copy().view(numpy_dtype("bfloat16"))
                P.reshape(heads, ld)[:, :n] = halved
            stored = P.reshape(heads, ld)[:, :n].astype(numpy_dtype(halves or dtype))
            np.testing.assert_array_equal(P.reshape(heads, ld)[:, :n], stored.astype(dtype))
            given.append(P)
        for one, two in zip(*results, strict=True):
            # P rounded to 8 bits may be the next number; elsewhere the exponentials are off alike.
            off = 2.0**-8 if halves and one.size > 9 else 64 * eps
            np.testing.assert_allclose(two, one, rtol=off, atol=float(64 * eps))


@pytest.mark.parametrize(("kind", "dtype", "halves"), SOFTMAX)
def test_softmax_along_of_scores_that_count_as_masked(kind, dtype, halves):
    """A head of the least number there is, and one of what is just too large to count."""
    n, low = 32, masked_score(dtype)
    S, m = np.zeros((3, n), dtype), np.array([-np.inf, -np.inf, 0], dtype)
    S[0], S[1] = np.finfo(dtype).min, np.nextafter(np.array(low, dtype), np.array(0, dtype))
    with np.errstate(over="ignore"):
        for run, cpu in (
            (plain.softmax_along, Plain(8)),
            (softmax_along, code_of(kind, dtype, like=Avx512)),
        ):
            top, l, alpha = m.copy(), np.zeros(3, dtype), np.zeros(3, dtype)
            run(cpu, S.reshape(-1).copy(), n, 3, n, top, l, alpha, 0, HALVES.get(halves))
            np.testing.assert_array_equal(l, [0, n, n])


@pytest.mark.parametrize(("cpu", "locality"), [("znver4", 2), ("skylake-avx512", 3), ("", 3)])
def test_lines_are_brought_into_the_cache_that_has_room_for_them(cpu, locality, monkeypatch):
    """The second one on AMD's CPUs, of K's rows and of V's."""
    monkeypatch.setattr(registers.llvm, "get_host_cpu_name", lambda: cpu)
    for build in (decode_gemv.build_dots, decode_gemv.build_weigh):
        module = ir.Module()
        build(module, BLOCKING[Avx512], 4)
        asked = re.findall(r"prefetch[^)]*, i32 0, i32 (\d), i32 1\)", str(module))
        assert set(asked) == {str(locality)}
