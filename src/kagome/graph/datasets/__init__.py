"""Data sets by name, from files, and made up."""
