"""``python -m flashsim.studies.verify.workload CASES [COUNTED]``: runs the cases to measure.

The argument CASES is a JSON list of the results of `Case.to_dict`. With the path COUNTED, the
kernels count their transfers, and the counts are written to that file. Without COUNTED, the kernels
run at full speed, for Nsight Compute.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from flashsim.api.execution import Gradients, Result, run
from flashsim.problem.problem import numpy_dtype
from flashsim.studies.verify.cases import Case, Counted

#: The number of random numbers that inputs repeat. Traffic does not depend on the values, and
#: drawing hundreds of millions would take longer than all kernels.
DRAWN = 1 << 20


def main(arguments: list[str]) -> None:
    """Run all cases, one after the other."""
    cases = [Case.from_dict(values).placed() for values in json.loads(arguments[0])]
    counting = len(arguments) > 1
    counted = [[x.to_dict() for x in run_case(case, counting=counting)] for case in cases]
    if counting:
        Path(arguments[1]).write_text(json.dumps(counted))


def run_case(case: Case, *, counting: bool) -> list[Counted]:
    """Run a case's passes; return the transfers that kernels counted, or [] without `counting`."""
    q, k, v, dout = _inputs(case)
    how: dict[str, Any] = {} if case.kernel is None else {"kernel": case.kernel}
    how |= {name: getattr(case.problem, name) for name in ("causal", "window", "softcap")}
    how |= {name: getattr(case, name) for name in ("algorithm", "backend", "device")}
    result = run(q, k, v, tiling=case.tilings[0], trace=counting, **how)
    passes: list[Result | Gradients] = [result]
    for deterministic in case.backward:
        grads = result.backward(dout, tiling=case.tilings[1], deterministic=deterministic)
        passes.append(grads)
    traces = [one.trace for one in passes if one.traced]
    return [
        Counted(t.algorithm, t.direction, t.tiling, dict(t.transfers), t.schedule.split.pack_gqa)
        for t in traces
    ]


def _inputs(case: Case) -> list[np.ndarray]:
    p = case.problem
    drawn = np.random.default_rng(0).standard_normal(DRAWN).astype(numpy_dtype(p.dtype))
    queries, keys = (p.batch, p.heads, p.n_q), (p.batch, p.kv_heads, p.n_kv)
    leads = queries, keys, keys, queries
    widths = p.head_dim, p.head_dim, p.head_dim_v, p.head_dim_v
    return [np.resize(drawn, (*lead, d)) for lead, d in zip(leads, widths, strict=True)]


if __name__ == "__main__":
    main(sys.argv[1:])
