"""Compiles functions that only kernels call: they become machine code once, inside the kernel.

Numba builds a separate library for every `@njit` function that another one calls. It optimises the
library and translates it to machine code that is never run, with a wrapper for Python callers. Then
it links the LLVM IR into each caller and optimises it again, at every level. A `part` is only
lowered to LLVM IR. A `Whole` links in every part that it calls, directly or indirectly, and
optimises everything once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite.binding import Linkage
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import register_pass
from numba.core.typed_passes import NativeLowering, NopythonRewrites
from numba.extending import overload


class _Text(JITCodeLibrary):
    """LLVM IR to be linked into other libraries, never into the process."""

    _shared_module: Any
    _linking_libraries: list[Any]

    def _optimize_functions(self, ll_module: Any) -> None:
        """Do nothing: the library that links this in optimises it."""
        ll_module.data_layout = self._codegen._data_layout

    def finalize(self) -> None:
        """Finish the library without linking in its callees and without machine code."""
        self._raise_if_finalized()
        self._finalize_final_module()

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        for (
            function
        ) in self._final_module.functions:  # several libraries may link in the same function
            if not function.is_declaration and function.linkage == Linkage.external:
                function.linkage = "linkonce_odr"
        self._finalized = True

    def _get_module_for_linking(self):
        """Return the IR with its callees linked in, for an ordinary Numba library."""
        self._ensure_finalized()
        if self._shared_module is None:
            self._shared_module = self._final_module.clone()
            _link(self, self._shared_module)
        return self._shared_module


class _HotText(_Text):
    """Like `_Text`, for inner loops, which LLVM unrolls further with each optimisation."""

    _optimize_functions = JITCodeLibrary._optimize_functions

    def finalize(self) -> None:
        """Link in the callees and optimise all of it."""
        _link(self, self._final_module)
        self._linking_libraries = []
        super(_Text, self).finalize()


class _Whole(JITCodeLibrary):
    """A library with the machine code of a function that Python calls and of all its callees."""

    _linking_libraries: list[Any]
    _optimize_functions = _Text._optimize_functions

    def finalize(self) -> None:
        """Link in every callee once; Numba would link in all callees once per function."""
        _link(self, self._final_module)
        self._linking_libraries = []
        super().finalize()


def _link(library: Any, module: Any) -> None:
    """Link all direct and indirect callees of a library into its module."""
    seen, left = set(), list(library._linking_libraries)
    while left:
        callee = left.pop()
        if callee in seen:
            continue
        seen.add(callee)
        if hasattr(callee, "_reload_init"):  # not before Numba 0.62
            library._reload_init.update(callee._reload_init)
        if isinstance(callee, _Text):
            module.link_in(callee._final_module, preserve=True)
            left += callee._linking_libraries
        else:
            module.link_in(callee._get_module_for_linking(), preserve=True)


@register_pass(mutates_CFG=True, analysis_only=False)
class _LowerToText(NativeLowering):
    """Numba's lowering pass, but into a `_Text`, without an address or wrappers."""

    _name = "flashsim_lower_to_text"
    library = _Text

    def run_pass(self, state: Any) -> bool:
        """Lower one function."""
        target = state.targetctx
        state.library = self.library(target.codegen(), state.func_id.func_qualname)
        flags = state.flags
        flags.no_compile = flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
        super().run_pass(state)
        # Numba's key is what Python would call: a builtin, different for each function. Through
        # `part` nobody gets hold of it.
        key = [state.cr.fndesc].append
        state.cr = state.cr._replace(cfunc=key)
        target.insert_user_function(key, state.cr.fndesc, [state.library])
        return True


@register_pass(mutates_CFG=True, analysis_only=False)
class _LowerToHotText(_LowerToText):
    """Like `_LowerToText`, but optimised at once."""

    _name = "flashsim_lower_to_hot_text"
    library = _HotText


class Part(CompilerBase):
    """Numba's pipeline up to LLVM IR."""

    lowering: type[NativeLowering] = _LowerToText

    def define_pipelines(self) -> list[Any]:
        """Return the pipeline for code without Python objects."""
        passes = DefaultPassBuilder.define_nopython_pipeline(self.state, "flashsim_part")
        at = [each for each, _ in passes.passes].index(NativeLowering)
        passes.passes[at] = (self.lowering, "lower to LLVM IR")
        # What these look for, expressions of whole arrays, no part has.
        passes.passes = [each for each in passes.passes if each[0] is not NopythonRewrites]
        passes.finalize()
        return [passes]


@register_pass(mutates_CFG=True, analysis_only=False)
class _LowerWhole(NativeLowering):
    """Numba's lowering pass, but into a `_Whole`."""

    _name = "flashsim_lower_whole"

    def run_pass(self, state: Any) -> bool:
        """Lower one function."""
        state.library = _Whole(state.targetctx.codegen(), state.func_id.func_qualname)
        state.library.enable_object_caching()
        return super().run_pass(state)


class Whole(Part):
    """The pipeline of a function that Python calls and that calls parts."""

    lowering = _LowerWhole


class HotPart(Part):
    """Like `Part`, for inner loops."""

    lowering = _LowerToHotText


def using(pipeline: type[Part], definition: Callable, choose: Callable, **options: Any) -> None:
    """Compile what `choose` returns for the types of a call, in place of `definition`."""
    jit_options: Any = {"pipeline_class": pipeline, "error_model": "numpy", **options}
    overload(definition, strict=False, jit_options=jit_options)(choose)


def part(definition: Callable | None = None, *, pipeline: type[Part] = Part, **options: Any) -> Any:
    """Let compiled callers use the decorated function; called from Python, it runs as it stands."""
    if definition is None:
        return lambda function: part(function, pipeline=pipeline, **options)
    using(pipeline, definition, lambda *_: definition, **options)
    return definition


def hot_part(definition: Callable) -> Any:
    """A `part` that is mostly one inner loop."""
    return part(definition, pipeline=HotPart)
