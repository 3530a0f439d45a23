"""Loops over edges: sums, extremes, softmax and attention by row, without a tensor of a row an edge."""
