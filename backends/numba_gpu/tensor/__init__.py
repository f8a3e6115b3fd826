"""Kernels in Python for tensor cores (`mma.sync`)."""
