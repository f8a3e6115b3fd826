"""flashsim.triton: kernels run on the CPU, right, counted to the byte, and Triton left as it was.

`make test-triton` runs these on the oldest and on the newest Triton.
"""

import csv
import inspect
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("triton")

import ml_dtypes
import triton
import triton.language as tl
import triton_cases as cases
from hand_written import without_stages
from triton.runtime import interpreter
from triton_cases import example, line_of

import flashsim
import flashsim.triton as traced_triton
from flashsim import Problem, Tiling
from flashsim.errors import (
    DTypeError,
    FlashSimError,
    MemoryModelError,
    OptionError,
    TraceError,
    UnsupportedError,
)
from flashsim.own_kernels.answer import answer
from flashsim.triton import libdevice, trace, watch

pytestmark = pytest.mark.promise("three counts equal", "bridges equal their library")

ROOT = Path(__file__).parents[2]
BF16 = ml_dtypes.bfloat16


def draw(*shapes, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape, dtype=np.float32).astype(dtype) for shape in shapes]


# -- bytes: a hand count, and the closed form ---------------------------------------------------


def rows_seen(n, block_q, block_k, causal):
    """Sum over query tiles of the keys that they load, counted one by one."""
    total = 0
    for first in range(0, n, block_q):
        end = min(first + block_q, n) if causal else n
        total += sum(min(block_k, n - k) for k in range(0, end, block_k))
    return total


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("n", "dtype"), [(128, np.float32), (100, np.float16), (72, BF16)])
def test_attention_forward_and_backward(n, dtype, causal):
    """Right within the type's error, and equal to a hand count and to the closed form."""
    fa, heads, d, tile = example("flash_attention"), 2, 32, (32, 16)
    q, k, v, do = draw(*[(heads, n, d)] * 4, dtype=dtype)
    p = Problem(n, head_dim=d, heads=heads, causal=causal, dtype=np.dtype(dtype).name)

    with watch(check=True) as seen:
        o, lse = fa.forward(q, k, v, causal, *tile)
    forward = seen.result()
    with watch(check=True) as seen:
        fa.backward(q, k, v, o, lse, do, causal, *tile)
    backward = seen.result()

    assert forward.verdict.right, str(forward.verdict)
    assert backward.verdict.right, str(backward.verdict)
    assert forward.problem == backward.problem == p
    assert forward.findings == [x for x in forward.findings if x.kind == "masked lanes"]
    size, item = n * d * q.itemsize, q.itemsize
    keys = rows_seen(n, *tile, causal)
    by_hand = {
        ("load", "Q"): heads * size,
        ("load", "K"): heads * keys * d * item,
        ("load", "V"): heads * keys * d * item,
        ("store", "O"): heads * size,
        ("store", "L"): heads * n * 4,
    }
    assert without_stages(forward.trace.transfers) == by_hand
    for one, direction in ((forward, "forward"), (backward, "backward")):
        counted = flashsim.count(p, tiling=Tiling(*tile), direction=direction)
        assert without_stages(one.trace.transfers) == without_stages(counted.transfers)
        assert one.compulsory() == counted.compulsory()
        assert one.trace.flops("matmul") > 0


def test_a_softmax_in_two_passes():
    x, (rows, n) = draw((48, 200))[0], (48, 200)

    scope = vars(example("softmax"))
    with watch() as seen:
        y = example("softmax").softmax(x)
        scope["made_inside"] = y
    traced = seen.result()

    assert scope.pop("made_inside") is y, "a name of the user's own module is gone"
    assert "interpreter_builder" not in scope
    e = np.exp(x - x.max(axis=1, keepdims=True))
    np.testing.assert_allclose(y, e / e.sum(axis=1, keepdims=True), rtol=1e-5)
    assert without_stages(traced.trace.transfers) == {
        ("load", "x_ptr"): 2 * rows * n * 4,
        ("store", "y_ptr"): rows * n * 4,
    }
    line = line_of(inspect.getsourcefile(example("softmax")), "x = tl.load", 1)
    (row,) = (row for row in traced.byte_rows if row.op == "load")
    assert f"loaded twice by every program, line {line}" in row.why


