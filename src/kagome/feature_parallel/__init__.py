"""Feature parallelism: a rank holds a slice of the features of all vertices, not all features of some."""
