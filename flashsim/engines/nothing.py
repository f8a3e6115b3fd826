"""Returns the results of empty jobs (batch, queries or keys of size 0) for every engine.

Results are zeros, and -inf for the LSE, as in `torch.nn.functional.scaled_dot_product_attention`.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from flashsim.engines.protocol import Engine, Job, Outcome
from flashsim.schedule import plans
from flashsim.schedule.tiling import Tiling

KERNEL = "none: nothing to compute"


class Nothing:
    """An engine for empty jobs, whose `Problem` has sizes of 1; `engine` creates result arrays."""

    OPTIONS: frozenset[str] = frozenset()

    def __init__(self, engine: Engine) -> None:
        self.constant = engine.constant

    def forward(self, job: Job) -> Outcome:
        """Return `out` filled with zeros and an LSE filled with -inf."""
        p, rows = job.problem, tuple(job.q.shape[:3])
        out = self.constant(job, (*rows, job.v.shape[3]), p.result_dtype, 0.0)
        lse = self.constant(job, rows, p.compute_dtype, -np.inf)
        return _outcome(job, {"out": out, "lse": lse})

    def recall(self, job: Job, out: Any, lse: Any) -> Mapping[str, Any]:
        """Return an empty dict, because an empty job's backward pass needs no saved tensors."""
        return {}

    def backward(self, job: Job, saved: Mapping[str, Any], dout: Any, dlse: Any = None) -> Outcome:
        """Return gradients that are all zeros; `dout` and `dlse` do not matter."""
        p = job.problem
        plans.stages(p, job.algorithm, "backward")  # raises if the algorithm has no such pass
        like = {f"d{name}": x for name, x in job.arrays.items()}
        arrays = {
            name: self.constant(job, tuple(x.shape), p.result_dtype, 0.0)
            for name, x in like.items()
        }
        return _outcome(job, arrays)


def _outcome(job: Job, arrays: dict[str, Any]) -> Outcome:
    return Outcome(arrays, job.tiling or Tiling(1, 1), None, KERNEL, {})
