"""Describe kernel launches: kernels, arguments, schedule tables and passes. Needs no GPU."""
