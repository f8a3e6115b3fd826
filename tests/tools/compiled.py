"""Compile CUDA C++ kernels to machine code with CuPy's NVRTC, without a GPU."""

import itertools
import re
import struct
from functools import lru_cache

import pytest

#: Calls that report; the first argument is the destination, and the second, if any, the value.
REPORTING = re.compile(
    r"(?<!void )(?<!define )\b(?:(report|report_one)|stamp|stamp_item|stamp_block|STAMP)\("
)


def thorough(*case):
    """Return a case of a large product of cases, marked `thorough`."""
    return pytest.param(*case, marks=pytest.mark.thorough)


def kernels_only(*case):
    """Return a case that only `make kernels`, and so CI, compiles."""
    return pytest.param(*case, marks=pytest.mark.kernels)


def some(always, often, cases):
    """Return the cases of one argument, marked for `make test`, `make kernels` or thorough."""
    marks = {case: pytest.mark.kernels for case in often} | dict.fromkeys(always, ())
    return [pytest.param(case, marks=marks.get(case, pytest.mark.thorough)) for case in cases]


def star(*axes, also=()):
    """Return a product of cases, thorough except those near its first and those in `also`.

    Near means that at most one axis differs. So each value of an axis is tried, with few kernels.
    """
    made = []
    for case in itertools.product(*axes):
        away = sum(value != axis[0] for value, axis in zip(case, axes, strict=True))
        made.append(case if away <= 1 or case in also else thorough(*case))
    return made


def source(kernel):
    """Return a kernel's text with its headers inserted."""
    from flashsim.backends.kernels import nvrtc as compiler

    return compiler.text(kernel)


def compiled(kernel, options, text=None):
    """Return NVRTC's log, with ptxas's registers and spills, and the cubin, empty on failure."""
    return _compiled(text or source(kernel), kernel.file, options)


@lru_cache(maxsize=128)  # keyed by the text: a seeded bug changes the text of the same kernel
def _compiled(text, file, options):
    pytest.importorskip("cupy")
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(text, file, [], [])
    try:
        nvrtc.compileProgram(program, (*options, "--ptxas-options=-v"))
    except nvrtc.NVRTCError:
        return nvrtc.getProgramLog(program), b""
    return nvrtc.getProgramLog(program), nvrtc.getCUBIN(program)


def usage(log):
    """Return registers, stack bytes and spilled bytes per thread, from the report of ptxas."""
    stack, stores = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores", log).groups()
    registers = re.search(r"Used (\d+) registers", log)[1]
    return int(registers), int(stack), int(stores)


def errors(kernel, options, text=None):
    """Return the errors of NVRTC's front end, "" if none; it generates no code, and so is fast."""
    pytest.importorskip("cupy")
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(text or source(kernel), kernel.file, [], [])
    try:
        nvrtc.compileProgram(program, (*options, "--fdevice-syntax-only"))
    except nvrtc.NVRTCError:
        return nvrtc.getProgramLog(program)
    return ""


def without_reports(text):
    """Return a source without the calls that report or stamp."""
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
    """Check that cutting out all reporting gives the same machine code as switching it off."""
    text = source(kernel)
    bare = without_reports(text)
    calls = len(REPORTING.findall(text))
    assert calls
    assert not REPORTING.search(bare)
    code = compiled(kernel, (*kernel.options, *options), text)[1]
    assert code
    return compiled(kernel, (*kernel.options, *options), bare)[1] == code


def _sections(cubin):
    """Yield the 128-bit instructions of each function in a cubin (64-bit ELF), in order."""
    start, size, count, names = struct.unpack_from("<Q10xHHH", cubin, 0x28)
    headers = [struct.unpack_from("<IIQQQQ", cubin, start + size * x) for x in range(count)]
    for name, _, _, _, offset, length in headers:
        if cubin.startswith(b".text.", headers[names][4] + name):
            yield [*struct.iter_unpack("<QQ", cubin[offset : offset + length])]


def instructions(cubin):
    """Return the 128-bit instructions of the only kernel of a cubin, in order."""
    return next(_sections(cubin))


def compares_maxima(cubin):
    """Return whether a maximum or minimum of integers sets a predicate, which may be wrong.

    See flash_same in flashsim/functions/emit.py.
    """
    every = (x for section in _sections(cubin) for x in section)
    extremes = (high for low, high in every if low & 0x1FF == 0x048)  # VIMNMX
    return any(high >> 17 & 0x3F != 0x3F for high in extremes)  # two predicates, 7 for none


def _with_waits(cubin, kind):
    """Return a word per instruction: "wait N", or the `kind` of its low half.

    "wait N" waits for all groups of products except the last N.
    """
    return [
        f"wait {high >> 8 & 7}" if low & 0xFFF == 0x9C5 else kind(low)
        for low, high in instructions(cubin)
    ]


def loads_under_the_last_products(cubin):
    """Return the number of shared-memory loads between the waits for dQ and for dK.

    The kernel is the fused backward for Hopper, whose first wait leaves one group of products.
    """
    seen = _with_waits(cubin, lambda low: "load" if low & 0xFFF == 0x984 else None)
    dq = len(seen) - 1 - seen[::-1].index("wait 1")
    return seen[dq : seen.index("wait 0", dq)].count("load")


def between_scores_and_output(cubin):
    """Return three-input maxima and exponentials between the waits for scores and for the output.

    They are those of a Hopper forward's visit, whose first wait leaves one group of products.
    """
    kinds = {0x00F: "max", 0x108: "exp"}  # VIMNMX3, MUFU
    seen = _with_waits(cubin, lambda low: kinds.get(low & 0x1FF))
    scores = seen.index("wait 1")
    output = seen.index("wait 0", scores)
    return [seen[scores:output].count(kind) for kind in ("max", "exp")]
