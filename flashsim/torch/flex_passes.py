"""`FlexPasses`: the forward and backward pass of `flex_attention`, for eager and compiled code."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from flashsim.functions.mask import MaskFunction
from flashsim.functions.tracing import Traced
from flashsim.torch import ops


class FlexPasses(NamedTuple):
    """A score function, a mask and options of `flex_attention`; its methods run the passes.

    `wanted` names the captured arrays that get a gradient; `more` holds keywords of `flashsim.run`.
    """

    score: Traced | None
    mask: MaskFunction | None
    scale: float | None
    wanted: tuple[str, ...]
    backend: str
    more: tuple[tuple[str, Any], ...] = ()
    deterministic: bool | None = None

    def _keywords(self, sinks: Tensor | None) -> dict[str, Any]:
        """Return the keywords of `flashsim.run`."""
        sinks = None if sinks is None else sinks.detach()
        functions = {"score_mod": self.score, "mask_mod": self.mask, "sinks": sinks}
        return dict(self.more, scale=self.scale, backend=self.backend, **functions)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Run the forward pass of attention, and return out and the LSE."""
        return ops.run(q, k, v, **self._keywords(sinks))

    def backward(
        self,
        gradients: tuple[Tensor, Tensor | None],
        results: tuple[Tensor, Tensor],
        inputs: tuple[Tensor, Tensor, Tensor],
        sinks: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, list[Tensor]]:
        """Run the backward pass; return gradients of q, k, v, the sinks and the `wanted` arrays."""
        dout, dlse = gradients
        found = ops.run_backward(
            *(*inputs, *results, dout),
            dlse=dlse,
            deterministic=self.deterministic,
            captured=self.wanted,
            **self._keywords(sinks),
        )
        dsinks = None if sinks is None else found.dsinks.to(sinks.dtype)
        captured = [found.captured[name] for name in self.wanted]
        return found.dq, found.dk, found.dv, dsinks, captured