def test_decoding_with_split_keys():
    heads, n, d, splits = 3, 512, 32, 4
    q, k, v = draw((heads, d), (heads, n, d), (heads, n, d))

    with watch(check=True) as seen:
        example("decode").decode(q, k, v, splits)
    traced = seen.result()

    assert traced.verdict.right
    counted = flashsim.count(
        Problem(1, n, head_dim=d, heads=heads),
        algorithm="flash-decode",
        splits=splits,
        tiling=Tiling(1, 64),
    )
    assert without_stages(traced.trace.transfers) == without_stages(counted.transfers)
    assert without_stages(traced.trace.transfers)["load", "O_part"] == splits * heads * d * 4


def test_traced_bytes_are_those_that_a_gpu_counts():
    """docs/data/triton-counters-h100.csv: read from L2 and written to it, equal to the byte.

    Two exceptions. A second pass over a row that L1 still holds is not read from L2 again. In the
    delta kernel of float16, ptxas spills five registers: its 128 threads store 20 B each to local
    memory, once in each program (`test_the_delta_kernel_spills_five_registers`).
    """
    with open(ROOT / "docs/data/triton-counters-h100.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 23
    for row in rows:
        where = row["kernel"], row["shape"]
        read = int(row["read_bytes"])
        if row["kernel"] == "softmax_two_passes":
            read += int(row["l1_hit_bytes"])
        assert read == int(row["traced_load_sector_bytes"]), where
        heads, _, rest = row["shape"].partition(" heads; ")
        spills = row["kernel"] == "attention_delta" and " x 64; float16; " in rest
        programs = int(heads) * -(-int(rest.split(" x ")[0]) // 64) if spills else 0
        written = int(row["written_bytes"]) - programs * 128 * 20
        assert written == int(row["traced_store_sector_bytes"]), where
    traced = {(row["kernel"], row["shape"]): row for row in rows}
    q, k, v = draw(*[(1, 512, 64)] * 3)
    with watch() as seen:
        example("flash_attention").forward(q, k, v, True, 64, 32)
    row = traced["attention_forward", "1 heads; 512 x 64; float32; causal; 64 x 32"]
    assert seen.result().bytes("load") == int(row["traced_load_bytes"])


@pytest.mark.skipif(not triton.__version__.startswith("3.6"), reason="the H100 ran Triton 3.6")
@pytest.mark.parametrize(
    ("dtype", "d", "stores"), [("fp16", 64, 5), ("bf16", 128, 0), ("fp32", 64, 0)]
)
def test_the_delta_kernel_spills_five_registers(dtype, d, stores, tmp_path):
    """Compiled for an H100, which takes no GPU: what its machine code stores to local memory."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kinds = {"o_ptr": f"*{dtype}", "do_ptr": f"*{dtype}", "delta_ptr": "*fp32", "n": "i32"}
    source = ASTSource(
        example("flash_attention").attention_delta,
        signature={**kinds, "BLOCK_Q": "constexpr", "D": "constexpr"},
        constexprs={"BLOCK_Q": 64, "D": d},
        attrs={(n,): [["tt.divisibility", 16]] for n in range(4)},
    )
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    cubin = tmp_path / "delta.cubin"
    cubin.write_bytes(made.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    text = subprocess.run([tool, "-c", cubin], capture_output=True, text=True, check=True).stdout
    assert len(re.findall(r"\bSTL ", text)) == stores
    assert len(re.findall(r"\bSTG\b", text)) == 1


# -- seeded mistakes ----------------------------------------------------------------------------


def forward(folder, *changes, n=96, heads=2, causal=True, check=True):
    """Trace the example's forward pass with changes of its text."""
    fa = example("flash_attention", folder, *changes)
    with watch(check=check) as seen:
        fa.forward(*draw(*[(heads, n, 16)] * 3), causal, 32, 16)
    return seen.result()


#: Old and new text, ..., what is said of the mistake, and of the first wrong step. test_graded.py
#: has more mistakes.
MISTAKES = [
    ("acc = alpha[:, None] * acc + tl.dot", "acc = acc + tl.dot",
     "O is not multiplied by exp(m_old - m_new)", "acc is wrong from row"),
    ("l = alpha * l + tl.sum(p, 1)", "l = l + tl.sum(p, 1)",
     "l is not multiplied by exp(m_old - m_new)", "l is wrong from row"),
    ("s = tl.dot(q, tl.trans(k)) * scale", "s = tl.dot(q, tl.trans(k))",
     "the scores are not multiplied by the scale", "step 1"),
    ("rows[:, None] >= cols", "rows[:, None] + 1 >= cols", "a query also sees the next key", ""),
    ("m + tl.log(l), mask", "(m + tl.log(l)) * 1.4426950408889634, mask",
     "the LSE is in base 2", ""),
    ("tl.exp(s - m_new", "tl.exp2(s - m_new", "tl.exp(m - m_new", "tl.exp2(m - m_new",
     "exp2 is taken of scores that were not multiplied by log2(e)", ""),
    ("tl.exp(s - m_new", "tl.exp2(s - m_new", "tl.exp(m - m_new", "tl.exp2(m - m_new",
     "m + tl.log(l)", "m * 0.6931471805599453 + tl.log(l)",
     "exp2 is taken of scores that were not multiplied by log2(e)", ""),
    ("tl.exp(s - m_new", "tl.exp2(s - m_new", "tl.exp(m - m_new", "tl.exp2(m - m_new",
     "tl.trans(k)) * scale", "tl.trans(k)) * (scale * 1.4426950408889634)",
     "the LSE is m + log(l), but m is in base 2: multiply m by log(2)", ""),
    ("rows, d = i * BLOCK_Q + tl.arange", "rows, d = i + tl.arange",
     "the program's index is not multiplied by the tile", ""),
]  # fmt: skip


@pytest.mark.parametrize("case", MISTAKES, ids=lambda case: case[-2])
def test_a_seeded_mistake_is_guessed(case, tmp_path):
    *texts, mistake, step = case

    verdict = forward(tmp_path, *zip(texts[::2], texts[1::2], strict=True)).verdict

    assert not verdict.right
    assert mistake in verdict.mistake, str(verdict)
    assert step in verdict.step
    if verdict.program:
        stores = {line_of(tmp_path / "flash_attention.py", x) for x in ("(o_ptr", "(lse_ptr")}
        assert verdict.line in stores


SIGNATURE = """q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, n, scale,
    causal: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
"""
#: Makes each program compute two row tiles, one after the other.
TWO_TILES = [
    ("attention_forward(\n    ", "tile(\n    i, head, "),
    ("    i, head = tl.program_id(0), tl.program_id(1)\n", ""),
    ("@triton.jit\ndef attention_delta", f"""@triton.jit
def attention_forward(
    {SIGNATURE}
    for half in range(2):
        tile(
            2 * tl.program_id(0) + half, tl.program_id(1), q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, n,
            scale, causal, BLOCK_Q, BLOCK_K, D,
        )


@triton.jit
def attention_delta"""),
]  # fmt: skip


def test_a_program_of_several_row_tiles_is_followed_in_its_first(tmp_path):
    made = forward(tmp_path, *TWO_TILES, ("m + tl.log(l)", "m + tl.log2(l)"), causal=False)
    assert "m + log2(l)" in made.verdict.mistake
    assert made.verdict.step == ""


def test_a_mask_that_is_missing(tmp_path):
    load = "k = tl.load(k_ptr + base + cols[:, None] * D + d[None, :]"
    change = f"{load}, mask=inside, other=0.0)", f"{load})"
    traced = forward(tmp_path, change, n=90, causal=False, check=False)
    kinds = {one.kind: one for one in traced.findings}

    line = line_of(tmp_path / "flash_attention.py", f"{load})")
    assert kinds["outside"].line == kinds["next head"].line == line
    assert kinds["outside"].program == (0, 1)
    assert kinds["next head"].program == (0, 0)


def test_two_programs_store_one_row_of_lse(tmp_path):
    change = "lse_ptr + head * n + rows, m", "lse_ptr + rows, m"
    traced = forward(tmp_path, change, n=64, causal=False, check=False)
    kinds = {one.kind: one for one in traced.findings}

    assert kinds["two stores"].tensor == kinds["never stored"].tensor == "L"


# -- numbers in narrow types --------------------------------------------------------------------


def rounded(x, dtype):
    return np.asarray(x, np.float64).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float16, BF16, np.float32])
