"""Kernels in Python for Hopper (`wgmma`, the copy engine)."""
