"""Graphs to train on: data sets, the structure of one graph, and the ways to cut it by vertices."""
