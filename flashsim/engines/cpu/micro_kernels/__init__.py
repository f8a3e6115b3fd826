"""The CPU engine's operations on a panel (block of scores), in plain Numba and as vector code."""
