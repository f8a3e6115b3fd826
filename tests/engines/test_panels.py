"""The CPU engine's panel operations: vector code against definitions, and what LLVM makes of it."""

import re

import numpy as np
import pytest
from compiled import kernels_only, thorough
from operations import assembly, code_of, jitted

from flashsim.engines.cpu.micro_kernels import codegen, float16, plain, registers
from flashsim.engines.cpu.micro_kernels.registers import BLOCKING, ROWS, Avx2, Avx512, Neon, Plain
from flashsim.engines.cpu.primitives import packing
from flashsim.problem.masks import masked_score
from flashsim.problem.problem import numpy_dtype

HOST = type(registers.best("float32"))
#: Vector code of every kind, which LLVM lowers to this CPU's registers: its own in `make test`, and
#: of the others the one that is furthest from it.
OTHER = Avx2 if HOST is Neon else Neon
LOWERED = [
    *((HOST, "float32"), (HOST, "float64"), (Plain, "float32"), (OTHER, "float32")),
    *(kernels_only(kind, "float32") for kind in (Avx2, Avx512, Neon) if kind not in (HOST, OTHER)),
    kernels_only(Plain, "float64"),
    *(thorough(kind, "float64") for kind in (Avx2, Avx512, Neon) if kind is not HOST),
]
pytestmark = [
    pytest.mark.promise("twice plain attention's error"),
    pytest.mark.skipif(HOST is Plain, reason="needs a CPU with AVX2 and FMA, AVX-512 or NEON"),
]


set_, add, rescale = map(jitted, (plain.product_set, plain.product_add, plain.product_rescale))
by_row, by_lane = map(jitted, (plain.grad_scores_by_row, plain.grad_scores_by_lane))
softmax, cap, cap_gated = map(jitted, (plain.online_softmax, plain.soft_cap, plain.soft_cap_gated))
pack, unpack = map(jitted, (packing.pack, packing.unpack))
round_, widen, narrow = map(jitted, (plain.round_panel, plain.widen, plain.narrow))


def compare(definition, walk, dtype, args, ulps):
    """Run both on copies; every array must agree, and nothing beside a panel may change."""
    cpu = registers.best(dtype)
    one, two = ([a.copy() if isinstance(a, np.ndarray) else a for a in args] for _ in range(2))
    definition(Plain(cpu.width), *one)
    walk(cpu, *two)
    for a, b in zip(one, two, strict=True):
        if isinstance(a, np.ndarray):
            size = max(float(np.abs(a[np.isfinite(a)]).max()), 1.0)
            np.testing.assert_allclose(b, a, rtol=0, atol=ulps * np.finfo(dtype).eps * size)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("rows", range(1, 2 * ROWS + 2))
