"""Masks and scores that are functions, as CUDA C++ kernels take them: generated text and bytes.

`flashsim.functions.emit` generates the text from traced functions. It defines ``FlashCaptured``,
what the functions read besides positions, and ``flash_mask``, ``flash_score`` and
``flash_score_grad``. It stands ahead of a kernel's own text, and the bytes of the struct stand
behind ``struct Args``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from flashsim.functions import emit
from flashsim.functions.graph import Graph

#: Ahead of the generated text: an array that no kernel writes, read through the read-only cache.
_PRELUDE = """\
template <class T> struct FlashArray {
    const T* data;
    __device__ __forceinline__ T operator[](long long i) const { return __ldg(data + i); }
};
"""
_CAPTURED = re.compile(r"^    const (.+)\* (a\d+);", re.MULTILINE)


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
    """

    text: str
    captured_bytes: int
    mask: bool
    score: bool
    sums: bool

    @property
    def constants(self) -> dict[str, int]:
        """The compile-time constants that say which functions there are."""
        return {"MASK_MOD": self.mask, "SCORE_MOD": self.score, "SCORE_SUMS": self.sums}


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

    @classmethod
    def of(
        cls, mask: Graph | None, score: Graph | None, wanted: tuple[str, ...] = ()
    ) -> Functions | None:
        """The functions with these graphs; None without any.

        `wanted` names the captured arrays of the score function that get a gradient.
        """
        if mask is None and score is None:
            return None
        plain = _generated(emit.cuda_source(mask, score), mask, score)
        if not wanted:
            return cls(plain, plain)
        return cls(plain, _generated(emit.cuda_source(mask, score, wanted), mask, score))


def _generated(source: emit.CudaSource, mask: Graph | None, score: Graph | None) -> Generated:
    text = _PRELUDE + _CAPTURED.sub(r"    FlashArray<\1> \2;", source.text)
    size = source.pack([0] * len(source.arrays), [0] * len(source.gradients)).nbytes
    return Generated(
        text, -(-size // 8) * 8, mask is not None, score is not None, bool(source.gradients)
    )
