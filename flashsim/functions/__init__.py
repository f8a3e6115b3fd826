"""Turns Python score and mask functions into expression graphs, from which kernels are generated.

``run(..., score_mod=f, mask_mod=g)`` takes functions written for PyTorch's FlexAttention. The
package `flashsim.functions` also has ready-made masks and score functions, such as ``causal() &
documents(numbers)`` and ``alibi(heads)``.
"""

from flashsim.functions.ready import (
    MaskRule,
    alibi,
    alibi_slopes,
    causal,
    chain,
    chunked,
    dilated,
    documents,
    padding,
    prefix_lm,
    relative,
    softcap,
    streaming,
    strided,
    t5_bias,
    tree,
    window,
)

__all__ = [
    "MaskRule",
    "alibi",
    "alibi_slopes",
    "causal",
    "chain",
    "chunked",
    "dilated",
    "documents",
    "padding",
    "prefix_lm",
    "relative",
    "softcap",
    "streaming",
    "strided",
    "t5_bias",
    "tree",
    "window",
]
