"""Replay: what a layer did in its last call is done again without running its Python code."""
