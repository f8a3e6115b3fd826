"""Kernels in Python for Hopper (`wgmma`, TMA)."""
