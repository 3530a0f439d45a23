"""Layers that keep their inputs alone and run once more in backward."""
