"""Combine attention of several blocks of scores in float32: merge outputs by LSE, add gradients."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashsim.torch.process_group import Parcel


@dataclass(frozen=True)
class Share:
    """Gradients of a range of tensor rows (the slice `rows`), by tensor name."""

    parts: Parcel
    rows: slice

    def widened(self, **whole: Tensor) -> Share:
        """Return float32 gradients of all rows, with zeros outside of the slice `rows`."""
        parts = {}
        for name, x in whole.items():
            wide = torch.promote_types(x.dtype, torch.float32)
            parts[name] = torch.zeros(x.shape, dtype=wide, device=x.device)
            if name in self.parts:
                parts[name][:, :, self.rows].copy_(self.parts[name])
        return Share(parts, slice(0, x.shape[2]))

    def add(self, other: Share) -> None:
        """Add another share's gradients to this share's gradients, in place."""
        for name, x in other.parts.items():
            self.parts[name][:, :, other.rows].add_(x)

    def plus(self, name: str, like: Tensor, own: list[tuple[slice, Tensor]]) -> Tensor:
        """Return the sum of this share's gradients and a rank's own gradients, rounded once."""
        total = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        for heads, part in own:
            if name in self.parts:
                here = self.parts[name][:, heads]
                torch.add(here, part[:, :, self.rows], out=total[:, heads, self.rows])
            for rest in (slice(0, self.rows.start), slice(self.rows.stop, like.shape[2])):
                if rest.start < rest.stop:
                    total[:, heads, rest].copy_(part[:, :, rest])
        return total


NOTHING = Share({}, slice(0, 0))


def merge_into(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge attention over more keys (`part`) into `out` and the LSE, in place and in float32."""
    if out.is_cuda:
        from flashsim.backends.cupy_gpu.merge import merge_into as fused

        fused(out, lse, part, part_lse)
        return
    total = torch.logaddexp(lse, part_lse)
    base = total.masked_fill(total == -torch.inf, 0)  # no key on either side
    a, b = torch.exp(lse - base)[..., None], torch.exp(part_lse - base)[..., None]
    out.copy_(a * out.to(lse.dtype) + b * part.to(lse.dtype))
    lse.copy_(total)
