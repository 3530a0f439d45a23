"""Rows that ranks read of each other: exchanges, their gradients, and how they are coded or kept."""
