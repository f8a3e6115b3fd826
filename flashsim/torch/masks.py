"""Recognise a mask tensor's pattern: causal, a window, a bias, or a mask that counts ignore."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

#: Scores above which the values of a mask are not read.
READ = 2**26


@dataclass(frozen=True)
class Pattern:
    """The scores that an attention call keeps, described with the parameters of `flashsim.Problem`.

    `note` says what a count does not reproduce exactly, or is "". `known` is False if the mask's
    values cannot be read, as on the meta device.
    """

    causal: bool = False
    window: tuple[int, int] | None = None
    bias: tuple[int, int] | None = None
    mask: Callable[..., Any] | None = None
    sinks: bool = False
    note: str = ""
    known: bool = True

    @property
    def kind(self) -> str:
        """Return the name of the mask's pattern in one or two words, for tables."""
        words = ["causal"] if self.causal else []
        if self.window is not None:
            words.append("window {}:{}".format(*self.window))
        if self.mask is not None:
            words.append("causal from the top left")
        if self.bias is not None:
            words.append("bias")
        if self.sinks:
            words.append("sinks")
        return ", ".join(words) or ("dense, see note" if self.note else "dense")


def top_left(q: Any, k: Any) -> Any:
    """Return torch's `is_causal` mask, whose diagonal starts at the first query and first key."""
    return k <= q


def diagonal(n_q: int, n_kv: int) -> Pattern:
    """Return the mask pattern of torch's ``is_causal=True`` for these sequence lengths."""
    return Pattern(causal=True) if n_q == n_kv else Pattern(mask=top_left)


def has_values(x: Tensor) -> bool:
    """Return True if a tensor's numbers can be read; meta, fake and vmapped tensors have none."""
    # Tensors inside torch.vmap have other values in each call.
    mapped = torch._C._functorch.is_batchedtensor(x)
    return x.device.type != "meta" and not isinstance(x, FakeTensor) and not mapped


def read(mask: Tensor, n_q: int, n_kv: int, batch: int, heads: int) -> Pattern:
    """Return the `Pattern` of a mask that broadcasts to (batch, heads, n_q, n_kv).

    An additive mask counts as boolean if all numbers are 0 or near the type's lowest number. If an
    additive mask's values cannot be read, a mask per head counts as a bias, because boolean masks
    rarely differ between heads.
    """
    bias = added(mask, batch, heads)
    of_heads = mask.dtype != torch.bool and bias[1] > 1
    if not has_values(mask):
        if of_heads:
            return Pattern(bias=bias, note="a bias without values: what it masks is not counted")
        return Pattern(note="a mask without values: counted as dense", known=False)
    if mask.numel() > READ:
        what = f"{mask.numel():,} values, not read"
        if of_heads:
            return Pattern(bias=bias, note=f"a bias of {what}: what it masks is not counted")
        return Pattern(note=f"a mask of {what}: counted as dense")
    with torch.no_grad(), unset_fake_temporarily():
        mask = mask.detach()
        kept = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
        if mask.dtype != torch.bool and bool(torch.where(kept, mask, 0).any()):
            return Pattern(
                bias=bias,
                note="" if bool(kept.all()) else "a bias that masks scores too: counted as dense",
            )
        return _boolean(kept.reshape(-1, *kept.shape[-2:]), n_q, n_kv)


def added(x: Tensor, batch: int, heads: int) -> tuple[int, int]:
    """Return the value for `Problem.bias`: numbers of bias matrices along batch and heads."""
    lead = (1, 1, *x.shape)[-4:-2]
    return batch if lead[0] > 1 else 1, heads if lead[1] > 1 else 1


def _boolean(kept: Tensor, n_q: int, n_kv: int) -> Pattern:
    """Return the `Pattern` of a boolean mask, (any, n_q or 1, n_kv or 1), True for kept scores."""
    if bool(kept.all()):
        return Pattern()
    kept = kept.expand(-1, n_q, n_kv)
    query = torch.arange(n_q, device=kept.device)[:, None]
    key = torch.arange(n_kv, device=kept.device)
    right_of = key - query - (n_kv - n_q)  # of the diagonal that ends at the bottom right
    one = kept[0]
    if bool((kept == one).all()) and bool(one.any()):
        if torch.equal(one, right_of <= 0):
            return Pattern(causal=True)
        if torch.equal(one, key <= query):
            return Pattern(mask=top_left)
        left, right = (int((side * right_of)[one].max()) for side in (-1, 1))
        band = (right_of >= -left) & (right_of <= right)
        if min(left, right) >= 0 and torch.equal(one, band):
            return Pattern(causal=right == 0, window=(left, right))
    share = float(kept.to(torch.float32).mean())
    return Pattern(note=f"a mask that keeps {share:.0%} of the scores: counted as dense")
