"""`backend="numba_cuda"`: FlashAttention-2 on NVIDIA GPUs in Python, compiled by numba-cuda."""
