"""What kernels say they did: from their buffers to traces."""
