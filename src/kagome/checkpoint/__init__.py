"""Checkpoints: what a run saves and continues from."""
