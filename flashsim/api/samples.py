"""Sample data: tensors of a real model, timed traces of a real GPU, and random inputs."""

from __future__ import annotations

from importlib import resources
from typing import NamedTuple

import numpy as np

from flashsim import report
from flashsim.errors import OptionError, own_errors, shown
from flashsim.problem import checks
from flashsim.problem.problem import Problem, numpy_dtype
from flashsim.trace.trace import Trace

#: Layers of the included model (see flashsim/data/README.md).
SAMPLES = ("layer0", "layer5")
#: Included traces of GPU runs.
TRACES = ("h200-forward", "h200-backward")


@report.shows_fields
class Sample(NamedTuple):
    """Attention inputs of one layer of a real model, and the model's own output.

    `q`, `k` and `v` are float16, and `out` is float32; each has 12 heads, 512 tokens and head_dim
    32.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    out: np.ndarray


@own_errors
def load_sample(name: str = "layer0") -> Sample:
    """Load q, k, v and the output of one attention layer of all-MiniLM-L6-v2 on 512 tokens.

    Parameters
    ----------
    name : {"layer0", "layer5"}
        The first or the last layer.

    Returns
    -------
    Sample
        With `q`, `k`, `v` and the model's output `out`; no mask, scale ``1 / sqrt(32)``.

    Raises
    ------
    OptionError
        For a layer that is not included.
    """
    checks.one_of("sample", name, SAMPLES)
    file = resources.files("flashsim") / "data" / "minilm_qkv.npz"
    with file.open("rb") as stream, np.load(stream) as arrays:
        return Sample(*(arrays[f"{name}_{field}"] for field in Sample._fields))


@own_errors
def load_sample_trace(name: str = "h200-forward") -> Trace:
    """Load a trace of a real GPU, with the times of every phase of every visit (tile pair).

    In this trace, flashsim's Hopper kernels run FlashAttention-2 on an NVIDIA H200. The problem has
    16 heads, 2,048 queries and keys, head_dim 128, a causal mask and bfloat16 inputs; the backward
    pass is fused. The trace's ``provenance`` has more details.

    Parameters
    ----------
    name : {"h200-forward", "h200-backward"}

    Returns
    -------
    Trace

    Raises
    ------
    OptionError
        For a trace that is not included.
    """
    checks.one_of("trace", name, TRACES)
    with resources.as_file(resources.files("flashsim") / "data" / f"{name}.npz") as file:
        return Trace.load(file)


@report.shows_fields
class RandomInputs(NamedTuple):
    """Standard normal 4-D arrays q, k, v and dout of a problem's shapes and dtype."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dout: np.ndarray


@own_errors
def random_inputs(problem: Problem, seed: int = 0) -> RandomInputs:
    """Draw standard normal q, k, v and dout of a problem's shapes and dtype.

    Parameters
    ----------
    problem : Problem
    seed : int
        The same seed gives the same numbers.

    Returns
    -------
    RandomInputs
        q (batch, heads, n_q, head_dim), k (batch, kv_heads, n_kv, head_dim),
        v (batch, kv_heads, n_kv, head_dim_v), dout (batch, heads, n_q, head_dim_v).

    Raises
    ------
    OptionError
        If the arrays do not fit in memory.
    """
    p = checks.instance("problem", problem, Problem, "flashsim.Problem")
    rng = np.random.default_rng(checks.seed(seed))
    inputs, result = numpy_dtype(p.dtype), numpy_dtype(p.result_dtype)

    def draw(heads: int, n: int, width: int, kind: np.dtype) -> np.ndarray:
        return rng.standard_normal((p.batch, heads, n, width)).astype(kind)

    try:
        return RandomInputs(
            q=draw(p.heads, p.n_q, p.head_dim, inputs),
            k=draw(p.kv_heads, p.n_kv, p.head_dim, inputs),
            v=draw(p.kv_heads, p.n_kv, p.head_dim_v, inputs),
            dout=draw(p.heads, p.n_q, p.head_dim_v, result),
        )
    except (MemoryError, ValueError):  # NumPy raises ValueError beyond 2**63 elements
        raise OptionError(
            f"this machine has too little memory for q, k, v and dout of {shown(p)}; use smaller "
            "sizes, or call flashsim.count, which needs no arrays"
        ) from None
