"""Pipelines whose stages form a DAG, for any module."""
