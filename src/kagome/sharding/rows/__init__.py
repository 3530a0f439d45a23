"""Rows: which tensors of a sharded model have rows of which set, and reads of rows of other ranks."""
