"""Replace Triton's GPU driver while kernels are traced, so that GPU programs run without a GPU.

User files measure times with `do_bench`, and put tensors on "cuda". While kernels are traced,
tensors stay on the CPU, and every measured time is NaN.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from flashsim.problem.hardware import Device
from flashsim.triton.installed import installed


class Driver:
    """Stands in for Triton's GPU driver, `triton.runtime.driver.active`, which needs a GPU."""

    def get_active_torch_device(self) -> Any:
        """Return torch's CPU device, or "cpu" if torch is not imported."""
        torch = sys.modules.get("torch")
        return torch.device("cpu") if torch is not None else "cpu"

    def get_current_device(self) -> int:
        """Return the number of the current device, which is always 0."""
        return 0

    def get_current_target(self) -> Any:
        """Return an A100 as the GPU for which Triton compiles."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 80, 32)

    @property
    def utils(self) -> Any:
        """Return the functions that ask for the device's properties, which are an A100's."""
        a100 = Device.get("A100")
        found = {
            "multiprocessor_count": a100.sm_count,
            "max_shared_mem": a100.sram_bytes,
            "max_num_regs": 65536,
            "warpSize": 32,
        }
        return SimpleNamespace(get_device_properties=lambda device: found)

    def get_benchmarker(self) -> Callable[..., Any]:
        """Return a benchmark function that measures nothing."""
        return _no_time

    def get_device_interface(self) -> Any:
        """Return the module `torch.cpu`, or None if torch is not imported."""
        torch = sys.modules.get("torch")
        return getattr(torch, "cpu", None)


class NotCompiled:
    """Stands for the compiled kernel that a launch or `warmup` returns; has no machine code."""

    def __init__(self, kernel: str) -> None:
        self._kernel = kernel

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{self._kernel} is interpreted, not compiled for a GPU, so its {name} is unknown; "
            "replace what needs it by a number while you trace"
        )


def _no_time(fn: Any, *_: Any, quantiles: Any = None, return_mode: str = "", **__: Any) -> Any:
    """Return NaN as the time of `fn`, without a call, so that launches in `fn` do not count."""
    nothing = float("nan")
    if quantiles is not None:
        return [nothing] * len(quantiles)
    return [nothing] if return_mode == "all" else nothing


@contextmanager
def standing_in(*, available: bool = False) -> Iterator[None]:
    """Replace Triton's driver by a `Driver` in the ``with`` block; fill np.empty with NaN.

    With `available`, `torch.cuda.is_available` returns True, because many tests skip themselves
    without a GPU. Functions of torch and ``triton.testing`` are replaced as soon as a file imports
    these modules, so that the file's own top-level code sees the replacements.
    """
    at = installed()
    driver = at.triton.runtime.driver
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(vars(driver)))  # puts back all of its attributes
        driver.set_active(Driver())
        for name in ("empty", "empty_like"):
            stack.enter_context(mock.patch.object(np, name, _with_nan(getattr(np, name))))
        on_import = {
            "triton.testing": lambda: _no_times(stack),
            "torch": lambda: _torch_on_cpu(stack, available),
        }
        for name in on_import.keys() & sys.modules.keys():
            on_import.pop(name)()
        finder = _AfterImport(on_import)
        sys.meta_path.insert(0, finder)
        stack.callback(sys.meta_path.remove, finder)
        yield


class _AfterImport(MetaPathFinder):
    """Call a function once, right after the module of its name has been imported."""

    def __init__(self, functions: dict[str, Callable[[], None]]) -> None:
        self._functions = functions

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the spec that the other finders find, with a loader that calls the function."""
        if name not in self._functions:
            return None
        others = (one.find_spec(name, path, target) for one in sys.meta_path if one is not self)
        spec = next(filter(None, others), None)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def loaded(module: Any) -> None:
                load(module)
                self._functions.pop(name, lambda: None)()

            spec.loader.exec_module = loaded  # type: ignore[method-assign]
        return spec


