"""What we train on: data, partitions, and the ways to cut a graph by vertices."""
