"""Profiling on this machine: what a model costs per row and edge, in seconds and in bytes."""
