"""Scope: what handlers and layer rules may ask about a part: its rows, constants and exchanges."""
