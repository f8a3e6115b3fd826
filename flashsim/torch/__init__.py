"""Attention for PyTorch: a differentiable operator, and a replacement for torch's attention.

The package needs torch (``pip install 'flashsim-attention[torch]'``). Nothing replaces torch's
attention until a program calls `install`.
"""

from __future__ import annotations

from flashsim.errors import BackendUnavailable

try:
    import torch  # noqa: F401
except ImportError as error:
    raise BackendUnavailable(
        f"flashsim.torch needs PyTorch, which cannot be imported ({error}): "
        "pip install 'flashsim-attention[torch]'"
    ) from None

from flashsim.torch.decoding import decode
from flashsim.torch.flex import flex_attention
from flashsim.torch.functional import FlashAttention, attention
from flashsim.torch.process_group import count_sent
from flashsim.torch.ring import ring_attention, shard
from flashsim.torch.sdpa_override import install
from flashsim.torch.watch import watch

__all__ = [
    "FlashAttention", "attention", "count_sent", "decode", "flex_attention", "install",
    "ring_attention", "shard", "watch",
]  # fmt: skip
