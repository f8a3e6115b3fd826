"""`pytest --covered 97.5` measures branch coverage, and fails below 97.5 % of lines and branches.

It uses SlipCover, whose probes are in the code: a tracer would double the time.
"""

import functools
import json
import shutil
import sys
from pathlib import Path
from types import CodeType

import pytest
import slipcover

SOURCE = "flashsim", "backends", "viz"
OMIT = (
    # Files that run or compile for a GPU: `pytest -m gpu`.
    "backends/numba_gpu/*",
    *(f"backends/cupy_gpu/{name}.py" for name in ("arrays", "bias", "calls", "captured", "direct")),
    *(f"backends/cupy_gpu/{name}.py" for name in ("engine", "fp8", "launching", "merge")),
    *(f"backends/cupy_gpu/{name}.py" for name in ("quantize", "units")),
    # Files that run in their own processes: Numba's simulator; a student's sandboxed file.
    *("flashsim/cuda/*", "flashsim/engines/sandbox/walls.py"),
    "flashsim/exercises/kernel_runner.py",
    # Files that `make test-torch` runs.
    *("flashsim/torch/*", "flashsim/jax/*", "flashsim/cli/watch.py"),
    # Files that `make test-triton` runs.
    *("flashsim/triton/*", "flashsim/cli/kernel*.py"),
)
#: Files that only the emulator runs; without g++ they are left out.
EMULATED = (
    *("backends/cupy_gpu/decode.py", "backends/cupy_gpu/decode_options.py"),
    *("backends/cupy_gpu/workspace.py", "backends/cupy_gpu/softmax_matmul.py"),
    "backends/reports/decode_report.py",
)
LEFT_OUT = () if sys.platform == "linux" and shutil.which("g++") else EMULATED
OMIT += LEFT_OUT
EXCLUDE = (
    r"@(njit|part|hot_part|operation|or_pairs)\b",  # compiled functions, which no probe can see
    r"if TYPE_CHECKING:",
    r"raise AssertionError",
    r"class .*\bProtocol\):",
)

#: How a process names what a file's tests took and what they did not.
KINDS = "executed", "missing"
#: How often a probe is hit before all probes that were hit are removed: never. A removal reads the
#: local variables of every frame, which keeps tiles alive, so that events of a run change places.
#: Removals after 50 hits also take more time than the hits, of 16 ns.
HITS = 2**31 - 1


class Covered:
    """The coverage of one test process; the first process adds up what the others measured."""

    def __init__(self, config, least):
        self.config, self.least = config, least
        one_of_many = hasattr(config, "workerinput")
        # The first process reports files that no process imports, and leaves out excluded lines.
        self.probes = slipcover.Slipcover(
            branch=True,
            source=None if one_of_many else list(SOURCE),
            omit=OMIT,
            d_miss_threshold=HITS,
            exclude_lines=[] if one_of_many else None,
            exclude_also=[] if one_of_many else EXCLUDE,
        )
        self.seen = None
        if one_of_many or not config.getoption("numprocesses", None):
            files = slipcover.FileMatcher(sources=SOURCE, omit=OMIT)
            slipcover.ImportManager(self.probes, files).__enter__()
            _give_plain_code_to_numba()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        covered = getattr(node, "workeroutput", {}).get("covered", "{}")
        for file, one in json.loads(covered).items():
            name = str(Path(file).absolute())
            branches = {kind: {tuple(b) for b in one[f"{kind}_branches"]} for kind in KINDS}
            self.probes.all_seen[name] |= branches["executed"].union(one["executed_lines"])
            self.probes.code_branches[name] |= branches["executed"] | branches["missing"]
            for kind in KINDS:
                self.probes.code_lines[name].update(one[f"{kind}_lines"])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self, session):
        result = yield
        self.seen = self.probes.get_coverage()
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput["covered"] = json.dumps(self.seen["files"])
        else:
            session.testsfailed += self.percent < self.least
        return result

    @property
    def percent(self):
        return self.seen["summary"]["percent_covered"]

    def pytest_terminal_summary(self, terminalreporter):
        # or the run was aborted
        if hasattr(self.config, "workeroutput") or self.seen is None:
            return
        terminalreporter.section("covered")
        slipcover.print_coverage(self.seen, outfile=terminalreporter, skip_covered=True)
        terminalreporter.line("")
        if LEFT_OUT:
            said = f"left out, as their tests need g++: {', '.join(LEFT_OUT)}"
            terminalreporter.line(said, yellow=True)
        good = self.percent >= self.least
        terminalreporter.line(
            f"{self.percent:.2f} % of lines and branches, at least {self.least:g} % asked for",
            **{"green" if good else "red": True},
        )


def _give_plain_code_to_numba():
    """Pass functions without probes to Numba, which cannot compile probes.

    Not needed from Python 3.12.
    """
    from numba.core.dispatcher import Dispatcher

    made = Dispatcher.__init__

    @functools.wraps(made)
    def make(self, py_func, *args, **kwargs):
        code = py_func.__code__
        if "__slipcover__" in code.co_consts:
            py_func.__code__ = _written(code.co_filename)[code.co_qualname, code.co_firstlineno]
        made(self, py_func, *args, **kwargs)

    Dispatcher.__init__ = make


@functools.cache
def _written(filename):
    """Return a file's code objects by name and line, as in its source."""
    found, left = {}, [compile(Path(filename).read_text(), filename, "exec")]
    while left:
        code = left.pop()
        found[code.co_qualname, code.co_firstlineno] = code
        left += [one for one in code.co_consts if isinstance(one, CodeType)]
    return found
