"""Layers over ranks, the graph in chunks."""
