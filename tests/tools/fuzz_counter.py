"""The counter of `fuzz`: a case's bytes and products, tile by tile, by docs/reference/model.md."""

from collections import Counter
from typing import Any

from fuzz_cases import Case, kept, sequences

Moves = Counter

#: What moves per visited tile, per row tile and per column tile: "<" is a load, ">" a store, "+" a
#: reduction. "*" marks an accumulator, and "~" a move that only narrow types need, whose
#: accumulators are tensors of their own (X_acc). A case without a bias or softcap moves neither
#: bias nor gate.
FORWARD = {
    "standard": ("<bias <K <V >S <S >P <P >gate", "<Q >O", ""),
    "flash1": ("<bias <Q <O* >O* <l >l <m >m", ">O* >l >m ~<O* ~>O", "<K <V"),
    "flash2": ("<bias <K <V", "<Q >O >L", ""),
}
FORWARD["flash2-fused"] = FORWARD["flash2"]
BACKWARD = {
    "standard": (  # dv and ds; ds; dq and dk
        "+dBias* <P <P <dP <dS <dS >dP >dS <gate <dO <Q <V <K",
        *("<dO >dQ", ">dK >dV"),
    ),
    "flash1": ("+dBias* <bias <Q <dO <O <dQ* >dQ* <l <m", *(">dQ* ~<dQ* ~>dQ", "<K <V >dK >dV")),
    "flash2-fused": (
        "+dBias* <bias <Q <dO +dQ* <L <delta",
        *("<O <dO >delta >dQ* ~<dQ* ~>dQ", "<K <V >dK >dV"),
    ),
    "flash2": (  # two loops, the second one for dQ
        "+dBias* <bias <Q <dO <L <delta <K <V <bias",
        *("<O <dO >delta <Q <dO <L <delta >dQ", "<K <V >dK >dV"),
    ),
}
OPS = {"<": "load", ">": "store", "+": "reduce"}


def count(case: Case, tiling: Any, direction: str, algorithm: str) -> tuple[Moves, int]:
    """Return bytes by (op, tensor) over all heads, and FLOPs of matrix products, tile by tile."""
    e = {"float64": 8, "float32": 4}.get(case.dtype, 2)
    a, d, dv = max(e, 4), case.d, case.dv
    acc = "_acc" if e < a else ""
    heads, group = case.batch * case.heads, case.heads // case.kv_heads
    absent = {"bias": case.bias is None, "dBias": case.bias is None, "gate": not case.softcap}
    moved: Moves = Counter()

    def move(moves: str, r: int, c: int, times: int) -> None:
        sides = {"Q": r * d, "O": r * dv, "K": c * d, "V": c * dv}
        sides |= dict.fromkeys(("S", "P", "Bias", "bias", "gate"), r * c)
        for word in moves.split():
            op, name = word.removeprefix("~")[0], word.removeprefix("~")[1:].rstrip("*")
            if absent.get(name) or (word[0] == "~" and not acc):
                continue
            # Statistics, such as l, have a row's number of elements and the accumulator's type.
            nbytes = sides.get(name if name in sides else name.removeprefix("d"), r)
            wide = "*" in word or name in ("l", "m", "L", "delta")
            key = OPS[op], name + acc if "*" in word else name
            moved[key] += nbytes * (a if wide else e) * times

    rows, cols, visits = _tiles(case, tiling, dense=algorithm == "standard")
    per_visit, per_row, per_col = (FORWARD if direction == "forward" else BACKWARD)[algorithm]
    for r, c in visits:
        move(per_visit, r, c, heads)
    for r in rows:
        move(per_row, r, 0, heads)
    for c in cols:  # in a backward pass, once for all heads of a KV head
        move(per_col, 0, c, heads if direction == "forward" else heads // group)
    products = {"standard": 2 * d + 2 * dv, "flash2": 4 * d + 3 * dv}.get(algorithm, 3 * d + 2 * dv)
    if direction == "forward":
        products = d + dv
    elif case.bias is not None:
        move(">dBias* ~<dBias* ~>dBias", case.n_q, case.n_kv, case.bias[0] * case.bias[1])
    area = sum(r * c for r, c in visits)
    return Counter({key: n for key, n in moved.items() if n}), 2 * area * products * heads


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
