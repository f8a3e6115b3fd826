"""CUDA C++ sources, and how they are compiled."""
