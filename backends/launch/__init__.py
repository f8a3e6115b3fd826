"""Describe kernel launches (kernels, arguments, schedule tables, passes) without a GPU."""
