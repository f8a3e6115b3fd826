"""Small kernels for the tests of flashsim.triton, and files of examples with mistakes in them."""

import importlib.util
from pathlib import Path

import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.language.extra.libdevice import tanh

EXAMPLES = Path(__file__).parents[2] / "examples" / "triton"


def example(name, folder=None, *changes):
    """Import an example; with `changes`, pairs of old and new text, a changed copy in a folder."""
    path = EXAMPLES / f"{name}.py"
    if changes:
        text = path.read_text(encoding="utf-8")
        for old, new in changes:
            assert text.count(old) >= 1, old
            text = text.replace(old, new, 1)
        path = folder / f"{name}.py"
        path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(f"case_{name}", path)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def line_of(path, fragment, nth=0):
    """The number of the line that has a fragment."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    return [n for n, line in enumerate(lines, 1) if fragment in line][nth]


@triton.jit
def add(x_ptr, y_ptr, z_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    total = tl.load(x_ptr + at, mask=inside) + tl.load(y_ptr + at, mask=inside)
    tl.store(z_ptr + at, total, mask=inside)


@triton.jit
def mixed(x_ptr, y_ptr, z_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x, y = tl.load(x_ptr + at), tl.load(y_ptr + at)
    larger = tl.where(x > y, x, y)
    tl.store(z_ptr + at, (x * y - x) / larger + tl.maximum(x, y) - 2.0)


@triton.jit
def product(x_ptr, y_ptr, z_ptr, N: tl.constexpr):
    r = tl.arange(0, N)
    at = r[:, None] * N + r[None, :]
    tl.store(z_ptr + at, tl.dot(tl.load(x_ptr + at), tl.load(y_ptr + at)))


@triton.jit
def convert(x_ptr, y_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at).to(y_ptr.dtype.element_ty))


@triton.jit
def rounded_to_zero(x_ptr, y_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at).to(tl.bfloat16, fp_downcast_rounding="rtz"))


@triton.jit
def row_sums(x_ptr, y_ptr, COLS: tl.constexpr):
    at = tl.program_id(0) * COLS + tl.arange(0, COLS)
    tl.store(y_ptr + tl.program_id(0), tl.sum(tl.load(x_ptr + at), 0))


@triton.jit
def histogram(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0)
    tl.atomic_add(y_ptr + x, 1, mask=at < n)


@triton.jit
def locked(x_ptr, lock_ptr, y_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    part = tl.sum(tl.load(x_ptr + at), 0)
    while tl.atomic_cas(lock_ptr, 0, 1) == 1:
        pass
    tl.store(y_ptr, tl.load(y_ptr) + part)
    tl.atomic_xchg(lock_ptr, 0)


# The interpreter runs the next kernels, and no GPU can.
@triton.jit
def breaks(x_ptr, y_ptr, BLOCK: tl.constexpr):
    for i in range(0, BLOCK):
        if tl.load(x_ptr + i) > 0:
            break
        tl.store(y_ptr + i, 1.0)


@triton.jit
def changes_type(x_ptr, y_ptr, BLOCK: tl.constexpr):
    total = 0
    for i in range(0, BLOCK):
        total = total + tl.load(x_ptr + i)
    tl.store(y_ptr, total)


@triton.jit
def _appended(x, parts):
    parts.append(x)
    return parts


@triton.jit
def appends(x_ptr, y_ptr, BLOCK: tl.constexpr):
    parts = []
    _appended(tl.load(x_ptr), parts)
    tl.store(y_ptr, parts[0])


@triton.jit
def copy_blocks(x_ptr, y_ptr, rows, cols, ROWS: tl.constexpr, COLS: tl.constexpr):
    x = tl.make_block_ptr(
        x_ptr, (rows, cols), (cols, 1), (tl.program_id(0) * ROWS, 0), (ROWS, COLS), (1, 0)
    )
    y = tl.make_block_ptr(
        y_ptr, (rows, cols), (cols, 1), (tl.program_id(0) * ROWS, 0), (ROWS, COLS), (1, 0)
    )
    for _ in range(0, cols, COLS):
        tile = tl.load(x, boundary_check=(0, 1), padding_option="zero")
        tl.store(y, tile + 1, boundary_check=(0, 1))
        x, y = tl.advance(x, (0, COLS)), tl.advance(y, (0, COLS))


@triton.jit
def fill_block(y_ptr, n, BLOCK: tl.constexpr):
    tl.store(tl.make_block_ptr(y_ptr, (n,), (1,), (0,), (BLOCK,), (0,)), 1.5, boundary_check=(0,))


@triton.jit
def copy_described(x_ptr, y_ptr, rows, cols, ROWS: tl.constexpr, COLS: tl.constexpr):
    x = tl.make_tensor_descriptor(x_ptr, [rows, cols], [cols, 1], [ROWS, COLS])
    y = tl.make_tensor_descriptor(y_ptr, [rows, cols], [cols, 1], [ROWS, COLS])
    for first in range(0, cols, COLS):
        at = [tl.program_id(0) * ROWS, first]
        y.store(at, x.load(at) + 1)


@triton.jit
def doubled(x):
    return x + x


@triton.jit
def with_a_helper(x_ptr, y_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y_ptr + at, doubled(tl.load(x_ptr + at)))


@triton.jit
def fails(x_ptr, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, BLOCK))
    tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], tl.float32, True, 1)


@triton.jit
def from_a_number(x_ptr, BLOCK: tl.constexpr):
    wild = (tl.arange(0, BLOCK) + 12345).to(tl.int64).to(tl.pointer_type(tl.float32))
    tl.store(x_ptr + tl.arange(0, BLOCK), tl.load(wild))


@triton.jit
def pointers(table_ptr, y_ptr, BLOCK: tl.constexpr):
    x_ptr = tl.load(table_ptr).to(tl.pointer_type(tl.float32))
    tl.store(y_ptr + tl.arange(0, BLOCK), tl.load(x_ptr + tl.arange(0, BLOCK)))


tuned = triton.autotune(
    configs=[triton.Config({"BLOCK": 16}), triton.Config({"BLOCK": 32})], key=["n"]
)(add)
with_heuristics = triton.heuristics({"BLOCK": lambda args: 64})(add)


@triton.jit
def from_libdevice(x_ptr, y_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    tl.store(y_ptr + at, libdevice.tanh(x) + tanh(x) + libdevice.pow(tl.abs(x), 1.5))


@triton.jit
def from_libdevice_unknown(x_ptr, y_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y_ptr + at, libdevice.j0(tl.load(x_ptr + at)))


@triton.jit
def adds_under_a_lock(x_ptr, sum_ptr, lock_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.program_id(0) * BLOCK + at)
    while tl.atomic_cas(lock_ptr, 0, 1) == 1:
        pass
    tl.store(sum_ptr + at, tl.load(sum_ptr + at) + x)
    tl.atomic_xchg(lock_ptr, 0)


@triton.jit
def adds_described(x_ptr, sum_ptr, BLOCK: tl.constexpr):
    x = tl.make_tensor_descriptor(x_ptr, [96], [1], [BLOCK])
    sums = tl.make_tensor_descriptor(sum_ptr, [48], [1], [BLOCK])
    sums.atomic_add([0], x.load([tl.program_id(0) * 48]))


@triton.jit
def only_compiled(x_ptr, BLOCK: tl.constexpr):
    tl.store(x_ptr, tl.extra.cuda.smid())
