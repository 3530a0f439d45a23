"""Models: ready-made ones, the tracing and cutting of a user's model, and exact layers under a split."""
