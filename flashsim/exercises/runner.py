"""Run a command in a separate process, with limits, and return its output.

To enforce the limits, the function `run` kills the process and all its children, and keeps no more
output than allowed. `ask` sends an order to a module of flashsim that runs in a separate process.
"""

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO, Any, NamedTuple

#: Environment variables that a process inherits, to find Python, its packages and its libraries.
_KEPT = ("PATH", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "HOME", "SYSTEMROOT")
#: One thread, because BLAS would allocate memory for each CPU of a large machine.
_ONE_THREAD = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}
#: Explanations of the limits that end a solution's process.
_WHY_ENDED = {
    "time": "it was stopped after {0:g} s; check for a loop that does not end",
    "result": "its recorded program is too long; use larger tiles",
    "printed": "it was stopped because it printed more than 1 MiB",
}
#: The most bytes of messages (stderr) of a process.
_PRINTED = 1 << 20


class Ended(NamedTuple):
    """A process that ended: its exit status, its result (stdout) and the text it printed (stderr).

    `why` names the limit that ended the process: "time", "result" or "printed"; "" if none did.
    """

    status: int
    result: bytes
    printed: str
    why: str

    @property
    def last(self) -> str:
        """The process's last printed line, shortened, or the exit status if nothing was printed."""
        lines = self.printed.strip().splitlines() or [f"exit status {self.status}"]
        return plain(lines[-1], 300)


def run(command: Sequence[str], given: bytes, seconds: float = 60.0, most: int = 1 << 26) -> Ended:
    """Run a command with the bytes `given` as stdin, for at most so many seconds.

    The result has the command's stdout, of at most `most` bytes, and its stderr.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**{key: os.environ[key] for key in _KEPT if key in os.environ}, **_ONE_THREAD},
        start_new_session=True,  # a process group of its own, which `_end` kills
    )
    assert process.stdin
    assert process.stdout
    assert process.stderr
    why: list[str] = []
    result, printed = bytearray(), bytearray()

    def feed(stream: IO[bytes]) -> None:
        with suppress(OSError), stream:
            stream.write(given)

    def drain(stream: IO[bytes], held: bytearray, name: str, most: int) -> None:
        with suppress(OSError, ValueError), stream:
            while piece := os.read(stream.fileno(), 1 << 16):
                held += piece
                if len(held) > most:
                    why.append(name)
                    _end(process)
                    return

    works: list[tuple[Any, ...]] = [
        (feed, process.stdin),
        (drain, process.stdout, result, "result", most),
        (drain, process.stderr, printed, "printed", _PRINTED),
    ]
    threads = [threading.Thread(target=work, args=of, daemon=True) for work, *of in works]
    for thread in threads:
        thread.start()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        why.append("time")
    finally:
        _end(process)
        process.wait()
    for thread in threads:
        thread.join(1)  # do not wait longer: a process that left the group may hold the pipe open
    text = bytes(printed[:_PRINTED]).decode("utf-8", "replace")
    return Ended(process.returncode, bytes(result), text, why[0] if why else "")


class Handover(NamedTuple):
    """A separate process's answer: kind and text of a failure, a dict about the result, the result.

    `kind` is "" if nothing failed.
    """

    kind: str = ""
    words: str = ""
    data: bytes = b""
    about: Mapping[str, Any] = {}


def ask(module: str, order: Any, most: int, line: int = 1 << 20) -> Handover:
    """Send an order to a module in a separate process, for at most `order.seconds`.

    The module writes one line of JSON, then its result, to stdout: at most `most` bytes together,
    and at most `line` bytes in the line.
    """
    ended = run([sys.executable, "-P", "-m", module], pickle.dumps(order), order.seconds, most)
    if ended.why:
        return Handover(ended.why, _WHY_ENDED[ended.why].format(order.seconds))
    first, _, data = ended.result.partition(b"\n")
    try:
        about = json.loads(first[:line])
        return Handover(plain(about["kind"], 20), plain(about["words"]), data, about)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        said = f"the solution ended its process before it was graded ({ended.last})"
        return Handover("process", said)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its process group."""
    if sys.platform == "win32":
        process.kill()
        return
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def plain(text: str, most: int = 4000) -> str:
    """Make untrusted text safe to print: shorten it, and remove terminal escapes."""
    cut = text if len(text) <= most else f"{text[:most]}..."
    return "".join(x if x.isprintable() or x == "\n" else repr(x)[1:-1] for x in cut)
