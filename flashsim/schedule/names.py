"""The vocabulary of transfers: operations, levels and the papers' names of tensors."""

from __future__ import annotations

#: Operations. `load`, `store` and `reduce` move bytes between HBM and SRAM; the others are on chip.
OPS = ("load", "store", "reduce", "alloc", "free", "compute")
LOAD, STORE, REDUCE, ALLOC, FREE, COMPUTE = range(len(OPS))
TRANSFERS = (LOAD, STORE, REDUCE)
LEVELS = ("hbm", "sram")
#: Tensors by the papers' names. `_acc`: an accumulator in HBM, in the accumulator type; `_part`: of
#: a part of the keys, in that type, too. `_scale`: what FP8 elements are multiplied by. F, M: the
#: captured arrays that a score and a mask function read per visit; `_own`: per outer step.
TENSORS = (
    *("-", "Q", "K", "V", "O", "L", "m", "l", "O_acc", "S", "P", "dO", "delta", "dQ", "dK", "dV"),
    *("dQ_acc", "dP", "dS", "bias", "dBias", "dBias_acc", "gate", "O_part"),
    "L_part",
    "table",
    *("Q_scale", "K_scale", "V_scale"),
    "dL",
    *("F", "F_own", "M", "M_own", "S_raw", "dF", "sink", "dSink"),
)
CODES = {name: code for code, name in enumerate(TENSORS)}
