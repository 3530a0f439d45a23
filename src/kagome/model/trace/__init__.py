"""Model tracing: a model's forward as a graph of steps."""
