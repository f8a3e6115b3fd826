"""Python kernels that read like the papers' algorithms, for any GPU or Numba's simulator."""
