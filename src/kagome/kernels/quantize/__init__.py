"""Quantization: rows of floats coded to a few bits per number and back."""
