"""Functions that all compiled kernels use: atomics, packing, arrays without reference counts."""
