"""Deferred messages: kept as expressions along edges until a kernel reduces them."""
