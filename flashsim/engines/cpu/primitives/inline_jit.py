"""Compiles a kernel together with the functions it calls, so that LLVM optimises each only once.

By default, Numba compiles every called `@njit` function separately to machine code, which never
runs. Numba also optimises a called function's LLVM IR in every caller. A `part` is a function that
this module only lowers to LLVM IR. The library of a `Whole`, a kernel's entry function, links in
every part that the kernel calls, directly or indirectly, and optimises everything once.
"""

from collections.abc import Callable
from typing import Any

from llvmlite.binding import Linkage
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import register_pass
from numba.core.typed_passes import NativeLowering, NopythonRewrites
from numba.extending import overload


class _Text(JITCodeLibrary):
    """A part's LLVM IR, which other libraries link in, and which is never loaded by itself."""

    _shared_module: Any
    _linking_libraries: list[Any]

    def _optimize_functions(self, ll_module: Any) -> None:
        """Do nothing, because the library that links in this LLVM IR optimises it."""
        ll_module.data_layout = self._codegen._data_layout

    def finalize(self) -> None:
        """Finish the library without linking in callees or generating machine code."""
        self._raise_if_finalized()
        self._finalize_final_module()

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        _relink(self, Linkage.external, "linkonce_odr")  # several libraries may link in a function
        self._finalized = True

    def _get_module_for_linking(self):
        """Return the IR of this library with its callees, for a caller that Numba compiles."""
        self._ensure_finalized()
        if self._shared_module is None:
            self._shared_module = self._final_module.clone()
            _link(self, self._shared_module)
        return self._shared_module


class _HotText(_Text):
    """An inner loop's LLVM IR, optimised once before linking, to unroll the loop further."""

    _optimize_functions = JITCodeLibrary._optimize_functions

    def finalize(self) -> None:
        """Link in the callees, and optimise the complete library."""
        _link(self, self._final_module)
        self._linking_libraries = []
        super(_Text, self).finalize()


class _Whole(JITCodeLibrary):
    """The machine code of a function that Python calls, and of its callees."""

    _linking_libraries: list[Any]
    _optimize_functions = _Text._optimize_functions

    def finalize(self) -> None:
        """Link in every callee once; Numba would link a callee again for each caller."""
        _link(self, self._final_module)
        self._linking_libraries = []
        super().finalize()

    def _finalize_final_module(self) -> None:
        """Hide the callees from other kernels, and generate machine code.

        A function's symbol has its name and a number, which Numba counts from 1 in each process. So
        in kernels from two processes, closures of one name but with different code may have the
        same symbol. A process that loads both kernels from disk would call one closure for both.
        """
        _relink(self, Linkage.linkonce_odr, "internal")
        super()._finalize_final_module()


def _relink(library: Any, old: Linkage, new: str) -> None:
    """Change how other libraries see the functions that a library defines with linkage `old`."""
    for function in library.get_defined_functions():
        if function.linkage == old:
            function.linkage = new


def _link(library: Any, module: Any) -> None:
    """Link a library's callees, direct and indirect, into the library's module."""
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
    """Numba's lowering pass, changed to produce a `_Text`, which Python cannot call."""

    _name = "flashsim_lower_to_text"
    library = _Text

    def run_pass(self, state: Any) -> bool:
        """Lower one function to LLVM IR."""
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
    """Numba's lowering pass, changed to produce a `_HotText`, which is optimised before linking."""

    _name = "flashsim_lower_to_hot_text"
    library = _HotText


class Part(CompilerBase):
    """Numba's compiler pipeline for a part, which ends with LLVM IR."""

    lowering: type[NativeLowering] = _LowerToText

    def define_pipelines(self) -> list[Any]:
        """Return the compiler pipeline for code without Python objects (nopython mode)."""
        passes = DefaultPassBuilder.define_nopython_pipeline(self.state, "flashsim_part")
        at = [each for each, _ in passes.passes].index(NativeLowering)
        passes.passes[at] = (self.lowering, "lower to LLVM IR")
        # What these look for, expressions of whole arrays, no part has.
        passes.passes = [each for each in passes.passes if each[0] is not NopythonRewrites]
        passes.finalize()
        return [passes]


@register_pass(mutates_CFG=True, analysis_only=False)
class _LowerWhole(NativeLowering):
    """Numba's lowering pass, changed to produce a `_Whole`, which Python can call."""

    _name = "flashsim_lower_whole"

    def run_pass(self, state: Any) -> bool:
        """Lower a kernel's entry function to LLVM IR."""
        state.library = _Whole(state.targetctx.codegen(), state.func_id.func_qualname)
        state.library.enable_object_caching()
        return super().run_pass(state)


class Whole(Part):
    """Numba's compiler pipeline for a kernel's entry function, which Python calls."""

    lowering = _LowerWhole


class HotPart(Part):
    """The compiler pipeline for a part that is mostly one inner loop."""

    lowering = _LowerToHotText


def using(pipeline: type[Part], definition: Callable, choose: Callable, **options: Any) -> None:
    """Make compiled code call ``choose(*types)`` wherever the source calls `definition`."""
    jit_options: Any = {"pipeline_class": pipeline, "error_model": "numpy", **options}
    overload(definition, strict=False, jit_options=jit_options)(choose)


def part(definition: Callable | None = None, *, pipeline: type[Part] = Part, **options: Any) -> Any:
    """Decorate a function as a part of kernels; Python calls run the plain function."""
    if definition is None:
        return lambda function: part(function, pipeline=pipeline, **options)
    using(pipeline, definition, lambda *_: definition, **options)
    return definition


def hot_part(definition: Callable) -> Any:
    """Decorate a part that is mostly one inner loop: see `HotPart`."""
    return part(definition, pipeline=HotPart)
