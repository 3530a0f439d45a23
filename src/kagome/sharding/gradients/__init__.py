"""Gradients: their sum over ranks, their norm, and the functions at the edge of a sharded model."""
