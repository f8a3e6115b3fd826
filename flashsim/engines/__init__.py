"""Engines that run on the CPU: the NumPy simulator."""
