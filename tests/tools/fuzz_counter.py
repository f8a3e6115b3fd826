"""The counter of `fuzz`: a case's bytes and products, tile by tile, by docs/reference/model.md."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from fuzz_cases import Case, kept, sequences

Moves = Counter


def count(case: Case, tiling: Any, direction: str, algorithm: str) -> tuple[Moves, int]:
    """Return bytes by (op, tensor) over all heads, and FLOPs of matrix products, tile by tile."""
    e = {"float64": 8, "float32": 4}.get(case.dtype, 2)
    a, d, dv = max(e, 4), case.d, case.dv
    acc = "_acc" if e < a else ""
    heads, group = case.batch * case.heads, case.heads // case.kv_heads
    moved: Moves = Counter()

    def move(op: str, tensor: str, nbytes: int, times: int = heads) -> None:
        moved[op, tensor] += nbytes * times

    rows, cols, visits = _tiles(case, tiling, dense=algorithm == "standard")
    area = sum(r * c for r, c in visits)
    matrices = 0 if case.bias is None else case.bias[0] * case.bias[1]
    has_bias = case.bias is not None
    if direction == "forward":
        walk = _forward(case, algorithm, rows, cols, visits, e, a, acc)
        products = d + dv
    else:
        walk = _backward(case, algorithm, rows, cols, visits, e, a, acc)
        products = {"standard": 2 * d + 2 * dv, "flash2": 4 * d + 3 * dv}.get(
            algorithm, 3 * d + 2 * dv
        )
        if has_bias:
            move("store", f"dBias{acc}", case.n_q * case.n_kv * a, matrices)
            if acc:
                move("load", "dBias_acc", case.n_q * case.n_kv * a, matrices)
                move("store", "dBias", case.n_q * case.n_kv * e, matrices)
    for op, tensor, nbytes, shared in walk:
        move(op, tensor, nbytes, heads // group if shared else heads)
    return Counter({key: n for key, n in moved.items() if n}), 2 * area * products * heads


# operation, tensor, bytes, whether once for all heads of a KV head
Move = tuple[str, str, int, bool]


def _forward(case, algorithm, rows, cols, visits, e, a, acc) -> Iterator[Move]:
    d, dv, has_bias = case.d, case.dv, case.bias is not None
    for r, c in visits:
        if has_bias:
            yield "load", "bias", r * c * e, False
        if algorithm == "flash1":
            yield "load", "Q", r * d * e, False
            for op in ("load", "store"):
                yield op, f"O{acc}", r * dv * a, False
                yield op, "l", r * a, False
                yield op, "m", r * a, False
            continue
        yield "load", "K", c * d * e, False
        yield "load", "V", c * dv * e, False
        if algorithm == "standard":
            for tensor in "SP":
                yield "store", tensor, r * c * e, False
                yield "load", tensor, r * c * e, False
            if case.softcap:
                yield "store", "gate", r * c * e, False
    for r in rows:
        if algorithm == "flash1":
            yield "store", f"O{acc}", r * dv * a, False
            yield "store", "l", r * a, False
            yield "store", "m", r * a, False
            if acc:
                yield "load", "O_acc", r * dv * a, False
                yield "store", "O", r * dv * e, False
            continue
        yield "load", "Q", r * d * e, False
        yield "store", "O", r * dv * e, False
        if algorithm != "standard":
            yield "store", "L", r * a, False
    if algorithm == "flash1":
        for c in cols:
            yield "load", "K", c * d * e, False
            yield "load", "V", c * dv * e, False


def _backward(case, algorithm, rows, cols, visits, e, a, acc) -> Iterator[Move]:
    d, dv, has_bias = case.d, case.dv, case.bias is not None
    for r, c in visits:
        if has_bias:
            yield "reduce", f"dBias{acc}", r * c * a, False
        if algorithm == "standard":
            for tensor in ("P", "P", "dP", "dS", "dS"):  # dv and ds; ds; dq and dk
                yield "load", tensor, r * c * e, False
            for tensor in ("dP", "dS"):
                yield "store", tensor, r * c * e, False
            if case.softcap:
                yield "load", "gate", r * c * e, False
            yield "load", "dO", r * dv * e, False
            yield "load", "Q", r * d * e, False
            yield "load", "V", c * dv * e, False
            yield "load", "K", c * d * e, False
            continue
        if has_bias:
            yield "load", "bias", r * c * e, False
        yield "load", "Q", r * d * e, False
        yield "load", "dO", r * dv * e, False
        if algorithm == "flash1":
            yield "load", "O", r * dv * e, False
            for op in ("load", "store"):
                yield op, f"dQ{acc}", r * d * a, False
        elif algorithm == "flash2-fused":
            yield "reduce", f"dQ{acc}", r * d * a, False
        else:  # the second loop, for dQ
            yield "load", "K", c * d * e, False
            yield "load", "V", c * dv * e, False
            if has_bias:
                yield "load", "bias", r * c * e, False
        for statistic in ("l", "m") if algorithm == "flash1" else ("L", "delta"):
            yield "load", statistic, r * a, False
    for r in rows:
        if algorithm == "standard":
            yield "load", "dO", r * dv * e, False
            yield "store", "dQ", r * d * e, False
            continue
        if algorithm != "flash1":
            yield "load", "O", r * dv * e, False
            yield "load", "dO", r * dv * e, False
            yield "store", "delta", r * a, False
        if algorithm == "flash2":
            yield "load", "Q", r * d * e, False
            yield "load", "dO", r * dv * e, False
            yield "load", "L", r * a, False
            yield "load", "delta", r * a, False
            yield "store", "dQ", r * d * e, False
            continue
        yield "store", f"dQ{acc}", r * d * a, False
        if acc:
            yield "load", "dQ_acc", r * d * a, False
            yield "store", "dQ", r * d * e, False
    for c in cols:
        if algorithm != "standard":
            yield "load", "K", c * d * e, True
            yield "load", "V", c * dv * e, True
        yield "store", "dK", c * d * e, True
        yield "store", "dV", c * dv * e, True


def _tiles(case: Case, tiling: Any, *, dense: bool):
    """Return the heights and widths of tiles, and (height, width) of each visited one."""
    keep = kept(case)
    rows, cols, visits = [], [], []
    for (q0, q1), (k0, k1) in zip(*sequences(case), strict=True):
        own = [(q, min(q + tiling.block_q, q1)) for q in range(q0, q1, tiling.block_q)]
        other = [(k, min(k + tiling.block_k, k1)) for k in range(k0, k1, tiling.block_k)]
        rows += [stop - start for start, stop in own]
        cols += [stop - start for start, stop in other]
        visits += [
            (b - a, d - c) for a, b in own for c, d in other if dense or keep[a:b, c:d].any()
        ]
    return rows, cols, visits
