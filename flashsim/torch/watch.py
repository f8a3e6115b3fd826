"""`watch`: record every attention call of a model as it is made.

A torch function mode sees functions that are called from Python. A dispatch mode sees operators
that TorchScript or C++ calls. Transformers' attention functions are wrapped at look-up, because
neither mode recognises the "eager" function, which consists of plain matrix products. Only the
outermost observer that sees a call records the call. A function of transformers is recorded only if
no call inside it was recorded.

Hooks on all modules maintain the stack of running modules, which gives each call its module's name.
Global hooks are used, because a module's own hooks would turn off nn.TransformerEncoderLayer's fast
path.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial, wraps
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torch.nn.modules import module as hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from flashsim.errors import DTypeError
from flashsim.problem import checks
from flashsim.torch import signatures
from flashsim.torch.calls import AttentionCall, copies
from flashsim.torch.compiled_calls import compiled_flex
from flashsim.torch.seen import Seen
from flashsim.torch.timing import Ranges, Timer

#: The largest number of bytes of q, k and v that are copied for all calls together.
KEPT = 2**26


@contextmanager
def watch(
    model: nn.Module | None = None, *, keep: int = 2**20, measure: bool = False
) -> Iterator[Seen]:
    """Record the attention calls in a ``with`` block, without changing their results.

    Watching also works on the meta device and under `FakeTensorMode`, where nothing is computed.
    Inside the block, code compiled by ``torch.compile`` runs uncompiled, so that its calls are
    seen; the results are those of the uncompiled model. Only calls in this thread are watched.

    `watch` records `scaled_dot_product_attention` and the operators under it, `flex_attention`,
    `nn.MultiheadAttention` and `nn.TransformerEncoderLayer`, the forward operators of flash_attn
    2.7 and newer, the functions of flash_attn 4, `flashsim.torch.attention`, and attention of
    transformers 5. `watch` does not see attention written as matrix products and a softmax, or
    extensions that torch does not know, such as `flash_attn_with_kvcache`.

    Parameters
    ----------
    model : torch.nn.Module, optional
        The model whose module names label the calls. Default: the outermost module called.
    keep : int
        Copy q, k and v of a call for `AttentionCall.trace` if they take at most `keep` bytes;
        0 copies nothing.
    measure : bool
        Time the calls with torch's profiler: their kernels on a GPU, their operators on a CPU.
        `Seen.table` then has a column of times, and `Seen.kernels` lists each kernel. The first
        run of a model also compiles and warms up, so run it once before.

    Yields
    ------
    Seen
        Filled as the calls are made; what was recorded before an exception stays.

    Raises
    ------
    DTypeError
        If `model` is not a module.
    OptionError
        If `measure` is set while a torch profiler is already running.
    """
    if model is not None and not isinstance(model, nn.Module):
        raise DTypeError(f"watch() takes a torch.nn.Module, got {type(model).__name__}")
    seen = Seen("a model" if model is None else type(model).__name__)
    recorder = _Recorder(seen, _Names(model), int(checks.number("keep", keep, low=0)))
    with ExitStack() as stack:
        if checks.flag("measure", measure):
            recorder.timer = Timer(stack)
        stack.enter_context(_recording(recorder))
        yield seen


@contextmanager
def in_ranges(open_range: Callable[[str], AbstractContextManager[Any]]) -> Iterator[Ranges]:
    """Record each call in a profiler range; `Ranges.calls` maps a range's name to a call.

    `open_range` returns a context manager for a named range, like `torch.cuda.nvtx.range`. Unlike
    with `watch`, compiled code runs flex_attention in compiled form.
    """
    recorder = _Recorder(Seen("a program"), _Names(None), 0)
    recorder.timer = Ranges(open_range)
    with _recording(recorder), compiled_flex(recorder.compiled):
        yield recorder.timer


@contextmanager
def _recording(recorder: _Recorder) -> Iterator[None]:
    """In the ``with`` block, make all observers report attention calls to `recorder`."""
    with ExitStack() as stack:
        stack.enter_context(_everywhere)
        for hook in (
            hooks.register_module_forward_pre_hook(recorder.enter),
            hooks.register_module_forward_hook(recorder.leave, always_call=True),
        ):
            stack.callback(hook.remove)
        stack.enter_context(_Operators(recorder))
        stack.enter_context(_Functions(recorder))
        yield


class _Everywhere:
    """Patches functions of torch and transformers while `watch` runs in at least one thread."""

    def __init__(self) -> None:
        self.lock, self.watching, self.replaced = threading.Lock(), 0, ExitStack()
        self.transformers = False

    def __enter__(self) -> None:
        with self.lock:
            self.watching += 1
            if self.watching > 1:
                return
            put = self.replaced.enter_context
            put(torch.compiler.set_stance("force_eager"))
            # Its own function warns about hooks on all modules.
            put(mock.patch.object(OptimizedModule, "__call__", nn.Module.__call__))
            put(mock.patch.object(torch.autograd.Function, "apply", classmethod(_applied)))
            # nn.MultiheadAttention asks it before its fast path, and a mode would answer.
            put(mock.patch.object(torch.overrides, "has_torch_function", _others_look_on))

    def __exit__(self, *_: Any) -> None:
        with self.lock:
            self.watching -= 1
            if not self.watching:
                self.replaced.close()
                self.transformers = False

    def look_for_transformers(self) -> None:
        """Patch transformers' look-up of attention once it is imported, even during a watch."""
        if self.transformers or "transformers.modeling_utils" not in sys.modules:
            return
        interface = sys.modules["transformers.modeling_utils"].AttentionInterface
        look_up = getattr(interface, "get_interface", None)
        with self.lock:
            if look_up is None or self.transformers:  # transformers 4: "eager" is not looked up
                return
            self.transformers = True
            get_interface = _wrapping(look_up)
            self.replaced.enter_context(
                mock.patch.object(interface, "get_interface", get_interface)
            )


