"""The fast CPU engine: FlashAttention-2 in Numba, on all cores."""
