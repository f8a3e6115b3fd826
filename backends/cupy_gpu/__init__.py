"""CUDA C++ kernels through CuPy."""
