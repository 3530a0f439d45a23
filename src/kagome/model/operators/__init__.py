"""A model as a DAG of operators over independent samples."""
