"""Keep flex_attention compiled while `watch` runs a program's other compiled code uncompiled.

Uncompiled flex_attention runs plain matrix products and stores all scores, so an X-ray would
measure kernels that the program does not normally run. Other attention functions call the same
kernels with and without compilation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any
from unittest import mock

import torch
from torch.nn.attention import flex_attention as flex
from torch.utils._python_dispatch import _disable_current_modes

#: Calls a function on q, k, v and further arguments, as an attention call that is observed.
Observer = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class _Around(threading.local):
    """The options of the compiled functions that are running in this thread, outermost first."""

    def __init__(self) -> None:
        self.options: list[dict[str, Any]] = []


@contextmanager
def compiled_flex(observe: Observer) -> Iterator[None]:
    """In the ``with`` block, compile flex_attention for each call that compiled code makes.

    Each call gets the options of the `torch.compile` that encloses the call. Code that was compiled
    or imported before the block is not affected.
    """
    around = _Around()
    made: dict[str, Callable[..., Any]] = {}
    compile_, attend = torch.compile, flex.flex_attention

    def compile(model: Any = None, **options: Any) -> Any:
        if model is None:
            return lambda model: compile(model, **options)
        if isinstance(model, torch.nn.Module):
            return _entered(compile_(model, **options), around, options)
        return _noting(compile_(model, **options), around, options)

    @wraps(attend)
    def attending(*args: Any, **kwargs: Any) -> Any:
        if not around.options or torch.compiler.is_compiling():
            return attend(*args, **kwargs)
        options = around.options[-1]
        key = repr(sorted(options.items()))
        if key not in made:
            made[key] = compile_(attend, **options)
        return observe(_on_its_own(made[key]), args, kwargs)

    with (
        mock.patch.object(torch, "compile", compile),
        mock.patch.object(flex, "flex_attention", attending),
    ):
        yield


def _noting(
    run: Callable[..., Any], around: _Around, options: dict[str, Any]
) -> Callable[..., Any]:
    """Return a function that calls `run`, with `options` in the list `around` during the call."""

    @wraps(run)
    def running(*args: Any, **kwargs: Any) -> Any:
        around.options.append(options)
        try:
            return run(*args, **kwargs)
        finally:
            around.options.pop()

    return running


def _entered(model: Any, around: _Around, options: dict[str, Any]) -> Any:
    """Add hooks to a compiled module that put `options` in the list `around` during each run."""

    def enter(*_: Any) -> None:
        around.options.append(options)

    def leave(*_: Any) -> None:  # a hook's result would replace the module's
        around.options.pop()

    model.register_forward_pre_hook(enter)
    model.register_forward_hook(leave, always_call=True)
    return model


def _on_its_own(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `run` with torch's modes off, as modes prevent compilation."""

    def running(*args: Any, **kwargs: Any) -> Any:
        with (
            torch._C.DisableTorchFunction(),
            _disable_current_modes(),
            torch.compiler.set_stance("default"),
        ):
            return run(*args, **kwargs)

    return running
