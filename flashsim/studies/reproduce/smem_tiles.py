"""Computes the shared memory of FlashAttention-2's and -3's tiles, from their kernels' tensors."""

from flashsim.problem.hardware import KIB, Device
from flashsim.report import Table
from flashsim.studies.reproduce.page import published

ITEM = 2  # bytes of half precision

#: FlashAttention-2's backward: (head_dim, block_q, block_k, the source's figure in KiB, V in
#: registers, only one Q buffer). The figures are the limits with which its launcher compares the
#: device's shared memory, and those in its comments.
FA2_BACKWARD = (
    (96, 64, 128, 116, False, False),
    (96, 64, 128, 92, True, False),
    (128, 64, 128, 144, False, False),
    (192, 64, 64, 136, False, False),
    (256, 64, 64, 176, False, False),
    (256, 64, 64, 144, False, True),
)

#: FlashAttention-3's forward: (head_dim, block_q, the widest key block that fits by its source, P
#: in shared memory).
FA3_FORWARD = ((128, 128, 192, False), (128, 128, 144, True), (192, 128, 112, False))


def tiles() -> list[Table]:
    """Return tables of FlashAttention-2's backward tiles and of FlashAttention-3's key blocks."""
    second = published(
        "FlashAttention-2 backward: shared memory, KiB",
        "flash_bwd_launch_template.h of Dao-AILab/flash-attention; ours: two Q and one dO buffer, "
        "K and V of the column tile, P and dS, in half precision",
    )
    for d, block_q, block_k, printed, v_in_registers, one_q in FA2_BACKWARD:
        ours = fa2_backward(d, block_q, block_k, v_in_registers=v_in_registers, one_q=one_q)
        what = ", V in registers" * v_in_registers + ", one Q buffer" * one_q
        second.line(f"d = {d}, {block_q} x {block_k}{what}", printed, ours / KIB)
    third = published(
        "FlashAttention-3 forward: widest key block on an H100",
        "tile_size.h of Dao-AILab/flash-attention ('hits the limit of smem'); ours: Q, two stages "
        "of K and V, and P if it passes through shared memory; widths are multiples of 16",
    )
    for d, block_q, widest, p_in_smem in FA3_FORWARD:
        what = ", P in shared memory" if p_in_smem else ""
        ours = fa3_widest(d, block_q, p_in_smem=p_in_smem)
        third.line(f"d = {d}, block_q = {block_q}{what}", widest, ours)
    third.line("d = 256, block_q = 128", 80, fa3_widest(256, 128))
    return [second, third]


def fa2_backward(
    d: int, block_q: int, block_k: int, *, v_in_registers: bool = False, one_q: bool = False
) -> int:
    """Return the shared memory in bytes for the tiles of FlashAttention-2's backward pass.

    Shared memory holds one tile each of dO, K, V, P and dS, and two tiles of Q (one if `one_q` is
    true).
    """
    rows = (2 if one_q else 3) * block_q * d
    columns = (1 if v_in_registers else 2) * block_k * d
    return ITEM * (rows + columns + 2 * block_q * block_k)


def fa3_widest(d: int, block_q: int, *, p_in_smem: bool = False) -> int:
    """Return the widest key block with which Q, two K tiles and two V tiles fit on chip."""
    per_key = ITEM * (2 * 2 * d + (block_q if p_in_smem else 0))
    return (Device.get("H100").sram_bytes - ITEM * block_q * d) // per_key // 16 * 16
