"""CUDA C++ kernels to machine code by CuPy's NVRTC, which needs no GPU."""

import itertools
import re
import struct
from functools import lru_cache

import pytest

#: What kernels report with; the first argument is where to, the second, if any, what was moved.
REPORTING = re.compile(
    r"(?<!void )(?<!define )\b(?:(report|report_one)|stamp|stamp_item|stamp_block|STAMP)\("
)


def thorough(*case):
    """One of a product of cases, too many to compile each time."""
    return pytest.param(*case, marks=pytest.mark.thorough)


def kernels_only(*case):
    """Machine code beside one kernel of its kind: `make kernels`, which CI always runs."""
    return pytest.param(*case, marks=pytest.mark.kernels)


def some(always, often, cases):
    """All cases of one argument: in `make test`, in `make kernels`, the others thorough."""
    marks = {case: pytest.mark.kernels for case in often} | dict.fromkeys(always, ())
    return [pytest.param(case, marks=marks.get(case, pytest.mark.thorough)) for case in cases]


def star(*axes, also=()):
    """A product of cases, thorough but for those that differ from its first in one place at most,
    and for `also`: each value of an axis is tried, with few of all the kernels there are.
    """
    made = []
    for case in itertools.product(*axes):
        away = sum(value != axis[0] for value, axis in zip(case, axes, strict=True))
        made.append(case if away <= 1 or case in also else thorough(*case))
    return made


def source(kernel):
    """A kernel's text with its headers in place."""
    from flashsim.backends.kernels import nvrtc as compiler

    return compiler.text(kernel)


def compiled(kernel, options, text=None):
    """NVRTC's log, with ptxas's figures of registers and spills; the cubin, empty if it fails."""
    return _compiled(text or source(kernel), kernel.file, options)


@lru_cache(maxsize=128)  # by the text: a seeded bug makes another one of the same kernel
def _compiled(text, file, options):
    pytest.importorskip("cupy")
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(text, file, [], [])
    try:
        nvrtc.compileProgram(program, (*options, "--ptxas-options=-v"))
    except nvrtc.NVRTCError:
        return nvrtc.getProgramLog(program), b""
    return nvrtc.getProgramLog(program), nvrtc.getCUBIN(program)


def errors(kernel, options, text=None):
    """What NVRTC's front end finds wrong, "" if nothing; it makes no code, and so is quick."""
    pytest.importorskip("cupy")
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(text or source(kernel), kernel.file, [], [])
    try:
        nvrtc.compileProgram(program, (*options, "--fdevice-syntax-only"))
    except nvrtc.NVRTCError:
        return nvrtc.getProgramLog(program)
    return ""


def without_reports(text):
    """A source with every call that reports or stamps cut out; loads that say their bytes stay."""
    parts, at = [], 0
    while found := REPORTING.search(text, at):
        depth, comma, end = 1, None, found.end()
        while depth:
            letter = text[end]
            if letter == "," and depth == 1 and comma is None:
                comma = end
            depth += (letter == "(") - (letter == ")")
            end += 1
        moved = without_reports(text[comma + 1 : end - 1]) if found[1] else "0"
        parts += [text[at : found.start()], f"static_cast<void>({moved})"]
        at = end
    return "".join(parts) + text[at:]


def costs_nothing_when_off(kernel, *options):
    """The source with all reporting cut out gives the same machine code as the switch."""
    text = source(kernel)
    bare = without_reports(text)
    calls = len(REPORTING.findall(text))
    assert calls
    assert not REPORTING.search(bare)
    code = compiled(kernel, (*kernel.options, *options), text)[1]
    assert code
    return compiled(kernel, (*kernel.options, *options), bare)[1] == code


def instructions(cubin):
    """The 128-bit instructions of a cubin's (64-bit ELF) only kernel, in order."""
    start, size, count, names = struct.unpack_from("<Q10xHHH", cubin, 0x28)
    headers = [struct.unpack_from("<IIQQQQ", cubin, start + size * x) for x in range(count)]
    for name, _, _, _, offset, length in headers:
        if cubin.startswith(b".text.", headers[names][4] + name):
            return [*struct.iter_unpack("<QQ", cubin[offset : offset + length])]
    raise ValueError("no code")


def _with_waits(cubin, kind):
    """A word an instruction: "wait N", for all groups of products but N, or the `kind` of its low
    half."""
    return [
        f"wait {high >> 8 & 7}" if low & 0xFFF == 0x9C5 else kind(low)
        for low, high in instructions(cubin)
    ]


def loads_under_the_last_products(cubin):
    """Of the fused backward for Hopper: loads from shared memory between the waits for dQ and for
    dK, of which the first leaves one group of products under way."""
    seen = _with_waits(cubin, lambda low: "load" if low & 0xFFF == 0x984 else None)
    dq = len(seen) - 1 - seen[::-1].index("wait 1")
    return seen[dq : seen.index("wait 0", dq)].count("load")


def between_scores_and_output(cubin):
    """Of a Hopper forward's visit: maxima of three and exponentials between the waits for its
    scores, which leaves one group of products under way, and for the output."""
    kinds = {0x00F: "max", 0x108: "exp"}  # VIMNMX3, MUFU
    seen = _with_waits(cubin, lambda low: kinds.get(low & 0x1FF))
    scores = seen.index("wait 1")
    output = seen.index("wait 0", scores)
    return [seen[scores:output].count(kind) for kind in ("max", "exp")]
