"""Functions that all compiled kernels use, such as atomics and the allocation of arrays."""
