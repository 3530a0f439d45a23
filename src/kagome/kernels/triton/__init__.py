"""Triton kernels for CUDA tensors, and their launch functions."""
