"""Restricts this process before it runs untrusted code.

`limit` limits CPU time and memory. On Linux, `close` uses Landlock to prevent all writes, and all
reads except of Python and its packages, and a seccomp filter to prevent new processes, signals and
network access. A process can undo neither Landlock nor seccomp. A process that starts compilers and
writes caches calls only `limit`.
"""

import ctypes
import os
import platform
import struct
import sys
from collections.abc import Iterable
from pathlib import Path

#: The names of what `close` blocks access to.
FILES, PROCESSES, NETWORK = "files", "other processes", "the network"

#: System calls that start or access another process, by their numbers on x86-64 and on ARM.
_PROCESS_CALLS = {
    "fork": (57, None), "vfork": (58, None), "clone": (56, 220), "clone3": (435, 435),
    "execve": (59, 221), "execveat": (322, 281), "kill": (62, 129), "tkill": (200, 130),
    "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424), "ptrace": (101, 117),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "prlimit64": (302, 261),
    "setpriority": (141, 140), "sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119),
    "io_uring_setup": (425, 425), "keyctl": (250, 219), "unshare": (272, 97), "setns": (308, 268),
}  # fmt: skip
_NETWORK_CALLS = {"socket": (41, 198), "socketpair": (53, 199)}
#: System calls that change a file's owner, mode or times, which Landlock does not restrict.
_FILE_CALLS = {
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "chown": (92, None), "lchown": (94, None), "fchown": (93, 55), "fchownat": (260, 54),
    "utime": (132, None), "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88),
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7),
}  # fmt: skip
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}


def limit(*, seconds: float, memory: int | None = None) -> None:
    """Limit this process to `seconds` of CPU time, and to `memory` MiB beyond its current use.

    On Windows nothing is limited; memory is limited only on Linux.
    """
    if sys.platform == "win32":
        return
    import resource

    _lower(resource.RLIMIT_CPU, int(seconds) + 1)
    _lower(resource.RLIMIT_CORE, 0)
    if memory is not None and sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        _lower(resource.RLIMIT_AS, pages * resource.getpagesize() + memory * 2**20)


def close() -> list[str]:
    """Block this process's access to files, other processes and the network.

    Imports of Python's packages, and writes to open files, stay possible. The function returns the
    kinds of access that this system could block, by name.
    """
    if sys.platform == "win32":
        return []
    import resource

    _lower(resource.RLIMIT_FSIZE, 0)
    if sys.platform != "linux":
        return []
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(38, 1, 0, 0, 0):  # no new privileges, which the kernel requires first
        return []
    closed = [FILES] if _landlock(libc, _readable()) else []
    if _seccomp(libc, {**_PROCESS_CALLS, **_NETWORK_CALLS, **_FILE_CALLS}):
        closed += [PROCESSES, NETWORK]
    return closed


def _lower(which: int, most: int) -> None:
    import resource

    hard = resource.getrlimit(which)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(which, (most, most))


def _readable() -> list[str]:
    """Return the paths of Python, its packages and the libraries that these load."""
    places = [sys.prefix, sys.base_prefix, str(Path(__file__).parents[2])]
    places += [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    places += ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache"]
    places += ["/usr/share/zoneinfo", "/dev/null", "/dev/urandom"]
    return [path for path in dict.fromkeys(places) if os.path.exists(path)]


def _landlock(libc: ctypes.CDLL, readable: Iterable[str]) -> bool:
    """Allow this process to read only below the paths `readable`; see landlock(7)."""
    create, add, restrict = 444, 445, 446  # numbers of system calls, on every architecture
    version = libc.syscall(create, None, 0, 1)
    if version < 1:
        return False
    rights = 13 + (version >= 2) + (version >= 3)  # kernels reject unknown bits
    attributes = [(1 << rights) - 1]
    attributes += [0b11] if version >= 4 else []  # no TCP
    attributes += [0b11] if version >= 6 else []  # no signals and no sockets to others
    rules = struct.pack(f"={len(attributes)}Q", *attributes)
    held = libc.syscall(create, rules, ctypes.c_size_t(len(rules)), 0)
    if held < 0:
        return False
    for path in readable:
        fd = os.open(path, os.O_PATH)  # type: ignore[attr-defined, unused-ignore]
        read_file, read_dir = 1 << 2, 1 << 3
        rights = read_file | read_dir if os.path.isdir(path) else read_file
        libc.syscall(add, held, 1, struct.pack("=Qi", rights, fd), 0)
        os.close(fd)
    done = libc.syscall(restrict, held, 0) == 0
    os.close(held)
    return done


class _Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))


def _seccomp(libc: ctypes.CDLL, calls: dict[str, tuple[int | None, ...]]) -> bool:
    """Make the system calls `calls` of this process fail with EPERM; see seccomp(2)."""
    known = _ARCHITECTURES.get(platform.machine())
    if known is None:
        return False
    column, architecture = known
    numbers = [number for call in calls.values() if (number := call[column]) is not None]
    load, equal, at_least, give = 0x20, 0x15, 0x35, 0x06
    n = len(numbers)
    code = [(load, 0, 0, 4), (equal, 0, n + 3, architecture), (load, 0, 0, 0)]
    code += [(at_least, n + 1, 0, 0x40000000)]  # x86-64's second table of numbers
    code += [(equal, n - at, 0, number) for at, number in enumerate(numbers)]
    code += [(give, 0, 0, 0x7FFF0000), (give, 0, 0, 0x00050001)]  # allow; EPERM
    packed = b"".join(struct.pack("=HBBI", *line) for line in code)
    return libc.prctl(22, 2, ctypes.byref(_Filter(len(code), packed)), 0, 0) == 0
