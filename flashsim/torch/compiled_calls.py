"""Compile each flex_attention call in compiled code, although `watch` runs that code uncompiled.

Without compilation, flex_attention runs plain matrix products and stores all scores. An X-ray would
then measure kernels that the program does not normally run. Other attention functions call the same
kernels with and without compilation.
"""

from __future__ import annotations

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


@contextmanager
def compiled_flex(observe: Observer) -> Iterator[None]:
    """In the ``with`` block, compile flex_attention for each call in compiled code.

    The call gets the options of the `torch.compile` around it. Only what this block compiles or
    imports is affected: the block replaces `torch.compile` and `flex_attention` in their modules.
    """
    around: list[dict[str, Any]] = []  # the options of the compiled functions that are running
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
        if not around or torch.compiler.is_compiling():
            return attend(*args, **kwargs)
        options = around[-1]
        run = made.setdefault(repr(sorted(options.items())), compile_(attend, **options))
        return observe(_on_its_own(run), args, kwargs)

    with (
        mock.patch.object(torch, "compile", compile),
        mock.patch.object(flex, "flex_attention", attending),
    ):
        yield


def _noting(
    run: Callable[..., Any], around: list[dict[str, Any]], options: dict[str, Any]
) -> Callable[..., Any]:
    """Return `run`, which puts its options on the list `around` while it runs."""

    @wraps(run)
    def running(*args: Any, **kwargs: Any) -> Any:
        around.append(options)
        try:
            return run(*args, **kwargs)
        finally:
            around.pop()

    return running


def _entered(model: Any, around: list[dict[str, Any]], options: dict[str, Any]) -> Any:
    """Return a compiled module, which puts its options on the list `around` while it runs."""

    def enter(*_: Any) -> None:
        around.append(options)

    def leave(*_: Any) -> None:  # a hook's result would replace the module's
        around.pop()

    model.register_forward_pre_hook(enter)
    model.register_forward_hook(leave, always_call=True)
    return model


def _on_its_own(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a compiled function that runs compiled: without observers, which would forbid it."""

    def running(*args: Any, **kwargs: Any) -> Any:
        with (
            torch._C.DisableTorchFunction(),
            _disable_current_modes(),
            torch.compiler.set_stance("default"),
        ):
            return run(*args, **kwargs)

    return running
