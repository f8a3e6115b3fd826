"""What every engine answers where there is nothing to compute: no batch, no query or no key.

Zeros, and an LSE of -inf, as `torch.nn.functional.scaled_dot_product_attention` has it. Nothing is
walked and no kernel is launched, so nothing is traced either.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from flashsim.engines.engine import Engine, Job, Outcome
from flashsim.schedule import plans
from flashsim.schedule.tiling import Tiling

KERNEL = "none: nothing to compute"


class Nothing:
    """An engine for jobs of which an extent is 0; their problem has 1 in its place.

    Parameters
    ----------
    engine : Engine
        Whose `constant` makes the arrays, and refuses what it refuses of any job.
    """

    OPTIONS: frozenset[str] = frozenset()

    def __init__(self, engine: Engine) -> None:
        self.constant = engine.constant

    def forward(self, job: Job) -> Outcome:
        """out of zeros, LSE of -inf."""
        p, rows = job.problem, tuple(job.q.shape[:3])
        out = self.constant(job, (*rows, job.v.shape[3]), p.result_dtype, 0.0)
        lse = self.constant(job, rows, p.compute_dtype, -np.inf)
        return _outcome(job, {"out": out, "lse": lse})

    def recall(self, job: Job, out: Any, lse: Any) -> Mapping[str, Any]:
        """Nothing is needed of a forward pass."""
        return {}

    def backward(self, job: Job, saved: Mapping[str, Any], dout: Any, dlse: Any = None) -> Outcome:
        """Gradients of zeros, whatever `dout` and `dlse` are."""
        p = job.problem
        plans.stages(p, job.algorithm, "backward")  # or say that there is no such pass
        like = {f"d{name}": x for name, x in job.arrays.items()}
        made = {
            name: self.constant(job, tuple(x.shape), p.result_dtype, 0.0)
            for name, x in like.items()
        }
        return _outcome(job, made)


def _outcome(job: Job, arrays: dict[str, Any]) -> Outcome:
    return Outcome(arrays, job.tiling or Tiling(1, 1), None, KERNEL, {})
