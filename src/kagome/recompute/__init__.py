"""Recomputation: layers that keep only their inputs and run once more in backward."""
