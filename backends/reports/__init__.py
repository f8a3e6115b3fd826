"""Convert reports that kernels write to buffers into traces."""
