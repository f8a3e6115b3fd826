"""Operations of the CPU engine, compiled: to functions that Python calls, and to assembly."""

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import njit

from flashsim.engines.cpu.micro_kernels import registers
from flashsim.engines.cpu.primitives.inline_jit import Whole


def jitted(operation):
    """Return an operation as a function for Python, which shares code with no other one."""

    @njit(pipeline_class=Whole)
    def call(cpu, *args):
        operation(cpu, *args)

    return call


def code_of(kind, dtype, like=None):
    """Return the argument `cpu` of a kind of code; plain code has the panels of `like`."""
    block = registers.BLOCKING[like if like and kind is registers.Plain else kind]
    return kind(block.lanes(np.dtype(dtype).itemsize) * block.vecs)


def assembly(build, kind, cpu, triple="x86_64-unknown-linux-gnu", **options):
    """Return one operation's machine code for another CPU, as text."""
    module = ir.Module()
    module.triple = triple
    build(module, registers.BLOCKING[kind], 4, **options).linkage = ""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=cpu, opt=3)
    parsed = llvm.parse_assembly(str(module))
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    passes.getModulePassManager().run(parsed, passes)
    return machine.emit_assembly(parsed)
