"""The CUDA C++ sources, and the code that compiles them."""
