"""Returns the results of empty jobs (batch, queries or keys of size 0) for every engine.

Results are zeros, and -inf for the LSE, as in `torch.nn.functional.scaled_dot_product_attention`.
With attention sinks, the LSE of a row that sees no key is the row's sink.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from flashsim.engines.protocol import Engine, Job, Outcome
from flashsim.functions.tracing import Traced
from flashsim.schedule import plans
from flashsim.schedule.tiling import Tiling

KERNEL = "none: nothing to compute"


class Nothing:
    """An engine for empty jobs, whose `Problem` has sizes of 1; `engine` creates result arrays.

    The `Problem` has no score function; `score` is the one that the call was made with.
    """

    OPTIONS: frozenset[str] = frozenset()

    def __init__(self, engine: Engine, score: Traced | None = None) -> None:
        self.constant = engine.constant
        self.captured = () if score is None else score.graph.differentiable

    def forward(self, job: Job) -> Outcome:
        """Return `out` filled with zeros, and an LSE filled with -inf or the sinks."""
        p, rows = job.problem, tuple(job.q.shape[:3])
        out = self.constant(job, (*rows, job.v.shape[3]), p.result_dtype, 0.0)
        lse = self.constant(job, rows, p.compute_dtype, -np.inf)
        if p.sinks:
            for head, sink in enumerate(job.sinks.tolist()):
                lse[:, head] = sink
        return _outcome(job, {"out": out, "lse": lse})

    def recall(self, job: Job, out: Any, lse: Any) -> Mapping[str, Any]:
        """Return an empty dict, because an empty job's backward pass needs no saved tensors."""
        return {}

    def backward(self, job: Job, saved: Mapping[str, Any], dout: Any, dlse: Any = None) -> Outcome:
        """Return zeros; only the sinks have a gradient, because they are the LSE."""
        p = job.problem
        plans.stages(p, job.algorithm, "backward")  # raises if the algorithm has no such pass
        like = {f"d{name}": x for name, x in job.arrays.items()}
        arrays = {
            name: self.constant(job, tuple(x.shape), p.result_dtype, 0.0)
            for name, x in like.items()
        }
        for spec in self.captured:
            arrays[f"d:{spec.name}"] = self.constant(job, spec.shape, spec.dtype, 0.0)
        if p.sinks:
            none = self.constant(job, (p.heads,), p.compute_dtype, 0.0)
            arrays["dsinks"] = none if dlse is None else dlse.sum((0, 2))
        return _outcome(job, arrays)


def _outcome(job: Job, arrays: dict[str, Any]) -> Outcome:
    return Outcome(arrays, job.tiling or Tiling(1, 1), None, KERNEL, {})
