"""Options and marks of the suite. Imports nothing of flashsim: a fault must be installed first."""

from __future__ import annotations

import functools
import gc
import os
import zlib

# JAX would take three quarters of a GPU's memory, and other tests and processes find none.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import faults
import hypothesis
import promises
import pytest
import typer.testing
import unoptimised
from chromium import browser  # noqa: F401
from lost_context import pytest_runtest_logfinish, pytest_runtest_makereport  # noqa: F401
from no_gpu import why_no_gpu

# All commands are built once a process: some hundred calls build them in 30 ms each.
typer.testing._get_command = functools.cache(typer.testing._get_command)


def pytest_addoption(parser):
    parser.addoption(
        "--fault",
        metavar="NAME",
        help="seed a bug of tests/faults before the tests run; they should fail",
    )
    parser.addoption(
        "--promise",
        metavar="NAME",
        help="run the tests that hold one of the promises of promises.py",
    )
    parser.addoption(
        "--covered",
        metavar="PERCENT",
        type=float,
        help="say which branches no test takes; fail where fewer are taken than that",
    )


def pytest_configure(config):
    # Of several test processes each takes one BLAS thread: with one a core in each they fight over
    # the cores, and float64 references take many times as long. Set before those processes begin:
    # another plugin of theirs may import NumPy before this file is read.
    if getattr(config.option, "numprocesses", None):
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    here = hasattr(config, "workerinput") or not getattr(config.option, "numprocesses", None)
    if here:
        unoptimised.install()
    if config.getoption("--covered"):
        from covered import Covered

        config.pluginmanager.register(Covered(config, config.getoption("--covered")))
    name = config.getoption("--fault")
    if name:
        try:
            faults.install(name)
        except faults.FaultError as error:
            raise pytest.UsageError(str(error)) from None
        # An example that fails is enough: the search for the smallest takes half a minute. The
        # same examples each time: by luck, 60 others may miss a fault.
        hypothesis.settings.register_profile(
            "fault", phases=[hypothesis.Phase.generate], derandomize=True
        )
        hypothesis.settings.load_profile("fault")


#: Where tests run the CPU engine's walks, which take a minute to compile: once, in one process.
WALKS = (
    *("tests/api/test_", "tests/engines/test_b", "tests/engines/test_c", "tests/engines/test_e"),
)

#: The files that take longest, longest first (half a minute of a core to six seconds). What is
#: short comes last, by its name, so that two processes end together.
LONGEST = (
    *("own_kernels/test_graded", "backends/test_numba_kernels", "backends/test_function_kernels"),
    *("backends/test_emulated_decode", "backends/test_decode_launch", "viz/test_viz_lab"),
    *("viz/test_viz_plots", "backends/test_emulated_hopper", "faults/test_kernel_faults"),
    *("functions/test_functions_engines", "backends/test_hopper_kernels", "studies/test_grader"),
    *("cli/test_cli", "studies/test_exercises", "backends/test_cuda_kernels"),
    *("studies/test_agreement", "cli/test_pictures", "studies/test_reproduce"),
    *("viz/test_viz_page", "engines/test_panels", "trace/test_tracefile_fuzz"),
    *("studies/test_xray", "backends/test_emulated", "backends/test_numba_barriers"),
    *("viz/test_viz_animation", "schedule/test_schedule", "functions/test_tiles_of_functions"),
    *("counts/test_traffic", "faults/test_crashes"),
    *("studies/test_lessons", "cli/test_long", "cli/test_streams"),
    *("backends/test_emulated_barriers", "counts/test_flash_decode"),
)
#: Files with those whose emulated kernels they run, too: a process compiles each of them once.
SHARING = {"tests/backends/test_decode_launch.py": "tests/backends/test_emulated_decode.py"}
PLACES = {f"tests/{name}.py": place for place, name in enumerate(LONGEST)}


def _place(nodeid):
    """Walks first, then `LONGEST`; files that follow keep their order, and tests theirs."""
    return -1 if nodeid.startswith(WALKS) else PLACES.get(nodeid.split("::")[0], len(PLACES))


def _scattered(nodeid):
    """Kernels in Python first, which compile longest; tests of the same kernels far apart: compiled
    for one they are on disk for the others, but not for those that begin at the same time.
    """
    return ("numba" not in nodeid and "python" not in nodeid, zlib.crc32(nodeid.encode()))


