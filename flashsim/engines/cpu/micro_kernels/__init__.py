"""Operations on a panel of scores: in plain Numba, and as vector code for a CPU."""
