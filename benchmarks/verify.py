"""Compare predictions with hardware counters over many shapes.

    python benchmarks/verify.py --out docs/data/verify-h200.csv [--keep FOLDER]
    python benchmarks/verify.py --keep FOLDER                              # only measure
    python benchmarks/verify.py --from FOLDER --out docs/data/verify-h200.csv   # anywhere

Needs a GPU, CuPy and Nsight Compute. Measures the forward, the three-pass and the fused backward of
both families of backend "cupy". The shapes have 16 Ki tokens per batch and 2048 / d heads: d 64 and
128, N 1 Ki to 16 Ki, causal and not, then grouped heads, a window and ragged lengths, which all
exceed L2, and two shapes that fit in L2. Then come the Hopper family's fused backward in a fixed
order ("in-order") on shapes of N = 4096, and backend "numba_cuda" on two shapes. The table has one
row per kernel and quantity. Two processes measure: one counts, and one is profiled. --keep saves
their output, and --from reads it. `flashsim verify --summary FILE` summarises the table.
docs/guides/truth.md explains the quantities.

`--shapes widths` measures small shapes with other head dimensions instead: multiples of no chunk of
64 columns, values narrower than keys, ragged lengths.

`--soak 14 --seeds 1,2,3` measures so many random cases per seed instead, those of `flashsim verify
--soak`. The table then has a row per quantity with a target, and the summary counts them. Without
--out or --from, it measures and compares nothing: comparing takes longer than measuring.
"""

import argparse
import csv
import json
import sys
from pathlib import Path

from flashsim import FlashSimError, Problem
from flashsim.counts.traffic import live
from flashsim.l2 import L2Model
from flashsim.problem.hardware import Device
from flashsim.studies.verify import HERE, Case, Record, compare, draw, passes_of, record, verify
from flashsim.studies.verify import table as soak_table

TOKENS, WIDTH = 16_384, 2048
KERNELS = ("hopper", "portable", "numba_cuda")
#: The table's name of a backward, by `deterministic` of `Result.backward`.
PASSES = {None: "flash2", False: "flash2-fused", True: "in-order"}


