"""Rows and edges selected by their position in the whole graph, on a part that has only some of them."""
