"""Masks and scores that are functions, as CUDA C++ kernels take them: generated text and bytes.

`flashsim.functions.emit` generates the text from traced functions. It defines ``FlashCaptured``,
what the functions read besides positions, and ``flash_mask``, ``flash_score`` and
``flash_score_grad``. It stands ahead of a kernel's own text, and the bytes of the struct stand
behind ``struct Args``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from flashsim.functions import emit
from flashsim.functions.derivative import adjoints
from flashsim.functions.graph import Graph
from flashsim.problem.problem import Problem

#: Around the generated text: the hardware's tanh, where a softcap takes it (common.cuh), and no
#: warnings about values that a function does not need.
_BEFORE = """\
#if FS_BF16
#define FLASH_FAST_TANH
#endif
#pragma nv_diagnostic push
#pragma nv_diag_suppress 177
"""
_AFTER = "#pragma nv_diagnostic pop\n"


@dataclass(frozen=True)
class Generated:
    """The generated text of one kernel.

    Attributes
    ----------
    text : str
    captured_bytes : int
        The size of ``struct FlashCaptured``, a multiple of 8.
    mask, score : bool
        Whether there is a function of masks, and one of scores.
    sums : bool
        Whether ``flash_score_grad`` adds to the gradients of captured arrays.
    reads : bool
        Whether captured arrays are read at positions of queries or keys, which then must exist.
    """

    text: str
    captured_bytes: int
    mask: bool
    score: bool
    sums: bool
    reads: bool

    @property
    def constants(self) -> dict[str, int]:
        """The compile-time constants that say which functions there are."""
        return {
            "MASK_MOD": int(self.mask),
            "SCORE_MOD": int(self.score),
            "SCORE_SUMS": int(self.sums),
            "READS": int(self.reads),
        }


@dataclass(frozen=True)
class Functions:
    """The functions of one problem, as its kernels take them.

    Attributes
    ----------
    plain, summing : Generated
        For kernels that add no gradients of captured arrays, and for those that do: of a backward
        only the KV-outer one, which has every score once.
    """

    plain: Generated
    summing: Generated


def functions_of(problem: Problem) -> Functions | None:
    """The functions of a problem; None if it has none."""
    if problem.mask_mod is None and problem.score_mod is None:
        return None
    mask = None if problem.mask_mod is None else problem.mask_mod.graph
    return _functions(mask, problem.score_mod, problem.score_grads, _extents(problem))


def read_arrays(problem: Problem) -> bool:
    """Whether a function of a problem reads captured arrays at positions of queries or keys."""
    functions = functions_of(problem)
    return functions is not None and functions.plain.reads


def has_known_slope(problem: Problem) -> bool:
    """Whether the score function's derivative does not depend on the score: a bias, or a factor."""
    return problem.score_mod is not None and _known_slope(problem.score_mod)


@lru_cache(maxsize=256)
def _known_slope(graph: Graph) -> bool:
    parts = adjoints(graph, ())
    if parts.score is None:
        return True
    return "score" not in Graph(parts.nodes, parts.score, parts.arrays).uses


def heads_share(problem: Problem, least: int) -> bool:
    """Whether heads read the same elements of an array per query and key, of `least` bytes."""
    graph = problem.score_mod
    return graph is not None and any(
        {"q", "k"} <= graph.depends[n] and "h" not in graph.depends[n] and size >= least
        for n in graph.loads
        for spec in [graph.arrays[graph.nodes[n].value]]
        for size in [math.prod(spec.shape) * spec.itemsize]
    )


def sources_of(problem: Problem) -> tuple[emit.CudaSource, emit.CudaSource]:
    """What `functions_of` is made of: it packs the structs of `plain` and `summing`."""
    mask = None if problem.mask_mod is None else problem.mask_mod.graph
    return _sources(mask, problem.score_mod, problem.score_grads, _extents(problem))


def _extents(problem: Problem) -> tuple[tuple[str, int], ...]:
    rows = [(s.q_stop - s.q_start, s.k_stop - s.k_start) for s in problem.sequences]
    q, k = (max(lengths) for lengths in zip(*rows, strict=True))
    return (("b", problem.batch), ("h", problem.heads), ("q", q), ("k", k))


@lru_cache(maxsize=256)
def _functions(mask: Any, score: Any, wanted: Any, extents: Any) -> Functions:
    plain, summing = (
        Generated(
            _BEFORE + source.text + _AFTER,
            packed_bytes(source.pack([0] * len(source.arrays), [0] * len(source.gradients))),
            mask is not None,
            score is not None,
            bool(source.gradients),
            any(g.depends[n] & {"q", "k"} for g in (mask, score) if g is not None for n in g.loads),
        )
        for source in _sources(mask, score, wanted, extents)
    )
    return Functions(plain, summing)


@lru_cache(maxsize=256)
def _sources(
    mask: Graph | None,
    score: Graph | None,
    wanted: tuple[str, ...],
    extents: tuple[tuple[str, int], ...],
) -> tuple[emit.CudaSource, emit.CudaSource]:
    plain = emit.cuda_source(mask, score, (), dict(extents))
    return plain, emit.cuda_source(mask, score, wanted, dict(extents)) if wanted else plain


def packed_bytes(packed: np.ndarray) -> int:
    """Bytes that a packed struct takes behind ``struct Args``."""
    return -(-packed.nbytes // 8) * 8