def shapes():
    """Yield keyword arguments of `Problem` for shapes whose tensors exceed an H200's L2."""
    for d in (128, 64):
        for causal in (False, True):
            for n in (1024, 4096, 16_384):
                yield {"n_q": n, "head_dim": d, "batch": TOKENS // n, "causal": causal}
    grouped = {"n_q": 4096, "head_dim": 128, "batch": 4, "heads": 16, "causal": True}
    yield {**grouped, "kv_heads": 4}
    yield {**grouped, "window": (1024, 0)}
    yield {**grouped, "n_q": 4001}
    yield {**grouped, "n_q": 1000, "n_kv": 4001}


def fitting():
    """Yield keyword arguments for shapes whose tensors all fit in L2 (20 MiB)."""
    yield {"n_q": 2048, "head_dim": 64, "heads": 8}
    yield {"n_q": 4096, "head_dim": 128, "heads": 2, "causal": True}


def in_python():
    """Yield keyword arguments for the Python kernels: one shape of each kind."""
    yield {"n_q": 4096, "head_dim": 128, "batch": 4, "causal": True}
    yield next(fitting())


def widths():
    """Yield keyword arguments with head dimensions that leave boxes or sectors partly unused."""
    for d in (32, 40, 56, 59, 72, 80, 96, 111, 120, 160, 200, 256):
        yield {"n_q": 2048, "head_dim": d, "heads": 8}
    yield {"n_q": 2048, "head_dim": 128, "head_dim_v": 64, "heads": 8}
    yield {"n_q": 2048, "head_dim": 40, "head_dim_v": 96, "heads": 8, "causal": True}
    yield {"n_q": 2011, "n_kv": 3001, "head_dim": 96, "heads": 8}


def narrow(device, kernels):
    """Yield `widths` with every C++ family; with the portable family, only odd head dimensions."""
    for family in kernels:
        for shape in widths():
            if family == "hopper" or (family == "portable" and shape["head_dim"] % 32):
                yield Case(
                    Problem(**shape, dtype="bfloat16"),
                    device=device,
                    backward=(None, False),
                    kernel=family,
                )


def cases(device, kernels):
    """Yield every shape with every kernel family."""
    for family in kernels:
        for shape in in_python() if family == "numba_cuda" else (*shapes(), *fitting()):
            whole = {"heads": WIDTH // shape["head_dim"], "dtype": "bfloat16", **shape}
            forms = (None, False)
            if family == "hopper" and shape["n_q"] == 4096:
                forms = (*forms, True)
            run = {"backend": family} if family == "numba_cuda" else {"kernel": family}
            yield Case(Problem(**whole), device=device, backward=forms, **run)


def fits(case):
    """Whether all tensors, forward and backward, fit in L2 together."""
    return live(case.problem, "flash2-fused") <= Device.get(case.device).l2_bytes


def named(case, passes):
    """Return the table's names of the case and its passes; of equal passes, only the first.

    With dQ in any order, `backward` may also run three passes, if they are faster.
    """
    called = {"forward": passes[0]}
    for form, one in zip(case.backward, passes[1:], strict=True):
        called.setdefault(PASSES[True] if form else one.traffic.algorithm, one)
    return called.items()


def write(path, kept, model):
    """Write the table; predictions are computed here."""
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        for number, (case, passes) in enumerate(zip(kept.cases, passes_of(kept), strict=True)):
            for name, one in named(case, passes):
                table = verify([one], str(case), l2=model).table()
                if number == 0 and name == "forward":
                    writer.writerow(("shape", "in L2", "kernels", "pass", "tile", *table.columns))
                where = table.title, "yes" if fits(case) else "no", case.kernel or case.backend
                where = *where, name, str(one.traffic.tiling)
                writer.writerows((*where, *row) for row in table.rows)


def soaked(seeds, kept, out):
    """Compare random cases, write a row per quantity, and print how many are within their target.

    The measurement has the same number of cases per seed.
    """
    passes, each = passes_of(kept), len(kept.cases) // len(seeds)
    columns = ("seed", "case", "kernels", "kernel", "quantity", "predicted", "measured", "target")
    rows = []
    for n, seed in enumerate(seeds):
        those = slice(n * each, (n + 1) * each)
        found = compare(kept.cases[those], passes[those])
        rows += [(seed, x) for x in found]
        print(seed, soak_table(found, most=8).text(width=200))
    for quantity in dict.fromkeys(x.quantity for _, x in rows):
        inside = [not x.misses for _, x in rows if x.quantity == quantity]
        print(f"{quantity}: {sum(inside):,} of {len(inside):,} within their targets")
    if out:
        with out.open("w", newline="") as stream:
            writer = csv.writer(stream, lineterminator="\n")
            writer.writerow(columns)
            for seed, x in rows:
                where = str(x.case), x.case.kernel, x.stage, x.quantity
                writer.writerow((seed, *where, x.predicted, x.measured, x.target))


def compile_first(wanted, jobs):
    """Compile every kernel, with and without counts."""
    import gpu_compile
    from times import passes_of

    kernels = []
    for case in wanted:
        family = "python" if case.backend == "numba_cuda" else case.kernel
        for name in ("forward", *(PASSES[form] for form in case.backward)):
            for report in ("", "counts"):
                passes = passes_of(family, case.problem, name, report)
                kernels += [(family, one.kernel) for one in passes]
    gpu_compile.compile_all(kernels, jobs)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default=HERE, help="device of the predictions")
    parser.add_argument("--kernels", default=",".join(KERNELS))
    parser.add_argument("--out", type=Path, help="CSV file for the table")
    parser.add_argument("--keep", type=Path, help="folder for the measurements")
    parser.add_argument("--from", type=Path, dest="source", help="folder with measurements")
    parser.add_argument("--jitter", type=float, help="jitter of the L2 model, in seconds")
    parser.add_argument("--shapes", choices=("all", "widths"), default="all")
    parser.add_argument("--soak", type=int, help="number of random cases per seed")
    parser.add_argument("--seeds", default="0", help="seeds of --soak")
    parser.add_argument("--jobs", type=int, help="compile first, in this many processes")
    parser.add_argument("--cases", action="store_true", help="only print the cases, as JSON")
    chosen = parser.parse_args()
    those = cases if chosen.shapes == "all" else narrow
    seeds = chosen.seeds.split(",")
    if chosen.soak:
        kernels = [name for name in chosen.kernels.split(",") if name != "numba_cuda"]
        drawn = {"device": chosen.device, "kernels": kernels}
        wanted = [x for seed in seeds for x in draw(chosen.soak, seed=int(seed), **drawn)]
    else:
        wanted = list(those(chosen.device, chosen.kernels.split(",")))
    if chosen.cases:
        print(json.dumps([case.to_dict() for case in wanted]))
        return
    if not (chosen.out or chosen.keep or chosen.source):
        parser.error("nothing to do: pass --out FILE, --keep FOLDER or both")
    try:
        if chosen.jobs and not chosen.source:
            compile_first(wanted, chosen.jobs)
        kept = Record.load(chosen.source / "ncu.csv") if chosen.source else record(wanted)
        if chosen.keep:  # save it before it is used
            chosen.keep.mkdir(parents=True, exist_ok=True)
            kept.save(chosen.keep / "ncu.csv")
        if chosen.soak and (chosen.out or chosen.source):
            soaked(seeds, kept, chosen.out)
        elif chosen.out:
            jitter = {} if chosen.jitter is None else {"jitter": chosen.jitter}
            write(chosen.out, kept, L2Model("grouped", **jitter))
    except (FlashSimError, OSError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
