"""A graph of steps cut into the stages of a pipeline."""
