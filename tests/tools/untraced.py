"""Functions that coverage does not watch: under its tracer Python takes half as long again."""

import functools
import sys
import threading

_taken = threading.local()


def untraced(function):
    """`function`, without a tracer while it runs."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        tracer = sys.gettrace()
        sys.settrace(None)
        before, _taken.tracer = getattr(_taken, "tracer", None), tracer
        try:
            return function(*args, **kwargs)
        finally:
            _taken.tracer = before
            sys.settrace(tracer)

    return call


def traced(function):
    """`function`, with the tracer that `untraced` took away if it did."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        own = sys.gettrace()
        sys.settrace(own or getattr(_taken, "tracer", None))
        try:
            return function(*args, **kwargs)
        finally:
            sys.settrace(own)

    return call


def draw_untraced(patch):
    """Let Matplotlib, which calls nothing that is measured, draw and write files untraced."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    for kind, name in ((FigureCanvasAgg, "draw"), (Figure, "savefig")):
        patch.setattr(kind, name, untraced(getattr(kind, name)))


def walks_untraced(patch):
    """Compile the CPU engine's walks untraced, but for what flashsim itself generates; and L2's."""
    from numba.core.dispatcher import Dispatcher

    watched = Dispatcher._compile_for_args
    unwatched = untraced(watched)

    def compile_for_args(self, *args, **kwargs):
        module = self.py_func.__module__
        if module == "flashsim.engines.cpu.threads":
            _trace_intrinsics()
        elif not module.startswith("flashsim.l2."):
            return watched(self, *args, **kwargs)
        return unwatched(self, *args, **kwargs)

    patch.setattr(Dispatcher, "_compile_for_args", compile_for_args)


@functools.cache  # the walks import all there are
def _trace_intrinsics():
    from numba.core.typing.templates import _IntrinsicTemplate

    for template in _IntrinsicTemplate.__subclasses__():
        if template._definition_func.__module__.startswith("flashsim."):
            template._definition_func = staticmethod(_generating(template._definition_func))


def _generating(definition):
    """An intrinsic, traced: its definition, and the code generator that this returns."""

    @functools.wraps(definition)
    def define(*args, **kwargs):
        made = traced(definition)(*args, **kwargs)
        return made and (made[0], traced(made[1]))

    return define