_everywhere = _Everywhere()


def _wrapping(look_up: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap transformers' look-up of attention functions, so that recorders see all calls."""

    def get_interface(self: Any, implementation: str, default: Any) -> Any:
        attend = look_up(self, implementation, default)
        for recorder in _here():
            attend = recorder.wrapped(attend, implementation or "eager")
        return attend

    return get_interface


_apply = torch.autograd.Function.apply.__func__


def _applied(cls: type, /, *args: Any, **kwargs: Any) -> Any:
    """Run and report an autograd function: torch's modes miss FlashAttention-4's functions."""
    run = partial(_apply, cls)
    for recorder in reversed(_here()):
        run = partial(_watching, recorder, cls, run)
    return run(*args, **kwargs)


def _watching(
    recorder: _Recorder, func: Any, run: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    return recorder.watched(func, args, kwargs, run)


class _Names:
    """The stack of modules that are running, and the modules' names."""

    def __init__(self, model: nn.Module | None) -> None:
        self.stack: list[nn.Module] = []
        self.given = model is not None
        self.known: dict[nn.Module, str] = {}
        if model is not None:
            self._learn(model)

    def _learn(self, root: nn.Module) -> None:
        for name, module in root.named_modules():
            parts = [part for part in name.split(".") if part != "_orig_mod"]  # torch.compile's
            self.known.setdefault(module, ".".join(parts))

    def enter(self, module: nn.Module) -> None:
        if not self.stack and not self.given:
            self._learn(module)
        self.stack.append(module)

    def leave(self, module: nn.Module) -> None:
        while self.stack and self.stack.pop() is not module:  # those that an exception left
            pass

    def current(self) -> str:
        """Return the name of the innermost running module that has a name, or "" if none has."""
        for module in reversed(self.stack):
            if module in self.known:
                name = self.known[module]
                if isinstance(module, nn.TransformerEncoderLayer):  # its fast path asks no one
                    name = f"{name}.self_attn".lstrip(".")
                return name or type(module).__name__
        return ""


class _Recorder:
    """Records the attention calls of one watch, for all observers."""

    def __init__(self, seen: Seen, names: _Names, keep: int) -> None:
        self.seen, self.names, self.keep, self.left = seen, names, keep, KEPT
        self.within = 0  # calls that are recorded already and still running
        self.layers: list[tuple[Any, dict[str, Any]]] = []  # of transformers, running
        self.ours: dict[int, AttentionCall] = {}  # by the memory of their output
        self.timer: Ranges | None = None

    def enter(self, module: nn.Module, _: Any) -> None:
        """Push a starting module onto the stack, if the module runs in the watched thread."""
        if self in _here():
            _everywhere.look_for_transformers()
            self.names.enter(module)

    def leave(self, module: nn.Module, *_: Any) -> None:
        """Remove an ending module from the stack of running modules."""
        if self in _here():
            self.names.leave(module)

    def watched(
        self,
        func: Any,
        args: Any,
        kwargs: dict[str, Any] | None,
        run: Callable[..., Any] | None = None,
    ) -> Any:
        """Call `run` (default: `func`), and record the call if `func` is an attention function."""
        kwargs, run = kwargs or {}, run or func
        if func is torch.ops.flashsim.attention_backward.default:
            self._went_back(args[1])
        found = None if self.within else signatures.reader(func)
        if found is None:
            return run(*args, **kwargs)
        read, name = found
        with self.quietly():
            with self._timed() as mark:
                result = run(*args, **kwargs)
            self.add(
                lambda: self._read(read, signatures.bind(func, name, args, kwargs)), result, mark
            )
        return result

    def compiled(
        self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call a compiled flex_attention, and record the call if the thread is watched."""
        if self not in _here():
            return run(*args, **kwargs)
        return self.watched(signatures.FLEX, args, kwargs, run)

    def _timed(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.timer is None else self.timer.forward()

    def _read(self, read: signatures.Reader, arguments: dict[str, Any]) -> AttentionCall:
        call = read(arguments)
        mapped = signatures.mapped(x for x in arguments.values() if isinstance(x, Tensor))
        call.sizes = call.sizes._replace(batch=mapped * call.sizes.batch)
        if self.layers and not call.pattern.known:
            module, keywords = self.layers[-1]
            call.pattern = signatures.said(module, call.sizes, keywords)
        if call.api in ("scaled_dot_product_attention", "flex_attention"):
            self._keep(call, *(arguments[name] for name in ("query", "key", "value")))
        return call

    def _layer(self, name: str, module: Any, *args: Any, **kwargs: Any) -> AttentionCall:
        call = signatures.layer(name, module, *args, **kwargs)
        self._keep(call, *args[:3])
        return call

    def _went_back(self, out: Tensor) -> None:
        """Mark the call with this output as run backward, because not every output has a hook."""
        call = self.ours.get(_memory(out))
        if call is not None:
            call.backward = True

    def _keep(self, call: AttentionCall, *tensors: Tensor) -> None:
        if signatures.dtype_of(tensors[0]) != call.dtype:  # autocast's
            return
        call.inputs = copies(tensors, call.sizes, min(self.keep, self.left))
        self.left -= sum(x.numel() * x.element_size() for x in call.inputs or ())

    def _noticed(self) -> int:
        return len(self.seen.calls) + len(self.seen.missed)

    @contextmanager
    def quietly(self) -> Iterator[None]:
        """In the ``with`` block, record no attention calls."""
        self.within += 1
        try:
            yield
        finally:
            self.within -= 1

    def add(self, read: Callable[[], AttentionCall], result: Any, mark: Any) -> None:
        """Record a call, or add the call to `Seen.missed` if the arguments cannot be read."""
        name = self.names.current()
        try:
            call = read()
        except Exception as error:  # the model has its result and continues
            what = f"{type(error).__name__}: {error}"
            self.seen.missed.append(f"{name or '(no module)'}: {what}")
            return
        call.name = name
        if torch._C._current_graph_task_id() != -1:
            call.notes.append("made in a backward pass, as checkpointing does")
        out = result[0] if isinstance(result, tuple) else result
        if call.api == signatures.OURS and isinstance(out, Tensor):
            self.ours[_memory(out)] = call
        if isinstance(out, Tensor) and out.requires_grad:
            out.register_hook(lambda _: setattr(call, "backward", True))
        if self.timer is not None:
            self.timer.follow(mark, call, out)
        self.seen.calls.append(call)

    def wrapped(self, attend: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Wrap a transformers function, to record a call in which no inner call was recorded."""

        @wraps(attend)
        def attending(module: Any, *args: Any, **kwargs: Any) -> Any:
            if self.within:
                return attend(module, *args, **kwargs)
            before = self._noticed()
            self.layers.append((module, kwargs))
            try:
                with self._timed() as mark:
                    result = attend(module, *args, **kwargs)
            finally:
                self.layers.pop()
            if self._noticed() == before:
                with self.quietly():
                    self.add(lambda: self._layer(name, module, *args, **kwargs), result, mark)
            return result

        return attending


def _memory(x: Tensor) -> int:
    """Return a number that identifies a tensor's storage; meta tensors have no address."""
    return x.untyped_storage()._cdata


class _Functions(TorchFunctionMode):
    """Observes torch functions that are called from Python."""

    def __init__(self, recorder: _Recorder) -> None:
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.recorder.watched(func, args, kwargs)


def _here() -> list[_Recorder]:
    """Return this thread's recorders, outermost first; autograd's threads inherit them."""
    modes = torch.overrides._get_current_function_mode_stack()
    return [mode.recorder for mode in modes if isinstance(mode, _Functions)]


class _Operators(TorchDispatchMode):
    """Observes torch operators that are called from C++."""

    supports_higher_order_operators = True

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.recorder.watched(func, args, kwargs)


_has_torch_function = torch.overrides.has_torch_function


def _others_look_on(tensors: Any) -> bool:
    """Return what torch's `has_torch_function` would return without flashsim's modes."""
    if not _has_torch_function(tensors):
        return False
    modes = torch.overrides._get_current_function_mode_stack()
    ours = bool(modes) and all(isinstance(mode, _Functions) for mode in modes)
    overloaded = torch.overrides._get_overloaded_args(tensors)
    return not ours or any(type(x) is not Tensor for x in overloaded)
