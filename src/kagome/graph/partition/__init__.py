"""Partitions of a graph: parts as ranks and files hold them, and chunks of a part."""
