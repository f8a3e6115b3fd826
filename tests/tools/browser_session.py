"""Run a session as in a browser: without compiler, CUDA, threads or command-line packages.

It needs its own process, so that `flashsim` is imported anew. The argument is the folder for files.
"""

import importlib.abc
import subprocess
import sys
import threading
from pathlib import Path

import pytest

#: Packages that Pyodide lacks, or that docs/guides/in_the_browser.md does not install.
BLOCKED = (
    *("numba", "llvmlite", "cupy", "scipy", "pandas", "dask", "torch", "jax"),
    *("typer", "click", "multiprocessing", "resource", "fcntl"),
)


class Blocked(importlib.abc.MetaPathFinder):
    """An import finder that refuses these packages."""

    def find_spec(self, name, path=None, target=None):
        """Raise ImportError for a refused package."""
        if name.partition(".")[0] in BLOCKED:
            raise ImportError(f"{name} is not there in a browser")


def refused(*_, **__):
    """Replaces functions that WebAssembly does not support."""
    raise RuntimeError("a browser starts no thread and no process")


def main(folder):
    """Run everything that the guide promises."""
    import ml_dtypes
    import numpy as np

    import flashsim
    from flashsim import Problem, Tiling, exercises, viz

    q, k, v = np.random.default_rng(0).standard_normal((3, 256, 64), dtype=np.float32)
    tiling = Tiling(64, 64)
    for algorithm in ("standard", "flash1", "flash2", "flash2-fused"):
        result = flashsim.run(q, k, v, causal=True, tiling=tiling, trace=True, algorithm=algorithm)
        gradients = result.backward(result.out)
        counted = flashsim.count(
            Problem(256, head_dim=64, causal=True), tiling=tiling, algorithm=algorithm
        )
        assert result.trace.bytes() == counted.bytes() > 0
        assert np.isfinite(gradients.dq).all()
        print(result.trace, gradients.trace, counted)
    narrow = (x.astype(ml_dtypes.bfloat16) for x in (q, k, v))
    half = flashsim.run(*narrow, tiling=tiling, trace=True)
    assert half.out.dtype.name == "bfloat16"
    half.trace.save(folder / "trace.npz")
    assert flashsim.Trace.load(folder / "trace.npz").bytes() == half.trace.bytes()

    viz.save_figure(viz.tile_map(result), folder / "tiles.svg")
    viz.save_figure(viz.traffic(result), folder / "traffic.svg")
    viz.page(result, folder / "page.html")
    assert viz.page(result)._repr_html_().startswith("<iframe")
    assert result.trace._repr_html_()

    exercise = exercises.get("online-softmax")
    marks, _ = exercises.grade(exercise.reference, exercise)
    assert marks.points == marks.most == 100
    assert exercises.grade(exercise.skeleton, exercise)[0].points < 100
    lesson = exercises.Lesson("in a browser")
    lesson.solve("online-softmax", exercise.reference)
    assert lesson.marks().points == 50

    for what in (
        lambda: flashsim.run(q, k, v, backend="numba"),
        lambda: flashsim.count(Problem(256), device="H100", level="dram"),
    ):
        with pytest.raises(flashsim.BackendUnavailable, match="needs Numba"):
            what()
    print("a browser's session: ok")


def shut():
    """Make this process behave like such a session."""
    sys.meta_path.insert(0, Blocked())
    threading.Thread.start = refused
    subprocess.Popen.__init__ = refused


if __name__ == "__main__":
    shut()
    main(Path(sys.argv[1]))
