"""The operations on a panel (a block of rows and lanes), in plain Numba and as vector code."""
