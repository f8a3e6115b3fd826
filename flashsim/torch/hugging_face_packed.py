"""Attention of sequences that transformers packed: in training, and in continuous batching."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashsim.torch.decoding import decode
from flashsim.torch.functional import attention


def attend(
    query: Tensor, key: Tensor, value: Tensor, offsets: dict[str, Any], options: dict[str, Any]
) -> Tensor:
    """Compute attention of packed (1, heads, tokens, d) inputs; return (1, tokens, heads, d).

    `offsets` holds transformers' "cu_seq_lens_q", "cu_seq_lens_k" and "max_seqlen_q". If a model
    has several kinds of layers, "cu_seq_lens_k" is a dict by kind. Tokens after the last offset are
    padding, and get zeros. Offsets are read on the host, except if each sequence has one token, as
    in a decoding step.
    """
    of_q, of_k = offsets["cu_seq_lens_q"], offsets["cu_seq_lens_k"]
    if isinstance(of_k, dict):
        of_k = of_k["full_attention" if options["window"] is None else "sliding_attention"]
    tokens = query.shape[2]
    one_each = offsets.get("max_seqlen_q") == 1 and len(of_k) > tokens
    if one_each and options["sinks"] is None and not torch.is_grad_enabled():
        starts, stops = of_k[:tokens].int(), of_k[1 : tokens + 1].int()
        out = decode(
            *(query[0].transpose(0, 1)[:, :, None], key, value),
            cache_starts=starts,
            cache_seqlens=stops,
            cache_batch_idx=torch.zeros_like(starts),  # all keys lie in one entry
            **{name: options[name] for name in ("causal", "window", "scale", "softcap")},
        )
        return out[None, :, :, 0]
    if "max_seqlen_q" not in offsets:
        told = {"cu_seqlens_q": of_q, "cu_seqlens_k": of_k, **options}
        return attention(query, key, value, **told).transpose(1, 2).contiguous()
    cuts = [x.tolist() for x in (of_q, of_k)]
    n_q, n_k = (x[-1] for x in cuts)
    out = query.new_zeros(1, tokens, query.shape[1], value.shape[3])
    if n_q and n_k:
        given = query[:, :, :n_q], key[:, :, :n_k], value[:, :, :n_k]
        found = attention(*given, cu_seqlens_q=cuts[0], cu_seqlens_k=cuts[1], **options)
        out[:, :n_q] = found.transpose(1, 2)
    return out