def _on_gpu(config):
    """Whether only tests on a GPU are asked for."""
    return "gpu" in config.option.markexpr.split()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """A process takes whole files, so that what their tests share is made once.

    On a GPU it takes tests one by one: kernels are kept on disk, and files are long.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            if _on_gpu(config):
                return nodeid
            file = nodeid.split("::")[0]
            return "walks" if nodeid.startswith(WALKS) else SHARING.get(file, file)

        def remove_node(self, node):
            """Return the test that a process crashed in, if any; its other tests are handed on.

            pytest-xdist 3.8 also hands on finished tests, and then waits forever for a process to
            finish them (pytest-xdist #1323). It also repeats the test that crashed.
            """
            units = self.assigned_work.pop(node).items()
            left = {
                scope: {nodeid: False for nodeid, done in unit.items() if not done}
                for scope, unit in units
            }
            crashed = next((nodeid for unit in left.values() for nodeid in unit), None)
            for unit in left.values():
                unit.pop(crashed, None)
            self.workqueue.update({scope: unit for scope, unit in left.items() if unit})
            self.schedule()
            return crashed

        def schedule(self):
            super().schedule()
            # A process starts a test only when it knows the next one, or that there is none. So a
            # replacement needs two units of work, as every process does at the start.
            for node in self.nodes:
                self._reschedule(node)

        def _reschedule(self, node):
            if node in self.registered_collections:  # else it asks again when it has collected
                super()._reschedule(node)

    return ByFile(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    """End the run when a test process crashes, as a failure that names the test.

    On a GPU the other tests go on: a faulty kernel ends its test process (`lost_context`).
    """
    if error in (None, "keyboard-interrupt") or _on_gpu(node.config):
        return
    session = node.config.pluginmanager.getplugin("dsession")
    units = session.sched.assigned_work.get(node, {}).values()
    tests = [test for unit in units for test in unit.items()]
    running = [nodeid for nodeid, done in tests if not done]
    # xdist would wait 10 s for the other processes, which may be in a long test.
    session.nodemanager.EXIT_TIMEOUT = 0.1
    if running:
        session.handle_crashitem(running[0], node)
        when = f"in {running[0]}"
    else:
        when = f"after {tests[-1][0]}" if tests else "before its first test"
    pytest.exit(f"test process {node.gateway.id} crashed {when}: {error}", 1)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What is imported and collected stays: the garbage collector need not look at it, ever.

    It looks at the rest less often than it would, which takes tests that draw or compile a tenth
    of their time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(50_000, 20, 20)
        gc.enable()


def pytest_report_header(config):
    name = config.getoption("--fault")
    return f"seeded fault: {name}: {faults.catalogue()[name].bug}" if name else None


def pytest_collection_modifyitems(config, items):
    if left_out := promises.keep(items, config.getoption("--promise")):
        config.hook.pytest_deselected(items=left_out)
    place = _scattered if _on_gpu(config) else _place
    items.sort(key=lambda item: place(item.nodeid))
    if config.option.markexpr == "gpu":  # takes the place of setup.cfg's, and means that, too
        left_out = [item for item in items if item.get_closest_marker("thorough")]
        items[:] = [item for item in items if not item.get_closest_marker("thorough")]
        config.hook.pytest_deselected(items=left_out)
    if not config.option.collectonly:
        _skip_without_gpu(config, items)


def _skip_without_gpu(config, items):
    """Skip one case of each test that needs a GPU; leave out its others, which would say the same.

    There are 2,000, and two processes take 5 s to say of each that it is skipped. Whether there is
    a GPU is asked only if there is such a test, as the answer takes 0.4 s.
    """
    marked = [item for item in items if item.get_closest_marker("gpu")]
    reason = why_no_gpu() if marked else None
    if not reason:
        return
    skipped, left_out = set(), []
    for item in marked:
        test = item.nodeid.split("[")[0]
        if test in skipped:
            left_out.append(item)
        skipped.add(test)
        item.add_marker(pytest.mark.skip(reason=reason))
    config.hook.pytest_deselected(items=left_out)
    left_out = set(left_out)
    items[:] = [item for item in items if item not in left_out]
