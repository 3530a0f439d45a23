"""Edges, attributes, labels and splits of one graph."""
