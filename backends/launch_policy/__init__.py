"""Choose the kernels of each forward or backward pass, their tiles and their launches."""
