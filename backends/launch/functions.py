"""Masks and scores that are functions, as CUDA C++ kernels take them: generated text and bytes.

The text is generated from a traced function and defines, for one kernel,

- ``struct FlashCaptured``: what the functions read besides positions, by value;
- ``flash_mask(c, b, h, q, k)``: whether the mask keeps a score;
- ``flash_score(c, s, b, h, q, k)``: the score that takes the place of the scaled score `s`;
- ``flash_score_grad(c, s, dout, b, h, q, k)``: the gradient of `s`, given that of the result. It
  adds the gradients of captured arrays with ``flash_add(float* to, float x)``.

`b` and `h` number the sequence and the query head; `q` and `k` are positions within the sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Ahead of the generated text. Of a backward's kernels only one adds to the captured arrays.
_PRELUDE = """\
__device__ __forceinline__ void flash_add(float* to, float x) {
#if FS_SCORE_SUMS
    atomicAdd(to, x);
#endif
}
"""


@dataclass(frozen=True)
class Functions:
    """The functions of one problem.

    Attributes
    ----------
    text : str
        CUDA C++: what the module's docstring lists. A function that is absent is not defined.
    captured_bytes : int
        Size of ``struct FlashCaptured``, a multiple of 8.
    mask, score : bool
        Whether there is a function of masks, and one of scores.
    sums : bool
        Whether captured arrays get a gradient.
    """

    text: str
    captured_bytes: int
    mask: bool
    score: bool
    sums: bool = False

    @property
    def source(self) -> str:
        """The text that stands ahead of a kernel's own."""
        return _PRELUDE + self.text

    def constants(self, *, sums: bool) -> dict[str, int]:
        """The compile-time constants of a kernel; `sums` says if it adds to captured arrays."""
        made = {"MASK_MOD": self.mask, "SCORE_MOD": self.score}
        return made | ({"SCORE_SUMS": 1} if sums and self.sums else {})
