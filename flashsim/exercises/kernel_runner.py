"""Run a file of kernels in a separate process, and return a record of all kernel accesses.

The grader starts ``python -m flashsim.exercises.kernel_runner``. The process has limits on time and
memory, but no sandbox, because the user's file imports torch, Triton or JAX. The page
docs/guides/grader.md describes the consequences. The process gets inputs, but no reference
solution, no right results and no points.
"""

import importlib
import json
import os
import pickle
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import (
    AbstractContextManager,
    contextmanager,
    nullcontext,
    redirect_stdout,
    suppress,
)
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flashsim.engines.sandbox import walls
from flashsim.engines.sandbox.recorder import WORDS, kind_of
from flashsim.errors import FlashSimError, MemoryModelError
from flashsim.exercises.marks import Refused
from flashsim.own_kernels.files import beside, imported, imports
from flashsim.own_kernels.record_file import Recorded, packed

#: torch operations that are allowed outside of the kernels: they allocate or view tensors.
_FREE = re.compile(
    r"(empty|new_empty|zeros|new_zeros|ones|full|fill|zero|detach|alias|view|_unsafe_view|reshape|"
    r"_reshape_alias|expand|permute|transpose|t|squeeze|unsqueeze|slice|select|as_strided|arange|"
    r"unbind|split|lift_fresh|_local_scalar_dense|is_pinned)(_like|_strided)?_?$"
)


class KernelOrder(NamedTuple):
    """The file that a separate process runs, and the calls to make.

    For each graded call, `calls` has the arrays, and the argument `causal` (None if the function
    has no such argument). `names` are the names of the function's arguments, and `outputs` the
    names of its results. If `tests` is true, pytest runs the folder `path` instead.
    """

    path: str
    root: str
    functions: tuple[str, ...]
    names: tuple[str, ...]
    outputs: tuple[str, ...]
    calls: tuple[tuple[list[np.ndarray], bool | None], ...]
    seconds: float
    memory: int
    tests: bool = False


def libraries(text: str) -> set[str]:
    """Return which of torch, triton and jax a file imports."""
    return {name.partition(".")[0] for name in imports(text)} & {"torch", "triton", "jax"}


def run(order: KernelOrder) -> list[Recorded]:
    """Call a file's function once per graded call, and return the records of its kernels."""
    path = Path(order.path)
    used = libraries(path.read_text(encoding="utf-8"))
    with _on_the_cpu("triton" in used), beside(path, order.root):
        module = imported(path)
        if not used & {"triton", "jax"}:
            raise Refused(
                "function",
                f"{path.name} imports neither triton nor jax; write kernels in Triton or Pallas",
            )
        name = next((one for one in order.functions if hasattr(module, one)), None)
        if name is None:
            raise Refused(
                "function",
                f"{path.name} defines no function {' or '.join(order.functions)}; the exercise "
                "needs one",
            )
        function, found = getattr(module, name), []
        for arguments, causal in order.calls:
            flags = [] if causal is None else [causal]
            if "triton" in used:
                library = "torch" if "torch" in used else "numpy"
                found.append(_triton(order, function, name, arguments, flags, library))
            else:
                found.append(_pallas(function, arguments, flags))
    return found


def _on_the_cpu(triton: bool) -> AbstractContextManager[None]:
    if not triton:
        return nullcontext()
    from flashsim.triton.driver import standing_in

    return standing_in(available=True)


def _triton(
    order: KernelOrder,
    function: Any,
    name: str,
    arguments: Sequence[np.ndarray],
    flags: Sequence[bool],
    library: str,
) -> Recorded:
    from flashsim.triton import watch

    given: dict[str, Any] = dict(zip(order.names, arguments, strict=True))
    outside: list[str] = []
    if library == "torch":
        import torch

        given = {key: torch.from_numpy(x.copy()) for key, x in given.items()}
    else:
        given = {key: x.copy() for key, x in given.items()}
    copies = dict(given)
    if hasattr(function, "apply"):
        call, given = _of_autograd(order, function, given, flags)
    else:
        call = lambda: function(*given.values(), *flags)  # noqa: E731
    with watch(check=True) as seen, _noted(outside, order.path, library):
        results = call()
    if not seen.launches:
        raise Refused("function", f"{name} launches no Triton kernel; the exercise needs one")
    results = list(results) if isinstance(results, (tuple, list)) else [results]
    known = given | dict(zip(order.outputs, results, strict=False))
    record = seen.record()
    names: dict[str, str] = {}
    for label, array in known.items():
        for code in seen.codes_of(array):
            if label not in names.values() and record.tensors[code].name not in names:
                names[record.tensors[code].name] = label
    for label in order.outputs[: len(results)]:
        if label not in names.values():
            raise Refused(
                "result",
                f"{label}: {name} returns a tensor that no kernel stored; return the tensor that "
                "the kernel writes",
            )
    if outside:
        words = "; ".join(dict.fromkeys(outside))
        raise Refused(
            "outside",
            f"torch computes outside of the kernels, where bytes are not counted: {words}; do it "
            "in a kernel",
        )
    computed = seen.computed_outside(given.values())
    for label, array in zip(order.names, arguments, strict=True):
        if seen.changed_outside(copies[label], array):
            computed.append(label)
    if computed:
        raise Refused(
            "outside",
            f"the kernels load numbers that were computed outside of the kernels: "
            f"{', '.join(computed)}; compute them in a kernel from the exercise's tensors",
        )
    return Recorded(record, names, tuple(seen.values()))


