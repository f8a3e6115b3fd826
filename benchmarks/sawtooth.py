"""Measure the sawtooth order on a GPU: every other wave of blocks reads its keys backwards.

    ncu --csv --clock-control none --print-units base \
        --metrics dram__bytes_read.sum,gpu__time_duration.sum \
        --kernel-name 'regex:forward' python benchmarks/sawtooth.py > sawtooth.csv
    python benchmarks/sawtooth.py --predict        # docs/data/sawtooth-h200.csv beside the model

Needs CuPy. One head, d = 128, 16 bits, whose K and V exceed or nearly fill L2. If all blocks read
them from the first key to the last, the next wave finds the last keys in L2, but starts with the
first. If it reads backwards, it starts with the last keys (arXiv:2601.16032). The order is data:
every other wave's tables of the schedule are reversed. Each length runs straight and sawtooth, with
each kernel family, twice. The output has one line per launch, in order, then Nsight Compute's
measurements of each. The kept table has the second launches. The results of both orders are
compared.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
from gpu_lab import read_table

from flashsim import Problem, Tiling
from flashsim.l2 import L2Model, dram

#: Numbers of keys. K and V have 512 B per key: 50, 67, 101, 134 MB, beside an L2 of 63 MB.
LENGTHS = (98_304, 131_072, 196_608, 262_144)
ORDERS = ("straight", "sawtooth")
TILES = {"hopper": (128, 176), "portable": (128, 64)}
KEPT = Path(__file__).parent.parent / "docs" / "data" / "sawtooth-h200.csv"


def problem(n):
    """Return a problem with a few waves of queries and `n` keys."""
    return Problem(132 * 128 * 6, n, head_dim=128, dtype="bfloat16")


def turned(one, places):
    """Return the pass with every other wave of `places` blocks reversed, as lists of visits."""
    tables = one.tables
    index, kind = tables.index.copy(), tables.kind.copy()
    place = np.empty(tables.tiles, int)
    place[tables.order] = np.arange(tables.tiles)
    for tile in range(tables.tiles):
        if place[tile] // places % 2:
            part = slice(tables.ptr[tile], tables.ptr[tile + 1])
            index[part], kind[part] = index[part][::-1].copy(), kind[part][::-1].copy()
    return replace(one, tables=replace(tables, spans=None, index=index, kind=kind))


def listed(one):
    """Return the pass with its kernel compiled for lists of visits instead of spans."""
    constants = tuple((k, 0 if k == "FS_SPANS" else v) for k, v in one.kernel.constants)
    return replace(one, kernel=replace(one.kernel, constants=constants))


def measure():
    """Launch each length straight and sawtooth, twice each; the second launch is the one to use."""
    import cupy

    from flashsim.backends.cupy_gpu import arrays, engine
    from flashsim.backends.cupy_gpu.calls import ABSENT, Call, Plan
    from flashsim.backends.launch import kernel as launch
    from flashsim.backends.launch_policy.hopper import HOPPER
    from flashsim.backends.launch_policy.portable import PORTABLE

    gpu = engine.gpu_of(0)
    for n in LENGTHS:
        p = problem(n)
        rng = cupy.random.default_rng(0)
        shapes = {"q": p.n_q, "k": n, "v": n}
        given = {
            x: rng.standard_normal((1, 1, rows, 128), dtype="float32").astype("float16")
            for x, rows in shapes.items()
        }
        p = replace(p, dtype="float16")
        space = arrays.space_of(given, p.dtype)
        for family in (HOPPER, PORTABLE):
            (one,) = family.forward_passes(p, None, gpu, "ascending", "")
            one = listed(one)
            blocks = 1 if one.kernel.boxes else resident(family, one)
            found = []
            for order in ORDERS:
                made = turned(one, blocks * gpu.multiprocessors)
                if order == "straight":
                    made = replace(made, tables=replace(one.tables, spans=None))
                plan = Plan(family.name, (made,), gpu, 0, family.load)
                out = cupy.empty_like(given["q"])
                lse = cupy.empty((1, 1, p.n_q), "float32")
                places = [space.view(x).place for x in (*given.values(), out)]
                rest = len(launch.SCRATCH) - 1
                head = *chain(*places, *[ABSENT] * 4), lse.data.ptr, *[0] * rest
                call = Call(space, head)
                for _ in range(2):
                    start, end = cupy.cuda.Event(), cupy.cuda.Event()
                    start.record()
                    plan.run(call, False)
                    end.record()
                    end.synchronize()
                    ms = cupy.cuda.get_elapsed_time(start, end)
                    print(f"{family.name},{n},{order},{blocks},{ms:.3f}", flush=True)
                found.append(out)
            apart = float(abs(found[0].astype("f4") - found[1].astype("f4")).max())
            print(f"# {family.name} {n}: largest difference {apart:.2e}", flush=True)


def resident(family, one):
    """Return the number of blocks per SM of a kernel that is not persistent."""
    function = family.load(one.kernel, 0)
    import cupy

    per = cupy.cuda.driver.occupancyMaxActiveBlocksPerMultiprocessor
    return per(function.ptr, one.kernel.threads, one.kernel.shared_bytes)


def table():
    """Return the table of measured and predicted bytes: one row for both orders of a length."""
    from flashsim.report import Table
    from flashsim.studies.verify.cases import predict

    kept = {}
    for row in read_table(KEPT):
        key = row["kernels"], int(row["keys"]), int(row["blocks_per_sm"])
        kept.setdefault(key, {})[row["order"]] = int(row["DRAM read B"])
    found = Table(
        "One head, d=128: DRAM reads, MB, predicted and measured on an H200",
        (
            "kernels",
            "keys",
            *(f"{order}, {x}" for order in ORDERS for x in ("predicted", "measured")),
        ),
    )
    for (kernels, n, blocks), measured in kept.items():
        traffic = predict(problem(n), "flash2", "forward", Tiling(*TILES[kernels]), "H200")
        cells = [kernels, f"{n:,}"]
        for order in ORDERS:
            model = L2Model("grouped", walk=order, blocks_per_sm=blocks)
            cells += [f"{dram(traffic, model).bytes('read') / 1e6:.0f}"]
            cells += [f"{measured[order] / 1e6:.0f}"]
        found.rows.append(tuple(cells))
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--predict", action="store_true", help="predict with the model, without a GPU"
    )
    if parser.parse_args().predict:
        print(table().markdown())
    else:
        measure()
