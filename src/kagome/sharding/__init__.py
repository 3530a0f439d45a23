"""Sharding: a user's model on one part of a graph, as a module for the user's own training loop."""
