"""The CUDA C++ sources of the kernels, and the code that compiles them."""
