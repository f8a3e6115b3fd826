"""CUDA C++ kernels to machine code by CuPy's NVRTC, which needs no GPU."""

import pytest


def source(kernel):
    """A kernel's text with its headers in place."""
    from flashsim.backends import compiler

    return compiler.source(kernel.file)


def compiled(kernel, options, text=None):
    """NVRTC's log, with ptxas's figures of registers and spills; the cubin, empty if it fails."""
    pytest.importorskip("cupy")
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(text or source(kernel), kernel.file, [], [])
    try:
        nvrtc.compileProgram(program, (*options, "--ptxas-options=-v"))
    except nvrtc.NVRTCError:
        return nvrtc.getProgramLog(program), b""
    return nvrtc.getProgramLog(program), nvrtc.getCUBIN(program)
