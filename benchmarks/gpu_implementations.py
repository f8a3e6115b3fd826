"""What benchmarks/gpu.py times, behind one interface: flashsim's GPU backends, torch's kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Inputs:
    """The arrays of one shape."""

    q: Any
    k: Any
    v: Any
    dout: Any
    causal: bool


class Torch:
    """One kernel of torch's scaled_dot_product_attention, by its name in `SDPBackend`."""

    def __init__(self, backend: str) -> None:
        self.backend = backend

    def _attend(self, q: Any, k: Any, v: Any, causal: bool) -> Any:
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention

        with sdpa_kernel(getattr(SDPBackend, self.backend)):
            return scaled_dot_product_attention(q, k, v, is_causal=causal)

    def forward(self, x: Inputs) -> Any:
        """With a graph, for the backward pass."""
        self.inputs = [a.detach().requires_grad_() for a in (x.q, x.k, x.v)]
        return self._attend(*self.inputs, x.causal)

    def inference(self, x: Inputs) -> Any:
        """Without one."""
        import torch

        with torch.no_grad():
            return self._attend(x.q, x.k, x.v, x.causal)

    def backward(self, x: Inputs, result: Any) -> Any:
        """The gradients of q, k and v."""
        import torch

        return torch.autograd.grad(result, self.inputs, x.dout, retain_graph=True)


class Flashsim:
    """One GPU backend of flashsim; `deterministic` chooses the form of its backward pass.

    True is the fastest deterministic form there is, which may be the fused one in a fixed order;
    None is the three-pass form.
    """

    def __init__(self, backend: str, deterministic: bool | None, **options: Any) -> None:
        self.backend, self.deterministic, self.options = backend, deterministic, options

    def forward(self, x: Inputs) -> Any:
        """The forward pass."""
        import flashsim

        return flashsim.run(x.q, x.k, x.v, causal=x.causal, backend=self.backend, **self.options)

    inference = forward

    def backward(self, x: Inputs, result: Any) -> Any:
        """The gradients of q, k and v."""
        return result.backward(x.dout, deterministic=self.deterministic)


#: Everything that might run, by the name that the CSV gives it.
IMPLEMENTATIONS: dict[str, Torch | Flashsim] = {
    "flashsim cupy": Flashsim("cupy", deterministic=False),
    "flashsim cupy deterministic": Flashsim("cupy", deterministic=True),
    "flashsim cupy three passes": Flashsim("cupy", deterministic=None),
    "flashsim cupy portable": Flashsim("cupy", deterministic=False, kernel="portable"),
    "flashsim cupy portable deterministic": Flashsim("cupy", deterministic=True, kernel="portable"),
    "flashsim cupy tf32": Flashsim("cupy", deterministic=False, allow_tf32=True),
    "flashsim numba_cuda": Flashsim("numba_cuda", deterministic=False),
    "flashsim numba_cuda deterministic": Flashsim("numba_cuda", deterministic=True),
    "flashsim numba_cuda tensor": Flashsim("numba_cuda", deterministic=False, kernel="tensor"),
    "torch flash2": Torch("FLASH_ATTENTION"),
    "torch cudnn": Torch("CUDNN_ATTENTION"),
    "torch efficient": Torch("EFFICIENT_ATTENTION"),
    "torch math": Torch("MATH"),
}
