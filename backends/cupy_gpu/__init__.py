"""The backend that runs CUDA C++ kernels through CuPy."""
