"""Rows of floats to a few bits a number and back."""
