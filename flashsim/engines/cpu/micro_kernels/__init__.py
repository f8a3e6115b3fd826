"""The CPU engine's operations on a panel (a block of scores), in plain Numba and as vector code."""
