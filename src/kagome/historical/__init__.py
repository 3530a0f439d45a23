"""Rows of other chunks: those last known, or all chunks in lockstep."""
