"""Engines that run on the CPU: the simulator in NumPy, and the fast CPU engine in Numba."""
