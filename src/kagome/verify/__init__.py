"""Verification: a split model against the same model whole."""
