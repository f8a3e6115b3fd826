"""Turn an additive bias into a score function, because kernels support no other form of bias."""

from dataclasses import replace
from functools import lru_cache
from typing import Any

from flashsim.engines.protocol import Job
from flashsim.errors import UnsupportedError
from flashsim.functions.builder import Builder
from flashsim.functions.graph import ArraySpec, Graph
from flashsim.functions.operations import FLOAT

#: The name of the bias among the captured arrays of the score function.
NAME = "the bias argument"


def as_function(job: Job, *, gradient: bool = False) -> Job:
    """Return a job whose score function adds the bias, if the job has a bias.

    With `gradient`, the backward pass also computes the bias's gradient.
    """
    p = job.problem
    if p.bias is None:
        return job
    if job.trace:
        raise UnsupportedError(
            "on a GPU, a call with bias= cannot be traced; add the bias in a score_mod=, leave out "
            "trace=, or use backend='simulator' or 'numba'"
        )
    if p.cu_seqlens_q is not None:
        raise UnsupportedError(
            "on a GPU, packed sequences do not support bias=; write it as a score_mod=, whose "
            "indices start at 0 in each sequence, or use backend='simulator' or 'numba'"
        )
    graph = _with_bias(p.score_mod, (*p.bias, p.n_q, p.n_kv), p.result_dtype)
    wanted = (*p.score_grads, NAME) if gradient else p.score_grads
    problem = replace(p, bias=None, score_mod=graph, score_grads=wanted)
    held = [*job.score_arrays, job.bias]
    return replace(job, problem=problem, score_arrays=tuple(held), bias=None)


@lru_cache(maxsize=64)
def _with_bias(score: Graph | None, shape: tuple[int, ...], dtype: str) -> Graph:
    """Return a score function that applies `score` and adds the bias, the last captured array."""
    arrays = () if score is None else score.arrays
    made = Builder([], [*arrays, ArraySpec(NAME, shape, dtype)])
    at = [
        made.const(0) if size == 1 and name in ("b", "h") else made.arg(name)
        for name, size in zip(("b", "h", "q", "k"), shape, strict=True)
    ]
    total = made.op("add", made.arg("score"), made.cast(made.load(len(arrays), at), FLOAT))
    if score is None:
        return made.graph(total, "bias")
    number: dict[int, int] = {}
    for n, node in enumerate(score.nodes):
        is_score = node.op == "arg" and node.value == "score"
        moved = node._replace(args=tuple(number[a] for a in node.args))
        number[n] = total if is_score else made.put(moved)
    return made.graph(number[score.root], score.name)


def renamed(found: dict[str, Any]) -> dict[str, Any]:
    """Rename the bias's gradient to "dbias" in the dict `found`, and return the dict."""
    name = f"d:{NAME}"
    return {"dbias" if key == name else key: x for key, x in found.items()}