@pytest.mark.parametrize("n", [1, 7])
def test_products(rows, n, dtype):
    rng = np.random.default_rng(rows)
    width = registers.best(dtype).width
    draw = lambda size: rng.standard_normal(size).astype(dtype)  # noqa: E731
    ldc, ldb = width + 3, width + 1
    C, B = draw(5 + (rows + 1) * ldc), draw(2 + n * ldb)
    A, alpha = draw(3 + (rows + 1) * (n + 2)), draw(4 + width)
    for row, step in ((n + 2, 1), (1, rows + 1)):  # K as it lies, and V transposed
        args = (C, 5, ldc, A, 3, row, step, B, 2, ldb, rows, n)
        compare(plain.product_set, set_, dtype, args, n + 1)
        compare(plain.product_add, add, dtype, args, n + 1)
        compare(plain.product_rescale, rescale, dtype, (*args, alpha, 4), n + 1)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_online_softmax(rows, dtype):
    rng = np.random.default_rng(rows)
    w = registers.best(dtype).width
    S = (20 * rng.standard_normal(3 + (rows + 1) * w)).astype(dtype)
    S[3 : 3 + rows * w : w] = -np.inf  # a lane that sees nothing in this tile
    m = np.full(2 + w, -np.inf, dtype)
    l, alpha = np.zeros(2 + w, dtype), np.zeros(2 + w, dtype)
    first = (S, 3, rows, m, l, alpha, 2)
    compare(plain.online_softmax, softmax, dtype, first, 64)
    m[2:] = 10 * rng.standard_normal(w)
    l[2:] = 1 + rng.random(w)
    m[3], l[3] = -np.inf, 0
    compare(plain.online_softmax, softmax, dtype, first, 64)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_online_softmax_of_scores_that_count_as_masked(dtype):
    """The least number there is in one lane, and what is just too large to count in another."""
    w, low = registers.best(dtype).width, masked_score(dtype)
    S, m, l, alpha = np.zeros(2 * w, dtype), *np.zeros((2, w), dtype), np.ones(w, dtype)
    m[:2], S[::w] = -np.inf, np.finfo(dtype).min
    S[1::w] = np.nextafter(np.array(low, dtype), np.array(0, dtype))
    with np.errstate(over="ignore"):
        for run, cpu in ((plain.online_softmax, Plain(w)), (softmax, registers.best(dtype))):
            P, *sums = (x.copy() for x in (S, m, l, alpha))
            run(cpu, P, 0, 2, *sums, 0)
            np.testing.assert_array_equal(P.reshape(2, w)[:, :3], [[0, 1, 1]] * 2)
            np.testing.assert_array_equal(sums[1][:3], [0, 2, 2])


