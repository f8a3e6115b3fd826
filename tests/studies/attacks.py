# ruff: noqa: E501 (a line is an attack)
"""Files that attack the grader, and forged programs; none may gain a point or stop it.

``NAME: (text, kind, words)``: the kind and the words of the first mark that is not full; a tuple of
kinds where walls and no walls differ. In a text, MARKER is a path that no file may come to be at,
and SECRET the path of a file that must not be read.
"""

import json

#: What most attacks end in: a program that stores zeros, and so gets no points.
ZEROS = """
def solution(machine):
    with machine.stage("s") as sram, sram.step(0):
        for name in ("O", "L"):
            sram.store(getattr(machine.hbm, name), slice(0, 32), 0.0)
"""
_WRITE = "open('MARKER', 'w').write('x')"
_ERROR = "error", "result"

FILES = {
    # -- ways out of a list of forbidden names
    "os by a star import": (f"from os import *\nsystem('touch MARKER')\n{ZEROS}", "result", ""),
    "runstring": (f"import numpy as np\nnp.testing.runstring({_WRITE!r}, {{}})\n{ZEROS}", _ERROR, ""),
    "type hints": (f"import typing\ndef f(x: {_WRITE!r}): pass\ntyping.get_type_hints(f)\n{ZEROS}", _ERROR, ""),
    "a generator's builtins": (f"g = (x for x in ())\ng.gi_frame.f_builtins['open']('MARKER', 'w')\n{ZEROS}", _ERROR, ""),
    "savez": (f"import numpy as np\nnp.savez('MARKER', 1)\n{ZEROS}", _ERROR, ""),
    "a file is read": ("import numpy as np\nraise ValueError(np.genfromtxt('SECRET', dtype=str))", "error", ""),
    "the grader's memory": ("import os\nraise ValueError(open(f'/proc/{os.getppid()}/cmdline').read())", "error", ""),
    # -- looking for the answer
    "frames": (
        "import sys\nframe = sys._getframe()\nseen = []\nwhile frame:\n"
        "    seen += [*frame.f_locals, *frame.f_globals]\n    frame = frame.f_back\n"
        "assert {'truth', 'reference', 'exercise'} & {*seen}, 'nothing to find'\n",
        "error", "nothing to find",
    ),
    "objects": (
        "import gc\nfound = [x for x in gc.get_objects() if type(x).__name__ in ('Exercise', 'Marks')]\n"
        "assert found, 'nothing to find'\n",
        "error", "nothing to find",
    ),
    # -- a patched grader
    "NumPy is patched": (f"import numpy as np\nnp.abs = np.isfinite = lambda x: np.zeros(1)\nnp.allclose = lambda *a: True\n{ZEROS}", "result", "off by up to"),
    "the trace is patched": (f"import flashsim\nflashsim.Trace.bytes = lambda *a, **k: 0\n{ZEROS}", "result", "off by up to"),
    "the machine is patched": (
        "from flashsim.engines.sandbox.hbm import OpenHbm\nOpenHbm._stored = lambda self, name: 'all'\n"
        "def solution(machine):\n    with machine.stage('s') as sram, sram.step(0):\n"
        "        sram.store(machine.hbm.O, slice(0, 8), 0.0)\n",
        "unstored", "rows 8 to 31 were never stored",
    ),
    "forged marks": (
        "import json, os\nforged = json.dumps({'exercise': 'x', 'marks': [{'name': 'x', 'points': 1000, 'most': 100}],\n"
        "    'figures': {}, 'moved': [], 'seconds': 0, 'kind': '', 'words': '', 'answers': None})\n"
        "for fd in range(1, 40):\n    try: os.write(fd, forged.encode() + b'\\n')\n    except OSError: pass\nos._exit(0)\n",
        "unstored", "ran no stage",
    ),
    "malformed results": ("import os\nfor fd in range(1, 40):\n    try: os.write(fd, b'\\xff[')\n    except OSError: pass\nos._exit(0)\n", "process", "ended its process"),
    "a flood of lines": ("import os\nfor fd in range(3, 40):\n    try: os.write(fd, b'\\n' * 10**7) and os._exit(0)\n    except OSError: pass\n", ("process", "function"), ""),
    # -- numbers
    "a mask that sees the tile": (
        "import numpy as np\nseen = []\nclass Mask(np.ndarray):\n"
        "    def __array_ufunc__(self, ufunc, method, *given, **how):\n        seen.append(given)\n"
        "def solution(machine):\n    mask = np.ones((8, 12), bool).view(Mask)\n"
        "    with machine.stage('s') as sram, sram.step(slice(0, 8)):\n"
        "        Q = sram.load(machine.hbm.Q, slice(0, 8))\n        Q *= mask\n",
        ("error", "unstored"), "",
    ),
    "a Python branch cannot depend on overflow": (
        "import numpy as np\ndef solution(machine):\n    with machine.stage('s') as sram:\n"
        "        for at in range(4):\n            rows = slice(8 * at, 8 * at + 8)\n            with sram.step(rows):\n"
        "                Q = sram.load(machine.hbm.Q, rows)\n"
        "                try:\n                    with np.errstate(all='raise'): np.exp(Q * 1e30)\n"
        "                    value = 0.0\n                except FloatingPointError: value = 1.0\n"
        "                for name in ('O', 'L'): sram.store(getattr(machine.hbm, name), rows, value)\n",
        "result", "off by up to",
    ),
    "a formatter in show": (
        "import numpy as np\nseen = []\nnp.set_printoptions(formatter={'float': lambda x: seen.append(x) or ''})\n"
        "def solution(machine):\n    with machine.stage('s') as sram, sram.step(0):\n"
        "        sram.show(sram.load(machine.hbm.Q, slice(0, 8)))\n        assert seen, 'saw nothing'\n",
        "error", "saw nothing",
    ),
    "full_like is patched": (
        "import numpy as np\nseen = []\nold = np.full_like\nnp.full_like = lambda x, v: seen.append(x) or old(x, v)\n"
        "def solution(machine):\n    with machine.stage('s') as sram, sram.step(0):\n"
        "        np.zeros_like(sram.load(machine.hbm.Q, slice(0, 8)))\n"
        "        assert not np.isnan(seen[0]).all(), 'saw nothing'\n",
        "error", "saw nothing",
    ),
    # -- limits
    "its own signals": ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", ("error", "process"), ""),
    "the parent is killed": (f"import os\nos.kill(os.getppid(), 9)\n{ZEROS}", _ERROR, ""),
    "forked sleepers": (f"import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(300)\n{ZEROS}", _ERROR, ""),
    "a socket": (f"import socket\nsocket.create_connection(('127.0.0.1', 9), 1)\n{ZEROS}", "error", ""),
    "no streams": ("import os\nfor fd in (0, 1, 2): os.close(fd)\nraise ValueError('closed')", "error", "ValueError: closed"),
    "everything is closed": ("import os\nos.closerange(0, 100)\nraise ValueError", "process", "exit status"),
    "300 MB are printed": ("import os\nwhile True: os.write(2, b'x' * 10**6)", "printed", "printed more than 1 MiB"),
    "a long exception": ("raise ValueError('x' * 10**8)", "error", "ValueError: xxx"),
    "an exception without words": ("class E(Exception):\n    def __str__(self): raise ValueError\nraise E", "error", "cannot be shown"),
    "a terminal's escapes": ("raise ValueError('\\x1b[2J\\ud800')", "error", "\\x1b[2J\\ud800"),
    "memory": ("x = [bytes(10**7) for _ in range(10**4)]", "memory", "MemoryError"),
    "KeyboardInterrupt": ("raise KeyboardInterrupt", "process", "ended its process before it was graded (KeyboardInterrupt)"),
    "rot13": ("# -*- coding: rot13 -*-\nvzcbeg bf", "syntax", "cannot read the file"),
    "surrogates": ("# -*- coding: unicode_escape -*-\nx = '\\ud800'", "syntax", "cannot read the file"),
    "a null": ("\0", "syntax", "cannot read the file"),
    "too deep": ("(" * 10**5, "syntax", "cannot read the file"),
    "too long": ("#" * 2**21, "file", "larger than 1,048,576 bytes"),
    # -- plain mistakes
    "a syntax error": ("def solution(machine:\n", "syntax", "line 1: '(' was never closed"),
    "no function": ("x = 1\n", "function", "defines no function solution(machine)"),
    "no function but a number": ("solution = 3\n", "function", "defines no function"),
    "a division by zero": ("1 / 0\n", "error", "the file ends with ZeroDivisionError"),
    "SystemExit": ("raise SystemExit\n", "error", "the file ends with SystemExit"),
    "SystemExit later": ("def solution(machine): raise SystemExit(3)\n", "error", "SystemExit: 3"),
    "no argument": ("def solution(): pass\n", "machine", "call with one argument, the machine"),
    "no such tensor": ("def solution(machine):\n    machine.hbm.W\n", "machine", "no tensor 'W'"),
}  # fmt: skip


