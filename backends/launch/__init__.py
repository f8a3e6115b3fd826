"""Descriptions of kernel launches: kernel, arguments, schedule tables, passes.

Nothing in this package needs a GPU.
"""
