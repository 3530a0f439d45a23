"""Ranks as threads of one process, for checks and tests."""
