"""Python kernels for tensor cores, with the instruction `mma.sync`."""
