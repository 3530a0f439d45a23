"""Searches for pipelines whose stages form a DAG."""
