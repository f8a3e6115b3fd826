"""Checks kernels that users write: the bytes moved, the unnecessary bytes, and the results.

A frontend such as `flashsim.triton` executes a kernel and records its accesses in a `Recorder`;
`KernelTrace` analyses the recorded accesses. This package depends on neither Triton nor Pallas.
"""

from flashsim.own_kernels.kernel_trace import KernelTrace
from flashsim.own_kernels.record import ATOMIC
from flashsim.own_kernels.recorder import Recorder
from flashsim.own_kernels.tensors import KernelTensor
from flashsim.schedule.names import LOAD, STORE

__all__ = ["ATOMIC", "LOAD", "STORE", "KernelTensor", "KernelTrace", "Recorder"]
