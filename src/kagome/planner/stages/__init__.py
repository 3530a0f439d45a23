"""Stage planners: searches for pipelines whose stages form a DAG, and what they share."""
