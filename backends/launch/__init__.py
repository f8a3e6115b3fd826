"""Kernel launches: the kernel, its arguments, its schedule tables, its passes; needs no GPU."""