def test_arithmetic_of_elements_rounds_once(dtype):
    x, y = draw(64, 64, dtype=dtype)
    z = np.zeros_like(x)

    trace(cases.mixed, (1,), x, y, z, BLOCK=64)

    wide = np.float32
    largest = np.maximum(x.astype(wide), y.astype(wide))
    step = rounded(x.astype(wide) * y.astype(wide), dtype)
    step = rounded(step.astype(wide) - x.astype(wide), dtype)
    step = step.astype(wide) / largest  # Triton divides in float32, and stays there
    step = rounded(step + largest - wide(2), dtype)
    np.testing.assert_array_equal(z.astype(wide), step.astype(wide))


@pytest.mark.parametrize(
    "dtype", [np.float16, BF16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]
)
def test_products_are_those_of_the_numbers(dtype):
    x, y = draw((32, 32), (32, 32), dtype=dtype)
    z = np.zeros((32, 32), np.float32)

    trace(cases.product, (1,), x, y, z, N=32)

    exact = x.astype(np.float64) @ y.astype(np.float64)
    np.testing.assert_allclose(z, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("to", [BF16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, np.float16])
def test_conversions_round_to_nearest_even(to):
    x = np.concatenate([draw(120)[0], [0, -0.0, 1e-8, 3e-5, 1 + 2**-8, 1 + 3 * 2**-8, 240, 2]])
    x = x.astype(np.float32)
    y, back = np.zeros(128, to), np.zeros(128, np.float32)

    trace(cases.convert, (1,), x, y, BLOCK=128)
    trace(cases.convert, (1,), y, back, BLOCK=128)

    np.testing.assert_array_equal(y.view(f"u{y.itemsize}"), x.astype(to).view(f"u{y.itemsize}"))
    np.testing.assert_array_equal(back, x.astype(to).astype(np.float32))


def test_fp8_saturates_as_on_a_gpu():
    x = np.array([1e6, -1e6, np.inf, np.nan] * 4, np.float32)
    y = np.zeros(16, ml_dtypes.float8_e4m3fn)

    trace(cases.convert, (1,), x, y, BLOCK=16)

    assert y[:3].astype(float).tolist() == [448, -448, 448]
    assert np.isnan(y[3].astype(float))


def test_narrow_numbers_are_right_or_refused():
    x, y = draw(64, 64, dtype=BF16)
    with pytest.raises(UnsupportedError, match=r"line \d+.*rounds to zero"):
        trace(cases.rounded_to_zero, (1,), x.astype(np.float32), y, BLOCK=64)
    with pytest.raises(UnsupportedError, match=r"an atomic operation of bfloat16"):
        trace(_atomic, (1,), x, y, BLOCK=64)
    out = np.zeros(2, np.float32)
    with pytest.raises(UnsupportedError, match=r"a reduction .* x\.to\(tl\.float32\)"):
        trace(cases.row_sums, (2,), x, out, COLS=32)
    trace(cases.row_sums, (2,), x.astype(np.float32), out, COLS=32)
    np.testing.assert_allclose(out, x.astype(np.float32).reshape(2, 32).sum(1), rtol=1e-5)


@triton.jit
def _atomic(x_ptr, y_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.atomic_add(y_ptr + at, tl.load(x_ptr + at))


# -- what kernels are made of -------------------------------------------------------------------


def test_arguments_by_their_names_and_ragged_ends():
    x, y, z = *draw(100, 100), np.zeros(100, np.float32)

    traced = trace(
        cases.add, lambda meta: (triton.cdiv(100, meta["BLOCK"]),), x, y, z, 100, BLOCK=32
    )

    np.testing.assert_array_equal(z, x + y)
    assert traced.outputs["z_ptr"] is z
    assert {k: traced.bytes(*k) for k in (("load", "x_ptr"), ("store", "z_ptr"))} == {
        ("load", "x_ptr"): 400,
        ("store", "z_ptr"): 400,
    }
    assert traced.record.launches[0].grid == (4,)
    assert traced.record.launches[0].constants == {"n": 100, "BLOCK": 32}
    assert int(traced.record.accesses["masked"].sum()) == 3 * 28


def test_one_array_under_two_parameters():
    x, z = *draw(64), np.zeros(64, np.float32)

    traced = trace(cases.add, (2,), x, x, z, 64, BLOCK=32)

    np.testing.assert_array_equal(z, 2 * x)
    assert traced.bytes("load", "x_ptr") == traced.bytes("load", "y_ptr") == 256


def test_views_of_one_buffer():
    both = draw((2, 64))[0]
    traced = trace(cases.add, (2,), both[0], both[1], z := np.zeros(64, np.float32), 64, BLOCK=32)

    np.testing.assert_array_equal(z, both.sum(axis=0))
    assert traced.findings == []
    # One lane too many reads the other view, which is memory of its own.
    z = np.zeros(96, np.float32)
    traced = trace(cases.add, (3,), both[0], both[1], z, 96, BLOCK=32)
    np.testing.assert_array_equal(z[64:], np.full(32, np.nan))
    assert traced.bytes("load", "y_ptr") == (64 + 32) * 4


def test_memory_outside_of_an_allocation_is_not_touched():
    x, y = draw(64, 64)
    z = np.full(96, 7, np.float32)

    traced = trace(cases.add, (3,), x, y, z[:64], 96, BLOCK=32)

    np.testing.assert_array_equal(z[:64], x + y)
    np.testing.assert_array_equal(z[64:], np.full(32, np.nan))  # not of z[:64], and yet of z
    kinds = [one.kind for one in traced.findings]
    assert kinds.count("outside") == 3
    line = line_of(cases.__file__, "total = tl.load(x_ptr")
    assert traced.findings[0].line == line


@pytest.mark.parametrize("kernel", [cases.copy_blocks, cases.copy_described])
def test_block_pointers_and_tensor_descriptors(kernel):
    x, y = draw((50, 40))[0], np.zeros((50, 40), np.float32)

    traced = trace(kernel, (4,), x, y, 50, 40, ROWS=16, COLS=32)

    np.testing.assert_array_equal(y, x + 1)
    assert traced.bytes("load", "x_ptr") == traced.bytes("store", "y_ptr") == x.nbytes
    assert traced.findings == [one for one in traced.findings if one.kind == "masked lanes"]


def test_a_number_can_be_stored_to_a_block():
    y = np.zeros(20, np.float32)
    traced = trace(cases.fill_block, (1,), y, 20, BLOCK=32)
    np.testing.assert_array_equal(y, 1.5)
    assert traced.bytes("store", "y_ptr") == 80


def test_helpers_atomics_and_locks():
    x, y = draw(64)[0], np.zeros(64, np.float32)
    trace(cases.with_a_helper, (1,), x, y, BLOCK=64)
    np.testing.assert_array_equal(y, 2 * x)

    drawn = np.random.default_rng(0).integers(0, 10, 100).astype(np.int32)
    bins = np.zeros(10, np.int32)
    traced = trace(cases.histogram, (4,), drawn, bins, 100, BLOCK=32)
    np.testing.assert_array_equal(bins, np.bincount(drawn, minlength=10))
    assert traced.bytes("reduce", "y_ptr") == 400
    assert not traced.record.clashes

    lock, total = np.zeros(1, np.int32), np.zeros(1, np.float32)
    traced = trace(cases.locked, (4,), x, lock, total, BLOCK=16)
    np.testing.assert_allclose(total, x.sum(), rtol=1e-5)


@pytest.mark.parametrize(
    ("kernel", "line", "reason"),
    [
        ("breaks", "            break", "AST node type: Break"),
        ("changes_type", "for i in range(0, BLOCK):", "initial type int32 but is re-assigned to"),
        ("appends", "    _appended(tl.load(x_ptr), parts)", "append"),
        ("product", "tl.store(z_ptr + at, tl.dot(", "Input shapes should have M >= 1"),
    ],
)
def test_a_kernel_that_only_the_interpreter_runs_is_named(kernel, line, reason):
    """With the line of the launched kernel, also if a helper is wrong."""
    function = getattr(cases, kernel)
    arrays = draw(*[(4, 4)] * len([x for x in function.arg_names if x.endswith("_ptr")]))
    traced = trace(function, (1,), *arrays, 4)
    (note,) = traced.record.notes
    number = line_of(cases.__file__, line, nth=kernel == "changes_type")
    assert note.startswith(f"line {number}, `{line.strip()}")
    assert re.search(f"cannot compile {kernel} for a GPU.*{reason}", note)
    assert f"\ncompile  line {number}, " in answer(traced)


def test_a_kernel_after_another_compiles():
    """Although the interpreter has changed the language for the one before."""
    x, y, z = *draw(64, 64), np.zeros(64, np.float32)
    with watch() as seen:
        cases.add[(2,)](x, y, z, 64, BLOCK=32)
        cases.mixed[(1,)](x, z, y, BLOCK=64)
    assert not seen.record().notes


def test_a_table_of_pointers():
    x, y = draw(32)[0], np.zeros(32, np.float32)
    table = np.array([x.ctypes.data], np.int64)

    with pytest.raises(MemoryModelError, match=r"pointers, .*32 of 32 pointers point to no tensor"):
        trace(cases.pointers, (1,), table, y, BLOCK=32)


def test_autotuned_kernels_run_one_configuration():
    x, y, z = *draw(100, 100), np.zeros(100, np.float32)
    grid = lambda meta: (triton.cdiv(100, meta["BLOCK"]),)  # noqa: E731

    traced = trace(cases.tuned, grid, x, y, z, 100)
    assert traced.record.launches[0].grid == (7,)
    assert (
        "add is autotuned: ran its configuration {'BLOCK': 16}, one of 2" in traced.record.notes[0]
    )
    assert traced.bytes("load", "x_ptr") == 400
    for config in (1, {"BLOCK": 32}):
        assert trace(cases.tuned, grid, x, y, z, 100, config=config).record.launches[0].grid == (4,)
    with pytest.raises(OptionError, match=r"add has no configuration with \{'BLOCK': 8\}"):
        trace(cases.tuned, grid, x, y, z, 100, config={"BLOCK": 8})
    with pytest.raises(OptionError, match="has 2 configurations, so config= must be from 0 to 1"):
        trace(cases.tuned, grid, x, y, z, 100, config=2)
    traced = trace(cases.with_heuristics, grid, x, y, z, 100)
    assert traced.record.launches[0].grid == (2,)


def test_some_of_the_programs():
    x, y, z = *draw(100, 100), np.zeros(100, np.float32)

    traced = trace(cases.add, (4,), x, y, z, 100, BLOCK=32, programs=[(1,)])

    assert z[32:64].any()
    assert not z[:32].any()
    assert traced.bytes("load", "x_ptr") == 128
    with pytest.raises(OptionError, match=r"has a grid of \(4,\), which has no program \(4,\)"):
        trace(cases.add, (4,), x, y, z, 100, BLOCK=32, programs=[(4,)])


def test_values_that_a_program_holds_at_once(tmp_path):
    held = forward(tmp_path, n=64).record.launches[0].held

    assert set(held) >= {"acc", "m", "l", "s", "p"}
    assert held["acc"] == ((32, 16), 32 * 16 * 4)


def test_numbers_of_libdevice():
    near, far, half = np.float32([0.49999997, 8388609, -2.5])
    whole = libdevice.computed("__nv_roundf", [np.array([near, far, half])])
    assert whole.tolist() == [0, far, -3]
    assert libdevice.computed("__nv_lgammaf", [np.float32([0, -2, 5])]).tolist()[:2] == [np.inf] * 2


def test_functions_of_libdevice():
    x = draw(64)[0]
    y = np.empty_like(x)

    traced = trace(cases.from_libdevice, (1,), x, y, BLOCK=64)

    np.testing.assert_allclose(y, 2 * np.tanh(x) + np.abs(x) ** 1.5, rtol=1e-6)
    assert not traced.record.notes  # Triton's compiler takes the kernel as it is
    with pytest.raises(UnsupportedError, match=r"libdevice\.j0.*libdevice's function j0f is not"):
        trace(cases.from_libdevice_unknown, (1,), x, y, BLOCK=64)
    half = x.astype(np.float16)
    with pytest.raises(DTypeError, match=r"libdevice\.tanh is not defined .*fp16"):
        trace(cases.from_libdevice, (1,), half, half.copy(), BLOCK=64)


def test_sums_of_several_programs():
    """Under a lock, and by a tensor descriptor's atomic operation, which masks the last rows."""
    x, sums, lock = (
        np.arange(96, dtype=np.float32),
        np.zeros(32, np.float32),
        np.zeros(1, np.int32),
    )

    traced = trace(cases.adds_under_a_lock, (3,), x, sums, lock, BLOCK=32)

    np.testing.assert_array_equal(sums, x.reshape(3, 32).sum(axis=0))
    assert traced.findings == []
    assert any("takes a lock" in note for note in traced.record.notes)
    sums = np.zeros(48, np.float32)
    traced = trace(cases.adds_described, (2,), x, sums, BLOCK=64)
    np.testing.assert_array_equal(sums, x.reshape(2, 48).sum(axis=0))
    assert traced.bytes("reduce", "sum_ptr") == 2 * 48 * 4


# -- errors, and what is left behind ------------------------------------------------------------


def state():
    """Everything of Triton that tracing touches."""
    objects = [tl, tl.core, tl.math, tl.standard, tl.tensor, tl.dtype, interpreter.GridExecutor]
    objects += [interpreter.InterpretedFunction, triton.runtime.jit.JITFunction, interpreter]
    objects += [interpreter.interpreter_builder, interpreter.ReduceScanOpInterface]
    objects += [tl.core.tensor_descriptor_base, triton.runtime.autotuner.Autotuner]
    return {
        (n, name): value
        for n, one in enumerate(objects)
        for name, value in vars(one).items()
        if not name.startswith("__") or name in ("__call__", "__index__", "__bool__")
    } | {(-1, name): value for name, value in vars(cases).items()}


def call_fails():
    trace(cases.fails, (1,), np.zeros(32, np.float32), BLOCK=32)


def call_works():
    trace(cases.with_a_helper, (1,), *draw(64), np.zeros(64, np.float32), BLOCK=64)


def call_blocks():
    x = np.zeros((16, 32), np.float32)
    trace(cases.copy_blocks, (1,), x, x.copy(), 16, 32, ROWS=16, COLS=32)


@pytest.mark.parametrize("call", [call_works, call_blocks, call_fails])
def test_triton_is_left_as_it_was(call):
    call_works() if call is call_fails else None
    before = state()

    try:
        call()
    except FlashSimError:
        assert call is call_fails

    after = state()
    assert before.keys() == after.keys()
    changed = [key for key, value in before.items() if after[key] is not value]
    assert [key for key in changed if before[key] != after[key]] == []


X = np.zeros(64, np.float32)
NOT_A_GRID = OptionError, "the grid of add must be a tuple of one to three positive"
REFUSED = [
    (cases.from_a_number, (1,), (X,), MemoryModelError,
     r"line \d+, .*32 of 32 pointers point to no tensor"),
    (cases.add, (1,), ([1, 2], X, X, 64), DTypeError, r"x_ptr is \[1, 2\], which is not an array"),
    (cases.add, (1,), (X.astype(np.complex64), X, X, 64), DTypeError,
     "x_ptr has elements of dtype"),
    (cases.add, (1,), (X[::-1], X, X, 64), DTypeError, "x_ptr has strides of"),
    (cases.add, (1,), (X, X, X), OptionError,
     "add cannot be launched with these arguments: .*missing"),
    *((cases.add, grid, (X, X, X, 64), *NOT_A_GRID)
      for grid in ((), (1, 1, 1, 1), (0,), (1.5,), "ab")),
]  # fmt: skip


@pytest.mark.parametrize(("kernel", "grid", "given", "error", "said"), REFUSED)
def test_arguments_that_are_refused(kernel, grid, given, error, said):
    with pytest.raises(error, match=said):
        trace(kernel, grid, *given, BLOCK=32)


def test_errors_name_line_program_and_remedy():
    line = line_of(cases.__file__, "tl.inline_asm")
    with pytest.raises(
        UnsupportedError, match=rf"fails, program \(0,\), line {line}, .*interpreter"
    ):
        call_fails()
    with pytest.raises(UnsupportedError, match=r"smid\(\)\)`: .* exist only in compiled kernels"):
        trace(cases.only_compiled, (1,), np.zeros(32, np.float32), BLOCK=32)
    with pytest.raises(DTypeError, match="trace takes a kernel"):
        trace(print, (1,))
    with watch() as seen:
        pass
    with pytest.raises(TraceError, match="no kernel was launched"):
        seen.result()


def test_a_missing_triton_says_what_to_install(monkeypatch):
    from flashsim.triton.installed import installed

    installed.cache_clear()
    monkeypatch.setitem(sys.modules, "triton", None)
    try:
        with pytest.raises(
            flashsim.BackendUnavailable, match=r"pip install 'flashsim-attention\[tri"
        ):
            installed()
    finally:
        installed.cache_clear()
    assert traced_triton.trace is trace
