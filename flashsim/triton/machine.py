"""Replace parts of Triton's interpreter while kernels are traced, and restore them afterwards."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from flashsim.errors import OptionError, shown
from flashsim.own_kernels import ATOMIC, Recorder
from flashsim.own_kernels.names import paper_name
from flashsim.triton import block_pointers, libdevice
from flashsim.triton import narrow_floats as floats
from flashsim.triton.arguments import Arguments, Descriptor, Pointer
from flashsim.triton.driver import NotCompiled
from flashsim.triton.front_end import FrontEnd
from flashsim.triton.hooks import HOOKED, checking, descriptor_reduce, remembering
from flashsim.triton.installed import installed, language_restored
from flashsim.triton.lines import failure, in_library, reader_frame, tiles
from flashsim.triton.memory import Memory, Reached

#: Programs per launch whose tile values are examined; later programs hold the same tiles.
_HELD_PROGRAMS = 2
#: Exponents up to here are rounding.
POSITIVE = 1e-3


class Ran(NamedTuple):
    """A completed kernel launch, with the data needed to run one program again.

    Attributes
    ----------
    function : the kernel as the interpreter runs it
    arguments : the arguments by parameter, converted for the interpreter
    pointers : the array arguments
    before : the bytes of each allocation before the launch, by the allocation's address
    """

    function: Callable[..., Any]
    arguments: Mapping[str, Any]
    pointers: list[Pointer]
    grid: tuple[int, ...]
    before: dict[int, np.ndarray]


class Interpreter:
    """Triton's interpreter; in a ``with`` block of `entered`, the `recorder` records accesses.

    Parameters
    ----------
    config : the configuration of autotuned kernels to run: its index, or keyword arguments that it
        must have; default: the first one that remains after the kernel's `prune_configs_by`
    programs : run only the programs with these grid coordinates
    keep : copy memory before each launch, so that `again` can run its programs again
    """

    def __init__(
        self,
        config: int | Mapping[str, Any] | None = None,
        programs: Sequence[tuple[int, ...]] | None = None,
        keep: bool = False,
    ) -> None:
        self.at = installed()
        self.recorder = Recorder(f"triton {self.at.version}, interpreted on the CPU")
        self.arguments = Arguments(self.recorder)
        self.memory = Memory(self.recorder, self.arguments.pointers)
        self.ran: list[Ran] = []
        self.config = config
        self._programs = None if programs is None else [tuple(one) for one in programs]
        self._keep = keep
        self._loaded: dict[int, Any] = {}
        self._started = 0
        self.tuned = False  # whether a kernel had configurations to choose from
        self.atomic = False
        self._exponents: dict[int, tuple[int, float]] = {}  # of this launch, by line
        self._positive: set[int] = set()  # lines with exponentials of positive numbers
        self._kernel: Any = None  # the launched JITFunction; none with TRITON_INTERPRET=1
        self._front_end = FrontEnd()
        self._patched: set[int] | None = None  # ids of the globals that this launch has patched

    # -- hooks ----------------------------------------------------------------------------------

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Replace operations of the interpreter in a ``with`` block; restore them at the end."""
        at = self.at
        jit = at.triton.runtime.jit.JITFunction
        tuner = at.triton.runtime.autotuner.Autotuner
        run = at.interpreter.InterpretedFunction
        rewritten = dict(run.rewritten_fn)
        self._scopes: dict[int, tuple[dict[str, Any], set[str]]] = {}
        try:
            with language_restored(at.tl), ExitStack() as self._hooks:
                put, interpreter = self._put, at.interpreter
                put(interpreter.GridExecutor, "__call__", lambda *a, **k: self.launch(*a, **k))
                put(interpreter, "_patch_lang", self._patching(interpreter._patch_lang))
                put(interpreter, "_get_np_dtype", remembering(interpreter._get_np_dtype))
                put(run, "rewrite", self._rewriting(run.rewrite))
                put(jit, "run", lambda kernel, *a, **k: self._run(kernel, run, *a, **k))
                put(jit, "__call__", lambda kernel, *a, **k: run(kernel.fn)(*a, **k))
                put(tuner, "run", self._tuning(tuner.run))
                self._hook_builder()
                yield
            for text in self._front_end.notes():
                self.recorder.note(text)
        finally:
            run.rewritten_fn.clear()
            run.rewritten_fn.update(rewritten)
            for scope, names in self._scopes.values():
                for name in names & set(scope):
                    del scope[name]

    def _run(self, kernel: Any, interpreted: Any, *args: Any, **kwargs: Any) -> Any:
        self._kernel = kernel
        try:
            interpreted(kernel.fn).run(*args, **kwargs)
        finally:
            self._kernel = None
        return NotCompiled(kernel.__name__)

    def _put(self, obj: Any, name: str, value: Any) -> None:
        """Replace an attribute of an object in Triton's language until `entered` ends."""
        self._hooks.enter_context(mock.patch.object(obj, name, value, create=True))

    def _rewriting(self, rewrite: Callable[..., Any]) -> Callable[..., Any]:
        """Remember the globals of the user's file before the interpreter adds more names."""

        def remembering(function: Any) -> Any:
            scope = function.fn.__globals__
            before = set(scope)
            rewritten = rewrite(function)
            _, added = self._scopes.setdefault(id(scope), (scope, set()))
            added |= set(scope) - before
            return rewritten

        return remembering

    def _patching(self, patch: Callable[..., Any]) -> Callable[..., Any]:
        """Extend `patch`, the interpreter's change of Triton's language, with flashsim's changes.

        For Triton 3.9, flashsim adds block pointers. For Triton 3.6, flashsim replaces the
        conversion of tensors to integers, which NumPy 2.4 refuses.
        """
        tl, builder = self.at.tl, self.at.interpreter.interpreter_builder
        has_blocks = hasattr(builder, "create_tensor_pointer_load")

        def patched(fn: Any) -> Any:
            if self._patched is not None and id(fn.__globals__) in self._patched:
                return None  # a helper such as tl.sum, which would patch again at each call
            scope = patch(fn)
            if self._patched is not None:
                self._patched.add(id(fn.__globals__))
                self._bind(fn.__globals__)
            tl.tensor.__index__ = lambda tensor: int(tensor.handle.data.item())
            ours = getattr(tl.make_block_ptr, "__module__", "") == block_pointers.__name__
            if not has_blocks and not ours:
                self.with_block_pointers()
            return scope

        return patched

    def with_block_pointers(self) -> None:
        """Add flashsim's block pointers to Triton's language."""
        tl = self.at.tl

        def make(*args: Any, **options: Any) -> Any:
            self.recorder.note(
                f"flashsim simulates tl.make_block_ptr, but Triton {self.at.version} has removed "
                "it and cannot compile the kernel for a GPU: use tl.make_tensor_descriptor"
            )
            return block_pointers.make_block_ptr(*args, **options)

        make.__module__ = block_pointers.__name__
        tl.make_block_ptr, tl.advance = make, block_pointers.advance
        tl.load, tl.store = block_pointers.loading(tl.load), block_pointers.storing(tl.store)

    def _tuning(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Run one configuration of an autotuned kernel, without timing any configuration."""

        def tuned(tuner: Any, *args: Any, **kwargs: Any) -> Any:
            tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
            possible = tuner.prune_configs(kwargs) if len(tuner.configs) > 1 else tuner.configs
            with mock.patch.object(tuner, "configs", [self._choose(tuner, possible)]):
                return run(tuner, *args, **kwargs)

        return tuned

    def _choose(self, tuner: Any, possible: Sequence[Any]) -> Any:
        name = tuner.base_fn.__name__
        config = self.config
        self.tuned = True
        if isinstance(config, Mapping):
            for one in tuner.configs:
                every = one.all_kwargs()
                if all(every.get(key) == value for key, value in config.items()):
                    return one
            raise OptionError(
                f"{name} has no configuration with {dict(config)}; its configurations: "
                + "; ".join(str(one.kwargs) for one in tuner.configs)
            )
        if config is not None:
            if not 0 <= config < len(tuner.configs):
                raise OptionError(
                    f"{name} has {len(tuner.configs)} configurations, so config= must be from 0 "
                    f"to {len(tuner.configs) - 1}, got {config}"
                )
            return tuner.configs[config]
        chosen = possible[0]
        if len(tuner.configs) > 1:
            self.recorder.note(
                f"{name} is autotuned: ran its configuration {chosen.kwargs}, one of "
                f"{len(tuner.configs)}, without timing any; config= chooses another"
            )
        return chosen

    # -- the builder's operations ----------------------------------------------------------------

    def _hook_builder(self) -> None:
        builder, ops = (
            self.at.interpreter.interpreter_builder,
            self.at.interpreter.ReduceScanOpInterface,
        )
        for name in ("grid_idx", "grid_dim"):  # each launch sets them
            self._put(builder, name, getattr(builder, name, None))
        for name, make in HOOKED.items():
            if hasattr(builder, name):
                self._put(builder, name, partial(make, self, getattr(builder, name)))
        self._put(builder, "create_descriptor_reduce", partial(descriptor_reduce, self))
        if not hasattr(builder, "get_bf16"):
            rounded = lambda x: floats.cast(builder.get_fp32(x), self.at.tl.bfloat16)  # noqa: E731
            self._put(builder, "get_bf16", rounded)
        self._put(ops, "check_tensor", checking(ops.check_tensor))

    def line(self) -> tuple[str, int]:
        """Return the line of the user's kernel that is running now, as (file, line number)."""
        frame = reader_frame(self.at.folder)
        return ("?", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)

    def reach(self, op: int, pointers: Any, mask: Any) -> Reached:
        """Record an access of the running program, and return the accessed real memory."""
        active = np.ones((), bool) if mask is None else mask
        if not isinstance(active, np.ndarray):  # Triton 3.6 passes some masks as arrays
            active = mask.data
        op = ATOMIC if self.atomic else op
        reached = self.memory.reach(op, pointers, active, self.line())
        if self._started <= _HELD_PROGRAMS and not self.memory.silent:
            self._note_held()
        return reached

    def _note_held(self) -> None:
        held: dict[str, tuple[tuple[int, ...], int]] = {}
        known: set[int] = set()
        for name, value in self.locals().items():
            its = value.handle
            scalar = its.dtype.scalar
            same = id(its.data) in known or self._loaded.get(id(its)) is its
            if its.data.size > 1 and scalar.is_floating() and not same:
                known.add(id(its.data))
                nbytes = its.data.size * scalar.primitive_bitwidth // 8
                held[name] = tuple(its.data.shape), nbytes
        self.recorder.held(held)

    def locals(self) -> dict[str, Any]:
        """Return, by name, the running kernel's local variables that hold tensors."""
        return tiles(reader_frame(self.at.folder), self.at.folder, _run_program.__code__)

    def variables(self) -> dict[str, np.ndarray]:
        """Return the values of the running kernel's variables that hold tiles of floats."""
        return {
            name: np.array(floats.widen(value.handle))
            for name, value in self.locals().items()
            if value.handle.dtype.scalar.is_floating() and value.handle.data.size > 1
        }

    def loaded(self, found: Any) -> Any:
        """Remember the handle that a load returned, and return the handle."""
        self._loaded[id(found)] = found
        return found

    def dot(self, a: Any, b: Any) -> None:
        """Record the FLOPs of a matrix product."""
        if not self.memory.silent:
            flops = 2 * a.data.size * b.data.shape[-1]
            self.recorder.work("matmul", flops, line=self.line())

    def work(self, kind: str, size: int) -> None:
        """Record the FLOPs of an operation on a tile of `size` elements: one FLOP per element."""
        if not self.memory.silent and size > 1:
            self.recorder.work(kind, size, line=self.line())

    def exponent(self, arg: Any) -> None:
        """Keep the size and the largest argument of this line, for `_note_exponents`."""
        if self.memory.silent or floats.is_narrow(arg.dtype):
            return
        most = float(np.max(arg.data, initial=-np.inf, where=np.isfinite(arg.data)))
        size, known = self._exponents.get(self.line()[1], (0, -np.inf))
        if not in_library(self.at.folder):  # tl.sigmoid, for example
            self._exponents[self.line()[1]] = max(size, arg.data.size), max(known, most)

    def _note_exponents(self) -> None:
        """Add a note if a forward pass of attention computes exp of a positive number.

        Another exponential, of at least as many numbers and none of them positive, is the softmax;
        the line then computes something else, such as the tanh of a softcap.
        """
        papers = {paper_name(one.name) for one in self.recorder.tensors}
        found, self._exponents = self._exponents, {}
        if not {"Q", "K", "V"} <= papers or "dO" in papers:
            return
        softmax = max((size for size, most in found.values() if most <= POSITIVE), default=0)
        for number, (size, most) in found.items():
            if most > POSITIVE and size > softmax and number not in self._positive:
                self._positive.add(number)
                self.recorder.note(
                    f"line {number}: an exponential of a positive number, {most:.3g}. A softmax "
                    "subtracts its running maximum first, so that none is positive; without it, "
                    "large scores overflow"
                )

    # -- launches -------------------------------------------------------------------------------

    def launch(self, executor: Any, *args: Any, **kwargs: Any) -> None:
        """Run a kernel launch, program by program, in the order in which a GPU starts programs."""
        fn, name = executor.fn, executor.fn.__name__
        spec = inspect.getfullargspec(fn)
        known = {k: v for k, v in kwargs.items() if k in spec.args or k in spec.kwonlyargs}
        try:
            bound = inspect.getcallargs(fn, *args, **known)
        except TypeError as error:
            raise OptionError(f"{name} cannot be launched with these arguments: {error}") from None
        taken: dict[str, int] = {}
        visible = lambda parameter: parameter not in executor.constexprs  # noqa: E731
        host = {
            key: self.arguments.take(key, value, taken, visible) for key, value in bound.items()
        }
        grid = self._grid(executor, name, bound)
        code = getattr(fn, "__code__", None)
        constants = {
            key: value
            for key, value in bound.items()
            if key not in taken and isinstance(value, (bool, int, float, str, np.generic))
        }
        self.recorder.launch(
            *(name, grid),
            arguments=taken,
            constants=constants,
            file=code.co_filename if code else "?",
            line=code.co_firstlineno if code else 0,
        )
        if self._kernel is not None:
            self._front_end.add(self._kernel, host)
        pointers = [p for p in self.arguments.pointers if p.code in taken.values()]
        self.memory.begin(pointers)
        for hook in executor.pre_run_hooks:
            hook(*args, **known)
        with self._running(fn, grid):
            made = {
                key: value if key in executor.constexprs else self._convert(value)
                for key, value in host.items()
            }
            before = {p.memory: p.allocation().copy() for p in pointers if self._keep}
            ran = Ran(fn, made, pointers, grid, before)
            if self._keep:
                self.ran.append(ran)
            self._started = 0
            for place in self._places(name, grid):
                self._program(ran, place)
        self._note_exponents()

    @contextmanager
    def _running(self, fn: Callable[..., Any], grid: tuple[int, ...]) -> Iterator[None]:
        """Change Triton's language as a kernel of this grid needs it; restore it at the end."""
        interpreter = self.at.interpreter
        scope = interpreter._patch_lang(fn)
        try:
            self._patched = {id(fn.__globals__)}
            interpreter.interpreter_builder.set_grid_dim(*grid, *(1,) * (3 - len(grid)))
            with libdevice.replaced(interpreter.interpreter_semantic) as self._bind:
                self._bind(fn.__globals__)
                yield
        finally:
            self._patched = None
            scope.restore()

    def _program(self, ran: Ran, place: tuple[int, ...]) -> None:
        builder = self.at.interpreter.interpreter_builder
        self._started += 1
        self._loaded.clear()
        builder.set_grid_idx(*place, *(0,) * (3 - len(place)))
        if not self.memory.silent:
            self.recorder.program(place)
        try:
            with np.errstate(all="ignore"):
                _run_program(ran.function, ran.arguments)
        except Exception as error:
            raise failure(ran.function.__name__, place, error, self.at.folder) from error

    def again(self, ran: Ran, place: tuple[int, ...], look: Callable[..., None]) -> None:
        """Run a program again on the memory from before the launch; call `look` at each access."""
        now = {p.memory: p.allocation().copy() for p in ran.pointers}
        for p in ran.pointers:
            p.allocation()[:] = ran.before[p.memory]
        self.memory.begin(ran.pointers)
        self.memory.silent, self.memory.observer = True, look
        with self.entered():
            names = ran.function.__globals__  # the interpreter's names in them are gone by now
            new = set(vars(self.at.interpreter)) - set(names)
            self._scopes[id(names)] = names, new
            for name, value in vars(self.at.interpreter).items():
                names.setdefault(name, value)
            try:
                with self._running(ran.function, ran.grid):
                    self._program(ran, place)
            finally:
                self.memory.silent, self.memory.observer = False, None
                for p in ran.pointers:
                    p.allocation()[:] = now[p.memory]

    def _grid(self, executor: Any, name: str, bound: Mapping[str, Any]) -> tuple[int, ...]:
        grid = executor.grid(bound) if callable(executor.grid) else executor.grid
        sides = tuple(grid) if isinstance(grid, (tuple, list)) else (grid,)
        fit = 1 <= len(sides) <= 3 and all(
            isinstance(n, (int, np.integer)) and not isinstance(n, bool) and n > 0 for n in sides
        )
        if not fit:
            raise OptionError(
                f"the grid of {name} must be a tuple of one to three positive integers, got "
                f"{shown(grid)}"
            )
        return tuple(int(n) for n in sides)

    def _places(self, name: str, grid: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if self._programs is None:
            yield from (place[::-1] for place in np.ndindex(*grid[::-1]))
            return
        for place in self._programs:
            whole = all(isinstance(n, (int, np.integer)) for n in place)
            inside = all(p in range(n) for p, n in zip(place, grid, strict=False))
            if not whole or not inside or len(place) != len(grid):
                raise OptionError(
                    f"programs= must name programs of the grid: {name} has a grid of {grid}, "
                    f"which has no program {shown(place)}"
                )
            yield place

    def _convert(self, value: Any) -> Any:
        """Return an argument as an object that interpreted kernels accept."""
        at = self.at
        if isinstance(value, Pointer):
            kind = at.tl.pointer_type(value.element)
            data = np.array([value.address], np.uint64)
            return at.tl.tensor(at.interpreter.TensorHandle(data, kind), kind)
        if isinstance(value, Descriptor):
            return self._descriptor(value)
        if isinstance(value, tuple):
            parts = [self._convert(one) for one in value]
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        return at.interpreter._implicit_cvt(value)

    def _descriptor(self, value: Descriptor) -> Any:
        at, given = self.at, value.given
        strides = [self._convert(one) for one in given.strides]
        strides[-1] = at.tl.constexpr(1)
        made = at.interpreter.interpreter_semantic.make_tensor_descriptor(
            base=self._convert(value.base),
            shape=[self._convert(one) for one in given.shape],
            strides=strides,
            block_shape=[at.tl.constexpr(one) for one in given.block_shape],
            padding_option=given.padding,
        )
        if getattr(given, "round_f32_to_tf32", False):
            made.handle.round_f32_to_tf32 = True
        return made


def _run_program(function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    function(**arguments)
