"""The conversion of what kernels report, from their buffers, to traces."""
