"""What a thread block of each stage asks of L2: before its visits, at each visit, after them.

Requests are whole tiles of tensors; `order` runs through a block's visits. The same bytes as
`traffic` counts (a test adds them up), but in order and with an address, which a cache needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from flashsim.problem.problem import Problem

#: The code of a request: its operation, plus SIDE if an SM of the second partition asks.
LOAD, STORE, REDUCE, SIDE = 0, 1, 2, 4
OPS = {"load": LOAD, "store": STORE, "reduce": REDUCE}

ROW, COL, TILE = range(3)  # a tensor is cut into row tiles, column tiles or score tiles
QUERY, KEY, BIAS = range(3)  # it has one matrix a query head, a key head or a bias head


class Tensor(NamedTuple):
    """How a tensor lies in HBM: cut along `axis`, `width` bytes a row (or a score)."""

    axis: int
    owner: int
    width: int


@dataclass(frozen=True)
class Recipe:
    """Requests ``(op, tensor)`` of one thread block; `every` pairs of tiles are visited if set."""

    before: tuple[tuple[str, str], ...] = ()
    visit: tuple[tuple[str, str], ...] = ()
    after: tuple[tuple[str, str], ...] = ()
    every: bool = False


def tensors(p: Problem) -> dict[str, Tensor]:
    """Layout of every tensor an algorithm may touch."""
    e, a, d, dv = p.itemsize, p.compute_itemsize, p.head_dim, p.head_dim_v
    table = {name: Tensor(ROW, QUERY, d * e) for name in ("Q", "dQ")}
    table |= {name: Tensor(ROW, QUERY, dv * e) for name in ("O", "dO")}
    table |= {name: Tensor(ROW, QUERY, a) for name in ("L", "l", "m", "delta")}
    table |= {"dQ_acc": Tensor(ROW, QUERY, d * a), "O_acc": Tensor(ROW, QUERY, dv * a)}
    table |= {name: Tensor(COL, KEY, d * e) for name in ("K", "dK")}
    table |= {name: Tensor(COL, KEY, dv * e) for name in ("V", "dV")}
    table |= {name: Tensor(TILE, QUERY, e) for name in ("S", "P", "dP", "dS")}
    table |= {"bias": Tensor(TILE, BIAS, e), "dBias": Tensor(TILE, BIAS, e)}
    return table | {"dBias_acc": Tensor(TILE, BIAS, a)}


def recipe(p: Problem, algorithm: str, direction: str, stage: str) -> Recipe:
    """The requests of one stage of an algorithm."""
    table = _forward(p, algorithm) if direction == "forward" else _backward(p, algorithm)
    return table[stage]


def _loads(names: str) -> tuple[tuple[str, str], ...]:
    return tuple(("load", name) for name in names.split())


def _stores(names: str) -> tuple[tuple[str, str], ...]:
    return tuple(("store", name) for name in names.split())


def _forward(p: Problem, algorithm: str) -> dict[str, Recipe]:
    bias = _loads("bias") if p.bias else ()
    O = "O" if p.itemsize == p.compute_itemsize else "O_acc"
    if algorithm == "standard":
        return {
            "scores": Recipe(_loads("Q"), _loads("K") + bias + _stores("S")),
            "softmax": Recipe(visit=_loads("S") + _stores("P")),
            "output": Recipe(visit=_loads("P V"), after=_stores("O")),
        }
    if algorithm == "flash1":
        state = f"{O} l m"
        return {
            "init": Recipe(after=_stores(state)),
            "forward": Recipe(_loads("K V"), _loads(f"Q {state}") + bias + _stores(state)),
            "convert": Recipe(_loads("O_acc"), after=_stores("O")),
        }
    return {"forward": Recipe(_loads("Q"), _loads("K V") + bias, _stores("O L"))}


def _backward(p: Problem, algorithm: str) -> dict[str, Recipe]:
    narrow = p.itemsize != p.compute_itemsize
    bias = _loads("bias") if p.bias else ()
    dQ, dBias = ("dQ_acc", "dBias_acc") if narrow else ("dQ", "dBias")
    dbias = (("reduce", dBias),) if p.bias else ()
    shared = {
        "clear_dbias": Recipe(visit=_stores(dBias), every=True),
        "convert_dbias": Recipe(visit=_loads("dBias_acc") + _stores("dBias"), every=True),
        "convert": Recipe(_loads("dQ_acc"), after=_stores("dQ")),
        "delta": Recipe(_loads("O dO"), after=_stores("delta")),
    }
    if algorithm == "standard":
        capped = (_loads("S") + bias) if p.softcap else ()
        return shared | {
            "dv": Recipe(visit=_loads("P dO"), after=_stores("dV")),
            "dp": Recipe(_loads("dO"), _loads("V") + _stores("dP")),
            "ds": Recipe(visit=_loads("P dP") + dbias + capped + _stores("dS")),
            "dq": Recipe(visit=_loads("dS K"), after=_stores("dQ")),
            "dk": Recipe(visit=_loads("dS Q"), after=_stores("dK")),
        }
    if algorithm == "flash1":
        visit = _loads(f"Q O dO {dQ} l m") + bias + _stores(dQ) + dbias
        return shared | {
            "init": Recipe(after=_stores(dQ)),
            "backward": Recipe(_loads("K V"), visit, _stores("dK dV")),
        }
    rows = _loads("Q dO L delta") + bias
    return shared | {
        "delta": Recipe(
            _loads("O dO"),
            after=_stores(f"delta {dQ}" if algorithm == "flash2-fused" else "delta"),
        ),
        "dkdv": Recipe(_loads("K V"), rows, _stores("dK dV")),
        "dq": Recipe(_loads("Q dO L delta"), _loads("K V") + bias + dbias, _stores("dQ")),
        "fused": Recipe(_loads("K V"), (*rows, ("reduce", dQ), *dbias), _stores("dK dV")),
    }
