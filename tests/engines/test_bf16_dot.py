"""bfloat16 on AMX and AVX512-BF16: what LLVM makes of it, emulated everywhere, run where it can."""

import ctypes
import errno
import re

import numpy as np
import pytest
import test_extremes
import tile_machine
from helpers import Judge, Target, run_both, tensors
from numba import njit
from operations import assembly, jitted
from test_engines import OPTION_CASES
from tile_machine import EmulatedAmx, EmulatedBf16, Refused, TileMachine

import flashsim
from flashsim import BackendUnavailable, OptionError, Tiling
from flashsim.api import arrays
from flashsim.engines.cpu import engine, heuristics, operands
from flashsim.engines.cpu.bf16_dot import amx_tiles, codegen, operations, packing, steps
from flashsim.engines.cpu.micro_kernels import amx, pair_writer, plain, registers
from flashsim.engines.cpu.micro_kernels.exponential import SLACK
from flashsim.engines.cpu.micro_kernels.registers import BLOCKING, PAIRED, ROWS, Amx, Avx512Bf16
from flashsim.engines.cpu.micro_kernels.vector import vector_intrinsic
from flashsim.problem.masks import masked_score
from flashsim.problem.problem import numpy_dtype

pytestmark = pytest.mark.promise("twice plain attention's error")

NUMPY, NUMBA = Target("simulator"), Target("numba")
HERE = [name for name in PAIRED if registers.without(name) is None]
on_amx = pytest.mark.skipif("amx" not in HERE, reason="needs a CPU with AMX")
on_bf16 = pytest.mark.skipif("avx512_bf16" not in HERE, reason="needs a CPU with AVX512-BF16")
TILING = {"tiling": Tiling(32, 48)}


# -- what LLVM makes of it -------------------------------------------------------------------------


def instructions(text, pattern):
    return re.findall(rf"^\s+({pattern})\s+(.*)$", text, flags=re.M)


@pytest.mark.parametrize("mode", ["set", "add"])
def test_sums_stay_in_tiles_over_the_loop(mode):
    text = assembly(codegen.build_any_product, Amx, "sapphirerapids", mode=mode)
    step = text[text.index(f"\nflashsim_tiles_{mode}_2_2") :].partition("retq")[0]
    before, loop, after = re.split(r"^\.L\w+:.*$", step, flags=re.M)
    # Four tiles of C against two of A and two of B, each fetched once.
    dots = [operands.replace(" ", "").split(",") for _, operands in instructions(loop, "tdpbf16ps")]
    assert [c for _, _, c in dots] == ["%tmm0", "%tmm1", "%tmm2", "%tmm3"]
    fetched = [x.rpartition(" ")[2] for _, x in instructions(loop, "tileloadd")]
    assert sorted(fetched) == ["%tmm4", "%tmm5", "%tmm6", "%tmm7"]
    assert not instructions(loop, "tilestored|tilezero|ldtilecfg|callq")
    start = instructions(before, "tilezero" if mode == "set" else "tileloadd")
    assert [x.rpartition(" ")[2] for _, x in start] == ["%tmm0", "%tmm1", "%tmm2", "%tmm3"]
    stored = [x.partition(",")[0] for _, x in instructions(after, "tilestored")]
    assert stored == ["%tmm0", "%tmm1", "%tmm2", "%tmm3"]
    assert not re.search(r"tmm\d.*rsp|rsp.*tmm\d|rbp.*tmm\d", text)  # none is spilled
    assert not instructions(text, "ldtilecfg|tilerelease")  # a thread's, not a product's


def test_a_thread_describes_its_tiles_and_gives_them_back():
    begin = assembly(amx_tiles.build_configure, Amx, "sapphirerapids")
    assert len(instructions(begin, "ldtilecfg")) == 1
    assert begin.count(r"@\000" * 8) == 1  # 64 bytes a row, eight times
    assert begin.count(r"\020" * 8) == 1  # 16 rows
    end = assembly(amx_tiles.build_release, Amx, "sapphirerapids")
    assert end.count("\ttilerelease") == 1
    none = assembly(amx_tiles.build_configure, Avx512Bf16, "cooperlake")
    assert "tile" not in none.partition(":\n")[2].partition("retq")[0]


