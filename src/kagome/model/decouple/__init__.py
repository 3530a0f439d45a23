"""A model with its maps first and its propagation after."""