def program(*instructions):
    """A forged program, inside a stage and a step."""
    start = [
        [1, "stage", [{"machine": 0}, "s"], {}],
        [1, "step", [{"sram": 0}, {"slice": [0, 8, None]}], {}],
    ]
    return [json.dumps(one) for one in (*start, *instructions)]


_SRAM = {"sram": 0}
_Q = [2, "load", [_SRAM, {"hbm": "Q"}, {"slice": [0, 8, None]}], {}]

PROGRAMS = {
    "no JSON": ["x"],
    "no list": ["3"],
    "deep": ["[" * 10**6],
    "no such operation": program([1, "system", ["x"], {}]),
    "no such tile": program([1, "T", [{"tile": 7}], {}]),
    "a tile that is a number": program([1, "T", [3], {}]),
    "a tile that is a name": program([1, "copy", ["x"], {}]),
    "an end too many": program(*[[1, "end", [], {}]] * 3),
    "no end": program(),
    "no stage": [json.dumps([1, "load", [_SRAM], {}])],
    "drop what is not there": program([1, "drop", [0], {}]),
    "a long line": ["[" + "1," * 10**7 + "1]"],
    "a huge tile": program([1, "alloc", [_SRAM, "x", [1 << 40]], {}]),
    "a huge product": program(
        [1, "alloc", [_SRAM, "a", [1 << 19, 1], 0.0], {}],
        [1, "T", [{"tile": 0}], {}],
        [1, "product", [{"tile": 0}, {"tile": 1}], {}],
    ),
    "a huge sum": program(
        [1, "alloc", [_SRAM, "a", [1 << 19], 0.0], {}],
        [1, "part", [{"tile": 0}, [{"slice": [None, None, None]}, None]], {}],
        [1, "elementwise", [{"ufunc": "add"}, [{"tile": 0}, {"tile": 1}], None, True], {}],
    ),
    "a huge workspace": program([1, "new", [{"space": 0}, "W", 1 << 40], {}]),
    "many workspaces": program(
        *([1, "new", [{"space": 0}, f"W{at}", 1 << 18, 4], {}] for at in range(9))
    ),
    "a mask of nothing": program([1, "where", [{"mask": [[1 << 40], "00"]}, 1.0, 0.0], {}]),
    "a type with objects": program(_Q, [1, "astype", [{"tile": 0}, {"type": "object"}], {}]),
    "an unknown function": program([1, "elementwise", [{"ufunc": "frompyfunc"}, [], None], {}]),
    "an input is written": program([1, "store", [_SRAM, {"hbm": "Q"}, {"slice": [0, 8]}, 0.0], {}]),
    "a line that is a list": program([[1], "drop", [], {}]),
    "a long number": program([1, "alloc", [_SRAM, "x", 8, int("9" * 400)], {}]),
}
