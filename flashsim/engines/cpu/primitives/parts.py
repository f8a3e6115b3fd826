"""Functions that only compiled walks call: they become machine code once, inside a walk.

Numba makes of every `@njit` function that another one calls a library of its own: optimised and
translated to machine code that nobody runs, with a wrapper for callers in Python; then its text is
linked into each caller and optimised again, at every level. A `part` is lowered to LLVM IR and left
at that: what links it in optimises it, together with everything else and once.
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

    def _optimize_functions(self, ll_module: Any) -> None:
        """Whoever links this in does it."""
        ll_module.data_layout = self._codegen._data_layout

    def _optimize_final_module(self) -> None:
        """Whoever links this in does it."""

    def _get_module_for_linking(self):
        """Its functions, which several may link in: nobody else has this module, so no copy."""
        self._ensure_finalized()
        for function in self._final_module.functions:
            if not function.is_declaration and function.linkage == Linkage.external:
                function.linkage = "linkonce_odr"
        return self._final_module

    def _finalize_final_module(self) -> None:
        """Without machine code."""
        self._finalize_dynamic_globals()
        self._finalized = True


class _HotText(_Text):
    """The same for inner loops, which LLVM unrolls further each time that it sees them."""

    _optimize_functions = JITCodeLibrary._optimize_functions
    _optimize_final_module = JITCodeLibrary._optimize_final_module


@register_pass(mutates_CFG=True, analysis_only=False)
class _LowerToText(NativeLowering):
    """As Numba's own, into a `_Text`, without an address or wrappers."""

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
    """The same, optimised at once."""

    _name = "flashsim_lower_to_hot_text"
    library = _HotText


class Part(CompilerBase):
    """Numba's pipeline up to LLVM IR."""

    lowering = _LowerToText

    def define_pipelines(self) -> list[Any]:
        """The one for code without Python objects."""
        passes = DefaultPassBuilder.define_nopython_pipeline(self.state, "flashsim_part")
        at = [each for each, _ in passes.passes].index(NativeLowering)
        passes.passes[at] = (self.lowering, "lower to LLVM IR")
        # What these look for, expressions of whole arrays, no part has.
        passes.passes = [each for each in passes.passes if each[0] is not NopythonRewrites]
        passes.finalize()
        return [passes]


class HotPart(Part):
    """The same for inner loops."""

    lowering = _LowerToHotText


def using(pipeline: type[Part], definition: Callable, choose: Callable, **options: Any) -> None:
    """Compile what `choose` returns for the types of a call, in place of `definition`."""
    jit_options: Any = {"pipeline_class": pipeline, "error_model": "numpy", **options}
    overload(definition, strict=False, jit_options=jit_options)(choose)


def part(definition: Callable | None = None, *, pipeline: type[Part] = Part, **options: Any) -> Any:
    """Let compiled callers use the decorated function; called from Python, it runs as it stands."""
    if definition is None:
        return lambda given: part(given, pipeline=pipeline, **options)
    using(pipeline, definition, lambda *_: definition, **options)
    return definition


def hot_part(definition: Callable) -> Any:
    """A `part` that is mostly one inner loop."""
    return part(definition, pipeline=HotPart)
