"""Functions that compiled kernels share: atomics, packing, arrays without reference counts."""
