"""Compare: a sharded model and its loss against the same on the whole graph."""
