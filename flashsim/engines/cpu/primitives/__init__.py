"""Functions that all compiled kernels use, such as atomics and array allocation."""
