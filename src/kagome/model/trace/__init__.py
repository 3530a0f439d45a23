"""A model's forward as a graph of steps."""
