"""Kernels over edges: sums, minimum, maximum, softmax and attention scores, without a row per edge."""
