"""What a split must not change: statistics, draws, attention over all vertices."""
