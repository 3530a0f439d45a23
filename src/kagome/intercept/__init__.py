"""Interception of torch calls: a user's model runs on one part as if it were the whole graph."""
