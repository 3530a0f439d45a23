"""A model and a graph measured once, and the cuts that follow."""
