"""Kernels that users write: their bytes, whether those are needed, and whether results are right.

A frontend (`flashsim.triton`, or any other) executes a kernel and notes its accesses in a
`Recorder`. `KernelTrace` answers the questions. Nothing in this package knows Triton or Pallas.
"""

from __future__ import annotations

from flashsim.own_kernels.kernel_trace import KernelTrace
from flashsim.own_kernels.record import ATOMIC
from flashsim.own_kernels.recorder import Recorder
from flashsim.own_kernels.tensors import KernelTensor
from flashsim.schedule.names import LOAD, STORE

__all__ = ["ATOMIC", "LOAD", "STORE", "KernelTensor", "KernelTrace", "Recorder"]
