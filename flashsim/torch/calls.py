"""`AttentionCall`: one recorded attention call of a model."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flashsim import report
from flashsim.api import cost, execution, samples
from flashsim.api.scales import UNSCALED
from flashsim.counts.questions import in_words
from flashsim.errors import FlashSimError, UnsupportedError
from flashsim.problem.problem import Problem, numpy_dtype
from flashsim.torch.masks import Pattern, has_values
from flashsim.trace.trace import Trace


class Extents(NamedTuple):
    """The sizes of an attention call, with `Problem`'s names, and packed sequences' offsets."""

    batch: int
    heads: int
    kv_heads: int
    n_q: int
    n_kv: int
    head_dim: int
    head_dim_v: int
    cu_seqlens_q: tuple[int, ...] | None = None
    cu_seqlens_k: tuple[int, ...] | None = None

    @classmethod
    def of(cls, *sizes: int, offsets: tuple[Any, Any] = (None, None)) -> Extents:
        """Build `Extents` from sizes that may be torch's symbolic integers."""
        batch, heads, kv_heads, n_q, n_kv, d, d_v = map(int, sizes)
        return cls(batch, heads, kv_heads, n_q, n_kv, d, d_v, *offsets)


@dataclass(eq=False)
class AttentionCall:
    """One attention call of a model: sizes, types, options and, if measured, times.

    Attributes
    ----------
    name : the module that made the call, as in ``model.named_modules()``, or ""
    api : the function called: "scaled_dot_product_attention", "flex_attention", ...
    dtype : the element type of the computation; under autocast, the type to which autocast casts
    device : "cpu" or "cuda:0"; "meta" or "cpu (fake)" for tensors without values
    pattern : which scores are kept
    scale : None for 1 / sqrt(head_dim)
    notes : what the count does not reproduce exactly
    backward : True if the gradient was computed; may become true after the watch has ended
    inputs : copies of q, k and v, (batch, heads, n, head_dim), if they are small, or None
    measured : seconds per kernel (on a CPU per operator) of "forward" and "backward"
    """

    name: str
    api: str
    sizes: Extents
    dtype: str
    device: str
    pattern: Pattern = field(default_factory=Pattern)
    scale: float | None = None
    softcap: float = 0.0
    dropout: float = 0.0
    notes: list[str] = field(default_factory=list)
    backward: bool = False
    inputs: tuple[Tensor, ...] | None = None
    measured: dict[str, dict[str, float]] = field(default_factory=dict)

    @cached_property
    def problem(self) -> Problem:
        """Return the call as a `Problem`, for `flashsim.count`, `predict` and other functions.

        Raises
        ------
        FlashSimError
            If flashsim does not support the problem: a head_dim above 512, an 8-bit type.
        """
        p = self.pattern
        return Problem(
            **self.sizes._asdict(),
            dtype=self.dtype,
            causal=p.causal,
            window=p.window,
            bias=p.bias,
            mask=p.mask,
            sinks=p.sinks,
            softcap=self.softcap,
            scale=self.scale,  # type: ignore[arg-type]  # None is 1 / sqrt(head_dim)
        )

    @property
    def place(self) -> str | None:
        """Return "cpu" or "cuda", the device of the call, or None for tensors without values."""
        kind = self.device.partition(":")[0]
        return kind if kind in ("cpu", "cuda") and "fake" not in self.device else None

    @property
    def note(self) -> str:
        """Return which parts of the call are not counted, and why; "" if all parts are counted."""
        dropout = f"dropout {self.dropout:g}: its random numbers are not counted"
        notes = [self.pattern.note, *self.notes, *[dropout] * bool(self.dropout)]
        try:
            self.problem  # noqa: B018
        except FlashSimError as error:
            notes.append(f"not counted: {error}")
        return "; ".join(filter(None, notes))

    def trace(self, *, algorithm: str = "flash2", seed: int = 0, **options: Any) -> Trace:
        """Run the simulator on this call and return the trace, for pictures and the player.

        The simulation uses the recorded q, k and v if `watch` copied them, else random tensors
        (`seed`). `options` are keywords of `flashsim.run`.

        Raises
        ------
        OptionError
            If this machine's memory is too small for the tensors.
        UnsupportedError
            For a call with a bias or sinks, because their values are not recorded.
        """
        p = self.problem
        for name, given in (("bias", p.bias is not None), ("sinks", p.sinks)):
            if given:
                raise UnsupportedError(
                    f"{self!r} has {name}, but watch does not record its values; call "
                    f"flashsim.run(q, k, v, {name}=...) instead"
                )
        q, k, v = self._random(seed) if self.inputs is None else map(_numpy, self.inputs)
        for name in ("causal", "window", "softcap", "scale", "mask"):
            options.setdefault(name, getattr(p, name))
        if p.cu_seqlens_q is not None:
            options |= {"cu_seqlens_q": p.cu_seqlens_q, "cu_seqlens_k": p.cu_seqlens_k}
        if p.fp8:  # the numbers' meaning changes no size
            options.setdefault("scales", UNSCALED)
        options |= {"algorithm": algorithm, "trace": True}
        trace = execution.run(q, k, v, **options).trace
        assert trace is not None
        return trace

    def _random(self, seed: int) -> tuple[np.ndarray, ...]:
        p = self.problem
        rows = p.heads * p.n_q * (p.head_dim + p.head_dim_v)
        rows += p.kv_heads * p.n_kv * (p.head_dim + p.head_dim_v)
        cost.fits(p.batch * rows * 8, "`flashsim.count(call.problem)` counts without arrays")
        return samples.random_inputs(p, seed)[:3]

    def __repr__(self) -> str:
        try:
            what = in_words(self.problem)
        except FlashSimError:
            what = f"{self.sizes}, {self.dtype}"
        return f"<AttentionCall {self.name or '(no module)'}: {self.api}, {what} on {self.device}>"

    def _repr_html_(self) -> str:
        rows: list[Any] = [(n, str(x)) for n, x in vars(self).items() if n not in ("inputs",)]
        return report.Table(repr(self), ("field", "value"), rows).html()


def copies(tensors: tuple[Tensor, ...], sizes: Extents, limit: int) -> tuple[Tensor, ...] | None:
    """Return 4-D copies of q, k and v; return None without values or above `limit` bytes."""
    s = sizes
    wanted = (
        (s.batch, s.heads, s.n_q, s.head_dim),
        (s.batch, s.kv_heads, s.n_kv, s.head_dim),
        (s.batch, s.kv_heads, s.n_kv, s.head_dim_v),
    )
    for x, shape in zip(tensors, wanted, strict=True):
        if x.is_nested or not has_values(x) or x.numel() != int(np.prod(shape)):
            return None
    if sum(x.numel() * x.element_size() for x in tensors) > limit:
        return None
    with torch.no_grad():
        return tuple(
            x.detach().reshape(shape).to("cpu", copy=True)
            for x, shape in zip(tensors, wanted, strict=True)
        )


def _numpy(x: Tensor) -> np.ndarray:
    """Return a CPU tensor as a NumPy array that shares its memory; bfloat16 keeps its bits."""
    if x.dtype == torch.bfloat16:
        return x.contiguous().view(torch.int16).numpy().view(numpy_dtype("bfloat16"))
    return x.numpy()