def _of_autograd(
    order: KernelOrder, function: Any, given: dict[str, Any], flags: Sequence[bool]
) -> tuple[Callable[[], Any], dict[str, Any]]:
    """Return a function that runs an autograd.Function's graded pass, and the pass's inputs."""
    from flashsim.triton import watch

    inputs = [given[name].requires_grad_() for name in "QKV"]

    def forward() -> list[Any]:
        out = function.apply(*inputs, *flags)
        out = out[0] if isinstance(out, tuple) else out
        saved = getattr(getattr(out, "grad_fn", None), "saved_tensors", ())
        rows = [x for x in saved if x.shape == out.shape[:-1]]
        if not rows:
            raise Refused(
                "result", "the forward pass saves no L; pass a tensor of shape "
                f"{tuple(out.shape[:-1])} to ctx.save_for_backward"
            )  # fmt: skip
        return [out, rows[0]]

    if "dO" not in order.names:
        return forward, given
    with watch():
        out, lse = forward()
    import torch

    do = given["dO"]
    made = {**given, "O": out, "L": lse}
    return lambda: torch.autograd.grad(out, inputs, do), made


@contextmanager
def _noted(outside: list[str], path: str, library: str) -> Iterator[None]:
    """Append to `outside` each torch computation that runs outside of kernels, with its line."""
    if library != "torch":
        yield
        return
    from torch.utils._python_dispatch import TorchDispatchMode

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            name = func.__name__.partition(".")[0]
            frame: Any = sys._getframe(1)
            while frame is not None and frame.f_code.co_filename != path:
                frame = frame.f_back
            if frame is not None and not _FREE.match(name):
                outside.append(f"{name} in line {frame.f_lineno}")
            return func(*args, **(kwargs or {}))

    with Noting():
        yield


def _pallas(function: Any, arguments: Sequence[np.ndarray], flags: Sequence[bool]) -> Recorded:
    from flashsim.jax import trace_kernel

    traced = trace_kernel(function, *arguments, *flags)
    names = {t.name: label for t, label in zip(traced.record.tensors, traced.tensors, strict=True)}
    outside = [note for note in traced.record.notes if note.startswith("outside of the kernels")]
    if outside:
        raise Refused("outside", f"{outside[0]}; do it in a kernel")
    return Recorded(traced.record, names, traced.values)


def told(error: BaseException, path: str) -> str:
    """Return an error's text, with the line number in the user's file if it is known."""
    text = str(error)[:WORDS]
    if isinstance(error, FlashSimError):
        return text
    line, trace = 0, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == path:
            line = trace.tb_lineno
        trace = trace.tb_next
    if isinstance(error, SyntaxError):
        line = error.lineno or 0
    return f"{type(error).__name__}: {text}" + (f" (line {line})" if line else "")


def tested(order: KernelOrder) -> list[tuple[str, str, str]]:
    """Run a folder's tests on the CPU; return each test's name, outcome and last line of output."""
    import pytest

    from flashsim.triton import watch

    found: dict[str, tuple[str, str, str]] = {}

    class Listener:
        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.when == "call" or report.outcome != "passed":
                last = str(report.longrepr or "").strip().splitlines()[-1:]
                found[report.nodeid] = report.nodeid, report.outcome, "".join(last)[:WORDS]

        def pytest_collectreport(self, report: Any) -> None:
            if report.failed:
                last = str(report.longrepr).strip().splitlines()[-1:]
                found[report.nodeid] = report.nodeid, "failed", "".join(last)[:WORDS]

    sys.path.insert(0, order.root)
    importlib.import_module("torch")  # must be imported before the GPU driver is replaced
    os.chdir(order.root)
    with _on_the_cpu(True), watch():
        pytest.main(["-q", "-p", "no:cacheprovider", "--rootdir", order.root, order.path],
                    plugins=[Listener()])  # fmt: skip
    return list(found.values())


def done(order: KernelOrder) -> tuple[dict[str, Any], bytes]:
    """Carry out a `KernelOrder`; return a dict with any failure, and the record as bytes."""
    about: dict[str, Any] = {"kind": "", "words": "", "tests": []}
    try:
        if order.tests:
            about["tests"] = tested(order)
        else:
            return about, packed(run(order))
    except Refused as error:
        about |= {"kind": error.kind, "words": str(error)}
    except (Exception, SystemExit) as error:
        kind = error.kind if isinstance(error, MemoryModelError) else kind_of(error)
        kind = "syntax" if isinstance(error, SyntaxError) else kind
        about |= {"kind": kind, "words": told(error, order.path)}
    return about, b""


def main() -> None:
    """Carry out the `KernelOrder` on stdin; write one line of JSON, then the record, to stdout.

    Text that the user's file prints goes to stderr.
    """
    order: KernelOrder = pickle.load(sys.stdin.buffer)
    out = os.dup(1)
    os.dup2(2, 1)
    used = {"triton", "torch"}
    if not order.tests:
        used = libraries(Path(order.path).read_text(encoding="utf-8"))
    with suppress(ImportError):  # imports reserve gigabytes of addresses, so they precede the limit
        for library in sorted(used, reverse=True):
            importlib.import_module(library)
    walls.limit(seconds=order.seconds, memory=order.memory)
    with redirect_stdout(sys.stderr):
        about, data = done(order)
    with os.fdopen(out, "wb") as result:
        result.write(json.dumps(about).encode() + b"\n" + data)
    os._exit(0)  # skip any exit handlers that the file registered


if __name__ == "__main__":
    main()
