"""Pipelines whose stages form a DAG, for any module: ``pipeline`` is the face, the rest runs a batch."""
