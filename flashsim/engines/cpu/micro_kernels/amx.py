"""Requests AMX tile registers from Linux, which does not save them for a thread by default."""

import ctypes
import errno
import os
import platform
import sys
from functools import cache

#: arch_prctl(2) on x86-64: its number, the request's code, and the state (XFEATURE_XTILEDATA).
ARCH_PRCTL = 158
ARCH_GET_XCOMP_PERM, ARCH_REQ_XCOMP_PERM = 0x1022, 0x1023
TILE_DATA = 18

REASONS = {
    errno.EINVAL: "Linux before 5.16 does not support AMX tiles",
    errno.EOPNOTSUPP: "the CPU has no AMX tiles, or the virtual machine hides them",
    errno.ENOSPC: "a signal stack (sigaltstack) of this process is too small for AMX tiles",
    errno.EPERM: "a seccomp filter forbids the system call",
    errno.ENOSYS: "a seccomp filter forbids the system call, or this system is not Linux",
}


@cache
def refusal(process: int) -> str | None:
    """Request AMX tiles for this process; return Linux's reason for a refusal, or None.

    One request covers all threads of the process. The result is cached per `process` (os.getpid()).
    A forked process inherits the permission, and may request the tiles a second time.
    """
    del process
    if sys.platform != "linux" or platform.machine() != "x86_64" or sys.maxsize < 1 << 32:
        return f"AMX needs 64-bit Linux on x86, but this system is {platform.platform()}"
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    numbers = (ctypes.c_long(x) for x in (ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, TILE_DATA))
    if libc.syscall(*numbers) != 0:
        number = ctypes.get_errno()
        why = REASONS.get(number, os.strerror(number))
        return f"Linux refuses AMX tiles (arch_prctl, errno {number}): {why}"
    allowed = ctypes.c_uint64()
    numbers = (ctypes.c_long(x) for x in (ARCH_PRCTL, ARCH_GET_XCOMP_PERM))
    if libc.syscall(*numbers, ctypes.byref(allowed)) != 0 or not allowed.value >> TILE_DATA & 1:
        return "Linux granted AMX tiles, but does not list them among this process's permissions"
    return None
