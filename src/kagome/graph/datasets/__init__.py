"""Data sets: by name, from files, and generated."""
