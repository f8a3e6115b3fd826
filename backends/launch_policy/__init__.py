"""The choice of kernels for each pass, and their launch arithmetic."""