@pytest.mark.parametrize("cpu", ["cooperlake", "znver4"])
def test_pairs_fill_vector_registers_and_nothing_is_spilled(cpu):
    text = assembly(codegen.build_any_product, Avx512Bf16, cpu, mode="add")
    loops = re.split(r"^\.L\w+:", text, flags=re.M)
    widest = max(loops, key=lambda block: block.count("vdpbf16ps"))
    assert widest.count("vdpbf16ps") >= ROWS * BLOCKING[Avx512Bf16].vecs
    body = widest[: widest.rindex("vdpbf16ps")]
    assert not re.search(r"zmm\d+, -?\d*\(%rsp\)|\(%rsp\), %zmm", body)
    softmax = assembly(codegen.build_pair_softmax, Avx512Bf16, cpu)
    for name in ("vcvtne2ps2bf16", "vreduceps", "vscalefps"):
        assert name in softmax
    assert not re.search(r"zmm\d+, -?\d*\(%rsp\)|\(%rsp\), %zmm", softmax)
    assert "call" not in softmax


# -- the machine that emulates ---------------------------------------------------------------------


def bits(x):
    """Numbers as the bits of bfloat16."""
    return np.asarray(x).astype(numpy_dtype("bfloat16")).view(np.uint16)


def left(x):
    """Rows of numbers as pairs of neighbours."""
    return np.ascontiguousarray(bits(x)).view(np.uint32)


def right(x):
    """Rows of numbers, two and two merged."""
    low, high = (bits(x)[at::2].astype(np.uint32) for at in (0, 1))
    return np.ascontiguousarray(low | high << np.uint32(16))


def product(monkeypatch, mode, C, A, B):
    """By emulated tiles."""
    with monkeypatch.context() as patch:
        tile_machine.emulate(patch)
        got, walk = C.reshape(-1).copy(), {"set": set_, "add": add}[mode]
        strides = A.shape[1], B.reshape(-1), 0, 64, len(A), A.shape[1]
        walk(EmulatedAmx(64), got, 0, 64, A.reshape(-1), 0, *strides)
    assert tile_machine.ERRORS == []
    return got.reshape(C.shape)


@pytest.mark.parametrize("mode", ["set", "add"])
@pytest.mark.parametrize(("rows", "n"), [(16, 32), (48, 96)])
def test_the_machine_multiplies(rows, n, mode, monkeypatch):
    """Whole numbers, which every order of sums gives exactly."""
    rng = np.random.default_rng(rows)
    a, b, c = (rng.integers(-9, 10, s) for s in ((rows, n), (n, 64), (rows, 64)))
    got = product(monkeypatch, mode, c.astype(np.float32), left(a), right(b))
    np.testing.assert_array_equal(got, a @ b + (c if mode == "add" else 0))


def test_the_machine_rounds_as_the_manual_says(monkeypatch):
    a, b = np.zeros((16, 32)), np.zeros((32, 64))
    c = np.zeros((16, 64), np.float32)
    a[0, :4], b[:4, 0] = [1, 1, 2**-24, -1], 1  # even: 1 + 2^-24 is 1; odd: 1 - 1
    a[1, :2], b[:2, 1] = [2**-100, 2**-127], [2**-26, 2**-20]  # 2^-126 stays, a denormal is none
    c[2, 2], a[2, 0], b[0, 2] = 2**-130, 1, 2**-126
    a[3, 0], b[0, 3], c[3, 3] = 2.0**100, 2.0**100, -np.inf
    got = product(monkeypatch, "add", c, left(a), right(b))
    assert got[0, 0] == 1
    assert got[1, 1] == 2.0**-126
    assert got[2, 2] == 2.0**-126
    assert np.isnan(got[3, 3])
    assert tile_machine.vdpbf16ps(np.float32(2**-130), left([[1, 0]]), left([[2**-127, 0]])) == 0


def test_the_machine_refuses():
    machine, words = TileMachine(), np.zeros((16, 16), np.uint32)
    with pytest.raises(Refused, match="no LDTILECFG"):
        machine.zero(0)
    with pytest.raises(Refused, match="palette 1"):
        machine.configure(bytes(64))
    machine.configure(amx_tiles.CONFIG)
    machine.zero(0)
    machine.load(4, words.ctypes.data, 64)
    with pytest.raises(Refused, match="tmm6 is read before"):
        machine.dot(0, 4, 6)
    machine.release()
    with pytest.raises(Refused, match="no LDTILECFG"):
        machine.zero(0)


# -- operations ------------------------------------------------------------------------------------


