"""Scope: what handlers and layer rules may ask about a part: axes, ids, constants, sums over ranks."""
