"""Placement of tensors: rows of vertices or edges, along which axis, and how many."""
