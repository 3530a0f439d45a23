"""Feature slices of all vertices in place of all features of some vertices."""