def tiled(operation):
    """Return a product, compiled, with the tiles that it needs."""

    @njit
    def call(cpu, *args):
        operations.begin_tiles(cpu, args[0])
        C, c0, ldc, A, a0, row, B, b0, ldb, rows, n = args
        operation(cpu, C, c0, ldc, A, a0, row, 1, B, b0, ldb, rows, n)
        operations.end_tiles(cpu, args[0])

    return call


set_, add = map(tiled, (plain.product_set, plain.product_add))
softmax, by_rows, by_lanes, unpack_bits = map(
    jitted,
    (
        *(operations.online_softmax_pairs, operations.pairs_of_rows, operations.pairs_of_lanes),
        packing.unpack_bits,
    ),
)


@njit
def left_of_rows(cpu, out, X, x0, n, d):
    operands.left_of_rows(cpu, out, 0, X, x0, n, d, None)


@njit
def left_of_columns(cpu, out, row, X, x0, n, d):
    operands.left_of_columns(cpu, out, 0, row, row, X, x0, n, d, None)


@njit
def right_of_rows(cpu, out, X, x0, n, d):
    operands.right_of_rows(cpu, out, X, x0, n, d, out, out, None)


@njit
def right_of_columns(cpu, out, stride, X, x0, n, d):
    operands.right_of_columns(cpu, out, stride, X, x0, n, d, 1, out, None)


