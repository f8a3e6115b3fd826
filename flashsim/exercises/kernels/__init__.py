"""Exercises for kernels in Triton or Pallas, one file each."""