@pytest.mark.parametrize(("kind", "dtype"), LOWERED)
@pytest.mark.parametrize(("n", "d"), [(1, 1), (15, 17), (16, 16), (33, 32), (70, 40), (128, 64)])
def test_packing_transposes_and_back(kind, dtype, n, d):
    """Each row times its factor, nothing but zeros beside it, and every square in its place."""
    cpu = code_of(kind, dtype, like=HOST)
    rng = np.random.default_rng(n)
    X, factors = (rng.standard_normal(size).astype(dtype) for size in (3 + n * d, n))
    lanes = -(-n // cpu.width) * cpu.width
    panels = np.full(lanes * d + 1, 7, dtype)
    pack(cpu, panels, X, 3, n, d, factors)
    rows = X[3:].reshape(n, d) * factors[:, None]
    filled = np.zeros((lanes, d), dtype)
    filled[:n] = rows
    expected = filled.reshape(-1, cpu.width, d).transpose(0, 2, 1).reshape(-1)
    np.testing.assert_array_equal(panels[:-1], expected)
    back = np.full(2 + n * d + 1, 7, dtype)
    unpack(cpu, panels, back, 2, n, d, factors)
    np.testing.assert_array_equal(back[2:-1].reshape(n, d), rows * factors[:, None])
    assert panels[-1] == back[0] == back[1] == back[-1] == 7


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gradient_of_scores(dtype):
    rng = np.random.default_rng(0)
    w, rows = registers.best(dtype).width, 5
    ld = 2 * w
    S, dP = (rng.standard_normal(w + rows * ld).astype(dtype) for _ in range(2))
    S[w] = S[w + 1] = -np.inf
    L, delta = rng.random((2, 3 + max(rows, w))).astype(dtype)
    args = (S, w, dP, w, ld, rows, L, delta, 3)
    compare(plain.grad_scores_by_row, by_row, dtype, args, 8)
    compare(plain.grad_scores_by_lane, by_lane, dtype, args, 8)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_soft_cap(dtype):
    w = registers.best(dtype).width
    x = np.concatenate([np.geomspace(1e-8, 300, 50 * w), [0, np.inf] + [1] * (w - 2)])
    S = np.concatenate([-x, x]).astype(dtype)
    c, rows = np.array([1.5], dtype), len(S) // w
    compare(plain.soft_cap, cap, dtype, (S, 0, w, rows, c), 4)
    compare(plain.soft_cap_gated, cap_gated, dtype, (S, 0, w, rows, c, np.zeros_like(S), 0), 4)
    small = np.full(w, 1e-6, dtype)  # relative precision where a difference of powers would lose it
    cap(registers.best(dtype), small, 0, w, 1, c)
    np.testing.assert_allclose(small, 1.5 * np.tanh(1e-6 / 1.5), rtol=4 * np.finfo(dtype).eps)
    nan = np.full(w, np.nan, dtype)
    cap(registers.best(dtype), nan, 0, w, 1, c)
    assert np.isnan(nan).all()


@pytest.mark.parametrize(("kind", "dtype"), LOWERED)
def test_soft_cap_is_exact_relative_to_small_scores(kind, dtype):
    """LLVM lowers every kind of vector code to this CPU's registers: one rule for all of them.

    Dividing, tanh and multiplying, as plain attention does it, is off by up to 2 epsilon.
    """
    cpu = code_of(kind, dtype, like=HOST)
    wide = np.longdouble if dtype == "float64" else np.float64
    limits = np.finfo(dtype)
    for c in (50.0, 1.5, limits.tiny, limits.max / 4):
        c = np.array([c], dtype)
        x = np.geomspace(1e-7, 20, 200 * cpu.width) * wide(c[0])
        x = x[(limits.tiny < x) & (x < limits.max)].astype(dtype)
        x = np.resize(x, len(x) // cpu.width * cpu.width)
        S = np.concatenate([x, -x])
        cap(cpu, S, 0, cpu.width, len(S) // cpu.width, c)
        exact = wide(c[0]) * np.tanh(x.astype(wide) / wide(c[0]))
        error = np.abs(S / np.concatenate([exact, -exact]) - 1)
        assert error.max() < 3 * limits.eps


@pytest.mark.parametrize(("dtype", "ulps"), [("float32", 2), ("float64", 2)])
def test_powers_of_two(dtype, ulps):
    """Through the softmax with m = 0, above every score: P = exp(S), relative error in ulps."""
    cpu = registers.best(dtype)
    low = {"float32": -87, "float64": -708}[dtype]
    x = np.linspace(low, 0, 40_000 * cpu.width).astype(dtype)
    m, l, alpha = np.zeros(cpu.width, dtype), np.zeros(cpu.width, dtype), np.ones(cpu.width, dtype)
    P = x.copy()
    softmax(cpu, P, 0, len(x) // cpu.width, m, l, alpha, 0)
    wide = np.longdouble if dtype == "float64" else np.float64
    # x log2 e is rounded by the fused multiply-add alone, relative to its own size
    scale = 1 + np.abs(x.astype(wide)) / 2
    error = np.abs(P / np.exp(x.astype(wide)) - 1) / np.finfo(dtype).eps / scale
    assert error.max() < ulps
    special = np.full(cpu.width, 0, dtype)
    special[:4] = [-np.inf, np.nan, 2 * low, 0]
    softmax(cpu, special, 0, 1, m, l, alpha, 0)
    np.testing.assert_array_equal(special[:4], np.array([0, np.nan, 0, 1], dtype))


def every_case(dtype):
    """Every finite number of a 16-bit type, halves between neighbours, what is beside them, NaN."""
    exact = np.arange(2**16, dtype=np.uint16).view(numpy_dtype(dtype)).astype(np.float32)
    exact = np.sort(exact[np.isfinite(exact)])
    with np.errstate(over="ignore"):
        half = ((exact[1:].astype(np.float64) + exact[:-1]) / 2).astype(np.float32)
        beside = [np.nextafter(half, np.float32(to)) for to in (-9, 9)]
    nans = np.uint32([0x7FC00000, 0x7F800001, 0xFFFFFFFF, 0x7FFFFFFF]).view(np.float32)
    return np.concatenate([exact, half, *beside, np.float32([np.inf, -np.inf]), nans])


@pytest.mark.parametrize(
    ("dtype", "rounding"), [("float16", float16.FLOAT16), ("bfloat16", float16.BFLOAT16)]
)
def test_rounding_to_16_bits(dtype, rounding):
    """Every 16-bit number, what lies halfway to its neighbour, and what lies beside that."""
    cpu, x = registers.best("float32"), every_case(dtype)
    x = np.concatenate([x, np.zeros(-len(x) % cpu.width, np.float32)])
    with np.errstate(over="ignore", invalid="ignore"):
        expected = x.astype(numpy_dtype(dtype)).astype(np.float32)
    x, expected = x.reshape(-1, cpu.width), expected.reshape(-1, cpu.width)
    every = range(len(x))
    some = [*every[::37], every[-1]]  # in Python: slow, and the same as `Plain` is compiled from
    for walk, kind, panels in (
        (plain.round_panel, Plain, some),
        (round_, Plain, every),
        (round_, HOST, every),
    ):
        rounded = x[panels]
        walk(kind(cpu.width), rounded.reshape(-1), 0, cpu.width, len(rounded), rounding)
        np.testing.assert_array_equal(rounded, expected[panels])
        assert np.isnan(rounded).sum() == np.isnan(x[panels]).sum() > 0


@pytest.mark.parametrize(
    "kind",
    [None, Plain, HOST, OTHER]
    + [kernels_only(kind) for kind in (Avx2, Avx512, Neon) if kind not in (HOST, OTHER)],
)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_conversion_of_16_bits(dtype, kind):
    """There and back, from odd places and of lengths that fill no register.

    `None` is Python, of one number in 37; `Plain` is the same code, compiled.
    """
    step = 37 if kind is None else 1
    code = float16.FLOAT16 if dtype == "float16" else float16.BFLOAT16
    cpu = code_of(kind or Plain, "float32", like=HOST)
    there, back = (plain.widen, plain.narrow) if kind is None else (widen, narrow)

    every = np.arange(0, 2**16, step, dtype=np.uint16).view(numpy_dtype(dtype))
    with np.errstate(over="ignore", invalid="ignore"):
        x = every_case(dtype)[::step]
        x = np.concatenate([x, every.astype(np.float32)])
        expected = x.astype(numpy_dtype(dtype)).astype(np.float32)
    for size in (len(x), 67, 1):
        narrowed = np.full(size + size % 2 + 4, 7, np.uint16)
        back(cpu, x, len(x) - size, narrowed.view(np.float32), 3, size, code)
        found = narrowed[3 : 3 + size].view(numpy_dtype(dtype)).astype(np.float32)
        np.testing.assert_array_equal(found, expected[len(x) - size :])
        assert (np.delete(narrowed, slice(3, 3 + size)) == 7).all()
    for size in (len(every) - 1, 67, 1):
        wide = np.full(size + 3, 7, np.float32)
        there(cpu, wide, 2, every.view(np.float32), len(every) - size, size, code)
        np.testing.assert_array_equal(wide[2:-1], every[-size:].astype(np.float32))
        assert wide[0] == wide[1] == wide[-1] == 7


# -- what LLVM makes of it -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "triple", "cpu", "fma"),
    [
        (Avx2, "x86_64-unknown-linux-gnu", "haswell", r"vfmadd\d+ps\s.*%ymm"),
        (Avx512, "x86_64-unknown-linux-gnu", "skylake-avx512", r"vfmadd\d+ps\s.*%zmm"),
        (Avx512, "x86_64-unknown-linux-gnu", "sapphirerapids", r"vfmadd\d+ps\s.*%zmm"),
        (Neon, "aarch64-unknown-linux-gnu", "neoverse-n1", r"fmla\s+v\d+\.4s"),
    ],
)
def test_full_registers_and_nothing_spilled(kind, triple, cpu, fma):
    text = assembly(codegen.build_product, kind, cpu, triple, mode="add")
    # The loop of the widest step: its multiply-adds, and no vector that visits the stack.
    loops = re.split(r"^\.L\w+:", text, flags=re.M)
    widest = max(loops, key=lambda block: len(re.findall(fma, block)))
    assert len(re.findall(fma, widest)) >= ROWS * BLOCKING[kind].vecs
    body = widest[: [match.end() for match in re.finditer(fma, widest)][-1]]
    assert not re.search(r"[xyz]mm\d+, -?\d*\(%rsp\)|\(%rsp\), %[xyz]mm|\[sp", body)
