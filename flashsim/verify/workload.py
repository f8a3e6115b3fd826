"""``python -m flashsim.verify.workload JSON [TRACES]``: the run that is measured.

With a folder TRACES the kernels count (and their events are saved there); without one they run as
fast as they can, which is how Nsight Compute measures them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from flashsim.api import run
from flashsim.problem import Problem
from flashsim.samples import random_inputs
from flashsim.tiling import Tiling


def main(arguments: list[str]) -> None:
    """Run what the JSON says: problem, algorithm, backend, tilings, device, backward."""
    wanted: dict[str, Any] = json.loads(arguments[0])
    folder = Path(arguments[1]) if len(arguments) > 1 else None
    problem = Problem(**wanted["problem"])
    q, k, v, dout = random_inputs(problem, 0)
    forward, backward = (None if t is None else Tiling(*t) for t in wanted["tilings"])
    result = run(
        q,
        k,
        v,
        algorithm=wanted["algorithm"],
        backend=wanted["backend"],
        causal=problem.causal,
        window=problem.window,
        tiling=forward,
        device=wanted["device"],
        trace=folder is not None,
    )
    traces = [result.trace]
    if wanted["backward"]:
        traces.append(result.backward(dout, tiling=backward).trace)
    for trace in traces:
        if folder is not None and trace is not None:
            trace.save(folder / f"{trace.direction}.npz")


if __name__ == "__main__":
    main(sys.argv[1:])
