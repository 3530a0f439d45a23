"""CPU kernels: loops that numba compiles."""
