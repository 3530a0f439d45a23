"""Operators: a model over independent samples as a DAG that is cut into pipeline stages."""
