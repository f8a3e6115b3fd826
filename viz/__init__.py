"""Plots, animations and pages of traces. Matplotlib is imported here and nowhere else."""
