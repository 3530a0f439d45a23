"""The kernels for CUDA tensors."""
