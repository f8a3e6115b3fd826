"""Functions that coverage does not watch: under its tracer Python takes half as long again."""

import functools
import sys


def untraced(function):
    """`function`, without a tracer while it runs."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        tracer = sys.gettrace()
        sys.settrace(None)
        try:
            return function(*args, **kwargs)
        finally:
            sys.settrace(tracer)

    return call


def draw_untraced(patch):
    """Let Matplotlib, which calls nothing that is measured, draw and write files untraced."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    for kind, name in ((FigureCanvasAgg, "draw"), (Figure, "savefig")):
        patch.setattr(kind, name, untraced(getattr(kind, name)))


def walks_untraced(patch):
    """Compile the CPU engine's walks untraced.

    Its code generators run then, too; engines/test_panels.py, which is traced, runs them all.
    """
    from numba.core.dispatcher import Dispatcher

    watched = Dispatcher._compile_for_args
    unwatched = untraced(watched)

    def compile_for_args(self, *args, **kwargs):
        walk = self.py_func.__module__ == "flashsim.engines.cpu.threads"
        return (unwatched if walk else watched)(self, *args, **kwargs)

    patch.setattr(Dispatcher, "_compile_for_args", compile_for_args)
