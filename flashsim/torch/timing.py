"""Puts attention calls into profiler ranges, with which torch's profiler times kernels per call.

Each attention call, and each autograd node that the call creates, runs in a profiler range with a
unique name. `Timer` opens ranges of torch's profiler; `Ranges` opens NVTX ranges, with which Nsight
Compute labels kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from flashsim.errors import OptionError
from flashsim.torch.calls import AttentionCall

#: The beginning of every range's name.
RANGE = "flashsim.watch"
_LOOKING_ON = "PythonDispatchMode"  # watch's own


class Ranges:
    """Opens a profiler range around each call, and around each part of the call's backward pass."""

    def __init__(self, open_range: Callable[[str], AbstractContextManager[Any]]) -> None:
        self.open_range = open_range
        self.calls: dict[str, tuple[AttentionCall, str]] = {}
        self.made = 0

    @contextmanager
    def forward(self) -> Iterator[tuple[str, int]]:
        """Open a profiler range; yield the range's name and the next autograd sequence number."""
        self.made += 1
        mark = f"{RANGE} {self.made}", torch.autograd._get_sequence_nr()
        with self.open_range(mark[0]):
            yield mark

    def follow(self, mark: tuple[str, int], call: AttentionCall, out: Any) -> None:
        """Assign profiler ranges to `call` and to the call's backward pass."""
        name, first = mark
        self.calls[name] = call, "forward"
        self.calls[f"{name} backward"] = call, "backward"
        if not isinstance(out, Tensor) or out.grad_fn is None:
            return
        last, found, waiting = torch.autograd._get_sequence_nr(), set(), [out.grad_fn]
        while waiting:
            node = waiting.pop()
            if node in found or not first <= node._sequence_nr() < last:
                continue
            found.add(node)
            waiting += [other for other, _ in node.next_functions if other is not None]
        for node in found:
            _in_range(node, f"{name} backward", self.open_range)


class Timer(Ranges):
    """Measures the kernel times of all attention calls while the profiler runs."""

    def __init__(self, stack: ExitStack) -> None:
        super().__init__(record_function)
        if torch.autograd._profiler_enabled():
            raise OptionError(
                "torch's profiler is already running, but watch(measure=True) must start a "
                "profiler itself; stop the running profiler, or leave out measure=True"
            )
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        # There is only one cycle; it is kept, since torch warns about dropped ones.
        self.profile = profile(activities=activities, acc_events=True)
        stack.callback(self.read)  # after the profiler has stopped, which waits for the GPU
        stack.enter_context(self.profile)

    def read(self) -> None:
        """Store the measured times in each recorded call."""
        for event in self.profile.events():
            if event.name in self.calls and event.device_type == DeviceType.CPU:
                call, direction = self.calls[event.name]
                if call.place is None:
                    continue
                times = call.measured.setdefault(direction, {})
                for name, microseconds in _times(event, call.place == "cuda"):
                    times[name] = times.get(name, 0) + microseconds * 1e-6


def _in_range(
    node: Any, name: str, open_range: Callable[[str], AbstractContextManager[Any]]
) -> None:
    """Let an autograd node run in a profiler range."""
    running: list[Any] = []

    def begin(_: Any) -> None:
        running.append(open_range(name))
        running[-1].__enter__()

    def end(*_: Any) -> None:
        running.pop().__exit__(None, None, None)

    node.register_prehook(begin)
    node.register_hook(end)


def _times(event: Any, on_gpu: bool) -> Iterator[tuple[str, float]]:
    """Yield the name and the time in µs of each kernel (on a CPU: operator) of a profiler event."""
    for inner in event.cpu_children:
        if on_gpu:
            yield from (
                (kernel.name, kernel.duration)
                for kernel in inner.kernels
                if not kernel.name.startswith(RANGE)  # ranges are drawn on the GPU, too
            )
        elif not inner.name.startswith((RANGE, _LOOKING_ON)):
            yield inner.name, inner.self_cpu_time_total
        yield from _times(inner, on_gpu)
