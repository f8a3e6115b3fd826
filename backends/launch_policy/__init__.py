"""Which kernels run a pass, and with which launch arithmetic."""
