"""Kernels in Python that read like the algorithm, for any GPU and for Numba's simulator."""
