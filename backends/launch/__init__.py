"""Describe kernel launches by their kernels, arguments, schedule tables and passes.

Nothing in this package needs a GPU.
"""
