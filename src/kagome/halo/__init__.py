"""Halo exchange: rows that ranks read of each other, their gradients, compression and staleness."""
