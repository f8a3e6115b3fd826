"""Describe kernel launches (kernels, arguments, schedule tables, passes); needs no GPU."""
