"""Request AMX from Linux, which saves a thread's 8 KiB of tiles only if the process asked."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys
from functools import cache

#: arch_prctl(2) on x86-64: its number, what it is asked, and which state (XFEATURE_XTILEDATA).
ARCH_PRCTL = 158
ARCH_GET_XCOMP_PERM, ARCH_REQ_XCOMP_PERM = 0x1022, 0x1023
TILE_DATA = 18

REASONS = {
    errno.EINVAL: "Linux before 5.16 does not know tiles",
    errno.EOPNOTSUPP: "the CPU has no tiles, or the machine's monitor hides them",
    errno.ENOSPC: "a signal stack (sigaltstack) of this process is too small to save tiles on",
    errno.EPERM: "a rule about system calls (seccomp) forbids it",
    errno.ENOSYS: "a rule about system calls (seccomp) forbids it, or this is not Linux",
}


@cache
def refusal(process: int) -> str | None:
    """Request AMX tiles for this process; return None if it may use them, else the reason.

    One request covers all threads, existing and future. A fork inherits the permission. Because of
    `process` (os.getpid()) a fork asks again, which changes nothing.
    """
    del process
    if sys.platform != "linux" or platform.machine() != "x86_64" or sys.maxsize < 1 << 32:
        return f"AMX is asked for from 64-bit Linux on x86, and this is {platform.platform()}"
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    numbers = (ctypes.c_long(x) for x in (ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, TILE_DATA))
    if libc.syscall(*numbers) != 0:
        number = ctypes.get_errno()
        why = REASONS.get(number, os.strerror(number))
        return f"Linux refuses tiles (arch_prctl, errno {number}): {why}"
    allowed = ctypes.c_uint64()
    numbers = (ctypes.c_long(x) for x in (ARCH_PRCTL, ARCH_GET_XCOMP_PERM))
    if libc.syscall(*numbers, ctypes.byref(allowed)) != 0 or not allowed.value >> TILE_DATA & 1:
        return "Linux granted tiles, but does not list them among what this process may use"
    return None
