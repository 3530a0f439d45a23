"""What is said of a run: summaries, tables and traces."""
