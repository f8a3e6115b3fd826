"""Build a table of what benchmarks/ring.py measured beside `flashsim.predict.spread`."""

from __future__ import annotations

from flashsim import predict
from flashsim.problem.links import Link
from flashsim.problem.problem import Problem
from flashsim.report import Table

HEADS, HEAD_DIM = 16, 128
PASSES = {"forward": ("forward",), "forward + backward": ("forward", "backward")}
NVLINK = Link("NVLink, as two H200s reach it", 285e9)
CONTENDERS = ("flashsim, zigzag", "flashsim, ulysses", "context_parallel, cuDNN")


def predicted(row: dict[str, str]) -> float | None:
    """Return the predicted speed relative to one GPU; None for other implementations."""
    name, _, scheme = row["implementation"].partition(", ")
    if name != "flashsim":
        return None
    sizes = {"head_dim": HEAD_DIM, "heads": HEADS, "dtype": "bfloat16"}
    problem = Problem(int(row["n"]), causal=row["causal"] == "True", **sizes)
    how = {"ranks": int(row["ranks"]), "scheme": scheme, "link": NVLINK}
    times = [
        predict.spread(problem, direction=direction, algorithm="flash2-fused", **how)
        for direction in PASSES[row["pass"]]
    ]
    return sum(t.one for t in times) / sum(t.seconds for t in times)


def table(*runs: list[dict[str, str]]) -> Table:
    """Return the table of milliseconds, and of speed relative to one GPU."""
    ours, *others = ("zigzag", "ulysses", "`context_parallel`, cuDNN")
    columns = ["GPUs", "N", "mask", "pass", "one GPU", ours, "×", "predicted ×"]
    made = Table("", (*columns, *(cell for name in others for cell in (name, "×"))))
    for rows in runs:
        found = {(r["n"], r["causal"], r["pass"], r["implementation"]): r for r in rows}
        ranks = max(int(row["ranks"]) for row in rows)
        for (n, causal, passes, who), one in found.items():
            if who != "one GPU":
                continue
            mask = "causal" if causal == "True" else "full"
            way = passes if passes == "forward" else "with backward"
            line: list[object] = [ranks, f"{int(n) // 1024} Ki", mask, way, float(one["ms"])]
            for name in CONTENDERS:
                row = found.get((n, causal, passes, name))
                line += [float(row["ms"]), f"{float(row['of_one']):.2f}"] if row else ["", ""]
                if row and name == CONTENDERS[0]:
                    line.append(f"{predicted(row):.2f}")
            made.rows.append(tuple(line))
    return made
