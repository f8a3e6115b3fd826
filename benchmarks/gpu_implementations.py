"""The implementations that benchmarks/gpu.py times, behind one interface."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any


@dataclass(frozen=True)
class Inputs:
    """The arrays of one shape, (batch, heads, n, head_dim), and its mask.

    A row attends to its own key and at most `window` - 1 before it (0: all of them); causal only.
    """

    q: Any
    k: Any
    v: Any
    dout: Any
    causal: bool
    window: int = 0

    @cached_property
    def rows(self) -> tuple[Any, Any, Any, Any]:
        """Return contiguous torch tensors in flash-attention's (batch, n, heads, head_dim)."""
        q, k, v, dout = (
            x.transpose(1, 2).contiguous() for x in (self.q, self.k, self.v, self.dout)
        )
        return q, k, v, dout


class Torch:
    """One kernel of torch's scaled_dot_product_attention, by its name in `SDPBackend`."""

    def __init__(self, backend: str) -> None:
        self.backend = backend

    def _attend(self, q: Any, k: Any, v: Any, x: Inputs) -> Any:
        if x.window:
            raise NotImplementedError("scaled_dot_product_attention has no windows")
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention

        with sdpa_kernel(getattr(SDPBackend, self.backend)):
            grouped = q.shape[1] != k.shape[1]
            return scaled_dot_product_attention(q, k, v, is_causal=x.causal, enable_gqa=grouped)

    def forward(self, x: Inputs) -> Any:
        """Run the forward pass with autograd."""
        self.inputs = [a.detach().requires_grad_() for a in (x.q, x.k, x.v)]
        return self._attend(*self.inputs, x)

    def inference(self, x: Inputs) -> Any:
        """Run the forward pass without autograd."""
        import torch

        with torch.no_grad():
            return self._attend(x.q, x.k, x.v, x)

    def backward(self, x: Inputs, result: Any) -> Any:
        """Return the gradients of q, k and v."""
        import torch

        return torch.autograd.grad(result, self.inputs, x.dout, retain_graph=True)


class Cute:
    """flash-attention's kernels in CuTe-DSL (the package flash-attn-4), if they are installed."""

    def _attend(self, q: Any, k: Any, v: Any, x: Inputs) -> Any:
        from flash_attn.cute.interface import flash_attn_func

        window = (x.window - 1, 0) if x.window else (None, None)
        made = flash_attn_func(q, k, v, causal=x.causal, window_size=window)
        return made[0] if isinstance(made, tuple) else made

    def forward(self, x: Inputs) -> Any:
        """Run the forward pass with autograd."""
        self.inputs = [a.detach().requires_grad_() for a in x.rows[:3]]
        return self._attend(*self.inputs, x)

    def inference(self, x: Inputs) -> Any:
        """Run the forward pass without autograd."""
        import torch

        with torch.no_grad():
            return self._attend(*x.rows[:3], x)

    def backward(self, x: Inputs, result: Any) -> Any:
        """Return the gradients of q, k and v."""
        import torch

        return torch.autograd.grad(result, self.inputs, x.rows[3], retain_graph=True)


class Compiled(Torch):
    """scaled_dot_product_attention under torch.compile, with the kernel that torch selects."""

    def __init__(self) -> None:
        super().__init__("")

    def _attend(self, q: Any, k: Any, v: Any, x: Inputs) -> Any:
        if x.window:
            raise NotImplementedError("scaled_dot_product_attention has no windows")
        grouped = q.shape[1] != k.shape[1]
        return _compiled()(q, k, v, is_causal=x.causal, enable_gqa=grouped)


@cache
def _compiled() -> Any:
    import torch
    from torch._functorch import config

    config.donated_buffer = False  # the backward pass runs repeatedly on the same saved tensors
    return torch.compile(torch.nn.functional.scaled_dot_product_attention)


class Flashsim:
    """One GPU backend of flashsim; `deterministic` chooses the form of its backward pass.

    True is the fastest deterministic form, which may be the fused one in a fixed order; None is the
    three-pass form.
    """

    def __init__(self, backend: str, deterministic: bool | None, **options: Any) -> None:
        self.backend, self.deterministic, self.options = backend, deterministic, options

    def forward(self, x: Inputs) -> Any:
        """Run the forward pass."""
        import flashsim

        window = (x.window - 1, 0) if x.window else None
        given = {"causal": x.causal, "window": window, "backend": self.backend}
        return flashsim.run(x.q, x.k, x.v, **given, **self.options)

    inference = forward

    def backward(self, x: Inputs, result: Any) -> Any:
        """Return the gradients of q, k and v."""
        return result.backward(x.dout, deterministic=self.deterministic)


#: All implementations, by their names in the CSV.
IMPLEMENTATIONS: dict[str, Torch | Cute | Flashsim] = {
    "flashsim cupy": Flashsim("cupy", deterministic=False),
    "flashsim cupy deterministic": Flashsim("cupy", deterministic=True),
    "flashsim cupy three passes": Flashsim("cupy", deterministic=None),
    "flashsim cupy portable": Flashsim("cupy", deterministic=False, kernel="portable"),
    "flashsim cupy portable deterministic": Flashsim("cupy", deterministic=True, kernel="portable"),
    "flashsim cupy tf32": Flashsim("cupy", deterministic=False, allow_tf32=True),
    "flashsim numba_cuda": Flashsim("numba_cuda", deterministic=False),
    "flashsim numba_cuda deterministic": Flashsim("numba_cuda", deterministic=True),
    "flashsim numba_cuda three passes": Flashsim("numba_cuda", deterministic=None),
    "flashsim numba_cuda tensor": Flashsim("numba_cuda", deterministic=False, kernel="tensor"),
    "flashsim cupy heads packed": Flashsim("cupy", deterministic=False, pack_gqa=True),
    "flashsim cupy heads apart": Flashsim("cupy", deterministic=False, pack_gqa=False),
    "flash-attn cute": Cute(),
    "torch flash2": Torch("FLASH_ATTENTION"),
    "torch cudnn": Torch("CUDNN_ATTENTION"),
    "torch efficient": Torch("EFFICIENT_ATTENTION"),
    "torch math": Torch("MATH"),
    "torch sdpa compiled": Compiled(),
}
