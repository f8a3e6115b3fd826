"""What the Python kernels count of rows whose length is no multiple of 8: the elements that exist.

What an intrinsic emits is run on the CPU, thread after thread, with the GPU's own instructions left
out; a block's threads together must say what a tile's rows hold.
"""

import ctypes

import pytest

binding = pytest.importorskip("llvmlite.binding")
pytest.importorskip("numba_cuda")

from llvmlite import ir  # noqa: E402

from flashsim.backends.launch import kernel as launch  # noqa: E402
from flashsim.backends.numba_gpu import ptx, traversal  # noqa: E402
from flashsim.backends.numba_gpu.emit import F32, I32, I64, i32  # noqa: E402
from flashsim.backends.numba_gpu.hopper import wgmma_tiles as hopper_tiles  # noqa: E402
from flashsim.backends.numba_gpu.mma_tiles import RowWidth, Tile  # noqa: E402
from flashsim.backends.numba_gpu.tensor import backward_rows, output  # noqa: E402

pytestmark = pytest.mark.promise("three counts equal")

HEAD_DIMS = (1, 7, 8, 59, 64, 111, 128, 250)
ANYWHERE = ir.Constant(I64, 0)


@pytest.fixture
def block(monkeypatch):
    """``block(threads, intrinsic, *operands)``: the sum of what the threads of a block return."""
    thread = []
    monkeypatch.setattr(ptx, "special", lambda b, name, effects=False: thread[-1])
    monkeypatch.setattr(ptx, "again", lambda b, value: value)
    monkeypatch.setattr(ptx, "shuffle_xor", lambda b, value, mask: value)
    monkeypatch.setattr(ptx, "pack", lambda b, bf16, low, high: i32(0))
    monkeypatch.setattr(ptx, "asm", lambda b, text, constraints, operands, *_, **__: operands[0])
    for name in ("cp_async_16", "copy_out_16", "store_16", "add_float"):
        monkeypatch.setattr(ptx, name, lambda *_, **__: None)

    def run(threads, intrinsic, *operands):
        module = ir.Module()
        function = ir.Function(module, ir.FunctionType(I32, [I32]), "counted")
        thread.append(function.args[0])
        b = ir.IRBuilder(function.append_basic_block("entry"))
        given = (x(b, function.args[0]) if callable(x) else x for x in operands)
        b.ret(intrinsic.__wrapped__(b, *given))
        binding.initialize_native_target()
        binding.initialize_native_asmprinter()
        machine = binding.Target.from_default_triple().create_target_machine()
        engine = binding.create_mcjit_compiler(binding.parse_assembly(str(module)), machine)
        counted = ctypes.CFUNCTYPE(ctypes.c_uint32, ctypes.c_uint32)(
            engine.get_function_address("counted")
        )
        return sum(counted(n) for n in range(threads))

    return run


def row(head_dim):
    return RowWidth(launch.row_elements(head_dim), head_dim)


def padded(head_dim):
    return -(-head_dim // 16) * 16


def fragment(count):
    return [ir.Constant(F32, 0.0)] * count


@pytest.mark.parametrize("rows", [64, 37])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_tiles_in_shared_memory_count_what_exists(block, head_dim, rows):
    copies = traversal.tile_copies(Tile(64, padded(head_dim)), row(head_dim), 128)
    there = 2 * rows * head_dim
    assert block(128, copies.load, i32(0), ANYWHERE, i32(2 * head_dim), i32(rows)) == there
    assert block(128, copies.store, i32(0), ANYWHERE, i32(2 * head_dim), i32(rows)) == there


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("rows", [16, 5])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_reductions_count_what_exists(block, head_dim, rows, wide):
    n = padded(head_dim)
    reduce_tile = output.reduce_tile(1, row(head_dim), wide)
    given = ANYWHERE, fragment(n // 2), i32(0), i32(0), i32(rows)
    assert block(32, reduce_tile, *given) == 4 * rows * head_dim


@pytest.mark.parametrize("rows", [16, 5])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_outputs_from_hoppers_registers_count_what_exists(block, head_dim, rows):
    n = padded(head_dim)
    store = hopper_tiles.store_output(True, row(head_dim))
    given = ANYWHERE, i32(0), fragment(n // 2), fragment(2), i32(0), i32(rows)
    assert block(32, store, *given) == 2 * rows * head_dim


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_the_row_wise_passes_count_what_exists(block, head_dim):
    width = row(head_dim).width
    pieces, zeros = traversal.piece_bytes(row(head_dim)), backward_rows.zeros_bytes(row(head_dim))
    assert block(width // 8, pieces, lambda b, thread: thread) == 2 * head_dim
    fours = block(width // 4, zeros, lambda b, thread: b.mul(thread, i32(4)))
    assert fours == 4 * head_dim
