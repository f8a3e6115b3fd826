"""The operations of `operations.py` as Numba sees their vector code and tiles."""

from __future__ import annotations

from flashsim.engines.cpu.micro_kernels.vector import vector_intrinsic
from flashsim.engines.cpu.pairs.codegen import (
    build_add_scaled,
    build_configure,
    build_copy_pairs,
    build_pair_product,
    build_pair_softmax,
    build_pairs_of_lanes,
    build_pairs_of_rows,
    build_release,
    build_scale,
    build_transpose_columns,
    build_transpose_panel,
    build_transpose_rows,
)

_PRODUCT = "a o0 i a o1 i a o2 i i i"
_set = vector_intrinsic(_PRODUCT, build_pair_product, mode="set")
_add = vector_intrinsic(_PRODUCT, build_pair_product, mode="add")
_softmax = vector_intrinsic("a o0 i a a a o1,2,3 a a o5", build_pair_softmax)
_rows = vector_intrinsic("a o0 i i a o1", build_pairs_of_rows)
_lanes = vector_intrinsic("a o0 i i a o1 i", build_pairs_of_lanes)
_panel = vector_intrinsic("a o0 i i a", build_scale, by_lane=False)
_by_lane = vector_intrinsic("a o0 i i a o1", build_scale, by_lane=True)
_add_scaled = vector_intrinsic("a o0 a o1 i i a", build_add_scaled)
_copy = vector_intrinsic("a o0 i a o1 i i", build_copy_pairs)
_columns = vector_intrinsic("a o0 i a o1 i i i", build_transpose_columns)
_rows_over = vector_intrinsic("a o0 a o1 i i i", build_transpose_rows)
_panel_over = vector_intrinsic("a o0 a o1 i a o2 i i", build_transpose_panel)
_begin = vector_intrinsic("a", build_configure)
_end = vector_intrinsic("a", build_release)


def pairs_set(cpu, C, c0, ldc, A, a0, row, B, b0, ldb, rows, n):
    """`operations.pairs_set`."""
    _set(cpu, (C, c0, ldc, A, a0, row, B, b0, ldb, rows, n))


def pairs_add(cpu, C, c0, ldc, A, a0, row, B, b0, ldb, rows, n):
    """`operations.pairs_add`."""
    _add(cpu, (C, c0, ldc, A, a0, row, B, b0, ldb, rows, n))


def online_softmax_pairs(cpu, S, s0, rows, m, l, alpha, at, factor, P, p0):
    """`operations.online_softmax_pairs`."""
    _softmax(cpu, (S, s0, rows, m, l, alpha, at, factor, P, p0))


def pairs_of_rows(cpu, X, x0, ld, rows, P, p0):
    """`operations.pairs_of_rows`."""
    _rows(cpu, (X, x0, ld, rows, P, p0))


def pairs_of_lanes(cpu, X, x0, ld, rows, P, p0, row):
    """`operations.pairs_of_lanes`."""
    _lanes(cpu, (X, x0, ld, rows, P, p0, row))


def scale_panel(cpu, X, x0, ld, rows, factor):
    """`operations.scale_panel`."""
    _panel(cpu, (X, x0, ld, rows, factor))


def scale_lanes(cpu, X, x0, ld, rows, factors, f0):
    """`operations.scale_lanes`."""
    _by_lane(cpu, (X, x0, ld, rows, factors, f0))


def add_scaled(cpu, Y, y0, X, x0, ld, rows, factor):
    """`operations.add_scaled`."""
    _add_scaled(cpu, (Y, y0, X, x0, ld, rows, factor))


def copy_pairs(cpu, out, o0, row, X, x0, rows, pairs):
    """`operations.copy_pairs`."""
    _copy(cpu, (out, o0, row, X, x0, rows, pairs))


def transpose_columns(cpu, out, o0, row, X, x0, d, pairs, columns):
    """`operations.transpose_columns`."""
    _columns(cpu, (out, o0, row, X, x0, d, pairs, columns))


def transpose_rows(cpu, out, o0, X, x0, d, rows, pairs):
    """`operations.transpose_rows`."""
    _rows_over(cpu, (out, o0, X, x0, d, rows, pairs))


def transpose_panel(cpu, panel, p0, X, x0, d, factors, f0, rows, columns):
    """`operations.transpose_panel`."""
    _panel_over(cpu, (panel, p0, X, x0, d, factors, f0, rows, columns))


def begin_tiles(cpu, any_array):
    """`operations.begin_tiles`."""
    _begin(cpu, (any_array,))


def end_tiles(cpu, any_array):
    """`operations.end_tiles`."""
    _end(cpu, (any_array,))
