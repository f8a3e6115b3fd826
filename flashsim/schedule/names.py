"""The names and codes of operations in a trace's events, and the papers' tensor names."""

#: Operations. `load`, `store` and `reduce` move bytes between HBM and SRAM; the others do not.
OPS = ("load", "store", "reduce", "alloc", "free", "compute")
LOAD, STORE, REDUCE, ALLOC, FREE, COMPUTE = range(len(OPS))
TRANSFERS = (LOAD, STORE, REDUCE)
LEVELS = ("hbm", "sram")
#: Tensors by the papers' names. `X_acc` is X's accumulator in HBM, and `X_part` is X for a part of
#: the keys; both have the accumulator type. `X_scale` is the scales of an FP8 tensor X. F and M are
#: the elements of captured arrays that a score or a mask function reads at each visit; `F_own` and
#: `M_own` are those that it reads once per outer step.
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
