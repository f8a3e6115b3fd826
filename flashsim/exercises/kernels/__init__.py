"""The bundled exercises for kernels in Triton or Pallas, one file each."""
