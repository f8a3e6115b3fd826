"""Engines that run on the CPU: the NumPy simulator, and the fast one in Numba."""
