"""Rows and edges told apart by their place in the whole graph."""
