"""Random states of the tile lab, and the counts of `flashsim.count` that the lab must show."""

import numpy as np

import flashsim
from flashsim import BlockMask, Problem, Tiling
from flashsim.errors import FlashSimError
from flashsim.problem.checks import DTYPES
from flashsim.problem.hardware import PRESETS, Device
from flashsim.schedule import plans
from flashsim.schedule.split_kv import occupancy
from flashsim.schedule.tables import FULL

MASKS = ("none", "causal", "window", "prefix", "documents", "cells")


def states(count, seed=0):
    """Yield random states of the page: every algorithm, direction, mask, type and device."""
    rng = np.random.default_rng(seed)
    pick = lambda options: options[int(rng.integers(len(options)))]  # noqa: E731
    upto = lambda n: int(rng.integers(1, n + 1))  # noqa: E731
    found = []
    for _ in range(count):
        algorithm = pick(plans.ALGORITHMS)
        mask = pick(MASKS)
        tried = mask in ("prefix", "cells")  # Python evaluates these at every score
        longest = 200 if tried else pick((8, 300, 5000))
        n_q = upto(6) if algorithm == "flash-decode" and rng.random() < 0.7 else upto(longest)
        n_kv = n_q if rng.random() < 0.5 and n_q > 6 else upto(longest)
        kv_heads = upto(4)
        side = lambda: pick((16, 32, 64, 128, upto(150)))  # noqa: E731
        found.append(
            {
                "n_q": n_q,
                "n_kv": n_kv,
                "d": pick((16, 64, 128, upto(256))),
                "kv_heads": kv_heads,
                "heads": kv_heads * upto(4),
                "batch": 1 if mask == "documents" else upto(3),
                "dtype": pick(DTYPES),
                "mask": mask,
                "left": pick((-1, upto(longest) - 1)),
                "right": pick((-1, 0, upto(longest) - 1)),
                "prefix": upto(longest),
                "docs": min(upto(6), n_q, n_kv),
                "lengths": pick(("equal", "growing")),
                "doc_causal": upto(2) - 1,
                "cell": pick((16, 32, upto(70))),
                "reach": upto(3) - 1,
                "shared": upto(3) - 1,
                "algorithm": algorithm,
                "direction": pick(
                    plans.DIRECTIONS if algorithm in plans.TRAINING else plans.DIRECTIONS[:1]
                ),
                "block_q": side(),
                "block_k": n_kv if algorithm == "flash2-once" and rng.random() < 0.8 else side(),
                "fit": int(rng.random() < 0.2),
                "splits": pick(("auto", "fa3", upto(9))),
                "pack": upto(2) - 1,
                "device": pick((*PRESETS, "own")),
                "own_sram": pick((16, 64, 200)),
                "own_sm_sram": 256,
                "own_sms": upto(200),
                "own_hbm": 1000,
                "own_l2": 0,
                "own_peak": 100,
            }
        )
    return found


def problem(s):
    """Return the problem of a state."""
    shape = {name: s[name] for name in ("n_q", "n_kv", "batch", "heads", "kv_heads", "dtype")}
    return Problem(**shape, head_dim=s["d"], **masked(s))


def masked(s):
    """Return the arguments of `flashsim.run` for a state's mask."""
    n_q, n_kv = s["n_q"], s["n_kv"]
    if s["mask"] == "causal":
        return {"causal": True}
    if s["mask"] == "window":
        return {"window": (s["left"], s["right"])}
    if s["mask"] == "prefix":
        return {"mask": lambda q, k: (k <= q + n_kv - n_q) | (k < s["prefix"])}
    if s["mask"] == "documents":
        ends = {f"cu_seqlens_{x}": documents(s, n) for x, n in (("q", n_q), ("k", n_kv))}
        return {**ends, "causal": bool(s["doc_causal"])}
    if s["mask"] == "cells":
        row, column = (np.arange(-(-n // s["cell"])) for n in (n_q, n_kv))
        row, column = row[:, None], column[None, :]
        near = abs(row + column.size - row.size - column) <= s["reach"]
        shared = (row < s["shared"]) | (column < s["shared"])
        return {"block_mask": BlockMask(near | shared, s["cell"], s["cell"])}
    return {}


def documents(s, n):
    """Return where documents of equal or growing length end."""
    part = (lambda i: i) if s["lengths"] == "equal" else (lambda i: i * (i + 1))
    return tuple(n * part(i) // part(s["docs"]) for i in range(s["docs"] + 1))


def device(s):
    """Return the device of a state."""
    if s["device"] != "own":
        return Device.get(s["device"])
    return Device(
        "mine",
        sram_bytes=s["own_sram"] * 1024,
        sram_per_sm=s["own_sm_sram"] * 1024,
        sm_count=s["own_sms"],
    )


def expected(s):
    """Return the counts that the page shows, or None if `flashsim.count` refuses."""
    p, gpu = problem(s), device(s)
    how = {"algorithm": s["algorithm"], "direction": s["direction"]}
    decoding = plans.splits_keys(s["algorithm"])
    options = {"splits": s["splits"], "pack_gqa": bool(s["pack"])} if decoding else {}
    tiling = None if s["fit"] else Tiling(s["block_q"], s["block_k"])
    try:
        counted = flashsim.count(p, **how, **options, tiling=tiling, device=gpu)
    except FlashSimError as error:
        return {"refused": type(error).__name__}
    walk = counted.schedule(counted.stages[0])
    spans = walk.row_spans
    full = (
        (spans[:, 2] - spans[:, 1]).sum() if spans is not None else (walk.row_csr[2] == FULL).sum()
    )
    first, (flops, chip) = counted.stages[0], counted._work
    return {
        "tile": [counted.tiling.block_q, counted.tiling.block_k],
        "moved": {" ".join(key): size for key, size in counted.transfers.items()},
        "bytes": counted.bytes(),
        "compulsory": counted.compulsory(),
        "saved": counted.saved(),
        "flops": flops,
        "chip": chip,
        "peak": counted.peak_sram(),
        "visits": walk.sums.visits,
        "full": int(full),
        "sums": list(walk.sums),
        "tiles": [walk.t_r, walk.t_c],
        "splits": counted.split.splits,
        "per_sm": [occupancy(stage, counted.schedule(stage), gpu) for stage in counted.stages],
        "blocks": plans.heads_of(first, p)[0]
        * (
            int(walk.part_counts.sum())
            if first.parts
            else walk.t_r
            if first.outer == "queries"
            else walk.t_c
        ),
    }