@pytest.mark.parametrize("kind", [EmulatedBf16, pytest.param(Avx512Bf16, marks=on_bf16)])
@pytest.mark.parametrize(("n", "d"), [(64, 64), (96, 32), (128, 16), (64, 48), (37, 64), (70, 5)])
def test_operands_are_packed(kind, n, d, monkeypatch):
    """Whole tiles, which are transposed in registers, and what is left of them."""
    tile_machine.emulate(monkeypatch)
    x = np.random.default_rng(n).standard_normal((n, d)).astype(np.float32)
    X = np.concatenate([np.zeros(3), x.reshape(-1)])  # from element 3 on
    up = lambda k, to: -(-k // to) * to  # noqa: E731
    whole = np.zeros((up(n, 64), up(d, 64)))
    whole[:n, :d] = x
    by_rows, by_columns = left(whole[: up(n, 16), : up(d, 32)]), left(whole[: up(n, 32)].T)
    panels = right(whole.T[: up(d, 32)])
    for walk, size, args, expected in (
        (left_of_rows, by_rows.shape, (), by_rows),
        (left_of_columns, (up(d, 16), up(n, 32) // 2), (up(n, 32) // 2,), by_columns),
        (right_of_columns, (up(n, 32) // 2, 64), (64,), right(whole[: up(n, 32), :64])),
        (right_of_rows, panels.shape, (), panels.reshape(len(panels), -1, 64).swapaxes(0, 1)),
    ):
        out = np.full(np.prod(size), 7, np.uint32)
        walk(kind(64), out, *args, bits(X), 3, n, d)
        wanted = expected.reshape(-1) if walk is right_of_rows else expected[: size[0]].reshape(-1)
        np.testing.assert_array_equal(out, wanted, err_msg=walk.__name__)
    out, factors = np.zeros(3 + n * d, np.uint16), np.full(64, 2, np.float32)
    rows = min(n, 64)
    panel = np.ascontiguousarray(whole.T[:, :64], np.float32).reshape(-1)
    unpack_bits(kind(64), panel, out, 3, rows, d, factors)
    np.testing.assert_array_equal(out[3 : 3 + rows * d], bits(2 * x[:rows]).reshape(-1))
    assert not out[3 + rows * d :].any()


def extreme_operands(rows, n):
    """Numbers of every size, denormals among them, and what lies near float32's ends."""
    rng = np.random.default_rng(n)
    draw = lambda *shape: rng.standard_normal(shape) * 2.0 ** rng.integers(-75, 60, shape)  # noqa: E731
    a, b, c = draw(rows, n), draw(n, 64), draw(rows, 64).astype(np.float32)
    a[0, :2] = 2**-130
    return c, left(a), right(b)


@on_amx
@pytest.mark.parametrize(("rows", "n"), [(16, 32), (48, 96)])
def test_this_cpus_tiles_are_the_machines(rows, n, monkeypatch):
    C, A, B = extreme_operands(rows, n)
    expected, got = product(monkeypatch, "add", C, A, B), C.reshape(-1).copy()
    add(Amx(64), got, 0, 64, A.reshape(-1), 0, n // 2, B.reshape(-1), 0, 64, rows, n // 2)
    np.testing.assert_array_equal(got.reshape(C.shape), expected)


@pytest.mark.parametrize("kind", [EmulatedBf16, pytest.param(Avx512Bf16, marks=on_bf16)])
def test_vdpbf16ps_is_what_the_manual_says(kind, monkeypatch):
    tile_machine.emulate(monkeypatch)
    C, A, B = extreme_operands(20, 34)
    expected = np.zeros_like(C)
    for x in range(A.shape[1]):
        expected = tile_machine.vdpbf16ps(expected, A[:, x : x + 1], B[x])
    expected = C + expected  # what is added to comes last, as in float32's products
    got = C.reshape(-1).copy()
    add(kind(64), got, 0, 64, A.reshape(-1), 0, A.shape[1], B.reshape(-1), 0, 64, 20, A.shape[1])
    np.testing.assert_array_equal(got.reshape(C.shape), expected)


@pytest.mark.parametrize("kind", [EmulatedBf16, pytest.param(Avx512Bf16, marks=on_bf16)])
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_panels_become_pairs(kind, rows, monkeypatch):
    tile_machine.emulate(monkeypatch)
    rng = np.random.default_rng(rows)
    X = rng.standard_normal(3 + rows * 70).astype(np.float32)
    X[4:8] = np.inf, -np.inf, 3.4e38, np.nan
    panel = np.zeros((rows + rows % 2, 64), np.float32)
    panel[:rows] = X[3:].reshape(rows, 70)[:, :64]
    of_lanes = np.zeros((rows, 33), np.uint32)
    of_lanes[:, :32] = left(panel[:rows])
    for walk, expected, more in ((by_rows, right(panel), ()), (by_lanes, of_lanes, (33,))):
        got = np.zeros(1 + rows * 64, np.uint32)
        walk(kind(64), X, 3, 70, rows, got, 1, *more)
        expected = np.pad(expected.reshape(-1), (1, rows * 64 - expected.size))
        values = [p.view(numpy_dtype("bfloat16")).astype(np.float32) for p in (expected, got)]
        np.testing.assert_array_equal(*values)


def softmax_of(S, m, l, factor):
    """Return P, m, l and alpha after one step on scores (rows, lanes), by NumPy."""
    needed = S.max(axis=0) * factor
    top = np.where(needed > m, needed + np.float32(SLACK), m)
    base = np.where(top > masked_score(np.float32), top, np.float32(0))
    P, alpha = np.exp(S * factor - base), np.exp(m - base)
    return P, top, alpha * l + P.sum(axis=0), alpha


@pytest.mark.parametrize("kind", [EmulatedBf16, pytest.param(Avx512Bf16, marks=on_bf16)])
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_softmax_of_pairs(kind, rows, monkeypatch):
    tile_machine.emulate(monkeypatch)
    rng, w = np.random.default_rng(rows), 64
    S = (20 * rng.standard_normal(rows * w)).astype(np.float32)
    S[0::w] = -np.inf  # a lane that sees nothing
    m, l = np.full(w, -np.inf, np.float32), np.zeros(w, np.float32)
    m[5:], l[5:] = 3, 2
    m[9:14] = 40  # nothing comes near
    S[rows * w - 30 : rows * w - 20] = 3 / 0.3 + np.arange(10) * 3  # a little more and much more
    factor, alpha = np.array([0.3], np.float32), np.zeros(w, np.float32)
    exact, *statistics = softmax_of(S.reshape(rows, w), m, l, factor[0])
    P = np.zeros((rows + 1) // 2 * w, np.uint32)
    softmax(kind(w), S, 0, rows, m, l, alpha, 0, factor, P, 0)
    exact = np.pad(exact, ((0, rows % 2), (0, 0))).reshape(-1, 2, w).swapaxes(1, 2)
    got = P.view(numpy_dtype("bfloat16")).astype(np.float32).reshape(exact.shape)
    np.testing.assert_allclose(got, exact, rtol=2**-7, atol=1e-37)
    for name, one, two in zip("mla", (m, l, alpha), statistics, strict=True):
        np.testing.assert_allclose(one, two, rtol=5e-6, atol=1e-37, err_msg=name)


#: Scores of four column tiles of 32 keys for 16 queries; tiles that are visited.
SCORES = {
    "falls": ((4, 3, 2, 1), (0, 1, 2, 3)),
    "grows": ((0, 30, 31, 60), (0, 1, 2, 3)),
    "keys are left out": ((4, 3, 2, 1), (0, 2, 3)),
    "a gap and growth": ((0, 5, 20, 50), (0, 2, 3)),
}


@pytest.mark.parametrize("case", SCORES)
def test_p_waits_for_its_product_with_v(case, monkeypatch):
    """P is multiplied once a largest score grows or keys are left out, and at the end.

    The steps run as Python, with NumPy's operations.
    """
    level, visited = SCORES[case]
    w, d, n, rng = 16, 16, 32 * len(level), np.random.default_rng(1)
    scores = rng.standard_normal((n, w)) + np.repeat(level, 32)[:, None]
    values, weights = rng.standard_normal((n, d)), np.zeros((n, w))

    def step(cpu, S, s0, rows, m, l, alpha, at, factor, P, p0):
        key = 2 * p0 // w
        weights[key : key + rows], m[:], l[:], alpha[:] = softmax_of(
            S.reshape(rows, w), m, l, factor[0]
        )

    def product(cpu, O, o0, ldc, V, first, row, step, P, p0, ldb, rows, pairs):
        keys = slice(2 * first, 2 * (first + pairs))
        O += (values[keys].T @ weights[keys]).reshape(-1)

    def scale(cpu, O, o0, ld, rows, factors, f0):
        O.reshape(-1, w)[...] *= factors

    monkeypatch.setattr(operations, "online_softmax_pairs", step)
    monkeypatch.setattr(steps, "product_add", product)
    monkeypatch.setattr(operations, "scale_lanes", scale)
    cpu, V = registers.Plain(w), packing.Left(None, 0, n // 2, 1)
    O, P, ones = np.zeros(d * w), np.full(n // 2 * w, 7, np.uint32), np.ones(1, np.float32)
    m, l, alpha = np.full(w, -np.inf, np.float32), *np.ones((2, w), np.float32) * [[0], [1]]
    waiting, products = (0, 0), []
    for tile in visited:
        S, before = scores[32 * tile : 32 * (tile + 1)].reshape(-1), waiting
        waiting = steps.take_scores(
            *(cpu, (O, m, l, alpha), S, 32, ones, P, V, 32 * tile, 0, d, None, waiting)
        )
        products.append(waiting[0] != before[0])
    steps.weigh(cpu, O, P, V, 0, d, waiting)
    keys = np.concatenate([np.arange(32 * t, 32 * (t + 1)) for t in visited])
    exact = np.exp(scores[keys] - scores[keys].max(axis=0))
    exact = values[keys].T @ (exact / exact.sum(axis=0))
    np.testing.assert_allclose(O.reshape(d, w) / l, exact, atol=1e-5)
    assert products[0] is False or case == "keys are left out"
    assert any(products[1:]) == (case != "falls")


def test_an_odd_number_of_keys_is_followed_by_zeros():
    w = 16
    P = np.full(16 * w, 7, np.uint32)
    steps.clear_pairs(registers.Plain(w), P, 0, 5)
    assert (P[: 3 * w] == 7).all()
    assert not P[3 * w :].any()


def build_exp2(module, block, itemsize):
    """X, rows: each number becomes 2 to it."""
    code = pair_writer.PairCode(module, "exp2_of_rows", block, itemsize, "pi")

    def body(r, _):
        for x in code.vectors(code.at(X, code.times(r, code.width))):
            code.store(code.exp2(code.load(x)), x)
        return []

    X, rows = code.function.args
    code.loop(rows, [], body)
    return code.done()


_exp2 = vector_intrinsic("a i", build_exp2)


@njit
def exp2(cpu, X, rows):
    _exp2(cpu, (X, rows))


needs_dq = pytest.mark.skipif(
    bool(registers.lacking(("avx512dq",))), reason="needs a CPU with AVX-512 DQ"
)


@pytest.mark.parametrize("kind", [EmulatedAmx, pytest.param(Amx, marks=needs_dq)])
def test_powers_of_two_are_within_8_bits_and_more(kind, monkeypatch):
    """By AVX-512's own instructions, too: they round f down where it has a bit too many."""
    tile_machine.emulate(monkeypatch)
    wide = np.random.default_rng(0).uniform(-126, 10, 64 * 500).astype(np.float32)
    whole = np.arange(-126, 127, dtype=np.float32)
    below = np.nextafter(np.float32(-126), np.float32(-200))
    none = np.array([below, -127, -140, -160, -1e30, -np.inf], np.float32)
    x = np.concatenate([wide, whole, none, np.full(61, np.nan, np.float32)])
    got = x.copy()
    exp2(kind(64), got, x.size // 64)
    parts = np.split(got, np.cumsum([wide.size, whole.size, none.size]))
    np.testing.assert_allclose(parts[0], np.exp2(wide.astype(np.float64)), rtol=3.1e-6)
    np.testing.assert_array_equal(parts[1], np.exp2(whole))
    assert not parts[2].any()
    assert np.isnan(parts[3]).all()
    if kind is Amx:
        exp2(EmulatedAmx(64), x, x.size // 64)
        np.testing.assert_array_max_ulp(x[:-61], got[:-61], 1)


# -- the engine ------------------------------------------------------------------------------------

CASES = ["gqa", "mqa-causal", "narrow-values", "window", "varlen-bias", "scale", "descending"]


def judged(x, algorithm, micro_kernel=None, traces=False, **options):
    """Results by the 2 x rule; equal traces; on some CPUs a micro-kernel by its name."""
    named = {"micro_kernel": micro_kernel} if micro_kernel else {}
    result, gradients, got = run_both(x, NUMBA, algorithm, trace=traces, **named, **options)
    Judge.of(x, result.problem).check(got)
    if traces:
        for mine, other in zip(
            (result, gradients), run_both(x, NUMPY, algorithm, trace=True, **options), strict=False
        ):
            assert mine.trace.same_events(other.trace)
    return result, got


@pytest.fixture(params=[EmulatedAmx, pytest.param(EmulatedBf16, marks=pytest.mark.thorough)])
def emulated(request, monkeypatch):
    """The engine on a CPU that this one is not."""
    tile_machine.emulate(monkeypatch)
    monkeypatch.setattr(heuristics, "cpu", lambda *_, **__: request.param(64))
    yield request.param
    assert tile_machine.ERRORS == []
    for machine in tile_machine.ALL:
        assert machine.counts["Configure"] == machine.counts["Release"]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "algorithm", ["flash2-fused", pytest.param("flash2", marks=pytest.mark.thorough)]
)
def test_the_engine_on_an_emulated_cpu(emulated, algorithm, case):
    shape, options = OPTION_CASES[case]
    dots = sum(machine.counts["Dot"] for machine in tile_machine.ALL)
    x = tensors(50, 83, 40, dtype="bfloat16", **shape)
    if case == "varlen-bias":
        options = {**options, "cu_seqlens_q": (0, 20, 20, 50), "cu_seqlens_k": (0, 0, 20, 83)}
    result, _ = judged(x, algorithm, traces=True, **TILING, **options)
    assert result.kernel.startswith(f"numba {emulated.__name__.lower()}")
    ran = sum(machine.counts["Dot"] for machine in tile_machine.ALL) - dots
    assert (ran > 0) == (emulated is EmulatedAmx)


@pytest.mark.parametrize("kind", ["normal", "rising"])
def test_whole_tiles_on_an_emulated_cpu(emulated, kind):
    """Scores that rise scale the sums of every tile anew; of normal ones those of the first."""
    x = tensors(128, 128, 64, dtype="bfloat16", kind=kind, heads=1, dv=32)
    judged(x, "flash2-fused", tiling=Tiling(64, 32), causal=True)


@pytest.mark.parametrize("kind", ["normal", "rising"])
def test_a_wide_column_tile_takes_several_panels_of_scores(emulated, kind):
    """P of all of them waits for one product with V, unless a largest score grows in between."""
    x = tensors(70, 300, 16, dtype="bfloat16", kind=kind, heads=1)
    for options in ({}, {"causal": True}, {"window": (90, 40)}):
        judged(x, "flash2", traces=True, tiling=Tiling(32, 160), **options)


def alternate(q, k):
    """Every second row tile of 64 sees every second column tile of 32, the others see all."""
    return (q // 64 % 2 == 0) | (k // 32 % 2 == 0)


def test_keys_between_two_tiles_of_a_row_are_left_out(emulated):
    """Row tiles walked together need not visit the same column tiles; panels are full, or a lane
    without keys scales its sums at every visit."""
    x = tensors(512, 160, 16, dtype="bfloat16", heads=1)
    judged(x, "flash2", tiling=Tiling(64, 32), mask=alternate, threads=1)


@pytest.mark.parametrize(("block_k", "products"), [(64, 2), (128, 2), (320, 1)])
def test_sums_are_stored_once_for_all_the_keys_that_are_kept(emulated, block_k, products):
    """Of equal scores, whose largest one never grows: 20 x 4 tiles of S, 2 x 4 of O a product."""
    x = tensors(64, 320, 16, dtype="bfloat16", heads=1, dv=32)
    x.k[:] = 0
    stores = sum(machine.counts["Store"] for machine in tile_machine.ALL)
    out = flashsim.run(x.q, x.k, x.v, backend="numba", tiling=Tiling(64, block_k)).out
    ran = sum(machine.counts["Store"] for machine in tile_machine.ALL) - stores
    assert ran == (20 * 4 + 2 * 4 * products if emulated is EmulatedAmx else 0)
    mean = x.v.astype(np.float32).mean(axis=2, keepdims=True)
    np.testing.assert_allclose(out.astype(np.float32), np.broadcast_to(mean, out.shape), atol=2e-3)


def test_a_row_of_the_largest_finite_scores_is_a_mean(emulated):
    test_extremes.check_largest_finite_scores("bfloat16", 2**-8, backend="numba", **TILING)


def test_a_row_of_the_least_finite_scores_has_no_keys(emulated):
    test_extremes.check_least_finite_scores(NUMBA, "flash2", "bfloat16")


def test_sums_of_scores_that_rise_overflow_no_sooner(emulated):
    """By 4.9 from one tile to the next: less than what makes their sums be scaled anew."""
    x = tensors(16, 64, 16, dtype="bfloat16", heads=1)
    x.q[:], x.k[:], x.v[:] = 0, 0, 2.0**120
    x.q[..., 0], x.k[..., 32:, 0] = 4, 4.9
    out = flashsim.run(x.q, x.k, x.v, backend="numba", tiling=Tiling(16, 32)).out
    np.testing.assert_array_equal(out.astype(np.float32), np.float32(2.0**120))


def test_results_that_are_not_finite_are_seen_as_they_are_written(emulated, monkeypatch):
    """By the walk: nobody looks at the whole output again."""
    x = tensors(50, 600, 40, dtype="bfloat16", heads=1)
    with monkeypatch.context() as patch:
        patch.setattr(arrays, "_not_finite", pytest.fail)
        flashsim.run(x.q, x.k, x.v, backend="numba", **TILING)
    x.q[:], x.v[..., 3] = 0, 3e38
    with pytest.warns(RuntimeWarning, match="out contains"):
        flashsim.run(x.q, x.k, x.v, backend="numba", **TILING)


@pytest.mark.promise("deterministic")
def test_threads_change_nothing_on_an_emulated_cpu(emulated):
    x = tensors(50, 83, 16, dtype="bfloat16")
    one, three = (judged(x, "flash2-fused", threads=n, **TILING)[1] for n in (1, 3))
    for name, array in one.items():
        np.testing.assert_array_equal(array, three[name], err_msg=name)


@pytest.mark.skipif(not HERE, reason="needs a CPU with AMX or AVX512-BF16")
@pytest.mark.parametrize("case", OPTION_CASES)
@pytest.mark.parametrize("algorithm", engine.ALGORITHMS)
@pytest.mark.parametrize("micro_kernel", PAIRED)
def test_the_engine_on_this_cpu(micro_kernel, algorithm, case):
    if micro_kernel not in HERE:
        pytest.skip(f"this CPU has no {micro_kernel}")
    shape, options = OPTION_CASES[case]
    x = tensors(113, 203, 40, dtype="bfloat16", **shape)
    result, one = judged(x, algorithm, micro_kernel, traces=True, **{**TILING, **options})
    assert result.kernel.startswith(f"numba {PAIRED[micro_kernel][0].__name__.lower()}")
    if case in ("causal", "softcap", "mask"):
        for kind in ("normal", "rising"):
            whole = tensors(128, 128, 64, dtype="bfloat16", kind=kind, heads=2, kv_heads=1, dv=32)
            judged(whole, algorithm, micro_kernel, tiling=Tiling(64, 32), **options)
    three = judged(x, algorithm, micro_kernel, threads=3, **{**TILING, **options})[1]
    for name, array in one.items():
        np.testing.assert_array_equal(array, three[name], err_msg=name)


# -- which CPU -------------------------------------------------------------------------------------


@pytest.mark.skipif("amx" in HERE, reason="this CPU has AMX")
def test_amx_is_refused_where_there_is_none():
    x = tensors(5, 5, 4, dtype="bfloat16")
    with pytest.raises(
        BackendUnavailable, match=r"'amx' cannot run on this machine: .*leave out micro_kernel="
    ):
        flashsim.run(x.q, x.k, x.v, backend="numba", micro_kernel="amx")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_amx_multiplies_bfloat16_only(dtype):
    x = tensors(5, 5, 4, dtype=dtype)
    with pytest.raises(OptionError, match=f"needs bfloat16 inputs, got {dtype}"):
        flashsim.run(x.q, x.k, x.v, backend="numba", micro_kernel="amx")


BF16 = PAIRED["avx512_bf16"][1]


@pytest.mark.parametrize(
    ("name", "features", "refused", "compiled", "kind"),
    [
        ("sapphirerapids", PAIRED["amx"][1], None, None, Amx),
        ("sapphirerapids", PAIRED["amx"][1], "Linux refuses", None, registers.Avx512),
        ("znver9", PAIRED["amx"][1], "Linux refuses", None, Avx512Bf16),
        ("znver9", PAIRED["amx"][1], None, BF16, Avx512Bf16),  # NUMBA_CPU_FEATURES has no tiles
        ("znver4", BF16, None, None, Avx512Bf16),
        ("cooperlake", BF16, None, None, registers.Avx512),
        ("znver4", ("avx512f", "avx512vl"), None, None, registers.Avx512),
        ("znver4", PAIRED["amx"][1][:2], None, None, registers.Avx2),
    ],
)
def test_bfloat16_takes_what_this_process_may_use(
    name, features, refused, compiled, kind, monkeypatch
):
    monkeypatch.setattr(registers.llvm, "get_host_cpu_name", lambda: name)
    features = {"avx", "avx2", "fma", *features}  # all such CPUs have these
    monkeypatch.setattr(
        registers.llvm, "get_host_cpu_features", lambda: dict.fromkeys(features, True)
    )
    flags = ",".join(f"+{name}" for name in (features if compiled is None else compiled))
    monkeypatch.setattr(registers.config, "CPU_NAME", None)
    monkeypatch.setattr(registers.config, "CPU_FEATURES", flags)
    monkeypatch.setattr(registers.amx, "refusal", lambda process: refused)
    for cached in ("_host", "lacking", "pays"):
        monkeypatch.setattr(registers, cached, getattr(registers, cached).__wrapped__)
    choose = lambda dtype, one=False, heads=1: type(  # noqa: E731
        heuristics.cpu(
            None, flashsim.Problem(1, dtype=dtype, heads=heads, kv_heads=1), one_query=one
        )
    )
    assert choose("bfloat16") is kind
    # One query a head: pairs where arithmetic is the limit.
    assert choose("bfloat16", one=True) is choose("float32")
    assert choose("bfloat16", one=True, heads=8) is kind
    assert choose("float32") not in (Amx, Avx512Bf16)
    if refused:
        with pytest.raises(BackendUnavailable, match="Linux refuses"):
            heuristics.cpu("amx", flashsim.Problem(1, dtype="bfloat16"))


class Kernel:
    """What `arch_prctl` answers, by what it is asked."""

    def __init__(self, request: int, allowed: int) -> None:
        self.request, self.allowed, self.asked = request, allowed, []
        self.syscall = type("Call", (), {"__call__": staticmethod(self.answer)})()

    def answer(self, number, code, what):
        assert number.value == 158
        self.asked.append(code.value)
        if code.value == amx.ARCH_REQ_XCOMP_PERM:
            assert what.value == 18
            ctypes.set_errno(self.request)
            return -1 if self.request else 0
        ctypes.cast(what, ctypes.POINTER(ctypes.c_uint64))[0] = self.allowed
        return 0


@pytest.mark.parametrize(
    ("request_errno", "allowed", "told"),
    [
        (0, 1 << 18 | 7, None),
        (0, 7, "does not list them"),
        (errno.EINVAL, 0, "before 5.16"),
        (errno.EOPNOTSUPP, 0, "virtual machine hides them"),
        (errno.ENOSPC, 0, "sigaltstack"),
        (errno.EPERM, 0, "seccomp"),
    ],
)
def test_linux_is_asked_for_tiles(request_errno, allowed, told, monkeypatch):
    monkeypatch.setattr(amx.ctypes, "CDLL", lambda *_, **__: Kernel(request_errno, allowed))
    monkeypatch.setattr(amx.sys, "platform", "linux")
    monkeypatch.setattr(amx.platform, "machine", lambda: "x86_64")
    got = amx.refusal.__wrapped__(1)
    assert got is None if told is None else told in got


def test_elsewhere_there_are_no_tiles(monkeypatch):
    monkeypatch.setattr(amx.sys, "platform", "darwin")
    assert "64-bit Linux on x86" in amx.refusal.__wrapped__(1)
