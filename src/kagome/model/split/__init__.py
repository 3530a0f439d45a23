"""Model split: a graph of steps cut into the stages of a pipeline."""
