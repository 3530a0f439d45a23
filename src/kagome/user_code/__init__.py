"""What users' code does beside torch calls of a forward: hooks, own functions, kept tensors."""
