"""Attention calls of a model's layers, which usually differ only in the addresses of their tensors.

One comparison in C, torch's own `TensorGuards`, stands for the look-ups of `direct.known`. It is
private to torch, as is the allocation that the engine uses; without it every call is looked up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashsim.torch import direct

_AD = torch.autograd.forward_ad


class Layers:
    """The calls of a model's layers in one step, of which only the first is looked up.

    A later call that has the same options, and tensors of the same types, shapes and strides, runs
    what the first call prepared.
    """

    def __init__(self) -> None:
        self._asked: tuple[Any, ...] = ()
        self._types: tuple[type, ...] = ()
        self._alike: Callable[[Tensor, Tensor, Tensor], bool] = _never
        self._run: Any = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, asked: tuple[Any, ...]) -> Tensor | None:
        """Return the output of a call that was checked before, or None if it must be checked.

        The output is (batch, n_q, heads, head_dim_v) and contiguous. `asked` has the arguments
        causal, window, softcap, scale, algorithm, deterministic and backend of `attention`.
        """
        if torch.compiler.is_compiling():
            return None
        if (
            self._alike(q, k, v)
            and asked == self._asked
            and tuple(map(type, asked)) == self._types
            and _AD._current_level < 0  # not a part of dispatch keys
        ):
            return self._run(q, k, v)
        if torch._C._is_any_autocast_enabled():
            return None
        call, _ = direct.known(q, k, v, asked)
        if call is None:
            return None
        out = direct.by_token(call, q, k, v)
        if self._run is None and not (q.requires_grad or k.requires_grad or v.requires_grad):
            # From now on `alike` is False if a gradient, a mode or a transform of torch appears.
            self._asked, self._types = asked, tuple(map(type, asked))
            self._run = call.repeated(q, k, v)
            self._alike = _guards(q, k, v)
        return out

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Copy as a new step, because torch's comparison cannot be copied."""
        return Layers, ()


def _never(*_: Tensor) -> bool:
    return False


def _guards(q: Tensor, k: Tensor, v: Tensor) -> Callable[[Tensor, Tensor, Tensor], bool]:
    """Return a function that says if three tensors, and torch's state, are like those of now.

    It compares classes, types, devices, shapes, strides, `requires_grad` and dispatch keys. These
    keys tell autocast, dispatch modes, transforms of torch.func, tracing, and pending negations.
    """
    exactly = {"dynamic_dims_sizes": None, "dynamic_dims_strides": None}
    try:
        guards: Any = torch._C._dynamo.guards.TensorGuards
    except AttributeError:
        return _never
    return guards(q, k, v, **exactly).check