def _no_times(stack: ExitStack) -> None:
    """Make the functions of ``triton.testing`` that measure times measure nothing."""
    for name in ("do_bench", "do_bench_cudagraph"):
        stack.enter_context(mock.patch.object(sys.modules["triton.testing"], name, _no_time))


def _with_nan(make: Callable[..., Any]) -> Callable[..., Any]:
    """Fill new arrays of floats with NaN, so that reads of memory that nobody wrote show."""

    def made(*args: Any, **kwargs: Any) -> Any:
        array = make(*args, **kwargs)
        if "float" in array.dtype.name:
            array.fill(np.nan)
        return array

    return made


def _torch_on_cpu(stack: ExitStack, available: bool) -> None:
    """Make torch keep tensors on the CPU when a file puts them on "cuda"."""
    torch: Any = sys.modules["torch"]
    from torch.overrides import TorchFunctionMode

    class KeptOnCpu(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            kwargs = dict(kwargs or {})
            if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
                return args[0]
            if getattr(func, "__self__", None) is torch.Tensor.is_cuda and not _torch_asks(torch):
                return True  # "assert q.is_cuda" stands in many files
            if _on_gpu(kwargs.get("device")):
                kwargs["device"] = "cpu"
            if func is torch.Tensor.to:
                args = tuple("cpu" if _on_gpu(x) else x for x in args)
            made = func(*args, **kwargs)
            if func in empties and made.dtype in with_nan:
                made.fill_(float("nan"))  # as `_with_nan`
            return made

    empties = {torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty}
    with_nan = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
    stack.enter_context(KeptOnCpu())

    class Generator(torch.Generator):
        def __new__(cls, device: Any = "cpu") -> Any:
            return super().__new__(cls, "cpu" if _on_gpu(device) else device)

    stack.enter_context(mock.patch.object(torch, "Generator", Generator))
    stack.enter_context(mock.patch.object(torch, "set_default_device"))
    for name in ("synchronize", "empty_cache", "set_device", "reset_peak_memory_stats"):
        stack.enter_context(mock.patch.object(torch.cuda, name))
    for name in ("Event", "Stream", "current_stream", "default_stream", "device", "stream"):
        stack.enter_context(mock.patch.object(torch.cuda, name, _Nothing))
    for name, value in _device_facts().items():
        stack.enter_context(mock.patch.object(torch.cuda, name, _said(torch, name, value)))
    if available:
        stack.enter_context(mock.patch.object(torch.cuda, "is_available", return_value=True))


class _Nothing:
    """Stands in for a CUDA event or stream, or a context of one: other methods do nothing."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Any) -> float:
        return float("nan")


def _device_facts() -> dict[str, Any]:
    """Return the results of `torch.cuda`'s functions for an A100, by function name."""
    a100 = Device.get("A100")
    major, minor = a100.compute_capability
    properties = SimpleNamespace(
        name=a100.name,
        major=major,
        minor=minor,
        multi_processor_count=a100.sm_count,
        total_memory=a100.hbm_bytes,
        L2_cache_size=a100.l2_bytes,
        shared_memory_per_block_optin=a100.sram_bytes,
        shared_memory_per_multiprocessor=a100.sram_per_sm,
        warp_size=32,
    )
    return {
        "get_device_properties": properties,
        "get_device_capability": (major, minor),
        "get_device_name": a100.name,
        "current_device": 0,
    }


def _said(torch: Any, name: str, value: Any) -> Callable[..., Any]:
    """Return a function that returns `value` to user code, and the true value to torch."""
    plain = getattr(torch.cuda, name)

    def told(*args: Any, **kwargs: Any) -> Any:
        return plain(*args, **kwargs) if _torch_asks(torch) else value

    return told


def _torch_asks(torch: Any) -> bool:
    """Return True if torch itself, which needs the true value, called the replaced function."""
    return sys._getframe(2).f_code.co_filename.startswith(str(Path(torch.__file__).parent))


def _on_gpu(device: Any) -> bool:
    if isinstance(device, int):
        return not isinstance(device, bool)
    name = device if isinstance(device, str) else getattr(device, "type", "")
    return isinstance(name, str) and name.startswith("cuda")
