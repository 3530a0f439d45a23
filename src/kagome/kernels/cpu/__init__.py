"""The kernels as loops that numba compiles."""
